# SPDX-License-Identifier: Apache-2.0
"""The average gradient over the whole sets of stacked clients: `full_gradient` for all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedvitals.kernels import sums
from fedvitals.probes.full_gradient import BATCH
from fedvitals.probes.stack_model import StackModel
from fedvitals.probes.view import modes_kept
from fedvitals.stats import Array


def stacked_full_gradient(model: StackModel, x: Tensor, y: Tensor, loss: Callable[..., Any]) -> list[Array | Tensor]:
    """Nine sums per layer of each portion of clients, [clients, layers, 9]; x and y are [clients, samples, ...]."""
    names = [name for name, _ in model.parameters]

    def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Any:
        return loss(functional_call(model.module, {**parameters, **buffers}, (inputs,)), labels)

    gradients = vmap(grad(one), randomness="different")
    found = []
    with modes_kept(model.module):
        for part in model.parts(x[:, :BATCH]):
            state = model.tensors(part)
            buffers = {name: state.pop(name) for name in [*state] if name not in names}
            averages = [torch.zeros_like(tensor) for tensor in state.values()]
            for inputs, labels in zip(x[part].split(BATCH, dim=1), y[part].split(BATCH, dim=1), strict=True):
                share = inputs.shape[1] / x.shape[1]
                for average, gradient in zip(averages, gradients(state, buffers, inputs, labels).values(), strict=True):
                    average.add_(gradient, alpha=share)
            trained = [
                average.flatten(1) if told else None for average, told in zip(averages, model.trained, strict=True)
            ]
            found.append(sums(trained, clients=True))
    return found
