# SPDX-License-Identifier: Apache-2.0
"""The functions that `claims.toml` may name: from series to one number. Nothing else is evaluated.

A series per round is [rounds]; one per iteration is [rounds, iterations], or [edges, rounds, iterations] of all edges;
across repeats, [repeats] comes first. Values that are not finite are excluded, and a number that cannot be computed is
NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
UNTRAINED = 2  # rounds before the loss has a level from which it could jump


def final(series: Floats) -> float:
    """Return the mean of the last three rounds."""
    return _mean(series[-3:])


def last(series: Floats) -> float:
    """Return the last value."""
    return float(series[-1])


def peak(series: Floats) -> float:
    """Return the largest value."""
    return float(np.max(_finite(series), initial=-np.inf)) if _finite(series).size else np.nan


def lowest(series: Floats) -> float:
    """Return the smallest value."""
    return -peak(-series)


def size(series: Floats) -> float:
    """Return the median of the absolute values."""
    values = np.abs(_finite(series))
    return float(np.median(values)) if values.size else np.nan


def mean_fall(series: Floats) -> float:
    """Return the mean fall from one round to the next, a rise counting as 0: 0 for a curve that only rises."""
    return _mean(np.maximum(0.0, -np.diff(series)))


def largest_fall(series: Floats) -> float:
    """Return the largest fall from one round to the next."""
    return float(np.max(np.maximum(0.0, -_finite(np.diff(series))), initial=0.0))


def falls(series: Floats, by: float) -> float:
    """Return the number of rounds that end at least `by` below the previous one."""
    return float(np.sum(_finite(np.diff(series)) <= -by))


def share_under(series: Floats, level: float) -> float:
    """Return the share of the rounds below a level."""
    return _mean((_finite(series) < level).astype(np.float64))


def share_zero(series: Floats) -> float:
    """Return the share of the rounds at exactly 0."""
    return _mean((_finite(series) == 0).astype(np.float64))


def variation(series: Floats) -> float:
    """Return the standard deviation over the rounds, relative to the mean of the absolute values."""
    values = _finite(series)
    return ratio(float(np.std(values)), _mean(np.abs(values))) if values.size else np.nan


def unevenness(series: Floats) -> float:
    """Return the mean absolute second difference of log₁₀: 0 for a straight curve on a log axis."""
    return _mean(np.abs(np.diff(_log(series), n=2)))


def distance(a: Floats, b: Floats) -> float:
    """Return the mean absolute difference, round by round."""
    return _mean(np.abs(a - b))


def spread(*series: Floats) -> float:
    """Return the largest distance between several series at the same time, as the median over time."""
    stacked = np.stack(series)
    return size(np.max(stacked, axis=0) - np.min(stacked, axis=0))


def gap(above: Floats, below: Floats) -> float:
    """Return orders of magnitude between the smallest of one and the largest of the other: above 0, no overlap."""
    low, high = lowest(above), peak(below)
    if not low > 0:
        return -np.inf if high > 0 else np.nan
    return float(np.log10(low / high)) if high > 0 else np.inf


def gap_by_round(above: Floats, below: Floats) -> float:
    """Return the orders of magnitude by which one is above the other in the same round, at least."""
    both = np.isfinite(above) & np.isfinite(below)
    if not both.any():
        return np.nan
    gaps = [gap(above[[place]], below[[place]]) for place in np.flatnonzero(both)]
    return -np.inf if any(np.isnan(gaps)) else float(min(gaps))  # both at 0: nothing distinguishes them


def orders_apart(a: Floats, b: Floats) -> float:
    """Return orders of magnitude between the medians of the absolute values, whichever is larger."""
    quotient = ratio(size(a), size(b))
    return float(abs(np.log10(quotient))) if quotient > 0 else np.nan if np.isnan(quotient) else np.inf


def crossings(a: Floats, b: Floats) -> float:
    """Return how often two curves cross."""
    side = np.sign(_finite(a - b))
    side = side[side != 0]
    return float(np.sum(side[1:] != side[:-1]))


def rise(series: Floats, starts: Floats) -> float:
    """Return the largest rise inside a round, in the series' own unit, of any edge: from the lowest value so far,
    including the round's start, to a later one. 0 for losses that only fall.
    """
    return peak(_rises(series, starts))


def healed(series: Floats, starts: Floats, by: float) -> float:
    """Return the share of the rounds with such a rise whose next round starts lower than they ended, same edge."""
    rose = _rises(series, starts)[..., :-1] >= by
    lower = starts[..., UNTRAINED + 1 :] < series[..., UNTRAINED:-1, -1]
    return _mean(lower[rose].astype(np.float64))


def together(series: Floats, starts: Floats, other: Floats, by: float) -> float:
    """Return the share of the rounds with such a rise in which the other peaks at 1.5 × its usual peak, same edge."""
    peaks = np.max(np.abs(other[..., UNTRAINED:, 1:]), axis=-1)  # the first step of a fresh Adam is always its largest
    usual = np.median(peaks, axis=-1, keepdims=True)
    return _mean((peaks >= 1.5 * usual)[_rises(series, starts) >= by].astype(np.float64))


def burst(series: Floats) -> float:
    """Return the largest peak of a round over the usual one, of any edge, without the first iteration of each round."""
    peaks = np.max(np.abs(series[..., UNTRAINED:, 1:]), axis=-1)
    return peak(peaks / np.median(peaks, axis=-1, keepdims=True))


def seam(series: Floats) -> float:
    """Return the median step over the end of a round, over the median step inside rounds: above 1, averaging shows."""
    steps = np.abs(series[1:, 0] - series[:-1, -1])
    return ratio(size(steps), size(np.diff(series, axis=-1)))


def falls_at_seam(series: Floats) -> float:
    """Return the share of the rounds that begin lower than the previous one ended, in absolute value."""
    before, after = np.abs(series[:-1, -1]), np.abs(series[1:, 0])
    return _mean((after < before)[np.isfinite(before) & np.isfinite(after)].astype(np.float64))


def runs_apart(series: Floats) -> float:
    """Return the distance between the repeats' largest and smallest value, as the mean over the rounds."""
    return _mean(np.max(series, axis=0) - np.min(series, axis=0))


def alone(series: Floats, by: float) -> float:
    """Return, among rounds in which some repeat falls by this much, the share in which only one does."""
    fallen = np.sum(np.diff(series, axis=-1) <= -by, axis=0)
    return _mean((fallen[fallen > 0] == 1).astype(np.float64))


def ratio(a: float, b: float) -> float:
    """Return one number over another; something over zero is infinite."""
    if b == 0:
        return np.nan if a == 0 or np.isnan(a) else np.inf
    return a / b


def minus(a: float, b: float) -> float:
    """Return one number minus another."""
    return a - b


def largest(*numbers: float) -> float:
    """Return the largest of several numbers."""
    return max(numbers)


def _finite(series: Floats) -> Floats:
    return series[np.isfinite(series)]


def _mean(series: Floats) -> float:
    values = _finite(series)
    return float(np.mean(values)) if values.size else np.nan


def _log(series: Floats) -> Floats:
    return np.log10(np.where(series > 0, series, np.nan))


def _rises(series: Floats, starts: Floats) -> Floats:
    """Return [..., rounds]: how far a round's values rise above the lowest before them, including its start."""
    trained = np.concatenate([starts[..., UNTRAINED:, None], series[..., UNTRAINED:, :]], axis=-1)
    lowest_so_far = np.fmin.accumulate(trained, axis=-1)
    return np.asarray(np.nanmax(trained - lowest_so_far, axis=-1), dtype=np.float64)


YARDSTICKS: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        final, last, peak, lowest, size, mean_fall, largest_fall, falls, share_under, share_zero, variation, unevenness,
        distance, spread, gap, gap_by_round, orders_apart, crossings, rise, healed, together, burst, seam,
        falls_at_seam, runs_apart, alone, ratio, minus, largest,
    )
}  # fmt: skip
