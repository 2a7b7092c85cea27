# SPDX-License-Identifier: Apache-2.0
"""Computes confidence intervals of differences between repeats, seed by seed where both sides have the same seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

SURE = 0.95


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the means of the first side and another."""

    difference: float
    relative: float | None  # relative to the first side's mean; None if that is 0
    # Of the interval that contains the true difference with probability `SURE`; None: too few repeats
    low: float | None
    high: float | None
    runs: tuple[int, int]  # repeats on each side
    paired: bool = False  # the interval is of the differences seed by seed, not Welch's

    @property
    def beyond_chance(self) -> bool | None:
        """Whether the interval excludes 0; None if there is no interval."""
        return None if self.low is None or self.high is None else self.low > 0 or self.high < 0


def pairing(before: Sequence[int | None], after: Sequence[int | None]) -> list[int] | None:
    """Return for each run of the first side the index of the other's with its seed; None unless all seeds match."""
    if (
        len(before) < 2
        or None in before
        or len(set(before)) < len(before)
        or sorted(map(str, before)) != sorted(map(str, after))
    ):
        return None
    return [after.index(seed) for seed in before]


def change(
    before: Sequence[float], after: Sequence[float], sure: float = SURE, pairs: Sequence[int] | None = None
) -> Change | None:
    """Return the difference of the means, with an interval if both sides have at least two runs.

    With `pairs` (see `pairing`) it is that of the differences, seed by seed: d ± t_(n−1) · s/√n. The effect of a seed
    on both sides is then no noise. Otherwise Welch's: d ± t_f · √(s₁²/n₁ + s₂²/n₂), f by Welch and Satterthwaite (Welch
    1947).
    """
    if pairs is not None and all(map(math.isfinite, (*before, *after))):
        by_seed = _paired([after[place] - value for value, place in zip(before, pairs, strict=True)], before, sure)
        if by_seed is not None:
            return by_seed
    first, second = ([v for v in values if math.isfinite(v)] for values in (before, after))
    if not first or not second:
        return None
    difference = fmean(second) - fmean(first)
    relative = difference / abs(fmean(first)) if fmean(first) else None
    runs = (len(first), len(second))
    if min(runs) < 2:
        return Change(difference, relative, None, None, runs)
    errors = [variance(values) / len(values) for values in (first, second)]
    error = sum(errors)
    if error == 0:  # every repeat gave the same: a count, or a deterministic training
        return Change(difference, relative, difference, difference, runs)
    freedom = error**2 / sum(e**2 / (n - 1) for e, n in zip(errors, runs, strict=True))
    reach = student(freedom, sure) * math.sqrt(error)
    return Change(difference, relative, difference - reach, difference + reach, runs)


def _paired(differences: Sequence[float], before: Sequence[float], sure: float) -> Change | None:
    """Return the paired change; None if every seed has the same difference, as counts do by chance: no noise to use."""
    count, difference = len(differences), fmean(differences)
    spread = math.sqrt(variance(differences))
    if spread <= 1e-9 * max(map(abs, differences)):
        return None
    relative = difference / abs(fmean(before)) if fmean(before) else None
    reach = student(count - 1, sure) * spread / math.sqrt(count)
    return Change(difference, relative, difference - reach, difference + reach, (count, count), paired=True)


def student(freedom: float, sure: float = SURE) -> float:
    """Return the t that Student's |t| stays below with probability `sure`; for any degrees of freedom from 1 up.

    With t = √f · tan θ the density is ∝ cos^(f−1) θ, which a fine grid integrates well; a test compares it with tables.
    """
    # The grid is finer where the density is concentrated: its width is proportional to 1/√f.
    end = min(math.pi / 2, 12 / math.sqrt(max(1.0, freedom)))
    angle = np.linspace(0, end, 20_001)
    density = np.cos(angle) ** max(0.0, freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return float(math.sqrt(freedom) * math.tan(np.interp(sure, below / below[-1], angle)))
