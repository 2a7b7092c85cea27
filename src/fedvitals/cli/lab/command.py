# SPDX-License-Identifier: Apache-2.0
"""`fedvitals lab EXPERIMENT.toml`: run a federation that a file describes."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.lab.progress import Alarms, EndedRun, Progress, quality_of, remember
from fedvitals.cli.options import print_json, store_options
from fedvitals.cli.screen import size
from fedvitals.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from fedvitals.lab import Experiment
    from fedvitals.protocols import TapeRecorder

FINDINGS_NAMED = 4  # named at the end of a run


@click.command()
@click.argument("experiment", type=click.Path(exists=True, dir_okay=False))
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a setting: --set clients=50.")
@click.option("--data", type=click.Path(file_okay=False), help="Folder of the data set. Default: FEDVITALS_DATA.")
@click.option(
    "--engine",
    default="auto",
    show_default=True,
    help="Engine: sequential, reuse, stacked, flower (on Ray), or auto, which measures and takes the fastest.",
)
@click.option("--workers", type=int, help="Worker processes, or SuperNodes (flower). Default: one per core.")
@click.option(
    "--superlink", metavar="NAME", help="Engine flower: a connection of your Flower configuration, instead of Ray."
)
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="Engine flower: how long to wait for a round's replies. Default: an hour.",
)
@click.option("--device", default="cpu", show_default=True, help="Device: cpu, or cuda (engine stacked).")
@click.option(
    "--precision",
    type=click.Choice(["float32", "tf32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Precision of matrix products on cuda; tf32 and bfloat16 are faster and less exact.",
)
@click.option("--probes", default="standard", show_default=True, help="What is measured: light, standard, deep.")
@click.option("--run", "named", metavar="NAME", help="The run's name. Default: the experiment's, else the file's.")
@click.option("--resume", is_flag=True, help="Continue where this experiment was interrupted.")
@click.option("--plan", is_flag=True, help="Show the experiment and which client holds which data; train nothing.")
@click.option("--download", is_flag=True, help="Download the official data set to --data first.")
@click.option(
    "--tape/--no-tape", default=None, help="Record what a replay needs, next to the store.  [default: --tape]"
)
@click.option("--tape-budget", default="1 GB", show_default=True, metavar="SIZE", help="Largest size of the tape.")
@click.option("--unwatched", is_flag=True, help="Train without the monitor; nothing is stored.")
@store_options
def command(
    experiment: str,
    changes: tuple[str, ...],
    named: str | None,
    store: str | None,
    as_json: bool,
    plan: bool,
    download: bool,
    **how: Any,
) -> None:
    """Simulate and monitor the federation of EXPERIMENT.toml.

    The same seed gives the same weights. After Ctrl-C the finished rounds are kept; --resume continues from there, bit
    for bit.
    """
    try:
        from fedvitals import lab
        from fedvitals.lab import toml
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "lab", "The lab") from error
    pairs = dict(_pair(change) for change in changes)
    try:
        text = Path(experiment).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{experiment} is not TOML: it is not UTF-8 text ({error}).") from error
    settings = {name: toml.parse_value(value) for name, value in pairs.items()}
    wanted = lab.read(text, settings if named is None else {**settings, "name": named})
    if wanted.name == "experiment":
        import msgspec

        wanted = msgspec.structs.replace(wanted, name=Path(experiment).stem)
    if download:
        _download(wanted, how["data"])
    if plan:
        _plan(wanted, how["data"])
        return
    results = [_run_once(wanted, repeat, store or "runs.db", plain=as_json, **how) for repeat in range(wanted.repeats)]
    if as_json:
        print_json("lab", results[0] if len(results) == 1 else results)


def _download(experiment: Experiment, folder: str | None) -> None:
    from fedvitals.lab.data import datasets
    from fedvitals.lab.description import kind_of

    last = ""

    def tell(file: str, done: int, total: int | None) -> None:
        nonlocal last
        text = f"{file}: {size(done)}" + (f" of {size(total)}" if total else "")
        if text != last:
            click.echo(f"\r{text}    ", nl=False, err=True)
            last = text

    for path in datasets.download(kind_of(type(experiment.dataset).__name__), folder, tell):
        click.echo(f"\r{path}", err=True)


def _plan(experiment: Experiment, folder: str | None) -> None:
    """Print what would be run, and a picture of the clients' data."""
    from fedvitals import lab
    from fedvitals.lab.data.partition_picture import partition_heat_map

    click.echo(experiment.to_toml() or "# all as by default")
    site = lab.Site.of(experiment, folder)
    weights, samples = site.layout.weights, len(site.dataset.y)
    click.echo(f"{site.dataset.name}: {samples} samples over {experiment.clients} clients; {weights} weights\n")
    click.echo(partition_heat_map([*site.shards.values()], site.dataset))


def _pair(change: str) -> tuple[str, str]:
    name, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"--set takes NAME=VALUE, such as --set clients=50; got '{change}'.")
    return name.strip(), value.strip()


def _run_once(
    wanted: Experiment, repeat: int, store: str, *, plain: bool, resume: bool, unwatched: bool, **how: Any
) -> dict[str, Any]:
    """Run one repeat, from its beginning or from where it stopped."""
    import msgspec

    experiment = msgspec.structs.replace(wanted, seed=wanted.seed + repeat, repeats=1)
    train = _trainer(how, unwatched=unwatched, resume=resume)
    folder, run = _place(_folder(store) / experiment.digest(), resume=resume)
    began, alarms, view = time.perf_counter(), Alarms(), Progress(experiment, plain=plain)
    place = {"store": store, "folder": folder, "run": run, "resume": resume}
    try:
        with view:
            ended = train(experiment, view, alarms, **place, **how)
    except KeyboardInterrupt:
        text = f"Stopped after {view.done} of {experiment.rounds} rounds"
        again = "" if how.get("superlink") or not view.done else "; add --resume to go on from there"
        click.echo(f"\n{text}{again}.", err=True)
        raise
    finally:
        _tidy(folder, over=view.done == experiment.rounds)
    summary = {
        "run": ended.run,
        "experiment": experiment.name,
        "seed": experiment.seed,
        "rounds": ended.rounds,
        "metrics": ended.metrics,
        "engine": ended.engine,
        "seconds": time.perf_counter() - began,
        "store": None if unwatched else store,
        "alarms": alarms.count,
        "findings": len(alarms.findings),
    }
    if not plain:
        _closing(summary, store, alarms, taped=how.get("tape") is not False)
    return summary


def _trainer(how: dict[str, Any], *, unwatched: bool, resume: bool) -> Callable[..., EndedRun]:
    """Return the function that runs the experiment, here or in Flower. Refuses options that do not go together."""
    if how["engine"] != "flower":
        for option in ("superlink", "timeout"):
            if how.pop(option) is not None:
                raise ConfigError(f"--{option} is for --engine flower; got --engine {how['engine']}.")
        return functools.partial(_here, unwatched=unwatched)
    from fedvitals.cli.lab import flower as lab_flower

    lab_flower.check(unwatched=unwatched, resume=resume, **how)
    return lab_flower.train


def _here(
    experiment: Experiment,
    view: Progress,
    alarms: Alarms,
    *,
    store: str,
    folder: Path,
    run: str | None,
    probes: str,
    unwatched: bool,
    tape: bool | None,
    tape_budget: str,
    **how: Any,
) -> EndedRun:
    """Run the experiment in this process and its workers."""
    from fedvitals import lab
    from fedvitals.hosts.lab_monitor import monitor_of

    monitor = None
    if not unwatched:
        kept = _tape(tape, tape_budget)
        monitor = monitor_of(experiment, store, run=run, probes=probes, sinks=[alarms], tape=kept)
    remember(folder, None if monitor is None else monitor.run.id, experiment)
    result = None
    try:
        for result in lab.rounds(experiment, monitor, checkpoint=folder, **how):
            if result.rounds:
                view.show(result.rounds[-1])
    except KeyboardInterrupt:
        if monitor is not None:
            monitor.host.discard()  # the open round will be run again as a whole
        raise
    finally:
        if monitor is not None:
            monitor.close()
    assert result is not None  # noqa: S101 - an experiment has at least one round
    identity = None if monitor is None else monitor.run.id
    return EndedRun(identity, len(result.rounds), result.rounds[-1].metrics, result.engine)


def _tape(wanted: bool | None, budget: str) -> TapeRecorder | None:
    """Return a tape unless it is not wanted. If its packages are missing, only a user who asked for it is told."""
    if wanted is False:
        return None
    try:
        from fedvitals.replay.tape.tape import Tape
    except MissingExtraError:
        if wanted:
            raise
        return None
    return Tape(budget=budget)


def _folder(store: str) -> Path:
    """Return the folder where unfinished runs keep their state: beside the store; here, if the store is a server."""
    return Path("fedvitals.d" if "://" in store else f"{store}.d") / "lab"


def _place(folder: Path, *, resume: bool) -> tuple[Path, str | None]:
    """Return the folder of this run's state, and the stored run that it continues.

    Each run has its own folder: the same experiment may run twice at a time, and interrupted state is kept.
    """
    if not resume:
        return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", None
    from fedvitals.lab.checkpoint import FILE

    saved = sorted(folder.glob(f"*/{FILE}"), key=lambda file: file.stat().st_mtime)
    if not saved:
        raise ConfigError(
            f"There is nothing to resume: no unfinished run of this experiment in {folder.parent}. "
            "Give the same file, --set, --run and --store as for the run that was interrupted."
        )
    run_id = json.loads((saved[-1].parent / "run.json").read_text(encoding="utf-8")).get("run")
    return saved[-1].parent, run_id if isinstance(run_id, str) else None


def _tidy(folder: Path, *, over: bool) -> None:
    """Remove the state of a run that is over, or never finished a round."""
    from fedvitals.lab.checkpoint import FILE

    if not over and (folder / FILE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents[:3]:  # the folders of this experiment, of the lab, of the store
        with contextlib.suppress(OSError):  # it contains something else
            parent.rmdir()


def _closing(summary: dict[str, Any], store: str, alarms: Alarms, *, taped: bool) -> None:
    metrics = summary["metrics"]
    quality = f"{text}, " if (text := quality_of(metrics)) else ""
    click.echo(
        f"{summary['experiment']}: {summary['rounds']} rounds, {quality}{summary['seconds']:.0f} s, "
        f"engine {summary['engine']}"
    )
    if not math.isfinite(metrics.get("loss", 0.0)):
        click.echo("The global model's loss is not a finite number: the quality above means nothing.")
    if alarms.count:
        counted = "1 warning or error:" if alarms.count == 1 else f"{alarms.count} warnings and errors; the first:"
        click.echo(f"{counted} {alarms.first}")
    if alarms.findings:
        worst = sorted(alarms.findings, key=lambda place: (alarms.findings[place], place[0], place[1] or ""))
        named = ", ".join(f"{issue}{f' of {node}' if node else ''}" for issue, node in worst[:FINDINGS_NAMED])
        more = "" if len(worst) <= FINDINGS_NAMED else f" and {len(worst) - FINDINGS_NAMED} more"
        click.echo(f"Findings:        {named}{more}")
    if summary["run"] is not None:
        run, option = summary["run"], "" if store == "runs.db" else f" --store {shlex.quote(store)}"
        click.echo(f"What was found:  fedvitals findings {run}{option}")
        click.echo(f"Look at it:      fedvitals ui {run}{option}")
        click.echo(f"Health card:     fedvitals show {run}{option}")
        click.echo(f"Where time went: fedvitals profile {run}{option}")
        click.echo(f"All in one file: fedvitals report {run}{option}")
        if taped:
            click.echo(f"Run it again:    fedvitals replay {run}{option}")
