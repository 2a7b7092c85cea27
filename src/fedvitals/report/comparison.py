# SPDX-License-Identifier: Apache-2.0
"""The report on several runs: what changed, where they diverge, what it cost and why; then an appendix."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals import plot
from fedvitals.plot.comparison import draw_comparison
from fedvitals.report.findings_part import marked, verdict_card
from fedvitals.report.markup import Block, Folded, Heading, Pictures, Points, Table, Text, literal
from fedvitals.report.settings import settings_part
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.comparison.page import ComparePage, PageChange, PageRow, compare_page
from fedvitals.views.comparison.runs import sides_of
from fedvitals.views.units import compared, number
from fedvitals.views.verdict import Verdict, verdict_of

TROUBLES = 40


def comparison(reader: Reader, runs: Sequence[str], pictures: Pictures) -> tuple[list[Verdict], list[Block]]:
    """Return the verdict on each side's newest run, and the comparison as blocks."""
    page = compare_page(sides_of(reader, runs))
    newest = [side.runs[0] for side in page.sides]
    runs_of = [[queries.get_run(reader, run) for run in side.runs] for side in page.sides]
    verdicts = [verdict_of(reader, run) for run in newest]
    blocks: list[Block] = [
        Heading(1, " against ".join(literal(f"{side.letter} {side.name}", 60) for side in page.sides)),
        *(Text(literal(sentence), "lead") for sentence in page.words),
        Heading(2, "What happened"),
        _sides(page, verdicts),
        Text(literal(page.chance), "quiet"),
        Heading(3, "Where they diverge"),
        Points(tuple(literal(divergence.words) for divergence in page.partings)),
        *_troubles(page),
        Heading(3, "What it cost, and what was set otherwise"),
        Points(tuple(map(literal, page.costs))),
        Heading(2, "Evidence"),
        pictures.of(
            "comparison",
            "the runs' trends over the rounds: accuracy, loss, gradient scale, time, bytes",
            lambda: draw_comparison(page),
            "With repeats a line is their mean, its band reaches from the lowest to the highest.",
        ),
        pictures.of(
            "gsc",
            "gradient scale of all runs on one log axis",
            lambda: plot.gsc(*((reader, run) for run in newest)),
            "The paper's main use of the gradient scale: runs beside each other. 0 is a level of its own.",
        ),
        Heading(2, "What to do"),
    ]
    for side, verdict in zip(page.sides, verdicts, strict=True):
        blocks += [Heading(3, literal(f"{side.letter} {side.name}", 80)), verdict_card(verdict)]
    differing, same = settings_part(runs_of, [side.letter for side in page.sides])
    blocks += [differing, Heading(2, "Appendix"), Folded("All numbers", (_rows(page),)), *([same] if same else [])]
    return verdicts, blocks


def _sides(page: ComparePage, verdicts: Sequence[Verdict]) -> Table:
    rows = tuple(
        (side.letter, literal(side.name, 60), literal(side.runs[0]), str(len(side.runs)), str(side.rounds),
         str(side.clients), literal(verdict.sentence))
        for side, verdict in zip(page.sides, verdicts, strict=True)
    )  # fmt: skip
    head = ("", "name", "newest run", "runs", "rounds", "clients", "verdict")
    return Table("Runs", head, rows, numbers=frozenset({3, 4, 5}))


def _rows(page: ComparePage) -> Table:
    base = page.sides[0].letter
    head = ["", "", base]
    for side in page.sides[1:]:
        head += [side.letter, f"from {base}"]
    rows = []
    for row in page.rows:
        cells = [row.topic, literal(row.name), compared(row.values[0], row.unit)]
        for value, change in zip(row.values[1:], row.changes, strict=True):
            cells += [compared(value, row.unit), _change(change, row)]
        rows.append(tuple(cells))
    note = "± 95 % interval; **bold**: larger than chance explains."
    return Table("Numbers", tuple(head), tuple(rows), note, frozenset(range(2, len(head))))


def _change(change: PageChange | None, row: PageRow) -> str:
    """Return the change in percentage points, percent, or its unit, with half of its interval if there is one."""
    if change is None or change.difference is None:
        return "–"
    if not change.difference:
        return "same"
    factor, unit = 1.0, ""
    if row.unit == "share":
        factor, unit = 100.0, " points"
    elif row.unit not in ("rounds", "cases") and change.relative is not None:
        factor, unit = 100 * abs(change.relative / change.difference), " %"
    text = f"{'+' if change.difference > 0 else ''}{number(factor * change.difference)}{unit}"
    if change.low is not None and change.high is not None and change.low != change.high:
        text += f" ± {number(factor * (change.high - change.low) / 2)}"
    return f"**{text}**" if change.beyond_chance else text


def _troubles(page: ComparePage) -> list[Block]:
    blocks: list[Block] = [Heading(3, "Findings")]
    blind = [side.letter for side in page.sides if not side.judged]
    if blind:
        blocks.append(Text(f"Not judged, or not in full: {', '.join(blind)}. `fedvitals findings RUN` says why."))
    if not page.troubles:
        return [*blocks, Text("None.")]
    head = ("severity", "what", "where", *(side.letter for side in page.sides))
    rows = tuple(
        (marked(trouble.severity), literal(trouble.title), literal(trouble.place, 80),
         *(f"{count} of {len(side.runs)}" if len(side.runs) > 1 else "✓" if count else "·"
           for count, side in zip(trouble.runs, page.sides, strict=True)))
        for trouble in page.troubles[:TROUBLES]
    )  # fmt: skip
    more = len(page.troubles) - TROUBLES
    return [*blocks, Table("In how many runs of each", head, rows, f"and {more} more" if more > 0 else "")]
