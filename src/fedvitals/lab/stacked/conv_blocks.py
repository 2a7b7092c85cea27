# SPDX-License-Identifier: Apache-2.0
"""Small CNNs of many clients, with convolutions by our own Triton kernel; importable only with Triton, so on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedvitals.kernels.cuda.stacked_conv import LEAKY, LINEAR, TANH, ConvBlock, conv_block
from fedvitals.lab.stacked.plans import AutogradPlan, Weights, dense_layer

# Three products of halves of the numbers give a product as exact as float32's own, several times as fast.
_PRODUCTS = {"float32": "tf32x3", "tf32": "tf32", "bfloat16": "bf16"}


@dataclass
class ConvBlocks(AutogradPlan):
    """A plan for CNNs: `blocks` by the name of their convolution, then dense layers by name, each with its
    activation.
    """

    blocks: tuple[tuple[str, ConvBlock], ...]
    dense: tuple[tuple[str, nn.Module | None], ...]
    precision: str
    name: str = "blocks"

    @classmethod
    def of(cls, module: nn.Module, precision: str) -> ConvBlocks | None:
        """Return the plan for a module, or None if the module has another structure."""
        if not isinstance(module, nn.Sequential):
            return None
        layers = [*module.named_children()]
        blocks: list[tuple[str, ConvBlock]] = []
        while layers and isinstance(layers[0][1], nn.Conv2d):
            pooled = any(isinstance(layer, nn.MaxPool2d) for _, layer in layers[1:3])
            own, following = layers[: 2 + pooled], layers[2 + pooled :]
            block = _block([layer for _, layer in own])
            if block is None:
                return None
            blocks.append((own[0][0], block))
            layers = following
        if not blocks or not layers or not isinstance(layers[0][1], nn.Flatten):
            return None
        dense: list[tuple[str, nn.Module | None]] = []
        for name, layer in layers[1:]:
            if isinstance(layer, nn.Linear):
                dense.append((name, None))
            elif isinstance(layer, nn.ReLU | nn.LeakyReLU | nn.Tanh | nn.GELU) and dense and dense[-1][1] is None:
                dense[-1] = (dense[-1][0], layer)
            else:
                return None
        return cls(tuple(blocks), tuple(dense), precision) if dense else None

    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        h = x.permute(0, 1, 3, 4, 2).contiguous()
        for name, block in self.blocks:
            h = conv_block(h, weights[f"{name}.weight"], weights[f"{name}.bias"], block, _PRODUCTS[self.precision])
        h = h.permute(0, 1, 4, 2, 3).flatten(2)
        for name, activation in self.dense:
            h = dense_layer(weights, name, h)
            h = h if activation is None else activation(h)
        return h


def _block(layers: list[nn.Module]) -> ConvBlock | None:
    """Return the fused block for a convolution with an activation, and pooling before or after it, if any; or None.

    Both orders give the same result, since the activation is non-decreasing.
    """
    if len(layers) < 2:
        return None
    convolution, *pool, activation = layers[0], *sorted(layers[1:], key=lambda m: not isinstance(m, nn.MaxPool2d))
    assert isinstance(convolution, nn.Conv2d)  # noqa: S101 - asked by the caller
    side, padding = convolution.kernel_size[0], convolution.padding
    plain = (
        convolution.bias is not None
        and convolution.kernel_size == (side, side)
        and convolution.stride == convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.padding_mode == "zeros"
        and isinstance(padding, tuple)
        and len(set(padding)) == 1
        and max(convolution.in_channels, convolution.out_channels) <= 128  # one tile has all of them
    )
    known = {nn.Tanh: (TANH, 0.0), nn.ReLU: (LEAKY, 0.0), nn.Identity: (LINEAR, 0.0)}.get(type(activation))
    if isinstance(activation, nn.LeakyReLU) and activation.negative_slope >= 0:
        known = (LEAKY, activation.negative_slope)
    if not plain or known is None or not all(_halves(layer) for layer in pool):
        return None
    return ConvBlock(side, int(padding[0]), *known, 2 if pool else 1)


def _halves(layer: nn.Module) -> bool:
    """Return whether a layer is a max-pooling of 2 × 2."""
    return (
        isinstance(layer, nn.MaxPool2d)
        and layer.kernel_size in (2, (2, 2))
        and layer.stride in (2, (2, 2))
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
    )
