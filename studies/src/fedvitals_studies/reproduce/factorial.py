# SPDX-License-Identifier: Apache-2.0
"""The factorial: the paper's initial study under every reading of what it leaves open, and which one agrees best.

The score was fixed before the first run. Each sentence of the initial study (claims 1.x and 2.x; readings of one
sentence count once, by the better) gives 1 if it is reproduced, ½ if partly, and 0 if not, or if it cannot be tested
under this reading, since the paper reports an observation. The score is the mean over all sentences. «The likeliest
setting» is the reading with the highest score; between equal scores the one with the larger share of single checks that
hold in single repeats, then the one that comes first in `READINGS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedvitals_studies.reproduce.claims import Claim, Verdict, read, verdict_of
from fedvitals_studies.reproduce.conditions import (
    BY_NAME,
    FACTORIAL,
    OTHER_NETWORKS,
    OURS,
    READINGS,
    SETTLING,
    Condition,
    Reading,
)
from fedvitals_studies.reproduce.results import Results, beginning

REPEATS = 5  # per cell
EPOCH_REPEATS = 2  # of a cell in which an iteration is an epoch: each is twenty times the work of another cell
COMPLETE_REPEATS = 3  # of the extended study under the likeliest reading
POINTS = {"reproduced": 1.0, "partly": 0.5}
SCORED = ("1.", "2.")  # claims about the initial study


@dataclass(frozen=True, slots=True)
class ReadingScore:
    """How well the paper's initial study agrees with one reading."""

    reading: Reading
    verdicts: tuple[Verdict, ...]
    repeats: int  # the smallest number over its cells
    score: float
    held: float  # share of single checks in single repeats

    @property
    def order(self) -> tuple[float, float, int]:
        """Return the sort key: the best first."""
        return -self.score, -self.held, READINGS.index(self.reading)


def cells_of(reading: Reading) -> tuple[Condition, ...]:
    """Return the reading's eight cells."""
    return tuple(condition for condition in reading.conditions() if condition.study != "likeliest")


def extended_of(reading: Reading) -> tuple[Condition, ...]:
    """Return the extended study under a reading."""
    return tuple(condition for condition in reading.conditions() if condition.study == "likeliest")


def as_the_papers(results: Results, reading: Reading) -> Results:
    """Return the runs under a reading, under the names of the paper's own conditions."""
    prefix = reading.condition_of("")
    renamed = []
    for condition in reading.conditions():
        paper = BY_NAME[condition.name.removeprefix(prefix)]
        renamed += [
            beginning(run, dataclasses.replace(paper, rounds=min(paper.rounds, run["rounds"])))
            for run in results.of(condition.name)
        ]
    return Results(renamed)


def with_our_cells(results: Results) -> Results:
    """Return the results with what the factorial's cells under our own reading measured of the paper's conditions.

    The same seed is the same training, up to rounding: a repeat that both have takes every series of its cell, and
    keeps those that only the paper's condition measured.
    """
    found = {(run["condition"], run["repeat"]): run for run in results.all()}
    for cell in as_the_papers(results, OURS).all():
        whose = cell["condition"], cell["repeat"]
        if found.get(whose, cell)["rounds"] == cell["rounds"]:
            found[whose] = {**cell, "series": {**found.get(whose, cell)["series"], **cell["series"]}}
    return Results(found.values(), results.pieces)


def main_results(results: Results) -> tuple[Results, Reading]:
    """Return the results that the page shows first, and under which reading: the likeliest once its extended study
    exists, else ours.
    """
    ours, best = with_our_cells(results), likeliest(results)
    if best is None or best == OURS or not all(condition.name in results for condition in extended_of(best)):
        return ours, OURS
    under = as_the_papers(results, best)
    kept = [run for run in ours.all() if run["condition"] not in under]
    return Results([*kept, *under.all()], results.pieces), best


def standing_of(reading: Reading, results: Results, claims: Sequence[Claim]) -> ReadingScore | None:
    """Return the reading's score; None if not all its cells have been run."""
    names = [condition.name for condition in cells_of(reading)]
    if not all(name in results for name in names):
        return None
    own = as_the_papers(results, reading)
    verdicts = tuple(verdict_of(claim, own) for claim in claims if claim.id.startswith(SCORED))
    sentences: dict[str, float] = {}
    for verdict in verdicts:
        points = POINTS.get(verdict.verdict, 0.0)
        sentences[verdict.claim.says] = max(points, sentences.get(verdict.claim.says, 0.0))
    single = [
        each.check.judge(number) == "reproduced"
        for verdict in verdicts
        for each in verdict.measured
        for number in each.numbers
    ]
    return ReadingScore(
        reading,
        verdicts,
        min(len(results.repeats(name)) for name in names),
        sum(sentences.values()) / len(sentences),
        sum(single) / max(1, len(single)),
    )


def standings(results: Results) -> list[ReadingScore]:
    """Return all readings that have been run in full, the likeliest first."""
    claims, _ = read()
    found = [standing_of(reading, results, claims) for reading in READINGS]
    return sorted((each for each in found if each is not None), key=lambda each: each.order)


def likeliest(results: Results, repeats: int = REPEATS) -> Reading | None:
    """Return the best-agreeing reading with all repeats, once every one of the 64 cells has them; else None."""
    cells = [condition.name for condition in FACTORIAL if condition.study == "factorial"]
    if not all(len(results.repeats(name)) >= repeats for name in cells):
        return None
    fewest = {False: repeats, True: min(repeats, EPOCH_REPEATS)}  # by whether an iteration is an epoch
    return next(each.reading for each in standings(results) if each.repeats >= fewest[each.reading.epochs])


def phases(
    folder: Path, small: Callable[[Condition], Condition], repeats: int | None = None
) -> Iterator[tuple[tuple[Condition, ...], int]]:
    """Yield what is to be run, and how often, in phases; the later ones depend on the results of the earlier.

    The paper's first weights in other networks, which take a minute; the 64 cells; the extended study under the reading
    that agrees best, and under ours for comparison; then an epoch as iteration in the eight cells of that reading,
    which takes longest; and the extended study again if this reading agrees better. `small` scales a condition to the
    size at which it is run: the same, or a rehearsal's; `repeats`: of everything, instead of the usual.
    """
    cells, complete = repeats or REPEATS, repeats or COMPLETE_REPEATS
    yield tuple(map(small, OTHER_NETWORKS)), complete
    yield tuple(small(c) for c in FACTORIAL if c.study == "factorial"), cells
    best = likeliest(_read(folder, small), cells)
    if best is None:
        return
    yield tuple(map(small, dict.fromkeys((*extended_of(best), *extended_of(OURS))))), complete
    yield tuple(map(small, cells_of(dataclasses.replace(best, epochs=True)))), min(cells, EPOCH_REPEATS)
    best = likeliest(_read(folder, small), cells)
    if best is not None:
        yield tuple(map(small, extended_of(best))), complete


def _read(folder: Path, small: Callable[[Condition], Condition]) -> Results:
    return Results.read(folder, [small(condition) for condition in SETTLING])
