# SPDX-License-Identifier: Apache-2.0
"""The error of a stacked step on a device, for each precision and plan, relative to float64 on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedvitals.lab.engines.site import Site
from fedvitals.lab.stacked.executor import reproducible_precision
from fedvitals.lab.stacked.plans import PRECISIONS, Weights, available_plans

CLIENTS, BATCH = 4, 16


@dataclass(frozen=True, slots=True)
class Error:
    """The worst client's error: the norm of the difference over the norm of the float64 result."""

    plan: str
    outputs: float
    gradients: float


def precision_rows(site: Site) -> list[dict[str, Any]]:
    """Return a row for each precision. No bar: if a near tie in a pooling is resolved differently, a gradient jumps."""
    found = []
    for precision in PRECISIONS:
        own = [*errors(site, torch.device("cuda"), precision)]
        told = "; ".join(f"«{e.plan}» outputs {e.outputs:.1e}, gradients {e.gradients:.1e}" for e in own)
        what = f"error of a step against float64, {precision}"
        best = {"outputs": own[0].outputs, "gradients": own[0].gradients}
        found.append({"what": what, "bar": "", "measured": told, "verdict": "", **best})
    return found


def errors(site: Site, device: torch.device, precision: str) -> Iterator[Error]:
    """Yield errors of every plan that can compute the model there; clients begin slightly apart, so that all differ."""
    layout, stream = site.layout, torch.Generator().manual_seed(1)
    start = layout.flat(site.module)
    states = start * (1 + 0.1 * torch.randn(CLIENTS, len(start), generator=stream))
    parts = [site.tensors(node, 0) for node in site.experiment.nodes[:CLIENTS]]
    x, y = (torch.stack([part[which][:BATCH] for part in parts]) for which in range(2))
    wanted = _in_float64(site, layout.views(states), x, y)
    there = states.to(device)
    for plan in available_plans(copy.deepcopy(site.module).to(device), device, precision):
        gradients = torch.zeros_like(there)
        with reproducible_precision(precision):
            plan.gradients(layout.views(there), layout.views(gradients), x.to(device), y.to(device))
            outputs = plan.outputs(layout.views(there), x.to(device))
        yield Error(plan.name, _worst(outputs, wanted[0]), _worst(gradients, wanted[1]))


def _in_float64(site: Site, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    module = copy.deepcopy(site.module).double()

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(module, parameters, (x,))
        return F.cross_entropy(logits, y), logits

    exact = {name: weight.double() for name, weight in weights.items()}
    gradients, (_, outputs) = vmap(grad_and_value(loss, has_aux=True))(exact, x.double(), y)
    return outputs, torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)


def _worst(computed: Tensor, wanted: Tensor) -> float:
    off = computed.detach().cpu().double().flatten(1) - wanted.flatten(1)
    return float((off.norm(dim=1) / wanted.flatten(1).norm(dim=1)).max())
