# SPDX-License-Identifier: Apache-2.0
"""`fedvitals compare A B [C …]`: runs side by side, where they diverge, whether a difference can be chance, and why."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.case_cards import COLOURS
from fedvitals.cli.options import print_json, store_options
from fedvitals.cli.screen import APART, new_console, new_table, number, shown
from fedvitals.palette import DARK
from fedvitals.plural import counted
from fedvitals.views.units import compared

if TYPE_CHECKING:
    from fedvitals.views.comparison.chance import Change
    from fedvitals.views.comparison.runs import Comparison, ComparisonRow, Trouble

ROWS = 12  # of findings and settings, unless --all
PLACES = 4  # of one issue, unless --all
TEXT = 60  # characters of a setting, unless --all


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--repeats", is_flag=True, help="Compare all runs of each name and configuration, as repeats.")
@click.option("--all", "everything", is_flag=True, help="Show every finding and every setting that differs.")
@store_options
def command(runs: tuple[str, ...], repeats: bool, everything: bool, store: str | None, as_json: bool) -> None:
    """Compare two or more runs.

    It shows what changed from the first run to the others, since when they differ, whether that can be chance, and why.
    A run is an id, the beginning of one, or a name (its newest run). Runs that differ by their seed only are repeats of
    each other.
    """
    from fedvitals.store import open_reader
    from fedvitals.views.comparison.runs import compare

    with open_reader(store) as reader:
        comparison = compare(reader, runs, repeats=repeats)
    if as_json:
        print_json("compare", comparison)
    else:
        _print(comparison, everything=everything)


def _print(comparison: Comparison, *, everything: bool) -> None:
    """Print learning, where and in whom the runs diverge, findings, time and memory; then all numbers."""
    console = new_console()
    most = None if everything else ROWS
    _head(console, comparison)
    _opening(console, comparison, ("learning",))
    _divergences(console, comparison)
    _troubles(console, comparison, most)
    _opening(console, comparison, ("time", "memory"))
    console.print()
    console.print(_table(comparison))
    console.print(f"{comparison.confidence}\n", soft_wrap=False)
    _plot(console, comparison)
    _settings(console, comparison, most, everything=everything)


def _head(console: Any, comparison: Comparison) -> None:
    for side in comparison.sides:
        runs = side.runs[0] if len(side.runs) == 1 else f"{len(side.runs)} runs, {side.runs[0]} the newest"
        size = f"{counted(side.rounds, 'round')}, {counted(side.clients, 'client')}"
        console.print(f"{_letter(side.letter)}  [bold]{shown(side.name)}[/bold]  {shown(runs)}  [dim]{size}[/dim]")
    console.print()


def _letter(letter: str) -> str:
    from fedvitals.cli.bars import RUNS
    from fedvitals.views.comparison.runs import LETTERS

    colour = RUNS[LETTERS.index(letter) % len(RUNS)]
    return f"[bold {colour}]{letter}[/]"


def _opening(console: Any, comparison: Comparison, topics: Container[str]) -> None:
    """Print the most important numbers of each side: «Accuracy  90 % → 70 %  −20 pp»."""
    for row in comparison.opening:
        if row.topic in topics:
            values = " → ".join("not measured" if v is None else compared(v, row.unit) for v in row.values)
            changes = ", ".join(_change(change, row, plain=True) for change in row.changes)
            name = row.name.removesuffix(", last")
            console.print(f"[bold]{name[0].upper() + name[1:]}[/bold]  {values}  {changes}")


def _table(comparison: Comparison) -> Any:
    table = new_table("", "", padding=APART)
    for i, side in enumerate(comparison.sides):
        table.add_column(_letter(side.letter), justify="right", no_wrap=True)
        if i:
            table.add_column(f"from {comparison.sides[0].letter}", justify="right", no_wrap=True)
    topic = ""
    for row in comparison.rows:
        cells = [compared(row.values[0], row.unit)]
        for value, change in zip(row.values[1:], row.changes, strict=True):
            cells += [compared(value, row.unit), _change(change, row)]
        table.add_row("" if row.topic == topic else f"[bold]{row.topic}[/bold]", row.name, *cells)
        topic = row.topic
    if any(c is not None and c.beyond_chance is not None for row in comparison.rows for c in row.changes):
        by_seed = any(c is not None and c.paired for row in comparison.rows for c in row.changes)
        of = ", seed by seed" if by_seed else ""
        table.caption, table.caption_justify = f"± 95 % interval{of}; * larger than chance explains", "left"
    return table


def _change(change: Change | None, row: ComparisonRow, *, plain: bool = False) -> str:
    """Return a change in percent, percentage points or its own unit; green if better and red if worse."""
    if change is None:
        return "" if plain else "–"
    size = _size(change, row)
    if change.low is not None and change.difference and change.low != change.high and not plain:
        size += f" {_reach(change, row)}" + ("*" if change.beyond_chance else " ")
    if not change.difference or not row.better:
        return f"[dim]{size}[/dim]"
    good = (change.difference > 0) == (row.better == "higher")
    if change.beyond_chance is False:
        return f"[dim]{size}[/dim]"
    return f"[{DARK['ok-fill'] if good else DARK['critical-fill']}]{size}[/]"


def _size(change: Change, row: ComparisonRow) -> str:
    if not change.difference:
        return "same"
    sign = "+" if change.difference > 0 else ""
    if row.unit == "share":
        return f"{sign}{number(100 * change.difference)} points"
    if row.unit in ("rounds", "cases") or change.relative is None:
        return f"{sign}{number(change.difference)}"
    if abs(change.relative) > 9:
        return f"× {number(1 + change.relative)}"
    return f"{sign}{number(100 * change.relative)} %"


def _reach(change: Change, row: ComparisonRow) -> str:
    """Return half of the interval's width, in the unit of the change itself."""
    assert change.low is not None  # noqa: S101 - checked by the caller
    reach = change.difference - change.low
    if row.unit == "share":
        reach *= 100
    elif row.unit not in ("rounds", "cases") and change.relative is not None:
        reach *= 100 * abs(change.relative / change.difference) if change.difference else 0.0
    return f"± {number(reach)}"


def _troubles(console: Any, comparison: Comparison, most: int | None) -> None:
    unjudged = [side.letter for side in comparison.sides if not side.judged]
    if unjudged:
        console.print(f"Not judged, or not in full: {', '.join(unjudged)}. `fedvitals findings RUN` says why.")
    if not comparison.troubles:
        if len(unjudged) < len(comparison.sides):
            console.print("[bold]Findings[/bold]  none")
        console.print()
        return
    letters = [f">{_letter(side.letter)}" for side in comparison.sides]
    table = new_table("Findings", "", *letters, padding=APART)
    table.add_column("where", overflow="fold")
    issues = {
        trouble.issue: [other for other in comparison.troubles if other.issue == trouble.issue]
        for trouble in comparison.troubles
    }
    for issue, same in [*issues.items()][:most]:
        colour = COLOURS.get(same[0].severity, "dim")
        sums = [sum(other.runs[i] for other in same) / len(side.runs) for i, side in enumerate(comparison.sides)]
        counts = [number(count) if count else "·" for count in sums]
        table.add_row(
            f"[{colour}]{same[0].severity}[/]", issue, *counts, _places(comparison, same, everything=most is None)
        )
    console.print(table)
    if any(len(side.runs) > 1 for side in comparison.sides):
        console.print("[dim]cases a run[/dim]")
    if most is not None and len(issues) > most:
        console.print(f"[dim]and {len(issues) - most} more: --all[/dim]")
    console.print()


def _places(comparison: Comparison, troubles: list[Trouble], *, everything: bool) -> str:
    """Return the places of a trouble, and in which runs if not in all."""
    by_sides: dict[str, list[str]] = {}
    for trouble in troubles:
        which = "".join(side.letter for side, n in zip(comparison.sides, trouble.runs, strict=True) if n)
        by_sides.setdefault(which, []).append(shown(trouble.place))
    most = None if everything else PLACES
    texts = []
    for which, places in by_sides.items():
        more = "" if most is None or len(places) <= most else f" and {len(places) - most} more"
        texts.append(f"{which}: {', '.join(places[:most])}{more}")
    return "; ".join(texts)


def _plot(console: Any, comparison: Comparison) -> None:
    from fedvitals.cli.bars import SEVERAL, log_plot

    letters = "".join(side.letter for side in comparison.sides)
    note = f", median over the clients; log axis; {SEVERAL} where runs fall together"
    for pair, sides in [("", comparison.gsc), *comparison.layer_pairs.items()]:
        lines = log_plot(sides, letters, max(20, console.width - 14))
        if not lines:
            continue
        console.print(f"[bold]GSC[/bold]{f' of {shown(pair)}' if pair else ''}{note}")
        for line in lines:
            console.print(line, no_wrap=True)
        console.print()


def _divergences(console: Any, comparison: Comparison) -> None:
    """Print the verdict on each side, in which round it begins to differ from the first, and whose updates do."""
    from fedvitals.views.comparison.page import in_words

    for side in comparison.sides:
        console.print(f"{_letter(side.letter)}  {shown(side.verdict)}")
    for sentence in in_words(comparison)[2]:
        console.print(shown(sentence))
    console.print()


def _settings(console: Any, comparison: Comparison, most: int | None, *, everything: bool) -> None:
    if not comparison.settings:
        console.print("[bold]Why[/bold]  no setting, seed or version differs: what differs lies outside of them.")
        return
    console.print("[bold]Why[/bold]  settings that differ")
    table = new_table("", padding=APART)
    for side in comparison.sides:
        table.add_column(_letter(side.letter), overflow="fold")
    longest = None if everything else TEXT
    for setting in comparison.settings[:most]:
        defaults = setting.defaults or [False] * len(setting.values)
        cells = [_setting(*pair, longest) for pair in zip(setting.values, defaults, strict=True)]
        table.add_row(shown(setting.name), *cells)
    console.print(table)
    if most is not None and len(comparison.settings) > most:
        console.print(f"[dim]and {len(comparison.settings) - most} more: --all[/dim]")


def _setting(value: Any, is_default: bool, longest: int | None) -> str:
    text = "–" if value is None else str(value)
    text = shown(text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…")
    return f"[dim]{'none' if value is None else text} (default)[/dim]" if is_default else text
