# SPDX-License-Identifier: Apache-2.0
"""Start the lab's Flower app: on Ray, with a SuperLink of our own that lives as long as the run; or on the user's.

Everything that is started is also ended, however the run ends. The settings are in the app's configuration, which
Flower sends to every node, so an address with a password is not among them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from fedvitals.errors import ConfigError, FedvitalsError
from fedvitals.hosts.flower.superlink import QUIET, program, superlink, termination_as_exit, with_programs

OLDEST = (1, 38)  # its SuperLink has one port for everything, and its connections are in $FLWR_HOME/config.toml
OWN_CONNECTION = "fedvitals-lab"  # the connection to our own SuperLink
APP = """[project]
name = "fedvitals-lab"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "fedvitals"

[tool.flwr.app.components]
serverapp = "fedvitals_lab.app:server_app"
clientapp = "fedvitals_lab.app:client_app"

"""
MODULE = """from fedvitals.hosts.flower.lab import app as lab_app

server_app = lab_app.server_app  # Flower looks for assignments before it looks into the module
client_app = lab_app.client_app
"""
STOP = 10.0  # seconds
LAST_LINES = 25  # of the log, shown on failure
STARTED = re.compile(r"Successfully started run (\d+)")

AppConfig = dict[str, str | int | float | bool]


def check_installed(*, simulation: bool) -> None:
    """Raise ConfigError before anything is started if something needed is not installed."""
    version = importlib.metadata.version("flwr")
    installed = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if installed < OLDEST:
        raise ConfigError(
            f"The engine 'flower' starts a SuperLink of flwr {OLDEST[0]}.{OLDEST[1]} or newer; installed is {version}. "
            "Bring it up to date: pip install -U flwr."
        )
    if simulation and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "The engine 'flower' simulates on Ray, which is not installed: pip install 'flwr[simulation]'. "
            "Or name a SuperLink of yours with --superlink."
        )


def simulate(settings: AppConfig, nodes: int, on_line: Callable[[str], None], secrets: dict[str, str]) -> None:
    """Run the app on Ray with this many simulated nodes.

    `secrets`: environment variables of its processes on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="fedvitals-lab-", ignore_cleanup_errors=True) as folder:
        own = {**secrets, "FLWR_HOME": str(Path(folder) / "home")}
        with termination_as_exit(), _superlink(Path(folder), _environment(own)):
            options = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus={nodes}"
            _run(Path(folder), settings, OWN_CONNECTION, ["--federation-config", options], _environment(own), on_line)


def submit(settings: AppConfig, superlink: str, on_line: Callable[[str], None]) -> None:
    """Run the app on the SuperLink of that name in the user's own Flower configuration."""
    with tempfile.TemporaryDirectory(prefix="fedvitals-lab-", ignore_cleanup_errors=True) as folder:
        _run(Path(folder), settings, superlink, [], _environment({}), on_line)


def _run(
    folder: Path,
    settings: AppConfig,
    superlink: str,
    options: list[str],
    environment: dict[str, str],
    on_line: Callable[[str], None],
) -> None:
    """Run `flwr run` and pass its log on line by line until the run is over.

    If that is interrupted, the run is stopped.
    """
    app = write_app(folder / "fedvitals-lab", settings)
    process = subprocess.Popen(  # noqa: S603 - our own words
        [program("flwr"), "run", str(app), superlink, "--stream", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # we handle Ctrl-C
    )
    last: deque[str] = deque(maxlen=LAST_LINES)
    run, over = None, False
    try:
        assert process.stdout is not None  # noqa: S101 - asked for above
        for line in process.stdout:
            last.append(line.rstrip())
            run = run or STARTED.search(line)
            on_line(line)
        over = process.wait(STOP) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if run is not None and not over and superlink != OWN_CONNECTION:  # our own SuperLink ends with it
            subprocess.run(  # noqa: S603 - our own words
                [program("flwr"), "stop", run[1], superlink],
                env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=STOP * 2, check=False,
            )  # fmt: skip
    if not over or run is None:
        raise FedvitalsError("`flwr run` failed. The end of its log:\n" + "\n".join(last))


def write_app(folder: Path, settings: AppConfig) -> Path:
    """Write the app for Flower, a module that imports the lab's and its configuration, and return its folder."""
    from fedvitals.lab import toml  # noqa: PLC0415 - loads the lab

    package = folder / "fedvitals_lab"
    package.mkdir(parents=True)
    config = toml.dumps({"tool": {"flwr": {"app": {"config": settings}}}})
    (folder / "pyproject.toml").write_text(APP + config, encoding="utf-8")
    (package / "__init__.py").write_text("")
    (package / "app.py").write_text(MODULE)
    return folder


@contextlib.contextmanager
def _superlink(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a simulating SuperLink with a home and a folder of its own."""
    home, empty = folder / "home", folder / "empty"
    home.mkdir()
    empty.mkdir()  # a package in this folder would take precedence over the app's
    with superlink(environment, cwd=empty, options=["--disable-runtime-dependency-installation"]) as port:
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{OWN_CONNECTION}"\n\n'
            f'[superlink.{OWN_CONNECTION}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        yield


def _environment(own: dict[str, str]) -> dict[str, str]:
    environment = {**QUIET, **os.environ, **own, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    return with_programs(environment)
