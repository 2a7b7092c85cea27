# SPDX-License-Identifier: Apache-2.0
"""Holds one metric of all clients over all rounds as an array, with the statistics that heat maps and bands need."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedvitals.records import natural

Floats = npt.NDArray[np.float32]
Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Whole = npt.NDArray[np.int64]
T = TypeVar("T")

CAP = 10.0  # larger spreads count as this: one wild round must not hide a client that is always wrong
LARGE = 100_000  # cells; ten clients reach this after 10,000 rounds
EARLIER = "earlier"  # key of what is known of a matrix's first rounds
BY_ROUND = ORDERED, DEVIATIONS = ("_ordered", "deviations")  # methods that compute each round independently
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """For each round: the cohort's extremes, its median and how many clients reported a value; NaN where none did.

    Only finite values are included; `odd` counts the others.
    """

    rounds: Sequence[int]
    min: Reals
    p5: Reals
    median: Reals
    p95: Reals
    max: Reals
    count: Whole
    odd: Whole


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Neighbouring rounds joined to columns, so that any number of rounds fits a screen and spikes survive."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    low: Floats  # smallest and largest finite value of each row, NaN if there is none
    high: Floats
    worst: Floats  # the value furthest from the cohort's median of its round; NaN or infinity takes precedence
    there: Flags  # whether anything was reported


def remembered(method: Callable[[Matrix], T]) -> Callable[[Matrix], T]:
    """Cache what a matrix computes. A small one computes it each time: that takes milliseconds and no memory."""

    @functools.wraps(method)
    def known(matrix: Matrix) -> T:
        return matrix.once(method.__name__, lambda: method(matrix), keep=matrix.values.size >= LARGE)

    return known


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Values [nodes × rounds]. Rows may be anything with a name: clients, layers."""

    nodes: tuple[str, ...]
    rounds: Sequence[int]  # ascending; see `compact`
    values: Floats  # NaN where nothing was reported, and where NaN was
    there: Flags
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """The approximate size of the matrix in bytes, with what is computed from it."""
        return 3 * (self.values.nbytes + self.there.nbytes) + 200 * (len(self.nodes) + len(self.rounds))

    def __getitem__(self, node: str) -> tuple[list[int], list[float]]:
        """Return one row as a series: the rounds in which the node reported a value, and the values."""
        row = self.row(node)
        if row is None:
            return [], []
        here = np.flatnonzero(self.there[row])
        return [self.rounds[i] for i in here.tolist()], self.values[row, here].astype(float).tolist()

    def row(self, node: str) -> int | None:
        """Return the index of a node's row; None if there is none."""
        places: dict[str, int] = self.once("rows", lambda: {name: i for i, name in enumerate(self.nodes)})
        return places.get(node)

    def once(self, key: Any, make: Callable[[], T], *, keep: bool = True) -> T:
        """Return what `make` returns, called once for each key if the result is to be kept."""
        if key in self._known:
            known: T = self._known[key]
            return known
        computed = make()
        if keep:
            self._known[key] = computed
        return computed

    def grown(self, rounds: Sequence[int], unchanged: int) -> Matrix:
        """Return a copy with room for later rounds. Results for each of the first `unchanged` rounds are kept."""
        values = np.full((len(self.nodes), len(self.rounds) + len(rounds)), np.nan, np.float32)
        there = np.zeros(values.shape, bool)
        values[:, : len(self.rounds)], there[:, : len(self.rounds)] = self.values, self.there
        earlier = {**self._known.get(EARLIER, {}), **{k: self._known[k] for k in BY_ROUND if k in self._known}}
        if ORDERED in earlier:
            earlier[ORDERED] = tuple(part[:unchanged] for part in earlier[ORDERED])
        if DEVIATIONS in earlier:
            earlier[DEVIATIONS] = earlier[DEVIATIONS][:, :unchanged]
        return Matrix(self.nodes, compact((*self.rounds, *rounds)), values, there, {EARLIER: earlier})

    def take(
        self, rows: Sequence[int] | Whole | None = None, first: int | None = None, last: int | None = None
    ) -> Matrix:
        """Return some rows in that order, and the rounds from `first` to `last` (both included)."""
        low, high = self.span(first, last)
        if rows is None and (low, high) == (0, len(self.rounds)):
            return self
        nodes = self.nodes if rows is None else tuple(self.nodes[i] for i in rows)
        chosen = slice(None) if rows is None else np.asarray(rows, np.int64)
        known = {"deviations": self.deviations()[chosen, low:high]}  # relative to the whole cohort, even for a few rows
        return Matrix(nodes, self.rounds[low:high], self.values[chosen, low:high], self.there[chosen, low:high], known)

    def span(self, first: int | None, last: int | None) -> tuple[int, int]:
        """Return the indices of the rounds from `first` to `last` (both included), as a slice has them."""
        numbers = np.asarray(self.rounds)
        low = 0 if first is None else int(np.searchsorted(numbers, first))
        return low, max(low, len(numbers) if last is None else int(np.searchsorted(numbers, last, "right")))

    def sums(self, axis: int) -> Reals:
        """Return the sum of the finite values of each round (axis 0) or of each row (axis 1)."""
        return np.asarray(np.where(np.isfinite(self.values), self.values, 0).astype(float).sum(axis=axis))

    @remembered
    def band(self) -> Band:
        """Return the extremes and quantiles of each round."""
        ordered, counts = self._ordered()
        low, p5, median, p95, high = (_quantile(ordered, counts, share) for share in (0.0, 0.05, 0.5, 0.95, 1.0))
        counted = self.there.sum(axis=0)
        return Band(self.rounds, low, p5, median, p95, high, counted, counted - counts)

    @remembered
    def _ordered(self) -> tuple[Floats, Whole]:
        """Return the finite values of each round, sorted along the rows, and their number."""
        earlier = self._known.get(EARLIER, {}).pop(ORDERED, None)  # the result contains it
        later = self.values[:, 0 if earlier is None else len(earlier[1]) :]
        parts = _sorted(np.where(np.isfinite(later), later, np.nan).T)
        return parts if earlier is None else (np.concatenate((earlier[0], parts[0])), np.append(earlier[1], parts[1]))

    @remembered
    def deviations(self) -> Floats:
        """Return how far each value is from its round's median, in spreads of that round (1.4826 · MAD), with its sign.

        Used to sort and to choose what a joined cell shows, in the same way for every sign; not shown to users, and
        without the floor that robust deviations have. NaN where there is no finite value. In a round where most are
        equal, the mean distance replaces the median one; where all are equal, nobody deviates.
        """
        earlier = self._known.get(EARLIER, {}).pop(DEVIATIONS, None)
        first = 0 if earlier is None else earlier.shape[1]
        ordered, counts = self._ordered()
        ordered, counts = ordered[first:], counts[first:]
        middle, values = _quantile(ordered, counts, 0.5), self.values[:, first:]
        away = (values - middle).astype(np.float32)
        away[~np.isfinite(values)] = np.nan
        spread, _ = _sorted(np.abs(away).T)
        scale = 1.4826 * _quantile(spread, counts, 0.5)
        mean = 1.2533 * np.nansum(spread, axis=1) / np.maximum(counts, 1)
        # Float32 has seven digits: smaller differences count as equal.
        least = np.maximum(1e-6 * np.abs(np.nan_to_num(middle)), 1e-30)
        scale = np.maximum(np.where(scale > least, scale, mean), least)
        later = np.asarray(away / scale, np.float32)
        return later if earlier is None else np.concatenate((earlier, later), axis=1)

    @remembered
    def scores(self) -> Reals:
        """Return each row's distance from the cohort: its mean absolute deviation; infinite with a NaN or an infinity.

        Newer rounds weigh more: the weight halves over a tenth of the rounds (at least five).
        """
        if not self.rounds:
            return np.zeros(len(self.nodes))
        numbers = np.asarray(self.rounds, float)
        weights = 0.5 ** ((numbers[-1] - numbers) / max(5.0, 0.1 * (numbers[-1] - numbers[0])))
        sizes = np.minimum(np.abs(self.deviations()), CAP)
        known = np.isfinite(sizes)
        total = known.astype(np.float32) @ weights
        mean = np.where(known, sizes, 0) @ weights / np.where(total > 0, total, 1)
        odd = (self.there & ~np.isfinite(self.values)).any(axis=1)
        return np.where(odd, np.inf, mean)

    @remembered
    def worst_first(self) -> Whole:
        """Return the rows, those with a NaN or an infinity first, then those furthest from the cohort."""
        return np.argsort(-self.scores(), kind="stable")

    @remembered
    def extent(self) -> tuple[float, float, float, float] | None:
        """Return the smallest, 2nd percentile, 98th percentile and largest finite value; None if there are none."""
        finite = self.values[np.isfinite(self.values)]
        if not len(finite):
            return None
        low, high = np.percentile(finite, (2, 98)).tolist()
        return float(finite.min()), low, high, float(finite.max())

    def bucket(self, columns: int) -> Buckets:
        """Join neighbouring rounds, equally many each (the last may have fewer), into at most that many columns."""
        width = max(1, math.ceil(len(self.rounds) / max(1, columns)))
        return self.once(("bucket", width), lambda: self._bucket(width))

    def _bucket(self, width: int) -> Buckets:
        first, last = (*self.rounds[::width],), (*self.rounds[width - 1 :: width],)
        last = last if len(last) == len(first) else (*last, self.rounds[-1])
        finite = np.isfinite(self.values)
        if width == 1:
            known = np.where(finite, self.values, np.float32(np.nan))
            return Buckets(first, last, known, known, self.values, self.there)
        # NaN or infinity takes precedence over numbers, and numbers over nothing.
        rank = np.where(finite, np.abs(self.deviations()), np.where(self.there, np.inf, -1)).astype(np.float32)
        place = _blocks(rank, width, -1).argmax(axis=2)[..., None]
        worst = np.take_along_axis(_blocks(self.values, width, np.nan), place, axis=2)[..., 0]
        low = _blocks(np.where(finite, self.values, np.float32(np.inf)), width, np.inf).min(axis=2)
        high = _blocks(np.where(finite, self.values, np.float32(-np.inf)), width, -np.inf).max(axis=2)
        there: Flags = np.asarray(_blocks(self.there, width, False).any(axis=2))
        low[low == np.inf], high[high == -np.inf] = np.nan, np.nan
        return Buckets(first, last, low, high, worst, there)


def _sorted(values: Floats) -> tuple[Floats, Whole]:
    """Return each row sorted, with NaN at its end, and its number of numbers."""
    ordered = np.ascontiguousarray(values)
    ordered = np.sort(ordered, axis=1)
    return ordered, np.asarray(ordered.shape[1] - np.isnan(ordered).sum(axis=1), np.int64)


def _quantile(ordered: Floats, counts: Whole, share: float) -> Reals:
    """Return a quantile of each row, interpolated between neighbours; NaN if the row has no number."""
    if not ordered.shape[1]:
        return np.full(len(ordered), np.nan)
    place = share * np.maximum(counts - 1, 0)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(counts - 1, 0))
    rows = np.arange(len(ordered))
    low, high = ordered[rows, below].astype(float), ordered[rows, above].astype(float)
    return np.asarray(low + (high - low) * (place - below))


def _blocks(values: npt.NDArray[Any], width: int, nothing: Any) -> npt.NDArray[Any]:
    """Return [rows × columns] as [rows × blocks × width], with the last block padded."""
    rows, columns = values.shape
    missing = -columns % width
    return np.pad(values, ((0, 0), (0, missing)), constant_values=nothing).reshape(
        rows, (columns + missing) // width, width
    )


def compact(rounds: Sequence[int]) -> Sequence[int]:
    """Return ascending rounds as a range if they are consecutive, else as a tuple.

    A tuple takes 40 bytes per round, as much as the values of ten clients; a range takes none.
    """
    follow = range(rounds[0], rounds[0] + len(rounds)) if rounds else range(0)
    return follow if len(rounds) and rounds[-1] == follow[-1] else tuple(rounds)


def single(values: npt.ArrayLike) -> Floats:
    """Return the values as float32; finite values stay finite."""
    wide = np.asarray(values, float)
    clipped = np.where(np.isfinite(wide), np.clip(wide, -_LARGEST, _LARGEST), wide)
    return np.asarray(clipped, np.float32)


def matrix_of(nodes: Sequence[str], rounds: Sequence[int], values: npt.ArrayLike, there: Any = None) -> Matrix:
    """Make a matrix of any rows, for example layers × rounds; without `there`, NaN means that nothing was reported."""
    numbers = single(values)
    known = ~np.isnan(numbers) if there is None else np.asarray(there, bool)
    return Matrix(tuple(nodes), compact([int(number) for number in rounds]), numbers, known)


EMPTY = matrix_of((), (), np.empty((0, 0)))


def by_name(names: Sequence[str]) -> list[int]:
    """Return the places of the names in natural order."""
    return sorted(range(len(names)), key=lambda i: natural(names[i]))


@dataclass(frozen=True, slots=True)
class Points:
    """A series with a limited number of points: the last value of each bucket, and its extremes."""

    rounds: list[int]  # the last round of each bucket
    values: list[float]
    low: list[float]
    high: list[float]
    shown_of: int  # number of original points


def buckets(rounds: Sequence[int], values: Sequence[float], points: int) -> Points:
    """Return a series with at most `points` points. Spikes survive: `low` and `high` are the extremes of each bucket.

    A value that is not finite represents its bucket, since it must not be overlooked.
    """
    numbers = np.asarray(values, float)
    width = max(1, math.ceil(len(numbers) / max(1, points)))
    if width == 1:
        same = numbers.tolist()
        return Points([int(number) for number in rounds], same, same, same, len(numbers))
    finite = np.isfinite(numbers)
    low = _blocks(np.where(finite, numbers, np.inf)[None], width, np.inf).min(axis=2)[0]
    high = _blocks(np.where(finite, numbers, -np.inf)[None], width, -np.inf).max(axis=2)[0]
    ends = np.minimum(np.arange(width - 1, len(numbers) + width - 1, width), len(numbers) - 1)
    odd = _blocks(~finite[None], width, False)[0]
    shown = np.where(odd.any(axis=1), np.arange(len(ends)) * width + odd.argmax(axis=1), ends)
    low[np.isinf(low)], high[np.isinf(high)] = np.nan, np.nan
    return Points([int(rounds[i]) for i in ends], numbers[shown].tolist(), low.tolist(), high.tolist(), len(numbers))
