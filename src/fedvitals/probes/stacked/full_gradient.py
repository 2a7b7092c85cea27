# SPDX-License-Identifier: Apache-2.0
"""The average gradient over the whole data sets of stacked clients: `full_gradient` for all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedvitals.kernels import sums
from fedvitals.probes.full_gradient import BATCH
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.view import evaluation_mode
from fedvitals.stats import Array

Loss = Callable[..., Any]


def stacked_full_gradient(model: StackModel, x: Tensor, y: Tensor, loss: Loss) -> list[Array | Tensor]:
    """Return nine sums per layer, [clients, layers, 9], on the device of x; x and y are [clients, samples, ...]."""
    # A GPU takes as many as fit; a CPU as many as without a stack, so that sums are added in the same order.
    batch = max(1, model.together(x.device) // max(1, x[0, 0].numel())) if x.is_cuda else BATCH
    parts: list[Any] = []
    with evaluation_mode(model.module):
        for part in model.parts(x[:, :batch]):
            samples = (x[part].split(batch, dim=1), y[part].split(batch, dim=1))
            average = torch.zeros_like(model.matrix[part])
            for inputs, labels in zip(*samples, strict=True):
                average.add_(_gradient(model, part, inputs, labels, loss), alpha=inputs.shape[1] / x.shape[1])
            layers = zip(model.layers(average), model.trained, strict=True)
            parts.append(sums([layer if is_trained else None for layer, is_trained in layers], clients=True))
    if len(parts) > 1:
        parts = [torch.cat(parts) if isinstance(parts[0], Tensor) else np.concatenate(parts)]
    return parts


def _gradient(model: StackModel, part: slice, inputs: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Return the gradient of the mean loss over these samples, [clients, weights].

    It is computed by the host's forward, or by its module.
    """
    if model.forward is not None:
        with torch.enable_grad():
            states = model.states.detach()[part].clone().requires_grad_()
            losses = vmap(loss, randomness="different")(model.by_host(states, inputs), labels)
            # Clients do not mix, so one backward pass from the sum of their losses serves all.
            return torch.autograd.grad(losses.sum(), states)[0][:, : model.weights]

    def client_loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        return loss(functional_call(model.module, {**parameters, **buffers}, (x,)), y)

    state = model.tensors(part)
    parameters = {name: state.pop(name) for name, _ in model.parameters}
    gradients = vmap(grad(client_loss), randomness="different")(parameters, state, inputs, labels)
    return torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)
