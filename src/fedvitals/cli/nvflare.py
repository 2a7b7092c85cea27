# SPDX-License-Identifier: Apache-2.0
"""`fedvitals nvflare`: monitor NVFlare jobs without changing their scripts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from fedvitals.cli.options import store_option
from fedvitals.cli.run_summary import print_summary
from fedvitals.errors import ConfigError, MissingExtraError

F = TypeVar("F", bound=Callable[..., Any])
# All other arguments are passed on to the script or to NVFlare's simulator unchanged.
PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
NOTHING = (
    "fedvitals has no record of this run in {store}. What the log says above may tell why: the job ended before it "
    "began, it was sent to a server elsewhere (then its store is there), or it is one of the few without code of its "
    'own, and the workspace\'s class_allow_list lacks "fedvitals." (docs/nvflare.md).'
)


@click.group()
def command() -> None:
    """Monitor NVFlare jobs without changing their scripts.

    With a line in the script, fv.nvflare.attach(recipe, "runs.db"), none of this is needed: see docs/nvflare.md.
    """


def _settings(function: F) -> F:
    options = [
        click.option("--probes", metavar="PRESET", help="What to measure: light, standard or deep."),
        click.option(
            "--privacy", type=click.IntRange(0, 4), help="Highest privacy level that may leave a site: docs/metrics.md."
        ),
        click.option("--tracebacks", is_flag=True, default=None, help="Send whole tracebacks, which may quote data."),
        click.option("--guard", type=click.Choice(["report", "drop", "fail"]), help="What to do with NaN in updates."),
        click.option("--run", metavar="NAME", help="Name of the run."),
        store_option,
    ]
    for option in options:
        function = option(function)
    return function


@command.command(context_settings=PASSED_ON)
@_settings
@click.argument("job", type=click.Path(exists=True, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
def run(job: Path, arguments: tuple[str, ...], **settings: Any) -> int:
    """Run a job with monitoring: a recipe's script or a job's folder.

    All other arguments are passed on to the script:  fedvitals nvflare run job.py --rounds 5

    A folder is given to NVFlare's simulator, with its arguments:  fedvitals nvflare run fl_job/digits -n 4
    """
    environment = _environment(settings)
    began = time.time()
    try:
        if job.is_dir():
            code = _simulate(job, arguments, settings)
        else:
            code = subprocess.call([sys.executable, job, *arguments], env=environment)  # noqa: S603 - what was asked
    except KeyboardInterrupt:
        click.echo("\nStopped; what was measured is kept: see `fedvitals runs`.", err=True)
        raise
    print_summary(environment["FEDVITALS_STORE"], began, "nvflare", NOTHING)
    return code


@command.command()
@_settings
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def watch(folder: Path, **settings: Any) -> None:
    """Add the monitoring components to an exported job's folder, in place, before it is submitted.

    The store is a file on the server: --store is its path there.
    """
    _require_nvflare()
    from fedvitals.hosts.nvflare.job_folder import watch_folder
    from fedvitals.hosts.watch_settings import WatchSettings

    watch_folder(folder, WatchSettings(**settings))
    click.echo(
        f"{folder} is watched. fedvitals must be installed on the server, and on the sites that are to report more."
    )


def _require_nvflare() -> None:
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtraError("nvflare", "nvflare", "`fedvitals nvflare`")


def _environment(settings: dict[str, Any]) -> dict[str, str]:
    _require_nvflare()
    from fedvitals.hosts.watch_settings import NVFLARE, WatchSettings, absolute_store

    settings["store"] = absolute_store(settings["store"])
    return {**os.environ, **WatchSettings(**settings).variables(os.environ, NVFLARE)}


def _simulate(folder: Path, arguments: tuple[str, ...], settings: dict[str, Any]) -> int:
    """Run a copy of a job's folder in the simulator: the folder itself stays as it is."""
    from fedvitals.hosts.nvflare.job_folder import watch_folder
    from fedvitals.hosts.watch_settings import WatchSettings

    if not any(word in ("-n", "--n_clients", "-c", "--clients") for word in arguments):
        raise ConfigError("How many sites? Say -n 4, or -c site-1,site-2, which goes on to NVFlare's simulator.")
    with tempfile.TemporaryDirectory(prefix="fedvitals-nvflare-") as place:
        copy = Path(place) / folder.resolve().name
        shutil.copytree(folder, copy)
        watch_folder(copy, WatchSettings(**settings))
        simulator = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(copy)]
        return subprocess.call([*simulator, *arguments])  # noqa: S603 - what was asked
