# SPDX-License-Identifier: Apache-2.0
"""`fedvitals compare A B [C …]`: runs side by side, whether a difference can be chance, where they part, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.case_cards import COLOURS
from fedvitals.cli.options import print_json, store_options
from fedvitals.cli.screen import APART, new_console, new_table, number, shown
from fedvitals.views.units import compared

if TYPE_CHECKING:
    from fedvitals.views.comparison.chance import Change
    from fedvitals.views.comparison.divergence_point import Differing
    from fedvitals.views.comparison.runs import Comparison, ComparisonRow, Trouble

ROWS = 12  # of findings and settings, unless --all
PLACES = 4  # of one issue, unless --all
TEXT = 60  # characters of a setting, unless --all


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="A B [C ...]")
@click.option("--repeats", is_flag=True, help="Take all runs of each name and configuration, as repeats.")
@click.option("--all", "everything", is_flag=True, help="Every finding and every setting that differs.")
@store_options
def command(runs: tuple[str, ...], repeats: bool, everything: bool, store: str | None, as_json: bool) -> None:
    """Compare runs: what changed from the first to the others, whether that can be chance, where they part, and why.

    A run is an id, the beginning of one, or a name (its newest run). Runs that differ by their seed only are repeats
    of each other.
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
    console = new_console()
    _head(console, comparison)
    _opening(console, comparison)
    console.print(_table(comparison))
    console.print(f"{comparison.confidence}\n", soft_wrap=False)
    most = None if everything else ROWS
    _troubles(console, comparison, most)
    _plot(console, comparison)
    _partings(console, comparison)
    _settings(console, comparison, most, everything=everything)


def _head(console: Any, comparison: Comparison) -> None:
    for side in comparison.sides:
        runs = side.runs[0] if len(side.runs) == 1 else f"{len(side.runs)} runs, {side.runs[0]} the newest"
        size = f"{side.rounds} rounds, {side.clients} clients"
        console.print(f"{_letter(side.letter)}  [bold]{shown(side.name)}[/bold]  {shown(runs)}  [dim]{size}[/dim]")
    console.print()


def _letter(letter: str) -> str:
    from fedvitals.cli.bars import RUNS
    from fedvitals.views.comparison.runs import LETTERS

    colour = RUNS[LETTERS.index(letter) % len(RUNS)]
    return f"[bold {colour}]{letter}[/]"


def _opening(console: Any, comparison: Comparison) -> None:
    """Round time, memory and number of issues, before and after."""
    for row in comparison.opening:
        courses = " → ".join("not told" if v is None else compared(v, row.unit) for v in row.values)
        if row.name == "issues":
            courses = " → ".join("not judged" if v is None else f"{v:.3g}" for v in row.values)
        changes = ", ".join(_change(change, row, plain=True) for change in row.changes)
        console.print(f"[bold]{row.name[0].upper() + row.name[1:]}[/bold]  {courses}  {changes}")
    console.print()


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
    """In percent, points of a share or by itself; green if for the better and red if for the worse."""
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
    return f"[{'#009e73' if good else '#d55e00'}]{size}[/]"


def _size(change: Change, row: ComparisonRow) -> str:
    if not change.difference:
        return "same"
    sign = "+" if change.difference > 0 else ""
    if row.unit == "share":
        return f"{sign}{number(100 * change.difference)} pp"
    if row.unit in ("rounds", "cases") or change.relative is None:
        return f"{sign}{number(change.difference)}"
    if abs(change.relative) > 9:
        return f"× {number(1 + change.relative)}"
    return f"{sign}{number(100 * change.relative)} %"


def _reach(change: Change, row: ComparisonRow) -> str:
    """Half of the interval's width, in the unit of the change itself."""
    assert change.low is not None  # noqa: S101 - asked by the caller
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
    """Where, and in which runs if not in all."""
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
    lines = log_plot(comparison.gsc, letters, max(20, console.width - 14))
    if not lines:
        return
    console.print(f"[bold]GSC[/bold], median over the clients; log axis; {SEVERAL} where runs fall together")
    for line in lines:
        console.print(line, no_wrap=True)
    console.print()


def _partings(console: Any, comparison: Comparison) -> None:
    from fedvitals.views.comparison.divergence_point import NOISE

    first = comparison.sides[0]
    for side, divergence in zip(comparison.sides[1:], comparison.partings, strict=True):
        title = f"[bold]Where {first.letter} and {side.letter} part[/bold]"
        if divergence.exact is None:
            lasted = divergence.rounds
            lengths = "" if lasted[0] == lasted[1] else f", as far as both go ({min(lasted)} rounds)"
            console.print(f"{title}  nowhere: accuracy, loss and update norms are bit for bit the same{lengths}.")
            continue
        console.print(
            f"{title}  round {divergence.exact.round} is the first that differs at all: {_differing(divergence.exact)}."
        )
        if divergence.beyond_noise is None:
            console.print(f"  Nowhere by more than {NOISE:g} of the value: floating-point noise.")
        elif divergence.beyond_noise.round != divergence.exact.round:
            where = f"round {divergence.beyond_noise.round}: {_differing(divergence.beyond_noise)}"
            console.print(f"  Beyond floating-point noise ({NOISE:g}) first in {where}.")
        if min(divergence.repeats) > 1:
            where = f"first in round {divergence.beyond_repeats}, by {divergence.beyond_repeats_by}"
            first_round = where if divergence.beyond_repeats is not None else "in no round"
            console.print(f"  Beyond what repeats differ by: {first_round} (95 % over all rounds together).")


def _differing(what: Differing) -> str:
    words = [f"{name} {number(a)} against {number(b)}" for name, (a, b) in what.metrics.items()]
    nodes = [*what.nodes.items()]
    if nodes and what.same_nodes:
        named = ", ".join(
            f"{shown(node)} ({'absent' if a is None else number(a)} against {'absent' if b is None else number(b)})"
            for node, (a, b) in nodes[:3]
        )
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        words.append(f"update norms of {named}{more}; the same of {what.same_nodes} clients")
    elif nodes:
        words.append(f"the update norms of all {what.node_count} clients")
    return ", ".join(words)


def _settings(console: Any, comparison: Comparison, most: int | None, *, everything: bool) -> None:
    console.print()
    if not comparison.settings:
        console.print("[bold]Why[/bold]  no setting, seed or version differs: what differs lies outside of them.")
        return
    console.print("[bold]Why[/bold]  settings that differ")
    table = new_table("", padding=APART)
    for side in comparison.sides:
        table.add_column(_letter(side.letter), overflow="fold")
    for setting in comparison.settings[:most]:
        texts = ["–" if value is None else str(value) for value in setting.values]
        cells = [text if everything or len(text) <= TEXT else f"{text[: TEXT - 1]}…" for text in texts]
        table.add_row(shown(setting.name), *(shown(cell) for cell in cells))
    console.print(table)
    if most is not None and len(comparison.settings) > most:
        console.print(f"[dim]and {len(comparison.settings) - most} more: --all[/dim]")
