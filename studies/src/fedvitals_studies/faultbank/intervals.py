# SPDX-License-Identifier: Apache-2.0
"""Figures over runs with 95 % intervals: runs are resampled with replacement, since alarms cluster within a run.

If every run has the same result (all found, no alarm at all), resampling is uninformative; the far end is then the
exact bound for as many runs, or rounds, without an exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
DRAWS = 1000
SEED = 5
TAIL = 0.025
BINS = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval. No value: nothing to measure it on; an infinite delay: more than half were missed."""

    value: float | None
    low: float | None
    high: float | None
    count: float  # what it is a share of: targets, cases, client-rounds, rounds, ...

    @property
    def measured(self) -> bool:
        return self.value is not None


NOTHING = Estimate(None, None, None, 0)


@lru_cache(maxsize=32)
def _weights(runs: int) -> Floats:
    """Return how often each run occurs in each draw."""
    chance = np.random.default_rng(SEED)
    return chance.multinomial(runs, np.full(runs, 1 / runs), size=DRAWS).astype(np.float64)


def _ends(values: Floats) -> tuple[float | None, float | None]:
    finite = values[~np.isnan(values)]
    if not finite.size:
        return None, None
    # An order statistic, not an interpolation: 3.5 rounds between 2 and «never» would not be a delay.
    low, high = np.quantile(finite, [TAIL, 1 - TAIL], method="nearest")
    return float(low), float(high)


def of_sums(counts: ArrayLike, figure: Callable[[Floats], Floats], count: float, largest: float = 1.0) -> Estimate:
    """Return a figure of sums over runs. `counts`: [runs, sums]; `figure`: [..., sums] to [...], NaN if undefined."""
    table = np.asarray(counts, dtype=np.float64)
    if not len(table):
        return NOTHING
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure(table.sum(axis=0)))
        if math.isnan(value):
            return NOTHING
        low, high = _ends(figure(_weights(len(table)) @ table))
    runs = int((table.sum(axis=1) > 0).sum())
    bound = 1 - TAIL ** (1 / runs) if runs else 1.0  # the largest rate of exceptions that shows none in this many runs
    if value == 0 and high == 0:
        high = bound * largest
    if value == largest and low == largest:
        low = (1 - bound) * largest
    return Estimate(value, low, high, count)


def share(part: Sequence[float], whole: Sequence[float]) -> Estimate:
    """Return the sum of the parts over the sum of the wholes."""
    return of_sums(np.column_stack([part, whole]), lambda sums: sums[..., 0] / sums[..., 1], float(sum(whole)))


def rate(events: Sequence[float], rounds: Sequence[float], per: float = 100.0) -> Estimate:
    """Return events per `per` rounds; without any, up to the rate at which a Poisson process would still show none."""
    found = of_sums(
        np.column_stack([events, rounds]), lambda sums: per * sums[..., 0] / sums[..., 1], sum(rounds), math.inf
    )
    if found.value == 0:
        return Estimate(0.0, 0.0, -math.log(TAIL) * per / sum(rounds), found.count)
    return found


def poisson_rate(events: int, rounds: int, per: float = 100.0) -> Estimate:
    """Return events per `per` rounds with the exact limits of a Poisson process."""
    if not rounds:
        return NOTHING
    low = _poisson_mean(events, lambda mean: 1 - _poisson_below(events, mean) > TAIL) if events else 0.0
    high = _poisson_mean(events, lambda mean: _poisson_below(events + 1, mean) < TAIL)
    return Estimate(per * events / rounds, per * low / rounds, per * high / rounds, rounds)


def _poisson_below(count: int, mean: float) -> float:
    """Return the probability of fewer than `count` events."""
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))


def _poisson_mean(events: int, reached: Callable[[float], bool]) -> float:
    """Return the smallest mean that satisfies `reached`, by bisection."""
    low, high = 1e-9, 4.0 * events + 20
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def harmonic(
    hits: Sequence[float], targets: Sequence[float], true: Sequence[float], false: Sequence[float]
) -> Estimate:
    """Return F1 of recall = hits / targets and precision = true / (true + false). With targets, none found is 0."""

    def figure(sums: Floats) -> Floats:
        recall = sums[..., 0] / sums[..., 1]
        raised = sums[..., 2] + sums[..., 3]
        precision = np.where(raised > 0, sums[..., 2] / np.where(raised > 0, raised, 1), 0.0)
        both = recall + precision
        return np.where(both > 0, 2 * recall * precision / np.where(both > 0, both, 1), recall * 0)

    return of_sums(np.column_stack([hits, targets, true, false]), figure, float(sum(targets)))


def median(delays: Sequence[Sequence[float]]) -> Estimate:
    """Return the delay within which at least half were found, over all targets; infinite if fewer than half were."""
    every = sorted({delay for run in delays for delay in run})
    if not every:
        return NOTHING
    levels = np.asarray(every)
    counts = np.asarray([[run.count(level) for level in every] for run in map(list, delays)], dtype=np.float64)

    def middle(sums: Floats) -> Floats:
        reached = np.cumsum(sums, axis=-1)
        total = reached[..., -1:]
        at = np.argmax(reached >= total / 2, axis=-1)
        return np.where(total[..., 0] > 0, levels[at], np.nan)

    value = float(middle(counts.sum(axis=0)))
    low, high = _ends(middle(_weights(len(counts)) @ counts))
    return Estimate(value, low, high, float(counts.sum()))


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin with about as many stated probabilities as the others: their mean, and the observed frequency."""

    stated: float
    observed: float
    count: int


def calibration(runs: Sequence[Sequence[tuple[float, bool]]], bins: int = BINS) -> tuple[Estimate, tuple[Bin, ...]]:
    """Return the expected calibration error over bins of equal mass, and the bins."""
    stated = np.asarray([stated for run in runs for stated, _ in run])
    true = np.asarray([float(was) for run in runs for _, was in run])
    owner = np.asarray([place for place, run in enumerate(runs) for _ in run], dtype=np.int64)
    if not stated.size:
        return NOTHING, ()
    # Equal probabilities stay together, so bins are only of equal mass as far as the probabilities differ.
    levels, level, counts = np.unique(stated, return_inverse=True, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / stated.size
    of_level = np.minimum((middles * min(bins, len(levels))).astype(np.int64), bins - 1)
    parts = [np.flatnonzero(of_level[level] == place) for place in np.unique(of_level)]
    found = tuple(Bin(float(stated[p].mean()), float(true[p].mean()), len(p)) for p in parts)
    gaps = np.column_stack([np.bincount(owner[p], stated[p] - true[p], len(runs)) for p in parts])
    masses = np.column_stack([np.bincount(owner[p], minlength=len(runs)) for p in parts])
    sums = np.concatenate([gaps, masses], axis=1)

    def error(totals: Floats) -> Floats:
        gap, mass = totals[..., : len(parts)], totals[..., len(parts) :]
        return np.asarray(np.abs(gap).sum(axis=-1) / mass.sum(axis=-1))

    value = float(error(sums.sum(axis=0)))
    low, high = _ends(error(_weights(len(runs)) @ sums))
    return Estimate(value, low, high, float(stated.size)), found
