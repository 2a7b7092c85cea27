# SPDX-License-Identifier: Apache-2.0
"""List a client's own samples that contradict their labels most, for the owner of the data.

It runs where the data are, when called by their owner, and records and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.probes import samples
from fedvitals.probes.differentiate import logits_of
from fedvitals.probes.fit import is_classifier, to_device
from fedvitals.probes.view import evaluation_without_gradients

BATCH = 256


@dataclass(frozen=True, slots=True)
class SuspectSample:
    """A sample whose label the model contradicts.

    `index`: its position in the data. `guess`: the model's prediction. `margin`: the probability of the guess minus
    that of the label, above 0 and at most 1; infinite if the model's output for the sample is not finite, which usually
    means that its inputs are not either.
    """

    index: int
    label: int
    guess: int
    margin: float


def suspect_samples(model: nn.Module, data: Any, k: int = 20) -> list[SuspectSample]:
    """Return the samples whose labels are most doubtful, worst first. Model, data and random streams stay as they are.

    Args:
        model: The federation's model, as the client received it. One that the client has trained further agrees with
            its wrong labels, too.
        data: The client's samples, as `Monitor.client` takes them.
        k: How many samples to return at most.

    Returns:
        For each sample its index, its label, the class that the model predicts, and the margin; fewer than `k` if the
        model doubts fewer labels.
    """
    if k < 1:
        raise ConfigError(f"suspect_samples(k=) needs at least 1 sample to list, got {k}.")
    suspects: list[SuspectSample] = []
    total = samples.size(data)
    for first in range(0, total, BATCH):
        suspects += _suspects_in(model, data, range(first, min(first + BATCH, total)))
    return sorted(suspects, key=lambda sample: -sample.margin)[:k]


def _suspects_in(model: nn.Module, data: Any, indices: range) -> list[SuspectSample]:
    x, y = to_device(model, *samples.read(data, [*indices]))
    with evaluation_without_gradients(model):
        logits = logits_of(samples.apply(model, samples.mapped(x, torch.Tensor.clone)))
    if not is_classifier(logits, y):
        raise ConfigError("suspect_samples() needs a classifier: one row of logits and one whole label per sample.")
    chances = logits.double().softmax(1)
    top, guesses = chances.max(1)
    margins = top - chances.gather(1, y.long()[:, None])[:, 0]
    margins = torch.where(logits.isfinite().all(1), margins, torch.inf)
    rows = zip(indices, y.tolist(), guesses.tolist(), margins.tolist(), strict=True)
    return [SuspectSample(*row) for row in rows if row[3] > 0]
