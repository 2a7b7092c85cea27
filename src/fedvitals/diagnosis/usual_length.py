# SPDX-License-Identifier: Apache-2.0
"""How long a run's rounds usually take, and the length above which a round is too long to be one of them.

The limit is twice the median, which rounds of an even run never reach. If the run's own rounds are uneven it is higher:
`k` standard deviations of the logarithms above the median, where k is larger the fewer rounds are known, and the
standard deviation is shrunk towards that of even rounds while they are few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, variance

FEWEST = 5  # rounds needed
NEWEST = 30  # rounds considered
TWICE = 1.9  # times the median; less than 2, because the limit is only checked now and then
EVEN_SPREAD, EVEN_WEIGHT = 0.1, 4  # standard deviation of the logarithms in even runs; its weight in rounds
DEVIATIONS, DEVIATIONS_OF_FEW = 4.5, 10.0  # k = 4.5 + 10 / rounds


@dataclass(frozen=True, slots=True)
class UsualLength:
    """Seconds: the median, and the length above which a round is too long."""

    seconds: float
    limit: float


def usual_length(lengths: Sequence[float]) -> UsualLength | None:
    """Return the usual length of a run's rounds from past lengths in seconds; None while there are too few."""
    known = [math.log(seconds) for seconds in lengths[-NEWEST:] if seconds > 0]
    if len(known) < FEWEST:
        return None
    middle, own = median(known), len(known) - 1
    spread = math.sqrt((own * variance(known) + EVEN_WEIGHT * EVEN_SPREAD**2) / (own + EVEN_WEIGHT))
    deviations = DEVIATIONS + DEVIATIONS_OF_FEW / len(known)
    usual = math.exp(middle)
    return UsualLength(usual, max(TWICE * usual, math.exp(middle + deviations * spread)))
