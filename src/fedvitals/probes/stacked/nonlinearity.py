# SPDX-License-Identifier: Apache-2.0
"""Nonlinearity coefficient of stacked clients: `nonlinearity` for all of them by the same two backward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedvitals.probes.differentiate import require_class_outputs
from fedvitals.probes.nonlinearity import jacobian_product, nonlinearity_coefficient, pairs
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.view import evaluation_mode
from fedvitals.stats import Array

_COST = 3  # the backward pass is kept as well, for differentiation, and its derivative


def stacked_nonlinearity(model: StackModel, x: Tensor, seeds: Sequence[int]) -> Array:
    """Return the NLC of each client on its samples x [clients, n, ...]; NaN if its outputs do not vary.

    The random draws are the same as for each client alone, on every device.
    """
    if x.shape[1] < 2:
        return np.full(model.clients, math.nan)
    if not x.is_floating_point():
        return _one_by_one(model, x, seeds)
    streams = (torch.Generator().manual_seed(seed) for seed in seeds)
    drawn = torch.stack([pairs(x.shape[1], stream) for stream in streams], 1).to(x.device, non_blocking=True)
    with evaluation_mode(model.module), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        return torch.cat([_portion(model, x, drawn, part) for part in model.parts(x, _COST)]).cpu().numpy()


def _portion(model: StackModel, x: Tensor, drawn: Tensor, part: slice) -> Tensor:
    inputs = x[part].detach().clone().requires_grad_()
    # By the module: a host's hand-written kernels for its forward pass are seldom differentiable twice.
    outputs = model.apply(inputs, part, twice=True)
    require_class_outputs(
        outputs.flatten(0, 1) if isinstance(outputs, Tensor) else outputs, inputs.shape[0] * inputs.shape[1]
    )
    rows = torch.arange(len(inputs), device=x.device)[:, None]
    first, second = (inputs.detach()[rows, places] for places in drawn[:, part])
    pushed = jacobian_product(inputs, outputs, (first - second) / math.sqrt(2)).double()
    spread = outputs.detach().double().var(1, correction=1).sum(1)
    values: Tensor = (pushed.square().sum(2).mean(1) / spread).sqrt()
    return values.masked_fill(~(spread > 0), math.nan)


def _one_by_one(model: StackModel, x: Tensor, seeds: Sequence[int]) -> Array:
    """Return the coefficients for tokens, on a copy of the module, since its embedding needs a hook."""
    module, coefficients = model.own_copy(), []
    for client, seed in enumerate(seeds):
        model.load(module, client)
        coefficients.append(nonlinearity_coefficient(module, x[client], seed=seed))
    return np.array(coefficients)
