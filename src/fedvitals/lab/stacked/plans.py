# SPDX-License-Identifier: Apache-2.0
"""Plans to compute many clients' networks at once, each client with its own weights: same numbers, different speeds.

| plan | how | for |
| --- | --- | --- |
| mapped | `torch.func.vmap` of the module | whatever vmap supports; any device |
| dense | batched products, differentiated by hand (`dense.py`) | chains of dense layers; any device |
| grouped | clients as the groups of a convolution | networks for images, on CUDA |
| unfolded | convolutions as batched products with the patches of the images | small CNNs without pooling, on CUDA |
| blocks | convolution, pooling and activation as one kernel (`kernels/cuda/stacked_conv.py`) | small CNNs, on CUDA |

On CUDA the fastest is chosen by measuring (`cuda_round.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedvitals.lab.losses import CrossEntropy, Loss
from fedvitals.lab.models.blocks import Residual
from fedvitals.lab.stacked.dense import DensePlan

Weights = Mapping[str, Tensor]
"""Tensors by name, each with a leading axis of clients."""

CROSS_ENTROPY = CrossEntropy()
PRECISIONS = ("float32", "tf32", "bfloat16")
LARGEST_PATCHES = 1 << 30  # numbers of the plan `unfolded`: 4 GB, and as many for their gradient


class StackPlan(Protocol):
    """A way to compute the networks of a stack of clients."""

    @property
    def name(self) -> str: ...

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the logits, [clients, n, classes], of samples [clients, n, ...]; differentiable by autograd."""
        ...

    def gradients(self, weights: Weights, into: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Write the gradients `into` existing tensors, and return each client's mean loss, and the logits."""
        ...


class MappedPlan:
    """The plan that maps the module over clients with `torch.func.vmap`."""

    name = "mapped"

    def __init__(self, module: nn.Module, precision: str = "float32", loss: Loss = CROSS_ENTROPY) -> None:
        def apply(parameters: dict[str, Tensor], x: Tensor) -> Any:
            return functional_call(module, parameters, (x,))

        def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            outputs = apply(parameters, x).float()
            return loss(outputs, y), outputs

        self._apply: Callable[..., Any] = vmap(apply)
        self._differentiate: Callable[..., Any] = vmap(grad_and_value(loss_of, has_aux=True))
        self._half = precision == "bfloat16"

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        with autocast(self._half, x):
            return self._apply(dict(weights), x)  # type: ignore[no-any-return]

    def gradients(self, weights: Weights, into: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self._half, x):
            gradients, (losses, outputs) = self._differentiate(dict(weights), x, y)
        for name, gradient in gradients.items():
            into[name].copy_(gradient)
        return losses, outputs


class AutogradPlan:
    """Base class of plans whose forward pass is differentiated by autograd."""

    name: str
    loss: Loss = CROSS_ENTROPY

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gradients(self, weights: Weights, into: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with torch.enable_grad():
            outputs = self.outputs(leaves, x).float()
            if self.loss == CROSS_ENTROPY:  # in one call instead of one per client
                losses = self.loss.each(outputs.flatten(0, 1), y.flatten()).view(y.shape).mean(1)
            else:
                losses = torch.stack([self.loss(*own) for own in zip(outputs, y, strict=True)])
            gradients = torch.autograd.grad(losses.sum(), [*leaves.values()])
        torch._foreach_copy_([*into.values()], list(gradients))
        return losses.detach(), outputs.detach()


def dense_layer(weights: Weights, name: str, h: Tensor) -> Tensor:
    """Apply a dense layer per client: [clients, n, in] → [clients, n, out]."""
    bias = weights.get(f"{name}.bias")
    product = weights[f"{name}.weight"].mT
    return torch.bmm(h, product) if bias is None else torch.baddbmm(bias[:, None], h, product)


class GroupedPlan(AutogradPlan):
    """Images as [n, clients × channels, height, width]: a layer that works per channel works per client."""

    name = "grouped"

    def __init__(self, module: nn.Sequential, precision: str) -> None:
        self._module, self._half = module, precision == "bfloat16"

    @classmethod
    def of(cls, module: nn.Module, precision: str) -> GroupedPlan | None:
        if not isinstance(module, nn.Sequential) or not any(isinstance(m, nn.Conv2d) for m in module.modules()):
            return None
        return cls(module, precision) if all(_is_grouped(layer) for layer in module.children()) else None

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        clients, samples = x.shape[:2]
        with autocast(self._half, x):
            h = x.transpose(0, 1).flatten(1, 2)
            for name, layer in self._module.named_children():
                if isinstance(layer, nn.Flatten):  # from here on [clients, n, features]
                    h = h.reshape(samples, clients, -1).transpose(0, 1)
                elif isinstance(layer, nn.Linear):
                    h = dense_layer(weights, name, h)
                else:
                    h = _grouped(layer, name, weights, h, clients)
        return h


class UnfoldedPlan(GroupedPlan):
    """A convolution as a product of each client's kernel with all patches of its images, written out.

    cuDNN differentiates grouped convolutions slowly; batched products are fast. Where the patches would take more than
    LARGEST_PATCHES numbers, a network is computed as by the plan `grouped`.
    """

    name = "unfolded"

    @classmethod
    def of(cls, module: nn.Module, precision: str) -> UnfoldedPlan | None:
        """Return the plan for a module whose layers are all direct, and convolutions without groups or dilation."""
        plan = super().of(module, precision)
        layers = [*module.children()]
        convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
        plain = all(c.groups == 1 and c.dilation == (1, 1) and not isinstance(c.padding, str) for c in convolutions)
        direct = all(isinstance(layer, (*_PER_CHANNEL, nn.Conv2d, nn.Flatten, nn.Linear)) for layer in layers)
        return plan if plain and direct and isinstance(plan, UnfoldedPlan) else None

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        if self._patch_numbers(x) > LARGEST_PATCHES:
            return super().outputs(weights, x)
        with autocast(self._half, x):
            h = x.flatten(0, 1)  # [clients × n, channels, height, width]
            for name, layer in self._module.named_children():
                if isinstance(layer, nn.Flatten):  # from here on [clients, n, features]
                    h = h.reshape(*x.shape[:2], -1)
                elif isinstance(layer, nn.Linear):
                    h = dense_layer(weights, name, h)
                elif isinstance(layer, nn.Conv2d):
                    h = _product_with_patches(layer, name, weights, h, len(x))
                else:
                    h = layer(h)
        return h

    def _patch_numbers(self, x: Tensor) -> int:
        """Return an upper bound of the numbers in the patches of the largest convolution."""
        pixels = x.shape[-1] * x.shape[-2]
        kernels = (
            m.in_channels * m.kernel_size[0] * m.kernel_size[1] for m in self._module if isinstance(m, nn.Conv2d)
        )
        return x.shape[0] * x.shape[1] * pixels * max(kernels)


def _product_with_patches(layer: nn.Conv2d, name: str, weights: Weights, h: Tensor, clients: int) -> Tensor:
    bias = weights.get(f"{name}.bias")
    above, beside = int(layer.padding[0]), int(layer.padding[1])
    h = F.pad(h, (beside, beside, above, above)) if above or beside else h
    height, width = ((h.shape[2 + i] - layer.kernel_size[i]) // layer.stride[i] + 1 for i in (0, 1))
    patches: Tensor = _Patches.apply(h, layer.kernel_size, layer.stride, (height, width))  # type: ignore[no-untyped-call]
    found = weights[f"{name}.weight"].flatten(2)[:, None] @ patches.unflatten(0, (clients, -1))
    found = found if bias is None else found + bias[:, None, :, None]
    return found.view(len(h), -1, height, width)


class _Patches(torch.autograd.Function):
    """The patches of images [n, channels, height, width] as [n, channels × kernel, places], like `F.unfold`, which on
    CUDA takes the images one by one.
    """

    @staticmethod
    def forward(context: Any, h: Tensor, kernel: tuple[int, int], stride: tuple[int, int], size: Any) -> Tensor:
        context.settings = (h.shape[2:], kernel, 1, 0, stride)
        rows, columns = (
            [slice(i, i + step * (count - 1) + 1, step) for i in range(side)]
            for side, step, count in zip(kernel, stride, size, strict=True)
        )
        patches = torch.stack([h[:, :, row, column] for row in rows for column in columns], 2)
        return patches.flatten(3).flatten(1, 2)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return F.fold(gradients[0], *context.settings), None, None, None


_PER_CHANNEL = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.GELU, nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def _is_grouped(layer: nn.Module) -> bool:
    if isinstance(layer, Residual):
        return all(_is_grouped(part) for part in layer.children())
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros"
    return isinstance(layer, (*_PER_CHANNEL, nn.GroupNorm, nn.Flatten, nn.Linear))


def _grouped(layer: nn.Module, name: str, weights: Weights, h: Tensor, clients: int) -> Tensor:
    if isinstance(layer, Residual):
        inner = _grouped(layer.conv1, f"{name}.conv1", weights, h, clients)
        inner = F.relu(_grouped(layer.norm1, f"{name}.norm1", weights, inner, clients))
        inner = _grouped(layer.conv2, f"{name}.conv2", weights, inner, clients)
        inner = _grouped(layer.norm2, f"{name}.norm2", weights, inner, clients)
        return F.relu(inner + _grouped(layer.skip, f"{name}.skip", weights, h, clients))
    if isinstance(layer, nn.Conv2d):
        bias = weights.get(f"{name}.bias")
        weight = weights[f"{name}.weight"].flatten(0, 1)
        groups = clients * layer.groups
        bias = None if bias is None else bias.flatten()
        return F.conv2d(h, weight, bias, layer.stride, layer.padding, layer.dilation, groups)
    if isinstance(layer, nn.GroupNorm):
        own = [weights[f"{name}.{what}"].flatten() if layer.affine else None for what in ("weight", "bias")]
        return F.group_norm(h, clients * layer.num_groups, own[0], own[1], layer.eps)
    return layer(h)  # type: ignore[no-any-return]


def autocast(half: bool, x: Tensor) -> Any:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=half)


def available_plans(
    module: nn.Module, device: torch.device, precision: str = "float32", loss: Loss = CROSS_ENTROPY
) -> Sequence[StackPlan]:
    """Return the plans that can compute this module with this loss, the simplest last."""
    if not all(p.requires_grad for p in module.parameters()):  # the others do not know the module's own weights
        return [MappedPlan(module, precision, loss)]
    candidates: list[StackPlan | None] = []
    half = precision == "bfloat16"
    if device.type == "cuda":
        blocks = _blocks(module, precision)
        unfolded = None if blocks is not None else UnfoldedPlan.of(module, precision)
        for plan in (blocks, unfolded, GroupedPlan.of(module, precision)):
            if plan is not None:
                plan.loss = loss
            candidates.append(plan)
    if not half and loss == CROSS_ENTROPY:  # its products are written into given memory, which autocast does not follow
        candidates.append(DensePlan.of(module))
    return [plan for plan in (*candidates, MappedPlan(module, precision, loss)) if plan is not None]


def _blocks(module: nn.Module, precision: str) -> AutogradPlan | None:
    try:
        from fedvitals.lab.stacked.conv_blocks import ConvBlocks  # noqa: PLC0415 - needs Triton, which only CUDA builds bring
    except ImportError:
        return None
    return ConvBlocks.of(module, precision)
