# SPDX-License-Identifier: Apache-2.0
"""`fedvitals reproduce`: a published study, run again here, with a verdict on each of its claims."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import json_option, print_json

if TYPE_CHECKING:
    from fedvitals_studies.reproduce.conditions import Condition
    from fedvitals_studies.reproduce.page import Outcome
    from fedvitals_studies.reproduce.study import Job, Progress


ENTRY = "fedvitals_studies.reproduce.piece:main"  # what a pack's run.py calls


@click.command()
@click.argument("study", type=click.Choice(["gsc", "factorial"]))
@click.option("--quick", is_flag=True, help="A rehearsal: 10 clients, 6 rounds, digits where GTSRB is not there.")
@click.option("--out", default=None, metavar="DIR", help="Where results, figures and page go. Default: reproduction.")
@click.option("--data", default=None, metavar="DIR", help="Where GTSRB lies. Default: FEDVITALS_DATA, ../shared/data.")
@click.option("--only", multiple=True, metavar="CONDITION", help="A condition, a study, or a pattern; may be repeated.")
@click.option("--repeats", type=int, default=None, help="Runs of each. Default: 3; quick: 1; cells: 5.")
@click.option("--page-only", is_flag=True, help="Run nothing: draw the page again from what is there.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=None, help="Where to train. Default: cpu.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="Begin no run that would not fit into so many minutes.",
)
@click.option("--pack", default=None, metavar="DIR", help="Run nothing: write what a GPU machine without us needs.")
@click.option(
    "--part",
    type=click.IntRange(min=1),
    default=None,
    metavar="MIB",
    help="With --pack: the most that a folder of data may have.",
)
@click.option("--python", default="3.12", help="With --pack: the version of Python over there.")
@click.option("--wheel", multiple=True, metavar="FILE", help="With --pack: a wheel to take, where pip has no network.")
@click.option(
    "--pieces",
    default=None,
    metavar="COMMAND",
    help="With factorial: pack, run COMMAND for one piece after the other, and merge, until nothing is left.",
)
@click.option(
    "--merge", multiple=True, metavar="FILE|DIR", help="Take in the results of a pack's run; then draw the page."
)
@json_option
def command(
    study: str,
    quick: bool,
    out: str | None,
    data: str | None,
    only: tuple[str, ...],
    repeats: int | None,
    page_only: bool,
    device: str | None,
    minutes: float | None,
    pack: str | None,
    part: int | None,
    python: str,
    wheel: tuple[str, ...],
    pieces: str | None,
    merge: tuple[str, ...],
    as_json: bool,
) -> None:
    """Repeat a published study, and check its claims.

    `gsc` is the study of gradient scale monitoring. The same command continues where it was stopped. Only all of GTSRB
    with 100 clients and the paper's rounds is called a reproduction. Exit code 1: some condition could not be run.

    `factorial` runs the initial study under every reading of what the paper leaves open (64 cells, 5 repeats), then an
    epoch as iteration in the cells that agree best, then the extended study under the likeliest reading; the page of
    `gsc` shows both.

    For a GPU that is lent for minutes, with torch, Triton and numpy on it: --pack writes a folder to carry there,
    its run.py works in pieces, and --merge brings their results home. --pieces does it all: its shell command has to
    run `python $PACK/code/run.py $PIECE --out …` over there and bring the results into $OUT.
    """
    _require_one_purpose(pack, merge, page_only or bool(pieces), wheel if not pieces else ())
    place, wheels = Path(data) if data else None, [*map(Path, wheel)]
    if pack is not None:
        _pack(Path(pack), Path(out or "reproduction"), part, place, python, wheels, as_json=as_json)
        return
    from fedvitals_studies.reproduce.conditions import SETTLING, chosen
    from fedvitals_studies.reproduce.factorial import REPEATS, phases
    from fedvitals_studies.reproduce.page import write_page
    from fedvitals_studies.reproduce.results import Results

    folder = Path(out or ("reproduction-quick" if quick else "reproduction"))
    rehearsed_on = _dataset(folder, place, page_only or bool(merge)) if quick else None
    own, small = _study(rehearsed_on)
    everything = tuple(dict.fromkeys((*own, *map(small, SETTLING))))
    failed: list[str] = []
    if merge:
        _merge(folder, merge, everything)
    elif pieces is not None:
        _pieces(pieces, folder, small, everything, only, repeats, minutes, place, python, wheels, rehearsed_on)
    elif not page_only:
        named = [(chosen(everything if only else own, only), REPEATS if study == "factorial" else 3)]
        repeats = repeats or (1 if quick else None)
        for some, usual in phases(folder, small, repeats) if study == "factorial" and not only else named:
            failed += _run(folder, some, repeats or usual, place, device, minutes)
        if study == "gsc" and not (quick or failed or minutes):
            _measure_costs(folder, place)
    click.echo("Drawing the page ...", err=True)
    outcome = write_page(folder, Results.read(folder, everything))
    _finish(outcome, failed, study, as_json=as_json)


def _finish(outcome: Outcome, failed: list[str], study: str, *, as_json: bool) -> None:
    from fedvitals_studies.reproduce.page import as_facts

    if as_json:
        print_json("reproduce", {**as_facts(outcome), "study": study, "failed": failed, "files": _names(outcome)})
    else:
        _print(outcome, failed)
    if failed:
        sys.exit(1)


def _study(rehearsed_on: str | None) -> tuple[Sequence[Condition], Callable[[Condition], Condition]]:
    """Return the conditions of `gsc`, and how one of the factorial's is scaled to the size at which it is run."""
    from fedvitals_studies.reproduce.conditions import CONDITIONS, quick, quick_factorial

    if rehearsed_on is None:
        return CONDITIONS, lambda condition: condition
    return quick(rehearsed_on), lambda condition: quick_factorial(condition, rehearsed_on)


def _require_one_purpose(pack: str | None, merge: Sequence[str], page_only: bool, wheel: Sequence[str]) -> None:
    if pack is not None and (merge or page_only):
        raise click.UsageError("--pack sends the study away, --merge and --page-only draw its page: give one of them.")
    if wheel and pack is None:
        raise click.UsageError("--wheel goes with --pack.")


def _measure_costs(folder: Path, data: Path | None) -> None:
    from fedvitals_studies.reproduce import costs

    if not (folder / "costs.json").exists():
        click.echo("Measuring what each metric costs ...", err=True)
        costs.write(folder, data)


def _dataset(folder: Path, data: Path | None, nothing_to_run: bool) -> str:
    """Return GTSRB if it is available, else digits; for a folder with results, their data set."""
    import json

    before = sorted((folder / "results").glob("*.json"))
    if before:
        return str(json.loads(before[0].read_text(encoding="utf-8"))["dataset"])
    if nothing_to_run:  # a pack uses GTSRB
        return "gtsrb"
    from fedvitals_studies.reproduce.study import has_gtsrb

    return "gtsrb" if has_gtsrb(data) else "digits"


def _merge(folder: Path, files: Sequence[str], conditions: Sequence[Condition]) -> None:
    from fedvitals_studies.reproduce import bundle

    count = bundle.merge(folder, [Path(file) for file in files], conditions)
    click.echo(f"{count} results taken into {folder / 'results'}", err=True)


def _pieces(
    command: str,
    folder: Path,
    small: Callable[[Condition], Condition],
    everything: Sequence[Condition],
    only: Sequence[str],
    repeats: int | None,
    minutes: float | None,
    data: Path | None,
    python: str,
    wheels: list[Path],
    rehearsed_on: str | None,
) -> None:
    import tempfile
    from contextlib import nullcontext

    from fedvitals_studies.packs.pack import pack
    from fedvitals_studies.reproduce.conditions import SETTLING, chosen
    from fedvitals_studies.reproduce.data import packed_gtsrb
    from fedvitals_studies.reproduce.factorial import REPEATS
    from fedvitals_studies.reproduce.pieces import ARGUMENTS, run_pieces, runs_left
    from fedvitals_studies.reproduce.study import plan

    def left() -> int:
        if not only:
            return runs_left(folder, small, repeats)
        return len(plan(folder, chosen([*map(small, SETTLING)], only), repeats or REPEATS).todo)

    # By name: a pattern would need quotes, which a shell that expands $PIECE passes on unchanged.
    names = [condition.name for condition in chosen([*map(small, SETTLING)], only)] if only else []
    words = [ARGUMENTS, f"--minutes {minutes or 8:g}", *(f"--only {name}" for name in names)]
    words += [f"--repeats {repeats}"] * (repeats is not None)
    words += [f"--quick --dataset {rehearsed_on}"] * (rehearsed_on is not None)
    without = rehearsed_on not in (None, "gtsrb")
    with tempfile.TemporaryDirectory() as place, nullcontext(()) if without else packed_gtsrb(data) as files:
        made = pack(Path(place) / "pack", data=files, entry=ENTRY, python=python, wheels=wheels)
        run_pieces(command, folder, made.code, left, everything, " ".join(words), _tell)


def _pack(
    folder: Path, done: Path, part: int | None, data: Path | None, python: str, wheels: list[Path], *, as_json: bool
) -> None:
    from fedvitals_studies.packs.pack import PART_BYTES, pack, size
    from fedvitals_studies.reproduce import bundle
    from fedvitals_studies.reproduce.data import packed_gtsrb

    with packed_gtsrb(data) as files:
        made = pack(
            folder, data=files, entry=ENTRY, python=python, wheels=wheels, part_bytes=part << 20 if part else PART_BYTES
        )
    bundle.write_done(made.code / bundle.DONE, done)
    told = {str(part): size(part) for part in (made.code, *made.parts)}
    if as_json:
        print_json("reproduce", {"pack": told, "script": str(made.script)})
        return
    for path, count in told.items():
        click.echo(f"{count / 1e6:7.1f} MB  {path}")
    click.echo(f"There, with all of it in place, by Python {python}: python {made.script} --minutes 8 --out OUT")
    click.echo("Then here: fedvitals reproduce gsc --merge OUT")


def _run(
    folder: Path,
    conditions: Sequence[Condition],
    repeats: int,
    data: Path | None,
    device: str | None,
    minutes: float | None,
) -> list[str]:
    from fedvitals_studies.reproduce.conditions import richly
    from fedvitals_studies.reproduce.study import default_measure, in_words, measure_all, plan

    where = device or "cpu"
    if where != "cpu":
        conditions = [richly(condition) for condition in conditions]
    planned = plan(folder, conditions, repeats, where)
    if not planned.todo:
        click.echo(f"All {len(planned.done)} runs are there: {folder / 'results'}", err=True)
        return []
    if where != "cpu":
        from fedvitals.lab.engines.devices import resolve_device

        resolve_device(where)  # before anything is announced
    guess = " (a guess until the first is done)" if planned.guessed else ""
    click.echo(
        f"{len(planned.todo)} runs to do, {len(planned.done)} done; about {in_words(planned.seconds)}{guess}. "
        f"Each is kept in {folder / 'results'}: stop with Ctrl-C, go on with the same command.",
        err=True,
    )
    measure = default_measure(device)
    with _bars() as progress:
        return measure_all(
            folder,
            conditions,
            repeats=repeats,
            measure=measure,
            data=data,
            tell=_tell,
            progress=progress,
            minutes=minutes,
            device=where,
        )


def _tell(text: str) -> None:
    click.echo(text, err=True)


class _bars:  # noqa: N801 - used as a function is
    """One bar per run on a terminal; nothing elsewhere, where the surrounding lines are enough."""

    def __enter__(self) -> Callable[[Job], Progress]:
        self._open: Any = None
        return self._start

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.stop()
            self._open = None

    def _start(self, job: Job) -> Progress:
        self._close()
        if not sys.stderr.isatty():
            return lambda *_: None
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("  round {task.completed} of {task.total}")
        self._open = bar = Progress(text, BarColumn(), TimeRemainingColumn(), console=Console(stderr=True))
        task = bar.add_task("", total=job.condition.rounds)
        bar.start()

        def show(done: int, rounds: int) -> None:
            bar.update(task, completed=done, total=rounds)
            if done >= rounds:
                self._close()

        return show


def _names(outcome: Outcome) -> list[str]:
    return [str(file) for file in outcome.files]


def _print(outcome: Outcome, failed: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedvitals.cli.screen import shown
    from fedvitals_studies.reproduce.page import MARKS

    console = Console(highlight=False)
    console.print(f"[bold]{outcome.standing}[/]" + (": " + "; ".join(outcome.objections) if outcome.objections else ""))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("claim", "verdict", "in words", "reading", "repeats"):
        table.add_column(column, justify="right" if column == "repeats" else "left")
    ran = [verdict for verdict in outcome.verdicts if verdict.verdict != "not run"]
    for verdict in ran:
        claim = verdict.claim
        word = f"{MARKS[verdict.verdict]} {verdict.word}"
        table.add_row(claim.id, word, shown(claim.says), claim.reading, str(verdict.repeats))
    if ran:
        console.print(table)
    console.print(", ".join(f"{count} {word}" for word, count in outcome.counts.items()))
    for line in failed:
        console.print(f"[red]failed[/] {shown(line)}")
    console.print(f"Page: {outcome.files[1]} and {outcome.files[0].name} beside it", soft_wrap=True)
