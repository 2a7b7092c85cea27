# SPDX-License-Identifier: Apache-2.0
"""`fedvitals flower`: monitor unmodified Flower apps, through the environment variables of their processes."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from fedvitals.cli.options import store_option
from fedvitals.cli.run_summary import print_summary
from fedvitals.errors import MissingExtraError

F = TypeVar("F", bound=Callable[..., Any])
# All other arguments are passed on to Flower's program unchanged, including -h: else `-cbatch=4` would ask for help.
PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
ELSEWHERE = (
    "The app was sent to the SuperLink at {address}, and runs in processes that it and its SuperNodes start: fedvitals "
    "watches them where those were started with\n  fedvitals flower superlink ...    on the server\n"
    "  fedvitals flower supernode ...    on each client\nor have the variables that `fedvitals flower env` prints."
)
NOTHING = (
    "fedvitals has no record of this run in {store}. What the app's log says above may tell why: it ended before its "
    "first message, it attaches a monitor of its own, or its processes have no fedvitals."
)


@click.group()
def command() -> None:
    """Monitor Flower apps without changing them.

    It works on this machine and in deployments. Guards, detectors of your own and corrections need two lines in the
    app: see docs/flower.md.
    """


def _settings(*, server: bool) -> Callable[[F], F]:
    def add(function: F) -> F:
        options = [
            click.option("--probes", metavar="PRESET", help="What to measure: light, standard or deep."),
            click.option(
                "--privacy",
                type=click.IntRange(0, 4),
                help="Highest privacy level that may leave a client: docs/metrics.md.",
            ),
            click.option(
                "--tracebacks", is_flag=True, default=None, help="Send whole tracebacks, which may quote data."
            ),
            click.option(
                "--tape", metavar="DIR", help="Folder in which to record what clients are sent, for `fedvitals replay`."
            ),
        ]
        if server:
            options += [click.option("--run", metavar="NAME", help="Name of the runs."), store_option]
        for option in options:
            function = option(function)
        return function

    return add


@command.command(context_settings=PASSED_ON)
@_settings(server=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF flwr run]...")
def run(arguments: tuple[str, ...], **settings: Any) -> int:
    """Run an app as `flwr run` does, with monitoring.

    All other arguments are passed on to it:  fedvitals flower run . --run-config "num-server-rounds=3"

    On this machine the run gets a SuperLink of its own, which ends with it, and the log is shown as with --stream. For
    a SuperLink elsewhere, see `fedvitals flower superlink`.
    """
    place = _programs()  # before the imports, which need Flower
    from fedvitals.hosts.flower.superlink import superlink as started
    from fedvitals.hosts.flower.superlink import termination_as_exit

    settings["run"] = settings["run"] or os.environ.get("FEDVITALS_RUN") or _name_of(arguments)
    environment = _environment(place, settings)
    address = remote_address(arguments, environment)
    began = time.time()
    if address is not None or not knows_local():
        code = _run(place, arguments, environment)
    else:
        if someone_listens(environment):
            click.echo(
                "A local Flower SuperLink is already running, without fedvitals: this run gets one of its "
                "own, with Flower's defaults. What `flwr federation simulation-config` has set, say it by "
                "--federation-config.",
                err=True,
            )
        streamed = arguments if "--stream" in arguments else (*arguments, "--stream")
        try:
            with termination_as_exit(), started(environment) as port:
                code = _run(place, streamed, environment | {PORT: str(port)})
        except KeyboardInterrupt:
            click.echo(
                "\nStopped, and all that was started; what was measured is kept: see `fedvitals runs`.", err=True
            )
            raise
    if code == 0:
        _closing(environment["FEDVITALS_STORE"], began, address)
    return code


@command.command(context_settings=PASSED_ON)
@_settings(server=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF flower-superlink]...")
def superlink(arguments: tuple[str, ...], **settings: Any) -> None:
    """Start `flower-superlink` with monitoring.

    The server side of every app that is sent to it stores its run on this machine.
    """
    _become("flower-superlink", arguments, settings)


@command.command(context_settings=PASSED_ON)
@_settings(server=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF flower-supernode]...")
def supernode(arguments: tuple[str, ...], **settings: Any) -> None:
    """Start `flower-supernode` with monitoring.

    The client side of every app is measured here; the options say what may leave this machine.
    """
    _become("flower-supernode", arguments, settings)


@command.command()
@_settings(server=True)
@click.option(
    "--file", "as_file", is_flag=True, help="Print them without `export`, for systemd's EnvironmentFile= or Docker."
)
def env(as_file: bool, **settings: Any) -> None:
    """Print the environment variables that turn monitoring on.

    For servers that another program starts:  eval "$(fedvitals flower env)"
    """
    from fedvitals.hosts.watch_settings import FLOWER, WatchSettings, absolute_store

    settings["store"] = absolute_store(settings["store"])
    for name, value in WatchSettings(**settings).variables(os.environ, FLOWER).items():
        click.echo(f"{name}={value}" if as_file else f"export {name}={shlex.quote(value)}")


def _programs() -> Path:
    """Return the folder of Flower's programs: those of fedvitals' own Python, else apps would lack fedvitals."""
    place = Path(sys.executable).parent
    if not (place / "flwr").exists() and not (place / "flwr.exe").exists():
        raise MissingExtraError("flwr", "flower", f"`fedvitals flower` (beside {sys.executable})")
    return place


def _environment(place: Path, settings: dict[str, Any]) -> dict[str, str]:
    from fedvitals.hosts.watch_settings import FLOWER, WatchSettings, absolute_store

    if "store" in settings:
        settings["store"] = absolute_store(settings["store"])
    # Flower's programs start each other by name.
    own = {**os.environ, "PATH": f"{place}{os.pathsep}{os.environ.get('PATH', '')}"}
    return own | WatchSettings(**settings).variables(own, FLOWER)


def _become(program: str, arguments: tuple[str, ...], settings: dict[str, Any]) -> NoReturn:
    place = _programs()
    environment = _environment(place, settings)
    if os.name == "posix":  # one process less: signals and waiting parents reach Flower's own
        os.execve(place / program, [program, *arguments], environment)  # noqa: S606
    sys.exit(subprocess.call([place / program, *arguments], env=environment))  # noqa: S603


def _run(place: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> int:
    return subprocess.call([place / "flwr", "run", *arguments], env=environment)  # noqa: S603


def _name_of(arguments: tuple[str, ...]) -> str:
    """Return the app's own name, if its folder is available."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        folder = Path(arguments[0] if arguments and not arguments[0].startswith("-") else ".")
        return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])
    return "flower"


def _closing(store: str, began: float, address: str | None) -> None:
    """Print where the run is, what was found in it, and what to look at next."""
    print_summary(store, began, "flower", NOTHING if address is None else ELSEWHERE.format(address=address))


# The variable in which `flwr` looks for a local SuperLink, before it starts one
PORT = "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"
LOCAL = (":local:", ":local-in-memory:")
# Options of `flwr run` that take a value
VALUED = ("--federation", "--run-config", "-c", "--federation-config", "--format")


def remote_address(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the address of the SuperLink that `flwr run` with these arguments goes to; None for a local one."""
    home = Path(environment.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        connections = tomllib.loads((home / "config.toml").read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, ValueError):  # none yet, or one that flwr itself will complain about
        return None
    plain = _positional(arguments)
    named = plain[1] if len(plain) > 1 else connections.get("default")
    chosen = connections.get(named, {})
    address = chosen.get("address") if isinstance(chosen, dict) else None
    return None if address in (None, *LOCAL) else str(address)


def _positional(arguments: Sequence[str]) -> list[str]:
    positional, words = [], iter(arguments)
    for word in words:
        if word in VALUED:
            next(words, None)
        elif not word.startswith("-"):
            positional.append(word)
    return positional


def knows_local() -> bool:
    """Whether this Flower has local SuperLinks that we can replace; older versions run apps as children of `flwr`."""
    from flwr.cli import constant

    return hasattr(constant, "LOCAL_SUPERLINK_HTTP_API_PORT")


def someone_listens(environment: Mapping[str, str]) -> bool:
    """Whether one of Flower's own local SuperLinks is already running."""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection(("127.0.0.1", int(environment.get(PORT) or 39091)), 0.5),
    ):
        return True
    return False
