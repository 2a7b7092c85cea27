# SPDX-License-Identifier: Apache-2.0
"""Dense networks of many clients at once, differentiated by hand: forward, loss and gradients as batched products.

Equivalent to `vmap(grad_and_value(loss))` for a chain of dense layers with activations between them, without autograd:
at this size its overhead, and that of vmap, exceeds the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Activation:
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # of the gradient and the activation's own answer, in place


def _activation(layer: nn.Module) -> _Activation | None:
    match layer:
        case nn.ReLU():
            return _Activation(torch.relu_, lambda gradient, answer: gradient.mul_(answer > 0))
        case nn.Tanh():
            return _Activation(torch.tanh_, lambda gradient, answer: gradient.mul_(1 - answer * answer))
    return None


@dataclass(frozen=True, slots=True)
class DensePlan:
    """A chain of dense layers; `layers` are (weight name, bias name, activation)."""

    layers: tuple[tuple[str, str, _Activation | None], ...]
    name: str = "dense"

    @classmethod
    def of(cls, module: nn.Module) -> DensePlan | None:
        """Return the plan for a module, or None if the module has another structure."""
        if not isinstance(module, nn.Sequential):
            return None
        layers: list[tuple[str, str, _Activation | None]] = []
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                layers.append((f"{name}.weight", f"{name}.bias", None))
            elif isinstance(layer, nn.Flatten):
                if layers:
                    return None
            elif (known := _activation(layer)) is not None and layers and layers[-1][2] is None:
                layers[-1] = (*layers[-1][:2], known)
            else:
                return None
        return cls(tuple(layers)) if layers and layers[-1][2] is None else None

    def outputs(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits, [clients, n, classes]; differentiable by autograd."""
        h = x.flatten(2)
        for weight, bias, activation in self.layers:
            h = torch.baddbmm(weights[bias][:, None], h, weights[weight].mT)
            h = h if activation is None else activation.forward(h)
        return h

    def gradients(
        self, weights: Mapping[str, Tensor], into: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the gradients `into` existing tensors, and return each client's mean loss, and the logits."""
        inputs, h = [], x.flatten(2)
        for weight, bias, activation in self.layers:
            inputs.append(h)
            h = torch.baddbmm(weights[bias][:, None], h, weights[weight].mT)
            h = h if activation is None else activation.forward(h)
        logs = torch.log_softmax(h, 2)
        labels = y[..., None]
        losses = logs.gather(2, labels)[..., 0].mean(1).neg_()
        back = logs.exp_()
        back.scatter_add_(2, labels, back.new_full((), -1.0).expand(labels.shape))
        back /= y.shape[1]
        for number in reversed(range(len(self.layers))):
            weight, bias, _ = self.layers[number]
            torch.bmm(back.mT, inputs[number], out=into[weight])
            torch.sum(back, 1, out=into[bias])
            if number:
                back = torch.bmm(back, weights[weight])
                activation = self.layers[number - 1][2]
                back = back if activation is None else activation.backward(back, inputs[number])
        return losses, h
