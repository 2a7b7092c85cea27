# SPDX-License-Identifier: Apache-2.0
"""The global model's loss, and its accuracy where the host logs it, round by round.

A loss may rise while the model learns, when a few samples are misclassified with great confidence. Which model was the
best, and whether it is lost, is therefore judged by the accuracy first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedvitals.protocols import History
from fedvitals.stats import Array

WORSE = 0.1  # of the log loss: worse regardless of the scatter
POINTS = 0.05  # of accuracy: a difference beyond chance
GUESSING = 0.1  # an accuracy this far above the first model's has been learnt


@dataclass(frozen=True, slots=True)
class ModelTrend:
    """Loss and accuracy after each round; the accuracy may be missing in some or all rounds."""

    loss: Mapping[int, float]
    accuracy: Mapping[int, float] = field(default_factory=dict)
    label_entropy: float | None = None  # the loss of guessing

    def best_round(self, before: int) -> int | None:
        """Return the round after which the model was best; the newest if several are."""
        known = {round_index: self._badness(round_index) for round_index in self.loss if round_index < before}
        return min(known, key=lambda round_index: (known[round_index], -round_index), default=None)

    def best_if_worse(self, before: int, since: int) -> int | None:
        """Return the round of the best model if the newest models are clearly worse, else None.

        One bad round is not enough.
        """
        best = self.best_round(before)
        recent = [round_index for round_index in self.loss if max(since, before - 2) <= round_index < before]
        if best is None or not recent:
            return None
        now = min(self._badness(round_index) for round_index in recent)
        accuracy_known = best in self.accuracy and any(round_index in self.accuracy for round_index in recent)
        return best if now[0] > self._badness(best)[0] + (POINTS if accuracy_known else WORSE) else None

    def _badness(self, round_index: int) -> tuple[float, float]:
        loss = float(log_losses([self.loss[round_index]])[0])
        if not np.isfinite(loss):
            return (np.inf, loss)
        accuracy = self.accuracy.get(round_index)
        return (loss if accuracy is None else -accuracy, loss)

    @property
    def learnt_nothing(self) -> bool:
        """Return whether loss and accuracy are where they were in the first round.

        The loss must also be no lower than that of guessing.
        """
        if not self.loss:
            return True
        if self.label_entropy is None:
            return False  # unknown: the first round may have learnt everything there is
        rounds = sorted(self.loss)
        values = log_losses([self.loss[round_index] for round_index in rounds])
        guessing = float(np.log(max(self.label_entropy, 1e-8)))
        known = [self.accuracy[round_index] for round_index in rounds if round_index in self.accuracy] or [0.0]
        return bool(values.min() > max(values[0], guessing) - WORSE) and max(known) <= known[0] + GUESSING

    def more_accurate(self, since: int, before: int) -> bool:
        """Return whether the newest models are clearly more accurate than any before round `since`."""
        old = [value for round_index, value in self.accuracy.items() if round_index < since]
        new = [value for round_index, value in sorted(self.accuracy.items()) if since <= round_index < before][-2:]
        return bool(old and new) and min(new) > max(old) + POINTS

    def state(self, before: int) -> dict[str, Any]:
        """Return round, loss and accuracy of the newest model before a round, for people to read."""
        newest = max((round_index for round_index in self.loss if round_index < before), default=None)
        if newest is None:
            return {}
        return {"round": newest, "loss": self.loss[newest], "accuracy": self.accuracy.get(newest)}


def model_trend_of(history: History) -> ModelTrend:
    """Return the trend from the loss the host logs, else from the median loss of the clients on the model they
    received.

    The latter belongs to the model before the round's training, so it is stored one round earlier. Where a host
    averages its clients' evaluations more often than it evaluates itself, only the averages are used: the two are
    measured on different data and must not be mixed.
    """
    central, averaged = (
        tuple(dict(zip(*history.series(prefix + name, None), strict=True)) for name in ("loss", "accuracy"))
        for prefix in ("", "local.")
    )
    loss, accuracy = averaged if len(averaged[0]) > len(central[0]) else central
    if not loss:
        received = {
            round_index: [*history.latest("fit.loss_before", round_index).values()] for round_index in history.rounds()
        }
        loss = {round_index - 1: float(np.median(values)) for round_index, values in received.items() if values}
    first = min(history.rounds(), default=0)
    entropies = [*history.latest("label.entropy", first).values()]
    return ModelTrend(loss, accuracy, float(np.median(entropies)) if entropies else None)


def log_losses(values: Sequence[float]) -> Array:
    """Return the logarithms of losses; a loss that is not finite becomes infinity."""
    numbers = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(numbers), np.log(np.maximum(np.nan_to_num(numbers), 1e-8)), np.inf)
