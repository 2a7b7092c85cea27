# SPDX-License-Identifier: Apache-2.0
"""Reduces one sign over the rounds to as many points as a screen can show, keeping the extremes.

A bucket is a fixed number of round numbers, so that the buckets of all signs of a page line up. Spikes survive: each
bucket has its smallest and largest value. What was not measured is a gap; values that are not finite are listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from fedvitals.catalog import meaning_of, unit_of
from fedvitals.protocols import Node
from fedvitals.stats import Array
from fedvitals.store.read.metrics import series_of
from fedvitals.store.read.reader import Reader
from fedvitals.views.cohort import Matrix
from fedvitals.views.matrix import rounds_not_finite
from fedvitals.views.metric_titles import in_words, metric_title

Numbers = list[float | None]
"""Values for JSON: None where there is none, or none that is finite."""

GAP = 1.5  # times the usual distance of two measured rounds, beyond which something is missing


@dataclass(frozen=True, slots=True)
class Series:
    """One value per bucket; `low` and `high` are its extremes."""

    name: str
    node: str | None  # None: the federation
    of: str  # whose values: «federation», «server», «median client», or the node's name
    title: str  # the name for users
    unit: str
    meaning: str
    rounds: list[int]  # the first of each bucket
    last: list[int]
    values: Numbers
    low: Numbers
    high: Numbers
    odd: list[int]  # rounds whose value was NaN or infinite
    total: int  # measured rounds that these points represent


@dataclass(frozen=True, slots=True)
class Band:
    """The spread of a sign over the clients in each bucket of rounds."""

    name: str
    title: str  # the name for users
    unit: str
    meaning: str
    rounds: list[int]
    last: list[int]
    min: Numbers
    p5: Numbers
    median: Numbers
    p95: Numbers
    max: Numbers
    clients: list[int]  # finite values behind each bucket
    total: int  # rounds with any


def json_numbers(values: npt.ArrayLike) -> Numbers:
    """Return the values for JSON: None for those that are not finite."""
    return [value if math.isfinite(value) else None for value in np.asarray(values, dtype=float).tolist()]


def bucket_of(rounds: npt.ArrayLike, points: int) -> npt.NDArray[np.int64]:
    """Return for each round the first round of its bucket; at most `points` buckets in total."""
    numbers = np.asarray(rounds, dtype=np.int64)
    if not len(numbers):
        return numbers
    width = -(-int(numbers[-1] - numbers[0] + 1) // max(1, points))
    return np.asarray(numbers - (numbers - numbers[0]) % width)


def between(rounds: npt.ArrayLike, first: int | None, last: int | None) -> slice:
    """Return the slice of ascending rounds from `first` to `last`, both included."""
    low = 0 if first is None else int(np.searchsorted(rounds, first, "left"))
    return slice(low, None if last is None else int(np.searchsorted(rounds, last, "right")))


def series(
    reader: Reader,
    run: str,
    name: str,
    node: Node | None,
    points: int,
    first: int | None = None,
    last: int | None = None,
) -> Series:
    """Return a node's values, or the federation's own, else the server's."""
    return several_series(reader, run, (name,), (node,), points, first, last)[0]


def several_series(
    reader: Reader,
    run: str,
    names: Sequence[str],
    nodes: Sequence[Node | None],
    points: int,
    first: int | None = None,
    last: int | None = None,
) -> list[Series]:
    """Return the series of these metrics for these nodes, as in `series`, with one query."""
    known = series_of(reader, run, names, (*nodes, *(["server"] if None in nodes else ())))
    shown = []
    for name, node in product(names, nodes):
        rounds, values = known.get((name, node), ([], []))
        of = "federation" if node is None else node
        if node is None and not rounds:
            rounds, values = known.get((name, "server"), ([], []))
            of = "server"
        if lost := rounds_not_finite(reader, run, name).get(node or of):
            values = [math.nan if number in lost else value for number, value in zip(rounds, values, strict=True)]
        part = between(rounds, first, last)
        shown.append(bucketed(name, node, of, rounds[part], np.asarray(values[part], dtype=float), points))
    return shown


def median_series(name: str, matrix: Matrix, points: int, first: int | None = None, last: int | None = None) -> Series:
    """Return each round's median over the clients, used if there is no value of the federation."""
    low, high = matrix.span(first, last)
    middle = np.asarray(matrix.band().median)[low:high]
    seen = np.isfinite(middle)
    rounds = [number for number, there in zip(matrix.rounds[low:high], seen, strict=True) if there]
    return bucketed(name, None, "median client", rounds, middle[seen], points)


def bucketed(name: str, node: Node | None, of: str, rounds: Sequence[int], values: Array, points: int) -> Series:
    """Reduce values by round to at most `points` buckets."""
    starts = stretches(bucket_of(rounds, points))
    middle, low, high = (_reduced(values, starts, how) for how in (np.median, np.min, np.max))
    begins, ends = [int(rounds[b]) for b, _ in starts], [int(rounds[e - 1]) for _, e in starts]
    columns = [json_numbers(middle), json_numbers(low), json_numbers(high)]
    _open_gaps(begins, ends, columns)
    return Series(
        name=name,
        node=node,
        of=of,
        title=metric_title(name),
        unit=unit_of(name),
        meaning=in_words(meaning_of(name)),
        rounds=begins,
        last=ends,
        values=columns[0],
        low=columns[1],
        high=columns[2],
        odd=[int(number) for number, value in zip(rounds, values, strict=True) if not math.isfinite(value)],
        total=len(rounds),
    )


def stretches(buckets: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return where each bucket begins and ends among the rounds."""
    begins = np.unique(buckets, return_index=True)[1].tolist()
    return list(zip(begins, [*begins[1:], len(buckets)][: len(begins)], strict=True))


def _open_gaps(rounds: list[int], last: list[int], columns: Sequence[Numbers]) -> None:
    """Insert an empty point where more is missing than usual: a model evaluated every fifth round has no gaps."""
    steps = np.asarray(rounds[1:]) - np.asarray(last[:-1])
    usual = np.median(steps) if len(steps) > 1 else 1.0  # two points have no rhythm
    missing = np.flatnonzero(steps > GAP * usual)
    for i in reversed(missing.tolist()):
        rounds.insert(i + 1, last[i] + 1)
        last.insert(i + 1, rounds[i + 2] - 1)
        for column in columns:
            column.insert(i + 1, None)


def band(name: str, matrix: Matrix, points: int, first: int | None = None, last: int | None = None) -> Band:
    """Return the cohort of each round; for a bucket of rounds the extreme of each line, so that no spike is lost."""
    cohort, part = matrix.band(), slice(*matrix.span(first, last))
    numbers = np.asarray(cohort.rounds, dtype=np.int64)[part]
    lines = [np.asarray(line)[part] for line in (cohort.min, cohort.p5, cohort.median, cohort.p95, cohort.max)]
    finite = np.asarray(cohort.count - cohort.odd)[part]
    starts = stretches(bucket_of(numbers, points))
    low, p5, middle, p95, high = (
        json_numbers(_reduced(line, starts, how)) for line, how in zip(lines, _OUTERMOST, strict=True)
    )
    return Band(
        name=name,
        title=metric_title(name),
        unit=unit_of(name),
        meaning=in_words(meaning_of(name)),
        rounds=[int(numbers[begin]) for begin, _ in starts],
        last=[int(numbers[end - 1]) for _, end in starts],
        min=low,
        p5=p5,
        median=middle,
        p95=p95,
        max=high,
        clients=[int(finite[begin:end].max()) for begin, end in starts],
        total=len(numbers),
    )


_OUTERMOST: tuple[Callable[[Array], float], ...] = (np.min, np.min, np.median, np.max, np.max)


def _reduced(line: Array, starts: Sequence[tuple[int, int]], how: Callable[[Array], float]) -> Array:
    if len(starts) == len(line):  # no two rounds share a bucket
        return np.where(np.isfinite(line), line, np.nan)
    reduced = np.full(len(starts), np.nan)
    for i, (begin, end) in enumerate(starts):
        own = line[begin:end]
        own = own[np.isfinite(own)]
        if own.size:
            reduced[i] = how(own)
    return reduced
