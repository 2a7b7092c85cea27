# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks for images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import nn

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, require
from fedvitals.lab.models.blocks import Residual
from fedvitals.lab.models.description import Shape, image_shape, seeded_globally

POOLS: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "max": (lambda: nn.MaxPool2d(2),),
    "average": (lambda: nn.AvgPool2d(2),),
    "none": (),
}


NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "layer": lambda channels: nn.GroupNorm(1, channels),
}


class PaperCNN(Description, frozen=True):
    """The CNN of the gradient-scale paper in its three scenarios: two convolutions and one dense layer.

    Channels, kernel, pooling and the slope are our choice, since the paper does not say. The kernels lie inside the
    image (no padding) as long as something remains of it, as with 32 × 32 and 28 × 28 pixels; a smaller image, such as
    the digits' 8 × 8, is padded with zeros so that convolutions keep its size. What else belongs to a scenario, the
    clipping, is a setting of the local training.

    Args:
        scenario: «baseline», «exploding» or «vanishing».
        channels: The channels of the two convolutions.
        kernel: The width of the convolutions.
        slope: The negative slope of the activations.
        dense: How the dense layer is initialised: as in Keras («glorot»), or as in PyTorch.
        pool_first: Whether to pool before the activation, which gives the same numbers for less work.
        pool: «max», «average» or «none», of 2 × 2 pixels after each convolution.
    """

    scenario: Literal["baseline", "exploding", "vanishing"] = "baseline"
    channels: tuple[int, int] = (32, 64)
    kernel: int = 3
    slope: float = 0.3
    dense: Literal["glorot", "torch"] = "glorot"  # how the dense layer begins: as in Keras, or as PyTorch has it
    pool_first: bool = True  # of the maximum: the same numbers, and less work
    pool: Literal["max", "average", "none"] = "max"  # of 2 × 2 pixels, after each convolution

    stackable = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "channels", tuple(self.channels))
        known = ("baseline", "exploding", "vanishing")
        require(self.scenario in known, "scenario of paper_cnn", self.scenario, f"one of {', '.join(known)}")
        _require_channels("paper_cnn", self.channels)
        odd = self.kernel >= 1 and self.kernel % 2 == 1
        require(odd, "kernel of paper_cnn", self.kernel, "odd, such as 3 or 5")
        require(0 <= self.slope <= 1, "slope of paper_cnn", self.slope, "from 0 to 1")
        require(self.pool in POOLS, "pool of paper_cnn", self.pool, f"one of {', '.join(POOLS)}")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        image = image_shape("paper_cnn", shape, vocabulary)
        step = 1 if self.pool == "none" else 2
        inside = [((side - self.kernel + 1) // step - self.kernel + 1) // step for side in image[1:]]
        padding = 0 if min(inside) >= 1 else self.kernel // 2
        # Only a maximum may change places with the activation; the textbook has the activation first.
        pool_first = self.pool_first and self.pool == "max"
        with seeded_globally(generator):
            model = _convolutional(
                image, classes, self.channels, self.kernel, padding, self._activation, pool_first, self.pool
            )
            uniform = {"baseline": None, "exploding": (8.0, 10.0), "vanishing": (4.0, 7.0)}[self.scenario]
            for layer in model.children():
                if isinstance(layer, nn.Conv2d) or (isinstance(layer, nn.Linear) and self.dense == "glorot"):
                    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
                    if isinstance(layer, nn.Linear) or uniform is None:
                        nn.init.xavier_uniform_(layer.weight)
                    else:
                        nn.init.uniform_(layer.weight, *uniform)
        return model

    def _activation(self) -> nn.Module:
        if self.scenario == "baseline":
            return nn.LeakyReLU(self.slope)
        return nn.ReLU() if self.scenario == "exploding" else nn.Tanh()


class CNN(Description, frozen=True):
    """A small CNN for small images: two padded convolutions and one dense layer; 21,386 weights on the digits.

    Args:
        channels: The channels of the two convolutions.
        norm: What follows each convolution: «none», a «batch» norm, or a «layer» norm over all channels and pixels.
    """

    channels: tuple[int, int] = (32, 64)
    norm: Literal["none", "batch", "layer"] = "none"

    later = ("norm",)

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "channels", tuple(self.channels))
        _require_channels("cnn", self.channels)

    @property
    def stackable(self) -> bool:
        return self.norm != "batch"

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        with seeded_globally(generator):
            image = image_shape("cnn", shape, vocabulary)
            return _convolutional(image, classes, self.channels, 3, 1, nn.ReLU, norm=NORMS[self.norm])


class Resnet18(Description, frozen=True):
    """ResNet-18 for small images, with group norm or batch norm: 11.2 million weights.

    Args:
        norm: «group» or «batch».
    """

    norm: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        require(self.norm in ("group", "batch"), "norm of resnet18", self.norm, "group or batch")

    @property
    def stackable(self) -> bool:
        return self.norm == "group"  # a batch norm's running statistics change as a side effect

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        channels = image_shape("resnet18", shape, vocabulary)[0]
        norm: Callable[[int], nn.Module] = (
            nn.BatchNorm2d if self.norm == "batch" else lambda width: nn.GroupNorm(8, width)
        )
        with seeded_globally(generator):
            layers: dict[str, nn.Module] = {"conv": nn.Conv2d(channels, 64, 3, 1, 1, bias=False)}
            layers |= {"norm": norm(64), "relu": nn.ReLU()}
            width = 64
            for stage, outside in enumerate((64, 128, 256, 512), 1):
                layers[f"block{stage}a"] = Residual(width, outside, 1 if stage == 1 else 2, norm)
                layers[f"block{stage}b"] = Residual(outside, outside, 1, norm)
                width = outside
            layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(512, classes)}
            return nn.Sequential(OrderedDict(layers))


def _require_channels(kind: str, channels: tuple[int, ...]) -> None:
    right = len(channels) == 2 and all(width >= 1 for width in channels)
    require(right, f"channels of {kind}", channels, "two numbers, at least 1 each")


def _convolutional(
    image: tuple[int, int, int],
    classes: int,
    channels: tuple[int, int],
    kernel: int,
    padding: int,
    activation: Callable[[], nn.Module],
    pool_first: bool = True,
    pool: str = "max",
    norm: Callable[[int], nn.Module] | None = None,
) -> nn.Sequential:
    """Return two blocks of convolution, norm, pooling and activation, then a dense layer.

    Pooling before the activation gives the same numbers as the textbook's order, since max(f(a), f(b)) is f(max(a, b))
    for every non-decreasing f, and leaves the activation a quarter of the work.
    """
    layers: dict[str, nn.Module] = {}
    in_channels, (height, width) = image[0], image[1:]
    for number, out_channels in enumerate(channels, 1):
        after = [*((f"pool{number}", make_pool()) for make_pool in POOLS[pool]), (f"activation{number}", activation())]
        layers[f"conv{number}"] = nn.Conv2d(in_channels, out_channels, kernel, padding=padding)
        if norm is not None:
            layers[f"norm{number}"] = norm(out_channels)
        layers |= dict(after if pool_first else reversed(after))
        in_channels = out_channels
        step = 2 if POOLS[pool] else 1
        height, width = ((side + 2 * padding - kernel + 1) // step for side in (height, width))
    if min(height, width) < 1:
        raise ConfigError(f"An image of {image[1]} × {image[2]} pixels is too small for two convolutions with pooling.")
    layers |= {"flat": nn.Flatten(), "head": nn.Linear(in_channels * height * width, classes)}
    return nn.Sequential(OrderedDict(layers))
