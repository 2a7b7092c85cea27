# SPDX-License-Identifier: Apache-2.0
"""`fedvitals faultbank`: how good the detectors are, measured on runs whose faults are known."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import json_option, print_json

if TYPE_CHECKING:
    from fedvitals_studies.faultbank.bank import Taken
    from fedvitals_studies.faultbank.cases import Bank
    from fedvitals_studies.faultbank.pool import Done
    from fedvitals_studies.packs.pack import Packed

MOST_ON_ONE_GPU = 16  # processes
TOLD = ("f1", "culprit_f1", "top_1", "delay", "alarms", "accused_clean", "cause")


@click.command(epilog="Exit code: 1 if a case failed, or with --bar if a bar is missed; 2 for wrong use.")
@click.option(
    "--bank",
    default=None,
    metavar="NAME|FILE",
    help="held-out (default), held-out-large, held-out-three, attacks, adapters, tune, healthy[-tune], quick, a file.",
)
@click.option("--quick", is_flag=True, help="The bank «quick»: small cases, a few minutes on two cores.")
@click.option("--out", default=None, metavar="DIR", help="Where runs, outcomes and page go. Default: faultbank[-BANK].")
@click.option("--data", default=None, metavar="DIR", help="Where data sets lie; else FEDVITALS_DATA, ../shared/data.")
@click.option(
    "--workers", type=click.IntRange(1), default=None, help="Processes. Default: one per core; on cuda, ≤ 16."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to train. Default: cpu.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=None, help="Train no longer; then the page."
)
@click.option("--pack", "pack_to", default=None, metavar="DIR", help="Run nothing: pack it for a machine with a GPU.")
@click.option("--python", default="3.12", help="With --pack: the version of Python over there.")
@click.option("--wheel", "wheels", multiple=True, metavar="FILE", help="With --pack: instead of downloading msgspec.")
@click.option("--merge", multiple=True, metavar="FILE|DIR", help="Train nothing: the page of what a pack brought home.")
@click.option("--beside", default=None, metavar="FILE|DIR", help="Another page's summary.json, to compare with.")
@click.option(
    "--detector", "detectors", multiple=True, metavar="NAME|MODULE:FUNCTION", help="Also judge a detector of yours."
)
@click.option("--seen", default=None, metavar="FILE", help="outcomes.jsonl[.gz] of an earlier look, to report apart.")
@click.option("--list", "only_list", is_flag=True, help="Run nothing: say what is in the bank, and its digest.")
@click.option("--bar", "judge", is_flag=True, help="Exit with 1 if one of the bars is missed.")
@json_option
def command(
    bank: str | None,
    quick: bool,
    out: str | None,
    data: str | None,
    workers: int | None,
    device: str,
    minutes: float | None,
    pack_to: str | None,
    python: str,
    wheels: tuple[str, ...],
    merge: tuple[str, ...],
    beside: str | None,
    detectors: tuple[str, ...],
    seen: str | None,
    only_list: bool,
    judge: bool,
    as_json: bool,
) -> int:
    """Measure how good the detectors are on planted faults.

    It trains federations with known faults and their healthy twins, and writes a page. The same command continues where
    it was stopped; when detectors change, only the examination is repeated. docs/faultbank.md describes banks in TOML.

    On a machine that is lent for minutes: --pack here; the pack's run.py there; --merge here.
    """
    from fedvitals_studies.faultbank.bank import How, listing, take, take_home, usable_cores
    from fedvitals_studies.faultbank.cases import path_of, read_bank
    from fedvitals_studies.faultbank.outcome_lines import read_cases

    if quick and bank is not None:
        raise click.UsageError("--quick is a bank of its own: give --quick or --bank, not both.")
    if wheels and pack_to is None:
        raise click.UsageError("--wheel goes with --pack.")
    if pack_to is not None and merge:
        raise click.UsageError("--pack sends a bank away and --merge takes it home: give one of them.")
    name = "quick" if quick else bank or "held-out"
    chosen = read_bank(name)
    where = Path(data) if data else None
    if only_list:
        return _list(listing(chosen), as_json)
    if pack_to is not None or merge:
        _check_portable(chosen)
    if pack_to is not None:
        from fedvitals_studies.faultbank.pack import pack_bank

        packed = pack_bank(chosen, path_of(name), Path(pack_to), where, python, [Path(wheel) for wheel in wheels])
        return _tell_pack(packed, name, python, as_json)
    folder = Path(out or ("faultbank" if chosen.name == "held-out" else f"faultbank-{chosen.name}"))
    other = Path(beside) if beside else None
    before = read_cases(Path(seen)) if seen else frozenset[str]()
    if merge:
        taken = take_home(chosen, [Path(file) for file in merge], folder, other, before)
    else:
        processes = workers or (usable_cores() if device == "cpu" else min(MOST_ON_ONE_GPU, usable_cores()))
        how = How(processes, device, None if minutes is None else 60 * minutes, other, before, detectors)
        with _bars() as stage:
            taken = take(chosen, folder, where, how, stage)
    _tell(taken, as_json)
    return int(bool(taken.failed) or (judge and any(bar.verdict == "missed" for bar in taken.bars)))


def _check_portable(bank: Bank) -> None:
    """Refuse to train a bank elsewhere if its federations are a study's own code."""
    if bank.federations:
        raise click.UsageError(f"The bank {bank.name} is run here: leave --pack and --merge out.")


def _tell(taken: Taken, as_json: bool) -> None:
    for name, error in taken.failed:
        click.echo(f"fedvitals: the case {name} failed: {error.strip().splitlines()[-1]}", err=True)
    for absent in taken.absent:
        click.echo(f"fedvitals: {absent.cases} runs left out. {absent.words}", err=True)
    if as_json:
        print_json("faultbank", _facts(taken))
    else:
        _print(taken)


def _tell_pack(packed: Packed, bank: str, python: str, as_json: bool) -> int:
    """Print what was packed and how to continue. Returns the exit status."""
    from fedvitals_studies.packs.pack import size

    sizes = {str(part): size(part) for part in (packed.code, *packed.parts)}
    if as_json:
        print_json("faultbank", {"pack": sizes, "script": str(packed.script)})
        return 0
    for path, count in sizes.items():
        click.echo(f"{count / 1e6:7.1f} MB  {path}")
    there = f"python {packed.script} --device cuda --minutes 6 --out OUT"
    click.echo(f"There, with all of it in place, by Python {python}: {there}")
    click.echo(f"Then here: fedvitals faultbank --bank {bank} --merge OUT")
    return 0


def _list(facts: dict[str, Any], as_json: bool) -> int:
    """Print the content of a bank. Returns the exit status."""
    if as_json:
        print_json("faultbank", facts)
        return 0
    for name, value in facts.items():
        text = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        click.echo(f"{name}: {text}")
    return 0


class _bars:  # noqa: N801 - used as a function is
    """One bar per stage on a terminal, and an occasional line elsewhere; both on stderr."""

    def __init__(self) -> None:
        self._open: Any = None

    def __enter__(self) -> Any:
        return self._begin

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.stop()

    def _begin(self, name: str, cases: int) -> Done:
        if not cases:
            return lambda *_: None
        if not sys.stderr.isatty():
            return _lines(name, cases)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self._open is None:
            text = TextColumn("{task.description} {task.completed} of {task.total}")
            self._open = Progress(text, BarColumn(), TimeRemainingColumn(), console=Console(stderr=True))
            self._open.start()
        task = self._open.add_task(name, total=cases)
        return lambda *_: self._open.advance(task)


def _lines(name: str, cases: int) -> Done:
    began, over = time.monotonic(), 0

    def done(case: str, error: str | None) -> None:
        nonlocal over
        over += 1
        if error is not None:
            click.echo(f"{name}: {case} failed", err=True)
        if over % max(1, cases // 10) == 0 or over == cases:
            click.echo(f"{name}: {over} of {cases}, {time.monotonic() - began:.0f} s", err=True)

    return done


def _facts(taken: Taken) -> dict[str, Any]:
    from fedvitals_studies.faultbank.adapter_bank import AdapterSummary
    from fedvitals_studies.faultbank.healthy import Healthy

    if isinstance(taken.summary, AdapterSummary):
        tables: dict[str, Any] = {}
    elif isinstance(taken.summary, Healthy):
        tables = {"settings": taken.summary.lines, "pooled": taken.summary.pooled, "alarms": taken.summary.alarms}
    else:
        tables = {
            "methods": [
                {"method": row.name, "runs": row.runs, **{name: row.figures[name].value for name in TOLD}}
                for row in taken.summary.methods
            ]
        }
    return {
        "bank": taken.bank.name,
        "digest": taken.bank.digest,
        "counts": taken.summary.counts,
        "bars": [
            {
                "bar": bar.name,
                "asked": bar.limit,
                "obtained": bar.obtained.value,
                "low": bar.obtained.low,
                "high": bar.obtained.high,
                "verdict": bar.verdict,
                "note": bar.note,
            }
            for bar in taken.bars
        ],
        **tables,
        "absent": taken.absent,
        "failed": [name for name, _ in taken.failed],
        "files": [str(file) for file in taken.files],
    }


def _print(taken: Taken) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedvitals_studies.faultbank.adapter_bank import AdapterSummary
    from fedvitals_studies.faultbank.healthy import Healthy
    from fedvitals_studies.faultbank.healthy_page import head, row
    from fedvitals_studies.faultbank.page import HEADS, MARKS, PERCENT, words

    console = Console(highlight=False)
    counts = ", ".join(f"{count} {name}" for name, count in taken.summary.counts.items())
    console.print(f"[bold]{taken.bank.name}[/bold]: {counts}\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "bar", "asked", "obtained [95 %]"):
        table.add_column(column)
    for bar in taken.bars:
        percent = bar.unit == "%"
        asked = f"{'≥' if bar.at_least else '≤'} {100 * bar.limit if percent else bar.limit:g}{' %' * percent}"
        table.add_row(f"{MARKS[bar.verdict]} {bar.verdict}", bar.name, asked, words(bar.obtained, percent))
    console.print(table, "")
    table = Table(box=None, pad_edge=False, header_style="dim")
    if isinstance(taken.summary, AdapterSummary):
        columns: tuple[str, ...] = ()
        rows: list[tuple[str, ...]] = []
    elif isinstance(taken.summary, Healthy):
        columns = head(taken.summary)
        rows = [row(line, taken.summary) for line in (*taken.summary.lines, taken.summary.pooled)]
    else:
        columns = ("method", *(HEADS[name] for name in TOLD))
        rows = [
            (each.name, *(words(each.figures[name], name in PERCENT).partition(" [")[0] for name in TOLD))
            for each in taken.summary.methods
        ]
    for column in columns:
        table.add_column(column, no_wrap=column == "method")  # a name that is cut may be that of two detectors
    for cells in rows:
        table.add_row(*cells)
    console.print(table, "")
    console.print(f"Page: {taken.files[0]} and {taken.files[1].name} beside it", soft_wrap=True)
