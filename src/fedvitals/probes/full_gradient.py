# SPDX-License-Identifier: Apache-2.0
"""The average gradient over a client's whole data set, per layer: the paper's Figures 21 to 29.

Both readings of «average» derive from its nine sums: the signed mean and the mean magnitude. For a softmax head the
signed mean is 0 by construction, so the two differ (docs/metrics.md). It costs about as much as training on the whole
set once, so it has its own schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedvitals.kernels import sums
from fedvitals.probes import samples
from fedvitals.probes.view import View, evaluation_mode

BATCH = 64


def full_gradient(view: View) -> Mapping[str, Any]:
    """Measure the gradient of the mean loss over all of the client's samples.

    The model is in evaluation mode meanwhile, and `.grad` is left unchanged.

    Args:
        view: The client's model at this moment, and its data.

    Returns:
        {"gradient.full": [layers, 9]}, with the sums of `gradient_sums`; nothing without samples or a loss.
    """
    if view.data is None or view.loss is None:
        return {}
    total = samples.size(view.data)
    wanted = [p for p in view.parameters if p.requires_grad]
    if not total or not wanted:
        return {}
    device = wanted[0].device
    averages = [torch.zeros_like(p) for p in wanted]
    with evaluation_mode(view.model), torch.enable_grad():
        for first in range(0, total, BATCH):
            x, y = samples.read(view.data, range(first, min(first + BATCH, total)))
            x = samples.mapped(x, lambda part: part.to(device))
            loss = view.loss(samples.apply(view.model, x), y.to(device))
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
            for average, gradient in zip(averages, gradients, strict=True):
                if gradient is not None:
                    average.add_(gradient, alpha=len(y) / total)
    by_parameter = dict(zip(map(id, wanted), averages, strict=True))
    return {"gradient.full": sums([by_parameter.get(id(p)) for p in view.parameters])}
