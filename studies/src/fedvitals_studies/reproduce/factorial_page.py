# SPDX-License-Identifier: Apache-2.0
"""The factorial's part of the page: each reading's verdict on each claim, its score, and the likeliest setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fedvitals.report.markup import Block, Table, Text
from fedvitals_studies.reproduce.claims import WORDS, read, verdict_of
from fedvitals_studies.reproduce.conditions import FACTORIAL, OURS, Condition
from fedvitals_studies.reproduce.factorial import (
    EPOCH_REPEATS,
    REPEATS,
    SCORED,
    ReadingScore,
    as_the_papers,
    cells_of,
    extended_of,
    likeliest,
    standings,
    with_our_cells,
)
from fedvitals_studies.reproduce.parallel import PROCESSES, seconds_of
from fedvitals_studies.reproduce.results import Results

MARKS = {"reproduced": "●", "partly": "◐", "not": "○", "not testable": "∅", "not run": "–"}
RULE = (
    "The paper does not say whether there is pooling, how pixels are scaled, whether Adam's state is kept, and whether "
    "a local iteration is a mini-batch or an epoch. Each reading's eight cells (four topologies, unclipped and "
    "clipped) are judged by the same criteria. The score, fixed before the first run, is the mean over the sentences "
    "of the initial study: 1 for reproduced, ½ for partly, 0 for not, and 0 where a sentence cannot be tested, since "
    "the paper reports that something was seen; readings of one sentence count once, by the better. «The likeliest "
    "setting» has the highest score; between equal ones, more single checks that hold in single repeats, then the "
    "order in `conditions.READINGS`."
)


def blocks(results: Results) -> list[Block]:
    """Return the blocks for the page: the rule, progress, the readings, and what changes under the likeliest."""
    ranked = standings(results)
    cells = [condition.name for condition in FACTORIAL if condition.study == "factorial"]
    runs = sum(min(REPEATS, len(results.repeats(name))) for name in cells)
    whole = sum(name in results for name in cells)
    seconds = sum(run["seconds"] for name in cells for run in results.of(name))
    shown: list[Block] = [
        Text(RULE),
        Text(
            f"Run so far: {runs} of {REPEATS * len(cells)} runs, {whole} of {len(cells)} cells; {seconds / 60:.0f} "
            f"minutes added up over the runs, {PROCESSES} of which shared a GPU at a time."
        ),
    ]
    if not ranked:
        return shown
    shown.append(_table(ranked))
    best = likeliest(results)
    if best is None:
        shown.append(
            Text(
                f"**No reading is called the likeliest before every cell has {REPEATS} repeats.** So far "
                f"«{ranked[0].reading.words}» has the highest score among the readings whose eight cells have run."
            )
        )
    else:
        shown.append(Text(f"**The likeliest setting: {best.words}.**"))
    return [*shown, *_changes(results, ranked)]


def left(results: Results) -> str:
    """Return what is left of the factorial, and its expected duration, in words."""
    best = likeliest(results)
    if best is None:
        missing = [(c, REPEATS - len(results.repeats(c.name))) for c in FACTORIAL if c.study == "factorial"]
        runs = sum(max(0, count) for _, count in missing)
        return (
            f"{runs} of the factorial's {REPEATS * len(missing)} runs, about {_minutes(missing)} minutes of an H200; "
            "after them the extended study under the reading that agrees best, and an epoch as iteration in its eight "
            "cells, at twenty times the work of a cell. `fedvitals reproduce factorial` runs them (docs/gpu.md)."
        )
    cells = cells_of(dataclasses.replace(best, epochs=True))
    epochs = [(c, EPOCH_REPEATS - len(results.repeats(c.name))) for c in cells]
    runs = sum(max(0, count) for _, count in epochs)
    if not runs:
        return "nothing of the factorial is left."
    return f"{runs} runs in which an epoch is an iteration, about {_minutes(epochs)} minutes of an H200."


def _minutes(missing: Sequence[tuple[Condition, int]]) -> str:
    return f"{sum(seconds_of(cell) * max(0, count) for cell, count in missing) / PROCESSES / 60:.0f}"


def _table(ranked: Sequence[ReadingScore]) -> Table:
    ids = [verdict.claim.id for verdict in ranked[0].verdicts]
    rows = tuple(
        (each.reading.words + (" (ours)" if each.reading == OURS else ""), f"{each.score:.2f}",
         f"{100 * each.held:.0f} %", str(each.repeats), *(MARKS[verdict.verdict] for verdict in each.verdicts))
        for each in ranked
    )  # fmt: skip
    note = "● reproduced, ◐ partly, ○ not, ∅ not testable. «Checks»: single checks that hold, of single repeats."
    return Table("Readings, the best first", ("reading", "score", "checks", "repeats", *ids), rows, note)


def _changes(results: Results, ranked: Sequence[ReadingScore]) -> list[Block]:
    """Return verdicts that differ between ours and the best reading, including the extended study if it was run."""
    ours = next((each for each in ranked if each.reading == OURS), None)
    best = ranked[0]
    if ours is None or best.reading == OURS:
        return []
    before = {verdict.claim.id: verdict.verdict for verdict in ours.verdicts}
    rows = [
        (other.claim.id, other.claim.says, WORDS[before[other.claim.id]], WORDS[other.verdict])
        for other in best.verdicts
        if before[other.claim.id] != other.verdict
    ]
    if all(condition.name in results for condition in extended_of(best.reading)):
        under, own = as_the_papers(results, best.reading), with_our_cells(results)
        for claim in read()[0]:
            if not claim.id.startswith(SCORED):
                here, there = verdict_of(claim, own).verdict, verdict_of(claim, under).verdict
                rows += [(claim.id, claim.says, WORDS[here], WORDS[there])] if here != there else []
    if not rows:
        return [Text("No verdict of the initial study changes under it.")]
    return [Table("Verdicts that change", ("claim", "in words", "ours", f"under «{best.reading.words}»"), tuple(rows))]
