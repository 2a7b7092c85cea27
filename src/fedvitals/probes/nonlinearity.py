# SPDX-License-Identifier: Apache-2.0
"""Nonlinearity coefficient (NLC): how far a network is from a linear map, on the data it sees.

Philipp and Carbonell 2018; Philipp 2021, arXiv 2105.12210:

    NLC = √( E_x[ tr(J(x) · Cov_x · J(x)ᵀ) ] / tr(Cov_f) )

over inputs x and outputs f. 1 for a linear map; good initialisations lie between about 1 and 3; independent of the
input's scale, of biases and of width. The numerator is E‖J(x)·δ‖² with δ drawn from the data's covariance: the
difference of two samples over √2. Values below 1 on real data are not a fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.probes.differentiate import differentiable
from fedvitals.probes.scale import inputs_of, seed_of
from fedvitals.probes.view import View, evaluation_mode

IMAGES = 64


@dataclass(frozen=True, slots=True)
class nonlinearity:  # noqa: N801 - reads as its sibling probes, which are functions
    """A probe: how far a model is from its linearisation at the client's samples, as the metric `nonlinearity.nlc`.

    That is 1 for a linear map. With fewer than two samples nothing is measured.

    Args:
        images: The number of the client's samples to measure on, or «all».
    """

    images: int | str = IMAGES

    @property
    def __name__(self) -> str:
        return "nonlinearity"

    def __call__(self, view: View) -> Mapping[str, Any]:
        inputs = inputs_of(view, self.images)
        if inputs is None or len(inputs[0]) < 2:
            return {}
        value = nonlinearity_coefficient(view.model, inputs[0], seed=seed_of(view))
        return {} if math.isnan(value) else {"nonlinearity.nlc": value}


def nonlinearity_coefficient(model: nn.Module, x: Tensor, *, seed: int = 0) -> float:
    """Return the NLC on these samples; NaN if the outputs do not vary."""
    stream = torch.Generator().manual_seed(seed)
    with evaluation_mode(model), differentiable(model, x, twice=True) as graph:
        delta = _covariance_draws(graph.inputs.detach(), stream)
        pushed = jacobian_product(graph.inputs, graph.outputs, delta)
        outputs = graph.outputs.detach().double()
        spread = outputs.var(0, correction=1).sum()
    return math.sqrt(float(pushed.double().square().sum(1).mean() / spread)) if spread > 0 else math.nan


def jacobian_product(inputs: Tensor, outputs: Tensor, delta: Tensor) -> Tensor:
    """Return J(x)·δ of each sample, by two backward passes; there may be several sample axes.

    The derivative of vᵀJ with respect to v, along δ, is J·δ. This works for every operation that autograd can
    differentiate twice, which is more than forward mode supports.
    """
    v = torch.zeros_like(outputs, requires_grad=True)
    (pulled,) = torch.autograd.grad(outputs, inputs, v, create_graph=True)
    (pushed,) = torch.autograd.grad(pulled, v, delta, retain_graph=True)
    return pushed.detach()


def _covariance_draws(x: Tensor, stream: torch.Generator) -> Tensor:
    """Return one draw per sample from a distribution with the data's covariance.

    It is (a − b)/√2 for two different samples.
    """
    first, second = pairs(len(x), stream).to(x.device)
    return (x[first] - x[second]) / math.sqrt(2)


def pairs(count: int, stream: torch.Generator) -> Tensor:
    """Return for each sample the indices of two different ones, [2, samples]."""
    first = torch.randperm(count, generator=stream)
    return torch.stack([first, (first + torch.randint(1, count, (count,), generator=stream)) % count])
