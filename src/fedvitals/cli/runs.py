# SPDX-License-Identifier: Apache-2.0
"""`fedvitals runs`: what is in the store, and what is to stay there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import print_json, store_options
from fedvitals.cli.screen import WIDE, new_console, new_table, number, seconds, shown, size, with_unit
from fedvitals.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fedvitals.store.read.queries import RunSummary
    from fedvitals.store.upkeep.retention import Cleared

NAME = 16  # characters of a name; ids are cut first to make room
SHORTEST = 5  # characters of a name, however narrow the terminal is
TIME = 15  # characters with which a run's id encodes when it began
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@click.group(invoke_without_command=True)
@store_options
@click.pass_context
def command(context: click.Context, store: str | None, as_json: bool) -> None:
    """List the runs of a store, the newest first. A run's id begins with the time at which it started."""
    context.obj = store
    if context.invoked_subcommand is None:
        _list(store, as_json)


def _list(store: str | None, as_json: bool) -> None:
    from fedvitals.store import open_reader
    from fedvitals.store.read import queries
    from fedvitals.store.tapes import tape_bytes
    from fedvitals.views.cases import cases_of
    from fedvitals.views.gaps import gaps_of
    from fedvitals.views.status import run_states

    with open_reader(store) as reader:
        runs = queries.list_runs(reader)
        missing = {run.id: gaps_of(reader, run.id) for run in runs}
        states = run_states(reader)
        findings = {run.id: len(cases_of(reader, run.id)) for run in runs}
    tapes = {run.id: tape_bytes(store, run.id) for run in runs}
    if as_json:
        print_json(
            "runs",
            [
                {**asdict(run), "state": states[run.id], "tape_bytes": tapes[run.id], "not_judged": missing[run.id]}
                for run in runs
            ],
        )
        return
    if not runs:
        click.echo("No runs yet. `fedvitals demo` makes one; the README's ten lines make your own.", err=True)
        return
    # A pipe has no width: text cut there would be lost to the reader.
    console = new_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
    _print_table(console, runs, states, missing, findings)
    unjudged = [run for run in runs if missing[run.id]]
    if unjudged:
        text = f"Lost or (?): not fully examined. Why:  fedvitals findings {shown(unjudged[0].id)}"
        console.print(f"[dim]{text}[/dim]", soft_wrap=True)
    recorded = [name for name, taken in tapes.items() if taken]
    if recorded:
        recorded_runs = "1 run is" if len(recorded) == 1 else f"{len(recorded)} runs are"
        text = (
            f"{recorded_runs} on tape, {size(sum(tapes.values()))}; the newest:  fedvitals replay {shown(recorded[0])}"
        )
        console.print(f"[dim]{text}[/dim]", soft_wrap=True)


def _print_table(
    console: Any,
    runs: Sequence[RunSummary],
    states: Mapping[str, str],
    missing: Mapping[str, Sequence[str]],
    findings: Mapping[str, int],
) -> None:
    """Print a line per run in which every column is whole: where there is no room, names and ids are shortened.

    An id is cut to a beginning that no other run has, which any verb takes as well.
    """
    from fedvitals.views.short_ids import differing_parts, distinct_beginnings

    names, ids = [run.name for run in runs], [run.id for run in runs]
    cells = [_figures(run, states[run.id], findings[run.id], judged=not missing[run.id]) for run in runs]
    titles = ("rounds", "clients", "accuracy", "loss", "findings", "time")
    figures = sum(2 + max(map(len, column)) for column in zip(titles, *cells, strict=True))

    def room() -> int:
        return int(console.width) - figures - 2 - max(map(len, ids))

    if room() < min(NAME, max(map(len, names))):
        ids = distinct_beginnings(ids, TIME)
    names = differing_parts(names, max(room(), SHORTEST))
    table = new_table("run", "id", *(f">{title}" for title in titles), no_wrap=True)
    for name, identity, own in zip(names, ids, cells, strict=True):
        table.add_row(shown(name), shown(identity), *own)
    console.print(table)


def _figures(run: RunSummary, state: str, findings: int, *, judged: bool) -> tuple[str, ...]:
    lost = f" ({run.lost} lost)" if run.lost else "" if judged else " (?)"
    time = seconds(run.seconds) if run.finished else state
    return (
        str(run.rounds),
        str(run.clients),
        with_unit(run.accuracy, "share"),
        number(run.loss),
        f"{findings}{lost}",
        time,
    )


@command.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN...]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_options
@click.pass_obj
def delete(outer: str | None, runs: tuple[str, ...], yes: bool, store: str | None, as_json: bool) -> None:
    """Delete runs with their tapes, and give their space back. A run that is being written is refused.

    The tape of a run that is gone (`fedvitals doctor` names it) is deleted by that run's id.
    """
    from fedvitals.store import open_reader, store_target
    from fedvitals.store.read import queries
    from fedvitals.store.tapes import lost_tapes
    from fedvitals.store.upkeep import retention

    with open_reader(store or outer) as reader:
        lost = lost_tapes(store or outer, (run.id for run in queries.list_runs(reader)))
        chosen = list(dict.fromkeys(run if run in lost else queries.find_run(reader, run) for run in runs))
    if not yes and not click.confirm(f"Delete {', '.join(chosen)} for good?", err=True):
        click.echo("Nothing was deleted.", err=True)
        return
    _tell(retention.delete(store_target(store or outer), chosen), as_json)


@command.command()
@click.option("--keep-bytes", required=True, metavar="SIZE", help="Size that the store may have: 500MB, 2GiB, 1000000.")
@store_options
@click.pass_obj
def thin(outer: str | None, keep_bytes: str, store: str | None, as_json: bool) -> None:
    """Make a store fit a budget, the oldest runs first.

    Finished runs first lose what was kept for each step and each layer; if that is not enough, they go entirely. Open
    runs are left alone.
    """
    from fedvitals.store import store_target
    from fedvitals.store.upkeep import retention

    _tell(retention.thin(store_target(store or outer), bytes_of(keep_bytes)), as_json)


def bytes_of(text: str) -> int:
    """Parse a size such as «500MB»."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ConfigError(f"A size is a number and a unit, for example 500MB; got '{text}'.")
    unit = match[2].upper()
    if unit not in UNITS:
        raise ConfigError(unknown("unit of size", match[2], [unit for unit in UNITS if unit]))
    return int(float(match[1]) * UNITS[unit])


def _tell(cleared: Cleared, as_json: bool) -> None:
    if as_json:
        print_json("runs", cleared)
        return
    for gone in cleared.removed:
        if gone.what == "tape":
            click.echo(f"{shown(gone.run)}: the tape of a run that is gone, deleted, {size(gone.tape_bytes)}")
            continue
        what = "deleted" if gone.what == "run" else "thinned to its scalars"
        tape = f", and a tape of {size(gone.tape_bytes)}" if gone.tape_bytes else ""
        click.echo(f"{shown(gone.run)} ({shown(gone.name)}): {what}, {gone.rows} rows, {size(gone.bytes)}{tape}")
    if cleared.open:
        click.echo(f"Left alone, since they are open: {', '.join(map(shown, cleared.open))}")
    if not cleared.removed:
        click.echo("Nothing had to go.")
    click.echo(f"The store takes {size(cleared.bytes_after)}; before, {size(cleared.bytes_before)}.")
