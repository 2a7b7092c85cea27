# SPDX-License-Identifier: Apache-2.0
"""Gradient scale: how strongly a network's output responds to its input (GSC), measured cheaply and with its error.

After Bogacka et al., «Gradient scale monitoring for federated learning systems» (JAMRIS 3/2024), and Philipp et al.,
arXiv 1712.05577. Per sample, with J the Jacobian of the logits by the input and n the input's dimension:

    scale.gsc          (1/√n) · ‖J‖_F · ‖logits‖ / ‖input‖     grows with the square of the network's gain
    scale.sensitivity  (1/√n) · ‖J‖_F · ‖input‖ / ‖logits‖     free of scale; 1 for a linear isotropic map

The exact ‖J‖_F takes one backward pass per output. Estimated by a deflated random projection it takes two, whatever the
number of outputs: as training proceeds, J becomes nearly of rank one, along the top eigenvector u of W·Wᵀ of the last
layer, which is known at no cost. So ‖uᵀJ‖² is computed, and only the rest is projected at random: with z = (I − u·uᵀ)·r
and r of independent signs, E‖zᵀJ‖² = ‖(I − u·uᵀ)J‖_F². The random part of z is mostly explained by zᵀ·W·Wᵀ·z, since J
is W times the Jacobian of the features: scaled by ‖uᵀJ‖² it serves as a control variate at no cost. The estimate of
‖J‖_F² stays unbiased; its error falls by a third (docs/decisions.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError, UnsuitedError
from fedvitals.probes import samples
from fedvitals.probes.allowance import BACKWARD, CALL, FORWARD
from fedvitals.probes.deflation import by_decomposition, by_squaring
from fedvitals.probes.differentiate import Differentiable, differentiable
from fedvitals.probes.view import View, evaluation_mode

IMAGES = 16
OUTPUTS = 10  # assumed outputs of a model, to estimate the work of an exact measurement in advance
MOST_OUTPUTS = 4096  # of a model whose last layer is used for the estimate: 128 MB of products


@dataclass(frozen=True, slots=True)
class scale:  # noqa: N801 - reads as its sibling probes, which are functions
    """A probe: how strongly a model's output responds to its input (docs/guide/gradient_scale.md).

    Per client it gives the metrics `scale.gsc`, the gradient scale coefficient, and `scale.sensitivity`, each as the
    mean over the samples, with median, spread and standard error; and `scale.images`, the number of samples.

    Args:
        images: The number of the client's samples to measure on; «all»: as in the paper.
        exact: Whether to make one backward pass per output, instead of random projections.
    """

    images: int | str = IMAGES
    exact: bool = False

    def __post_init__(self) -> None:
        if self.images != "all" and (not isinstance(self.images, int) or self.images < 1):
            raise ConfigError(f"scale(images=) takes a number of samples of at least 1, or 'all'; got {self.images!r}.")

    @property
    def __name__(self) -> str:
        return "scale"

    def work(self, samples: int) -> float:
        """Return the cost of a measurement in passes of one sample: one forward, and one backward for each projection.

        Args:
            samples: The number of samples that the client has.
        """
        images = samples if self.images == "all" else int(self.images)
        return float(images * (FORWARD + BACKWARD * (OUTPUTS if self.exact else 2)) + CALL)

    def __call__(self, view: View) -> Mapping[str, Any]:
        inputs = inputs_of(view, self.images)
        if inputs is None:
            return {}
        x, from_batch = inputs
        parts = [gradient_scale(view.model, part, seed=seed_of(view), exact=self.exact) for part in x.split(64)]
        gsc, sensitivity = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        return {
            **summary("scale.gsc", gsc),
            **summary("scale.sensitivity", sensitivity),
            "scale.zero_samples": int((gsc == 0).sum()),
            "scale.nonfinite_samples": int((~torch.isfinite(gsc)).sum()),
            "scale.images": len(gsc),
            **({"scale.from_batch": 1} if from_batch else {}),
        }


def gradient_scale(model: nn.Module, x: Tensor, *, seed: int = 0, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Return GSC and sensitivity of each sample, [samples] in float64. The model is left unchanged."""
    with evaluation_mode(model), differentiable(model, x) as graph:
        squares = exact_squares(graph) if exact else estimated_squares(graph, last_weight(model, graph), seed)
        jacobian = (squares.clamp_min(0) / graph.inputs[0].numel()).sqrt()
        top, bottom = _norms(graph.outputs), _norms(graph.inputs)
    return ratio(jacobian * top, bottom), ratio(jacobian * bottom, top)


def exact_squares(graph: Differentiable) -> Tensor:
    """Return ‖J‖_F² of each sample, by one backward pass per output."""
    total = torch.zeros(len(graph.outputs), dtype=torch.float64, device=graph.outputs.device)
    for k in range(graph.outputs.shape[1]):
        direction = torch.zeros_like(graph.outputs)
        direction[:, k] = 1
        total += graph.pull(direction)
    return total


def estimated_squares(graph: Differentiable, weight: Tensor | None, seed: int) -> Tensor:
    """Return an unbiased estimate of ‖J‖_F² of each sample, by two backward passes."""
    outputs = graph.outputs
    count = outputs.shape[1]
    if count == 1:
        return graph.pull(torch.ones_like(outputs))
    # A stream of our own: it leaves the user's random numbers alone, and the same round gives the same estimate.
    stream = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, outputs.shape, generator=stream, dtype=torch.int8).to(outputs.device) * 2 - 1
    probe = signs.to(outputs.dtype)
    if weight is None:
        again = torch.randint(0, 2, outputs.shape, generator=stream, dtype=torch.int8).to(outputs.device) * 2 - 1
        return (graph.pull(probe) + graph.pull(again.to(outputs.dtype))) / 2
    gram = weight.detach().double() @ weight.detach().double().T
    direction = by_squaring(gram[None]) if gram.is_cuda else by_decomposition(gram[None])
    u = direction.u[0].to(outputs)
    z = probe - (probe @ u)[:, None] * u
    along, rest = graph.pull(u.expand_as(outputs)), graph.pull(z)
    # zᵀ·W·Wᵀ·z, whose mean is known, correlates with ‖zᵀJ‖²: its error here explains most of the other's.
    chance = (z.double() @ gram * z.double()).sum(1) - direction.rest[0]
    estimate: Tensor = along + rest - (along / direction.along[0] * chance).masked_fill(~(direction.along[0] > 0), 0.0)
    return estimate


def last_weight(model: nn.Module, graph: Differentiable) -> Tensor | None:
    """Return the weight of the last linear layer with as many outputs as the model.

    None if there is none with finite values, or if its products, outputs × outputs, would take too much memory.
    """
    count = graph.outputs.shape[1]
    if count > MOST_OUTPUTS:
        return None
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == count]
    return weights[-1] if weights and bool(torch.isfinite(weights[-1]).all()) else None


def summary(name: str, values: Tensor) -> dict[str, float]:
    """Return mean, median, spread and standard error over the finite samples."""
    finite = values[torch.isfinite(values)]
    if not len(finite):
        return {}
    spread = float(finite.std()) if len(finite) > 1 else math.nan
    metrics = {name: float(finite.mean()), f"{name}_median": float(finite.median()), f"{name}_spread": spread}
    return {**metrics, f"{name}_error": spread / math.sqrt(len(finite))}


def inputs_of(view: View, images: int | str) -> tuple[Tensor, bool] | None:
    """Return the samples to measure on, and whether they are from the last training batch; None if there are none."""
    if view.data is not None:
        total = samples.size(view.data)
        if not total:
            return None
        wanted = total if images == "all" else min(int(images), total)
        x, _ = samples.read(view.data, samples.spread_indices(total, wanted, (view.round or 0) * wanted))
        if not isinstance(x, Tensor):
            names = ", ".join(x) if isinstance(x, Mapping) else f"{len(x)} tensors"
            raise UnsuitedError(f"Gradient scale is not measured: the model takes several inputs ({names}).")
        device = next((p.device for p in view.parameters), x.device)
        return x.to(device), False
    if view.last_input is None:
        return None
    x = view.last_input.detach()
    return (x if images == "all" else x[: int(images)]), True


def seed_of(view: View) -> int:
    """Return a seed that is the same for the same round, node and step, so that reruns agree."""
    text = f"{view.round}/{view.node}/{view.step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def _norms(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values.detach().flatten(1).double(), dim=1)
    return norms


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return `above / below`; 0 over anything is 0, so that a dead network differs from a broken one."""
    return torch.where(above == 0, torch.zeros_like(above), above / below)
