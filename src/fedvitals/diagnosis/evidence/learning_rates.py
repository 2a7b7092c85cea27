# SPDX-License-Identifier: Apache-2.0
"""Which clients train with another learning rate than the others, according to their optimisers' settings.

Settings are read, not estimated. If clients have no common rate, as with schedules that each client steps by itself, no
client deviates.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node

METRIC = "optimizer.learning_rate"
DIFFERENT = 1.5  # times the common rate, or its inverse; smaller differences are ordinary tuning
MOST_AGREE = 2 / 3  # share of the clients that must have the common rate
DIGITS = 3  # significant digits in which rates must agree to count as the same


@dataclass(frozen=True, slots=True)
class OwnLearningRate:
    """A client's learning rate, and the others'; `before`: the common rate is the client's own earlier one."""

    rate: float
    common: float
    before: bool = False


@shared
def own_learning_rates(history: History, round_index: int) -> dict[Node, OwnLearningRate]:
    """Return the clients of a round whose learning rate differs from the one that the others share."""
    rates = {
        node: rate for node, rate in history.latest(METRIC, round_index).items() if math.isfinite(rate) and rate > 0
    }
    if len(rates) == 2:
        return _of_two(history, rates)
    common, holders = Counter(map(_rounded, rates.values())).most_common(1)[0] if rates else (math.nan, 0)
    if len(rates) < 3 or holders < MOST_AGREE * len(rates):
        return {}
    return {node: OwnLearningRate(rate, common) for node, rate in rates.items() if _differs(rate, common)}


def _of_two(history: History, rates: dict[Node, float]) -> dict[Node, OwnLearningRate]:
    """Return the one of two clients whose rate changed, while the other kept what both began with."""
    first = {node: next(iter(history.series(METRIC, node)[1]), math.nan) for node in rates}
    changed = [node for node, rate in rates.items() if _differs(rate, first[node])]
    if len(changed) != 1 or len({_rounded(rate) for rate in first.values()}) > 1:
        return {}
    return {node: OwnLearningRate(rates[node], first[node], before=True) for node in changed}


def _differs(rate: float, common: float) -> bool:
    return common > 0 and not common / DIFFERENT < rate < common * DIFFERENT


def _rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}") if math.isfinite(rate) else rate
