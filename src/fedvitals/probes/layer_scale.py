# SPDX-License-Identifier: Apache-2.0
"""Gradient scale between any two layers of a network: GSC(k, l), equation 1 of Bogacka et al. (JAMRIS 3/2024).

Per sample, with J the Jacobian of the activations f_k of the upper layer by the activations f_l of the lower one, and n
the number of the latter:

    GSC(k, l) = (1/√n) · ‖J‖_F · ‖f_k‖ / ‖f_l‖

For the logits and the input this is `scale.gsc`. As a probe of a monitor, `layer_pair_scale` records it for two layers
that a user asks for, so that runs can be compared by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.catalog import LAYER_PAIRS
from fedvitals.errors import ConfigError, unknown
from fedvitals.probes.allowance import BACKWARD, CALL, FORWARD
from fedvitals.probes.scale import IMAGES, inputs_of, ratio, seed_of
from fedvitals.probes.view import View, evaluation_mode

INPUT, OUTPUT = "input", "output"
EXACT_UP_TO = 64  # activations of the upper layer: one backward pass each; above, random projections
PROJECTIONS = 32


@dataclass(frozen=True, slots=True)
class layer_pair_scale:  # noqa: N801 - reads as its sibling probes, which are functions
    """A probe: the gradient scale between two layers, GSC(upper, lower), as the metric «user.gsc.UPPER/LOWER».

    Args:
        upper: The name of the module, as in `model.named_modules()`, whose output is the upper activation; or «output».
        lower: The module of the lower activation, in the same way; or «input».
        images: The number of the client's samples to measure on.
    """

    upper: str = OUTPUT
    lower: str = INPUT
    images: int = IMAGES

    @property
    def __name__(self) -> str:
        return f"scale of {self.upper}/{self.lower}"

    def work(self, samples: int) -> float:
        """Return the cost of a measurement in passes of one sample: one forward, and one backward for each projection.

        Args:
            samples: The number of samples that the client has.
        """
        return float(min(samples, self.images) * (FORWARD + BACKWARD * PROJECTIONS) + CALL)

    def __call__(self, view: View) -> Mapping[str, Any]:
        inputs = inputs_of(view, self.images)
        if inputs is None:
            return {}
        scales = layer_scale(view.model, inputs[0], self.upper, self.lower, seed=seed_of(view))
        finite = scales[torch.isfinite(scales)]
        return {f"{LAYER_PAIRS}{self.upper}/{self.lower}": float(finite.mean())} if len(finite) else {}


def layer_scale(
    model: nn.Module,
    x: Tensor,
    upper: str = OUTPUT,
    lower: str = INPUT,
    *,
    projections: int = PROJECTIONS,
    seed: int = 0,
) -> Tensor:
    """Return the gradient scale between two layers, GSC(upper, lower), for each sample.

    The model and its gradients are left unchanged.

    ‖J‖_F is exact for up to 64 activations of the upper layer; above, it is estimated by random projections, which are
    unbiased for its square.

    Args:
        model: The network.
        x: A batch of samples.
        upper: The name of the module, as in `model.named_modules()`, whose output is the upper activation; or «output».
        lower: The module of the lower activation, in the same way; or «input».
        projections: The number of random projections.
        seed: The seed of these projections.

    Returns:
        A number for each sample, in float64; NaN where the upper layer does not depend on the lower one.
    """
    with evaluation_mode(model), torch.enable_grad(), _activations(model, {upper, lower}) as seen:
        inputs = x.detach().clone().requires_grad_()
        seen[INPUT], seen[OUTPUT] = inputs, model(inputs)
        top, bottom = seen[upper], seen[lower]
        flat = top.flatten(1)
        squares = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        rows = _directions(flat, projections, seed)
        for direction in rows:
            (gradient,) = torch.autograd.grad(flat, bottom, direction, retain_graph=True, allow_unused=True)
            if gradient is None:
                return torch.full((len(x),), torch.nan, dtype=torch.float64, device=x.device)
            squares += gradient.detach().flatten(1).double().square().sum(1)
    if flat.shape[1] > EXACT_UP_TO:
        squares /= projections
    jacobian = (squares / bottom[0].numel()).sqrt()
    norms = [torch.linalg.vector_norm(part.detach().flatten(1).double(), dim=1) for part in (top, bottom)]
    return ratio(jacobian * norms[0], norms[1])


def _directions(flat: Tensor, projections: int, seed: int) -> Iterator[Tensor]:
    """Yield the unit vectors of the upper activations, or as many random signs."""
    if flat.shape[1] <= EXACT_UP_TO:
        for place in range(flat.shape[1]):
            yield torch.nn.functional.one_hot(torch.tensor(place), flat.shape[1]).to(flat).expand_as(flat)
        return
    stream = torch.Generator().manual_seed(seed)
    for _ in range(projections):
        yield (torch.randint(0, 2, flat.shape, generator=stream, dtype=torch.int8) * 2 - 1).to(flat)


@contextmanager
def _activations(model: nn.Module, names: set[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the outputs of these modules in the next forward pass."""
    modules = dict(model.named_modules())
    seen: dict[str, Tensor] = {}
    handles = []
    for name in sorted(names - {INPUT, OUTPUT}):
        if name not in modules or not name:
            raise ConfigError(unknown("layer", name, [INPUT, *(known for known in modules if known), OUTPUT]))

        def keep(_module: nn.Module, _inputs: object, output: Tensor, name: str = name) -> None:
            seen[name] = output

        handles.append(modules[name].register_forward_hook(keep))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
