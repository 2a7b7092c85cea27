# SPDX-License-Identifier: Apache-2.0
"""Did it help? A correction is judged by the path of the global loss, against the run's own trend before it.

Losses are compared as logarithms, so that halving counts the same early and late. A run that learns has a falling
line; whoever corrects it as a whole must beat that line, which a healthy run, learning ever more slowly, does not do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.corrections.model_trend import WORSE, log_losses
from fedvitals.stats import Array

WINDOW = 5  # rounds before, from which the trend is taken
FEWEST = 3  # rounds, under which there is no trend
LEARNING = -0.005  # change of the log loss per round, above which a run does not learn
ERRATIC = 0.15  # scatter about the line that no healthy run has
RESTLESS, CALM = 0.05, 0.5  # scatter that could be calmed, and to which part of it
BETTER = 0.03
SMOOTH, CREEPING = 0.01, -0.1  # scatter and slope of a run whose steps are too small
QUICKER = 1.5  # times as fast as before, at least, where larger steps are on trial


@dataclass(frozen=True, slots=True)
class LossTrend:
    """Where the log loss stood, where it was going, and how much it scattered; level inf: it was not finite."""

    level: float  # median of the last three
    end: float  # of the line
    slope: float
    noise: float
    rounds: int

    @property
    def too_slow(self) -> bool:
        """Learning, smoothly and in tiny steps: larger ones could be borne."""
        return self.rounds >= FEWEST and self.noise < SMOOTH and CREEPING < self.slope < 0

    @property
    def unhealthy(self) -> bool:
        """Not learning, or by leaps and bounds. Too few rounds to say: not ill."""
        if math.isinf(self.level):
            return True
        return self.rounds >= FEWEST and (self.slope > LEARNING or self.noise > ERRATIC)


def loss_trend_of(losses: Mapping[int, float], until: int, since: int = -(2**31)) -> LossTrend:
    """Of the newest rounds up to `until`, and not before `since`."""
    rounds = [round_index for round_index in sorted(losses) if since <= round_index <= until][-WINDOW:]
    if not rounds:
        return LossTrend(math.nan, math.nan, 0.0, 0.0, 0)
    values = log_losses([losses[round_index] for round_index in rounds])
    if not np.isfinite(values[-1]):
        return LossTrend(math.inf, math.inf, 0.0, 0.0, len(rounds))
    finite = np.isfinite(values)
    x, y = np.asarray(rounds, dtype=np.float64)[finite] - rounds[-1], values[finite]
    if len(y) < FEWEST:
        return LossTrend(float(np.median(y)), float(y[-1]), 0.0, WORSE, len(y))
    slope, end = (float(value) for value in np.polyfit(x, y, 1))
    noise = math.sqrt(float(np.sum((y - slope * x - end) ** 2)) / (len(y) - 2))
    return LossTrend(float(np.median(y[-3:])), end, slope, noise, len(y))


def judge_correction(
    before: LossTrend, after: Sequence[float], restored: float | None = None, *, raising: bool = False
) -> str:
    """«better», «worse» or «same»: the losses since, against the trend before.

    `restored`: the loss of the checkpoint that the trial began from, where it did: it need only stay as good.
    `raising`: larger steps are on trial, so the loss must fall faster than it did, however slow that was.
    """
    values = log_losses(after)
    if not len(values) or math.isnan(before.level):
        return "same"
    if not np.isfinite(values[-1]):
        return "worse"
    now = float(np.median(values[-3:]))
    base, room = before.level, max(2 * before.noise, WORSE)
    if restored is not None:
        base, room = float(log_losses([restored])[0]), WORSE
    if now > base + room:
        return "worse"
    if restored is not None:
        return "better" if now <= base + BETTER else "same"
    return "better" if math.isinf(base) or _helped(before, values, raising=raising) else "same"


def _helped(before: LossTrend, values: Array, *, raising: bool) -> bool:
    """Below the line that the trend would have gone on, or much calmer than before; and not on the rise again."""
    if values[-1] > values.min() + WORSE:
        return False
    expected = before.end + min(before.slope, 0.0) * np.arange(1, len(values) + 1)
    gain = float(np.mean((expected - np.where(np.isfinite(values), values, expected))[-3:]))
    if raising:
        quicker = before.end - values[-1] > QUICKER * (before.end - expected[-1])
        return bool(quicker and gain > 3 * before.noise)
    steps = np.abs(np.diff(values[-3:]))
    calmer = before.noise > RESTLESS and len(steps) > 1 and steps.max() < CALM * before.noise
    return gain > max(before.noise, BETTER) or bool(calmer and values[-1] < before.level)
