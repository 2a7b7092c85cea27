# SPDX-License-Identifier: Apache-2.0
"""A model's outputs as a function of its inputs, for backward passes that leave the training untouched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedvitals.errors import UnsuitedError


@dataclass(frozen=True, slots=True)
class Differentiable:
    """One forward pass: `outputs` [samples, K] of `inputs` [samples, ...], with its graph."""

    inputs: Tensor
    outputs: Tensor

    def pull(self, direction: Tensor) -> Tensor:
        """Return ‖vᵀJ‖² of each sample, where v is that sample's row of `direction`; in float64.

        It uses `autograd.grad` for the inputs alone: no parameter's `.grad` is touched, and no weight gradient
        computed.
        """
        (gradient,) = torch.autograd.grad(self.outputs, self.inputs, direction, retain_graph=True)
        return gradient.detach().flatten(1).double().square().sum(1)


@contextmanager
def differentiable(model: nn.Module, x: Tensor, *, twice: bool = False) -> Iterator[Differentiable]:
    """Apply the model to x. Integers, such as tokens, are differentiated from the first embedding's output.

    `twice`: the gradients will be differentiated again, which torch's fast attention does not support.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH) if twice else nullcontext():
        if x.is_floating_point():
            inputs = x.detach().clone().requires_grad_()
            outputs = model(inputs)
        else:
            inputs, outputs = _from_embedding(model, x)
        yield Differentiable(inputs, require_class_outputs(outputs, len(x)))


def require_class_outputs(outputs: Any, samples: int) -> Tensor:
    """Return the outputs, or the logits among them, if they are one row of numbers per sample.

    Otherwise raise UnsuitedError, which says what is supported.
    """
    outputs = logits_of(outputs)
    if isinstance(outputs, Tensor) and outputs.shape == (samples, *outputs.shape[1:]) and outputs.dim() == 2:
        return outputs
    got = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise UnsuitedError(
        "Gradient scale is not measured: it is defined for one row of outputs per sample, [samples, outputs], and this "
        f"model returns {got}."
    )


def logits_of(outputs: Any) -> Any:
    """Return the `logits` of outputs that have any, as those of Hugging Face models do; else the outputs."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


def _from_embedding(model: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """Replace the first embedding's output by a new leaf, and return it with the outputs."""
    table = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if table is None:
        raise UnsuitedError(
            f"Gradient scale is not measured: it cannot differentiate by {x.dtype} inputs, and the model has no "
            "nn.Embedding that would turn them into numbers."
        )
    leaves: list[Tensor] = []

    def replace(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().clone().requires_grad_())
        return leaves[-1]

    handle = table.register_forward_hook(replace)
    try:
        outputs = model(x)
    finally:
        handle.remove()
    if not leaves:
        raise UnsuitedError(
            "Gradient scale is not measured: it follows integer inputs from the first nn.Embedding on, which did not "
            "run."
        )
    return leaves[0], outputs
