# SPDX-License-Identifier: Apache-2.0
"""The factorial's part of the page: each reading's verdict on each claim, its score, and the likeliest setting."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals.report.markup import Block, Table, Text
from fedvitals_studies.reproduce.claims import WORDS, read, verdict_of
from fedvitals_studies.reproduce.conditions import FACTORIAL, OURS
from fedvitals_studies.reproduce.factorial import (
    REPEATS,
    SCORED,
    Standing,
    as_the_papers,
    extended_of,
    likeliest,
    standings,
)
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
    """For the page: the rule, how much has been run, the readings, and what changes under the likeliest."""
    ranked = standings(results)
    cells = [condition.name for condition in FACTORIAL if condition.study == "factorial"]
    runs = sum(min(REPEATS, len(results.repeats(name))) for name in cells)
    whole = sum(name in results for name in cells)
    shown: list[Block] = [Text(RULE)]
    seconds = sum(run["seconds"] for name in cells for run in results.of(name))
    shown.append(
        Text(
            f"Run so far: {runs} of {REPEATS * len(cells)} runs, {whole} of {len(cells)} cells; {seconds / 60:.0f} "
            "minutes added up over the runs, eight of which shared a GPU at a time. `fedvitals reproduce factorial`, "
            "or another piece, goes on with the rest."
        )
    )
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


def _table(ranked: Sequence[Standing]) -> Table:
    ids = [verdict.claim.id for verdict in ranked[0].verdicts]
    rows = tuple(
        (each.reading.words + (" (ours)" if each.reading == OURS else ""), f"{each.score:.2f}",
         f"{100 * each.held:.0f} %", str(each.repeats), *(MARKS[verdict.verdict] for verdict in each.verdicts))
        for each in ranked
    )  # fmt: skip
    note = "● reproduced, ◐ partly, ○ not, ∅ not testable. «Checks»: single checks that hold, of single repeats."
    return Table("Readings, the best first", ("reading", "score", "checks", "repeats", *ids), rows, note)


def _changes(results: Results, ranked: Sequence[Standing]) -> list[Block]:
    """Verdicts that differ between ours and the reading of the highest score, the extended study where it was run."""
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
        under = as_the_papers(results, best.reading)
        for claim in read()[0]:
            if not claim.id.startswith(SCORED):
                here, there = verdict_of(claim, results).verdict, verdict_of(claim, under).verdict
                rows += [(claim.id, claim.says, WORDS[here], WORDS[there])] if here != there else []
    if not rows:
        return [Text("No verdict of the initial study changes under it.")]
    return [Table("Verdicts that change", ("claim", "in words", "ours", f"under «{best.reading.words}»"), tuple(rows))]
