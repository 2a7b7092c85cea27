# SPDX-License-Identifier: Apache-2.0
"""Estimate the error of a model that was aggregated from updates which clients computed on other weights.

By secants: between two recorded rounds the model moved, and the step that the (changed) aggregation makes of what
clients sent changed. Their ratio, ρ, measures how strongly steps respond to the position of the model. A model moved by
u would have got a step that differs by about ρ·‖u‖. The error grows by e ← e + ρ·(‖u‖ − e), where the part in brackets
is what remains of the move once the response is counted.

It is an estimate, not a bound: compared with true re-runs (digits; mlp and cnn; 18 changes of 9 kinds, 10 rounds each)
it was 0.35 to 2.2 times the true error, in the median 0.7 after two rounds and 1.0 after ten.
"""

from __future__ import annotations

import math
from statistics import median

import torch
from torch import Tensor


class DriftEstimate:
    """The estimate, updated round by round. `weights`: how many leading values of a state are trained; buffers do
    not count.
    """

    def __init__(self, weights: int) -> None:
        self._weights = weights
        self._step: Tensor | None = None
        self._at: Tensor | None = None
        self._answers: list[float] = []
        self.moved = 0.0  # distance of the changed model from the recorded one
        self.error = 0.0

    @property
    def relative(self) -> float:
        """Return the error as a fraction of the move."""
        return self.error / self.moved if self.moved > 0 else 0.0

    def add(self, before: Tensor, after: Tensor, stood: Tensor, stands: Tensor) -> None:
        """Add a round: the recorded model before and after it, and the changed one before and after it."""
        before, after, stood, stands = (t[: self._weights].double() for t in (before, after, stood, stands))
        step, moved = stands - stood, _length(stood - before)
        if self._step is not None and self._at is not None:
            way = _length(before - self._at)
            if way > 0 and math.isfinite(way):
                self._answers.append(_length(step - self._step) / way)
        self._step, self._at = step, before
        known = [answer for answer in self._answers if math.isfinite(answer)]
        if known:
            self.error += min(1.0, median(known)) * max(0.0, moved - self.error)
        self.moved = _length(stands - after)


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
