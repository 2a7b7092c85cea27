# SPDX-License-Identifier: Apache-2.0
"""Gradient scale of stacked clients: the same estimate as `scale`, of all clients by the same few backward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError
from fedvitals.probes.differentiate import classified
from fedvitals.probes.scale import ratio, scale, summary
from fedvitals.probes.stack_model import StackModel
from fedvitals.probes.view import modes_kept
from fedvitals.stats import Array

_SAMPLES = 64  # of each client at a time, as without a stack: a random stream begins anew with each portion


def stacked_scale(probe: scale, model: StackModel, x: Tensor, seeds: Sequence[int]) -> dict[str, Array]:
    """Metrics by name, [clients] each, on the samples x [clients, n, ...]; masked where a client has no such value."""
    if not x.is_floating_point():
        raise ConfigError(f"Gradient scale of stacked clients cannot differentiate by {x.dtype} inputs.")
    portions = []
    with modes_kept(model.module):
        for samples in x.split(_SAMPLES, dim=1):
            parts = [
                _portion(model, samples[part], part, seeds[part], exact=probe.exact) for part in model.parts(samples)
            ]
            portions.append(torch.cat(parts, dim=1))
    gsc, sensitivity = torch.cat(portions, dim=2).cpu().unbind()
    return {
        **_summaries("scale.gsc", gsc),
        **_summaries("scale.sensitivity", sensitivity),
        "scale.zero_samples": (gsc == 0).sum(1).double().numpy(),
        "scale.nonfinite_samples": (~gsc.isfinite()).sum(1).double().numpy(),
        "scale.images": np.full(len(gsc), float(gsc.shape[1])),
    }


def _portion(model: StackModel, x: Tensor, part: slice, seeds: Sequence[int], *, exact: bool) -> Tensor:
    """GSC and sensitivity, [2, clients, samples] in float64."""
    with torch.enable_grad():
        inputs = x.detach().clone().requires_grad_()
        outputs = model.apply(inputs, part)
        classified(outputs.flatten(0, 1) if isinstance(outputs, Tensor) else outputs, x.shape[0] * x.shape[1])
        squares = (
            _exact(inputs, outputs)
            if exact
            else _estimated(inputs, outputs, _last_weight(model, part, outputs.shape[2]), seeds)
        )
    jacobian = (squares.clamp_min(0) / inputs[0, 0].numel()).sqrt()
    top, bottom = (torch.linalg.vector_norm(t.detach().flatten(2).double(), dim=2) for t in (outputs, inputs))
    return torch.stack([ratio(jacobian * top, bottom), ratio(jacobian * bottom, top)])


def _pull(inputs: Tensor, outputs: Tensor, direction: Tensor) -> Tensor:
    """‖vᵀJ‖² of each client's samples. Samples do not mix, nor do clients, so one backward pass serves all."""
    (gradient,) = torch.autograd.grad(outputs, inputs, direction, retain_graph=True)
    return gradient.detach().flatten(2).double().square().sum(2)


def _exact(inputs: Tensor, outputs: Tensor) -> Tensor:
    directions = torch.eye(outputs.shape[2], dtype=outputs.dtype, device=outputs.device)
    return torch.stack([_pull(inputs, outputs, row.expand_as(outputs)) for row in directions]).sum(0)


def _estimated(inputs: Tensor, outputs: Tensor, weight: Tensor | None, seeds: Sequence[int]) -> Tensor:
    """The estimate of `scale.estimated_squares`, from the same random signs."""
    if outputs.shape[2] == 1:
        return _pull(inputs, outputs, torch.ones_like(outputs))
    signs = _signs(outputs, seeds, 1 if weight is not None else 2)
    if weight is None:
        return (_pull(inputs, outputs, signs[0]) + _pull(inputs, outputs, signs[1])) / 2
    weight = weight.double()
    gram = weight @ weight.mT
    finite = gram.isfinite().all(2).all(1)[:, None, None]
    # Where it is not finite, neither are the outputs, and so the result; but the decomposition would refuse all.
    gram = gram.where(finite, torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device))
    # On the host: cuSOLVER takes 8 ms for each of these small matrices, so 100 clients would wait most of a second.
    values, vectors = (found.to(gram.device) for found in torch.linalg.eigh(gram.cpu()))
    u = vectors[:, None, :, -1].to(outputs)  # [clients, 1, outputs]
    probe = signs[0]
    z = probe - (probe * u).sum(2, keepdim=True) * u
    along, rest = _pull(inputs, outputs, u.expand_as(outputs)), _pull(inputs, outputs, z)
    chance = ((z.double() @ gram) * z.double()).sum(2) - values[:, :-1].sum(1, keepdim=True)
    top = values[:, -1:]
    return along + rest - torch.where(top > 0, along / top * chance, 0.0)


def _signs(outputs: Tensor, seeds: Sequence[int], times: int) -> Tensor:
    """[times, clients, samples, outputs] of ±1: each client's from a stream of its own, as if it were alone."""
    shape = outputs.shape[1:]
    bits = torch.empty(times, len(seeds), *shape, dtype=torch.int8)
    stream = torch.Generator()
    for client, seed in enumerate(seeds):
        stream.manual_seed(seed)
        for time in range(times):
            torch.randint(0, 2, shape, generator=stream, dtype=torch.int8, out=bits[time, client])
    return (bits * 2 - 1).to(outputs.device, outputs.dtype)


def _last_weight(model: StackModel, part: slice, count: int) -> Tensor | None:
    """[clients, outputs, features] of the last linear layer with as many outputs as the model."""
    linear = ((n, m) for n, m in model.module.named_modules() if isinstance(m, nn.Linear))
    found = [f"{name}.weight".lstrip(".") for name, module in linear if module.out_features == count]
    return model.tensors(part).get(found[-1]) if found else None


def _summaries(name: str, values: Tensor) -> dict[str, Array]:
    """Mean, median, spread and standard error over each client's finite samples."""
    names = (name, f"{name}_median", f"{name}_spread", f"{name}_error")
    mean, median = values.mean(1), values.median(1).values
    spread = values.std(1) if values.shape[1] > 1 else torch.full_like(mean, math.nan)
    found = torch.stack([mean, median, spread, spread / math.sqrt(values.shape[1])]).numpy()
    finite = values.isfinite()
    for client in (~finite.all(1)).nonzero().flatten().tolist():
        own = summary(name, values[client])
        found[:, client] = [own.get(n, math.nan) for n in names]
    nothing = ~finite.any(1).numpy()
    return {n: np.ma.masked_array(row, nothing) for n, row in zip(names, found, strict=True)}
