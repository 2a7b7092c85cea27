# SPDX-License-Identifier: Apache-2.0
"""Forecast when memory that grows from round to round will run out, with an uncertainty.

The growth per round is the median of the slopes between all pairs of rounds (Theil and Sen), with the interval of 90 %
that Kendall's rank statistic gives (Sen 1968). Single high rounds, in which garbage waited to be collected, hardly
change it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.memory_fit import size_words

FEWEST = 4  # rounds
DEVIATIONS = 1.645  # of a normal distribution, for 90 % in the middle
FAR = 1000  # rounds: the horizon of the forecast


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes per round: the estimate and its interval of 90 %."""

    bytes: float
    least: float
    most: float

    def __str__(self) -> str:
        if size_words(self.least) == size_words(self.most):
            return f"{size_words(self.bytes)} a round"
        return f"{size_words(self.bytes)} a round ({size_words(max(0.0, self.least))} to {size_words(self.most)})"


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The number of rounds until memory runs out, with bounds; `most` is None if there is no upper bound."""

    rounds: int
    least: int
    most: int | None

    def __str__(self) -> str:
        if self.most == self.least:
            return f"Out of memory in about {self.rounds} rounds."
        until = f"{self.least} to {self.most}" if self.most is not None else f"{self.least} or more"
        return f"Out of memory in about {self.rounds} rounds ({until})."


def growth_of(rounds: Sequence[int], sizes: Sequence[float]) -> Growth | None:
    """Return the growth of memory per round; None if there are too few rounds, or it does not grow."""
    count = len(rounds)
    if count < FEWEST:
        return None
    first, second = np.triu_indices(count, 1)
    at, held = np.asarray(rounds, np.float64), np.asarray(sizes, np.float64)
    slopes = np.sort((held[second] - held[first]) / (at[second] - at[first]))
    middle = float(np.median(slopes))
    if not middle > 0:
        return None
    off = DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - off) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + off) / 2))
    return Growth(middle, float(slopes[low]), float(slopes[high]))


def forecast(growth: Growth, room: float) -> MemoryForecast | None:
    """Return when `room` bytes are used up; None if that is beyond the horizon."""
    rounds = max(0.0, room) / growth.bytes
    if rounds > FAR:
        return None
    longest = max(0.0, room) / growth.least if growth.least > 0 else math.inf
    return MemoryForecast(
        rounds=math.floor(rounds),
        least=math.floor(max(0.0, room) / growth.most),
        most=math.floor(longest) if longest <= FAR else None,
    )
