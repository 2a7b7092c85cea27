# SPDX-License-Identifier: Apache-2.0
"""Gradient scale of stacked clients: the same estimate as `scale`, for all clients by the same few backward passes.

On a GPU nothing here synchronises, and no shape depends on a value, so `scale_graph` can capture it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.errors import UnsuitedError
from fedvitals.probes.deflation import Direction, by_decomposition, by_squaring
from fedvitals.probes.differentiate import require_class_outputs
from fedvitals.probes.scale import ratio, scale
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.stacked.signs import DeviceSigns, HostSigns, Signs
from fedvitals.probes.view import evaluation_mode
from fedvitals.stats import Array

_SAMPLES = 64  # per client at a time, as without a stack: a random stream restarts with each portion


def stacked_scale(
    probe: scale,
    model: StackModel,
    x: Tensor,
    seeds: Sequence[int],
    samples: Callable[..., Tensor] | None = None,
) -> dict[str, Array]:
    """Return metrics by name, [clients] each, on the samples x [clients, n, ...]; masked where a client has no value.

    `samples` computes them, such as a `ScaleGraph`; by default `scale_samples`.
    """
    summaries = scale_summaries((samples or scale_samples)(model, x, seeds, exact=probe.exact))
    rows = dict(zip(summaries, torch.stack([*summaries.values()]).cpu().numpy(), strict=True))  # one copy to the host
    for name in ("scale.gsc", "scale.sensitivity"):
        nothing = np.isnan(rows[name])
        for metric in (name, f"{name}_median", f"{name}_spread", f"{name}_error"):
            rows[metric] = np.ma.masked_array(rows[metric], nothing)
    return rows


def scale_samples(model: StackModel, x: Tensor, seeds: Sequence[int], *, exact: bool = False) -> Tensor:
    """Return GSC and sensitivity of each sample, [2, clients, samples] in float64, on the device of x.

    On a GPU the seeds together make one stream of signs (`signs`) instead of one per client.
    """
    signs = DeviceSigns(seeds, x.device) if x.is_cuda else HostSigns(seeds)
    with evaluation_mode(model.module):
        return measure_scale(model, x, signs, exact=exact)


def scale_summaries(samples: Tensor) -> dict[str, Tensor]:
    """Return the metrics of `scale`, [..., clients] each in float64, from GSC and sensitivity.

    The input is [2, ..., clients, samples]. Computed over the finite samples, like `scale.summary`; NaN if there are
    none. It does not synchronise.
    """
    gsc, sensitivity = samples.unbind()
    return {
        **_summaries("scale.gsc", gsc),
        **_summaries("scale.sensitivity", sensitivity),
        "scale.zero_samples": (gsc == 0).sum(-1).double(),
        "scale.nonfinite_samples": (~gsc.isfinite()).sum(-1).double(),
        "scale.images": gsc.new_full(gsc.shape[:-1], float(gsc.shape[-1])),
    }


def measure_scale(model: StackModel, x: Tensor, signs: Signs, *, exact: bool) -> Tensor:
    """Return `scale_samples` with these signs, for a module in evaluation mode."""
    if not x.is_floating_point():
        raise UnsuitedError(
            f"Gradient scale is not measured: of clients that train as one batch it cannot differentiate by {x.dtype} "
            "inputs."
        )
    most = max(1, model.together(x.device) // max(1, x[0, 0].numel())) if x.is_cuda else _SAMPLES
    portions = []
    for samples in x.split(most, dim=1):
        parts = [_portion(model, samples[part], part, signs, exact=exact) for part in model.parts(samples)]
        portions.append(torch.cat(parts, dim=1))
    return torch.cat(portions, dim=2)


def _portion(model: StackModel, x: Tensor, part: slice, signs: Signs, *, exact: bool) -> Tensor:
    """Return GSC and sensitivity, [2, clients, samples] in float64."""
    with torch.enable_grad():
        inputs = x.detach().clone().requires_grad_()
        outputs = model.apply(inputs, part)
        require_class_outputs(
            outputs.flatten(0, 1) if isinstance(outputs, Tensor) else outputs, x.shape[0] * x.shape[1]
        )
        squares = (
            _exact(inputs, outputs)
            if exact
            else _estimated(inputs, outputs, _last_weight(model, part, outputs.shape[2]), part, signs)
        )
    jacobian = (squares.clamp_min(0) / inputs[0, 0].numel()).sqrt()
    top, bottom = (torch.linalg.vector_norm(t.detach().flatten(2).double(), dim=2) for t in (outputs, inputs))
    return torch.stack([ratio(jacobian * top, bottom), ratio(jacobian * bottom, top)])


def _pull(inputs: Tensor, outputs: Tensor, direction: Tensor) -> Tensor:
    """Return ‖vᵀJ‖² of each client's samples, by one backward pass, since neither samples nor clients mix."""
    (gradient,) = torch.autograd.grad(outputs, inputs, direction, retain_graph=True)
    if gradient.is_cuda:  # in memory order and without storing all squares, which halves the traffic
        within = tuple(range(2, gradient.dim()))
        norms: Tensor = torch.linalg.vector_norm(gradient.detach().double(), dim=within)
        return norms.square()
    return gradient.detach().flatten(2).double().square().sum(2)


def _exact(inputs: Tensor, outputs: Tensor) -> Tensor:
    directions = torch.eye(outputs.shape[2], dtype=outputs.dtype, device=outputs.device)
    return torch.stack([_pull(inputs, outputs, row.expand_as(outputs)) for row in directions]).sum(0)


def _estimated(inputs: Tensor, outputs: Tensor, weight: Tensor | None, part: slice, signs: Signs) -> Tensor:
    """Return the estimate of `scale.estimated_squares`."""
    if outputs.shape[2] == 1:
        return _pull(inputs, outputs, torch.ones_like(outputs))
    drawn = signs(outputs, part, 1 if weight is not None else 2)
    if weight is None:
        return (_pull(inputs, outputs, drawn[0]) + _pull(inputs, outputs, drawn[1])) / 2
    weight = weight.double()
    gram = weight @ weight.mT
    finite = gram.isfinite().all(2).all(1)[:, None, None]
    # Where it is not finite, neither are the outputs, nor the result; but the decomposition would fail for all clients.
    gram = gram.where(finite, torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device))
    direction = by_squaring(gram) if gram.is_cuda else by_decomposition(gram)
    return deflated(inputs, outputs, gram, direction, drawn[0])


def deflated(inputs: Tensor, outputs: Tensor, gram: Tensor, direction: Direction, signs: Tensor) -> Tensor:
    """Return an unbiased estimate of ‖J‖_F², [clients, samples]: exact along the direction, random across it."""
    u = direction.u[:, None].to(outputs)  # [clients, 1, outputs]
    z = signs - (signs * u).sum(2, keepdim=True) * u
    along, rest = _pull(inputs, outputs, u.expand_as(outputs)), _pull(inputs, outputs, z)
    chance = ((z.double() @ gram) * z.double()).sum(2) - direction.rest
    return along + rest - (along / direction.along * chance).masked_fill(~(direction.along > 0), 0.0)


def _last_weight(model: StackModel, part: slice, count: int) -> Tensor | None:
    """Return [clients, outputs, features] of the last linear layer with as many outputs as the model."""
    linear = ((n, m) for n, m in model.module.named_modules() if isinstance(m, nn.Linear))
    names = [f"{name}.weight".lstrip(".") for name, module in linear if module.out_features == count]
    return model.tensors(part).get(names[-1]) if names else None


def _summaries(name: str, values: Tensor) -> dict[str, Tensor]:
    """Return mean, median, spread and standard error over each client's finite samples."""
    lost = ~values.isfinite()
    count = (~lost).sum(-1).double()
    mean = values.masked_fill(lost, 0.0).sum(-1) / count  # 0 / 0, which is NaN, if nothing is finite
    squares = (values - mean[..., None]).masked_fill(lost, 0.0).square().sum(-1)
    spread = (squares / (count - 1)).sqrt().masked_fill(count < 2, math.nan)
    middle = ((count - 1).clamp_min(0) / 2).long()[..., None]  # the lower of the two, as in torch
    median = values.masked_fill(lost, math.inf).sort(-1).values.gather(-1, middle).squeeze(-1)
    return {
        name: mean,
        f"{name}_median": median.masked_fill(count < 1, math.nan),
        f"{name}_spread": spread,
        f"{name}_error": spread / count.sqrt(),
    }
