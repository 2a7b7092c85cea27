# SPDX-License-Identifier: Apache-2.0
"""How far a model may be off that was aggregated from updates which clients computed on other weights.

By secants: between two recorded rounds the model moved, and the step that the (changed) aggregation makes of what the
clients sent became another one. How much it did so per distance, ρ, is how strongly the steps answer to where the model
is. A model that is moved away by u would have got another step by about ρ·‖u‖. It is moved by what is known, and by
what is not: e ← e + ρ·(‖u‖ − e), where the part in brackets is what is left of the move once the answer is counted.

An estimate and no bound: measured against true re-runs (digits; mlp and cnn; 18 changes of 9 kinds, 10 rounds each) it
was 0.35 to 2.2 times the true error, in the median 0.7 after two rounds and 1.0 after ten.
"""

from __future__ import annotations

import math
from statistics import median

import torch
from torch import Tensor


class DriftEstimate:
    """Fed round by round. `weights`: how much of a state is trained; buffers do not count."""

    def __init__(self, weights: int) -> None:
        self._weights = weights
        self._step: Tensor | None = None
        self._at: Tensor | None = None
        self._answers: list[float] = []
        self.moved = 0.0  # distance of the changed model from the recorded one
        self.error = 0.0

    @property
    def relative(self) -> float:
        """The error as a share of the move."""
        return self.error / self.moved if self.moved > 0 else 0.0

    def add(self, before: Tensor, after: Tensor, stood: Tensor, stands: Tensor) -> None:
        """One round: the recorded model before and after it, the changed one before and after it."""
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
