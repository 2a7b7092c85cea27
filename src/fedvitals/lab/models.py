# SPDX-License-Identifier: Apache-2.0
"""The models by name, how each is built for a data set, and the operations per sample."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError
from fedvitals.lab.data.datasets import Dataset
from fedvitals.lab.description import Description, require
from fedvitals.lab.model_blocks import (
    Encoder,
    ImageRows,
    MeanOverSteps,
    Patches,
    PositionEmbedding,
    Recurrent,
    Residual,
)

Shape = tuple[int, ...]
"""Of one sample: (channels, height, width), (steps, features), (features,), or (steps,) of tokens."""


class ModelDescription(Protocol):
    """The interface of a model's description."""

    @property
    def stackable(self) -> bool:
        """Whether many clients can be computed at once, with `torch.func.vmap` over their weights."""

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        """Return the module, which outputs logits; its initial weights depend on the generator only."""


POOLS: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "max": (lambda: nn.MaxPool2d(2),),
    "average": (lambda: nn.AvgPool2d(2),),
    "none": (),
}


class PaperCNN(Description, frozen=True):
    """The CNN of the gradient-scale paper in its three scenarios: two convolutions and one dense layer.

    Channels, kernel, pooling and the slope are our choice, since the paper does not say. The kernels lie inside the
    image (no padding) as long as something remains of it, as with 32 × 32 and 28 × 28 pixels; a smaller image, such as
    the digits' 8 × 8, is padded with zeros so that convolutions keep its size. What else belongs to a scenario, the
    clipping, is a setting of the local training.
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
        image = _image("paper_cnn", shape, vocabulary)
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
    """A small CNN for small images: two padded convolutions and one dense layer; 21,386 weights on the digits."""

    channels: tuple[int, int] = (32, 64)

    stackable = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "channels", tuple(self.channels))
        _require_channels("cnn", self.channels)

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        with seeded_globally(generator):
            return _convolutional(_image("cnn", shape, vocabulary), classes, self.channels, 3, 1, nn.ReLU)


class MLP(Description, frozen=True):
    """Dense layers with ReLU between them."""

    hidden: tuple[int, ...] = (64,)

    stackable = True

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "hidden", tuple(self.hidden))
        require(all(width >= 1 for width in self.hidden), "hidden widths of mlp", self.hidden, "at least 1 each")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        _no_tokens("mlp", vocabulary)
        layers: dict[str, nn.Module] = OrderedDict(flat=nn.Flatten())
        width = math.prod(shape)
        with seeded_globally(generator):
            for number, outside in enumerate(self.hidden, 1):
                layers[f"dense{number}"] = nn.Linear(width, outside)
                layers[f"relu{number}"] = nn.ReLU()
                width = outside
            return nn.Sequential(OrderedDict(layers, head=nn.Linear(width, classes)))


class Logistic(Description, frozen=True):
    """Multinomial logistic regression: one dense layer that starts at 0."""

    stackable = True

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        del generator  # nothing is drawn
        _no_tokens("logistic", vocabulary)
        head = nn.utils.skip_init(nn.Linear, math.prod(shape), classes)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(OrderedDict(flat=nn.Flatten(), head=head))


class Resnet18(Description, frozen=True):
    """ResNet-18 for small images, with group norm or batch norm: 11.2 million weights."""

    norm: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        require(self.norm in ("group", "batch"), "norm of resnet18", self.norm, "group or batch")

    @property
    def stackable(self) -> bool:
        return self.norm == "group"  # a batch norm's running statistics change as a side effect

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        channels = _image("resnet18", shape, vocabulary)[0]
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


class Transformer(Description, frozen=True):
    """A small transformer on image patches, on the steps of sequences, or on tokens; without dropout."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    patch: int = 4

    stackable = True

    def __post_init__(self) -> None:
        require(self.layers >= 1, "layers of transformer", self.layers, "at least 1")
        require(self.patch >= 1, "patch of transformer", self.patch, "at least 1 pixel")
        fits = self.heads >= 1 and self.width >= 1 and self.width % self.heads == 0
        require(fits, "width of transformer", self.width, f"a multiple of its {self.heads} heads")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        with seeded_globally(generator):
            steps, first = self._first(shape, vocabulary)
            layers: dict[str, nn.Module] = {"embedding": first, "places": PositionEmbedding(steps, self.width)}
            layers |= {f"encoder{number}": Encoder(self.width, self.heads) for number in range(1, self.layers + 1)}
            layers |= {"norm": nn.LayerNorm(self.width), "mean": MeanOverSteps()}
            return nn.Sequential(OrderedDict(layers, head=nn.Linear(self.width, classes)))

    def _first(self, shape: Shape, vocabulary: int | None) -> tuple[int, nn.Module]:
        """Return the number of steps, and the layer that maps each of them to `width` numbers."""
        if vocabulary is not None:
            return shape[0], nn.Embedding(vocabulary, self.width)
        if len(shape) == 2:
            return shape[0], nn.Linear(shape[1], self.width)
        channels, height, width = _image("transformer", shape, None)
        if height % self.patch or width % self.patch:
            raise ConfigError(f"Patches of {self.patch} pixels do not fill an image of {height} × {width}.")
        return height * width // self.patch**2, Patches(channels, self.width, self.patch)


class LSTM(Description, frozen=True):
    """A recurrent network on the steps of sequences, on tokens, or on an image's rows from the top."""

    hidden: int = 64
    layers: int = 1

    stackable = False  # torch computes it as one operation, which cannot be batched over weights

    def __post_init__(self) -> None:
        require(self.hidden >= 1, "hidden width of lstm", self.hidden, "at least 1")
        require(self.layers >= 1, "layers of lstm", self.layers, "at least 1")

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        with seeded_globally(generator):
            if vocabulary is not None:
                first: nn.Module = nn.Embedding(vocabulary, self.hidden)
                features = self.hidden
            elif len(shape) == 2:
                first, features = nn.Identity(), shape[1]
            else:
                channels, _, width = _image("lstm", shape, None)
                first, features = ImageRows(), channels * width
            recurrent = Recurrent(features, self.hidden, self.layers)
            return nn.Sequential(
                OrderedDict(embedding=first, recurrent=recurrent, head=nn.Linear(self.hidden, classes))
            )


@dataclass(frozen=True)
class Own:
    """A user's own model: a function without arguments that returns the module, with one output for each class.

    Random numbers that it draws from torch come from the experiment's seed.
    """

    factory: Callable[[], nn.Module]
    stackable: bool = False

    def __repr__(self) -> str:
        """Identify the factory by its name, which unlike its address is the same in every process."""
        return f"Own({self.factory.__module__}.{getattr(self.factory, '__qualname__', type(self.factory).__name__)})"

    def build(self, shape: Shape, classes: int, generator: torch.Generator, vocabulary: int | None = None) -> nn.Module:
        del shape, classes, vocabulary  # the factory knows
        with seeded_globally(generator):
            module: Any = self.factory()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"The model's factory gave {type(module).__name__}: it must give a torch.nn.Module.")
        return module


MODELS = (PaperCNN, CNN, MLP, Resnet18, Transformer, LSTM, Logistic)


def build(model: ModelDescription, dataset: Dataset, generator: torch.Generator) -> nn.Module:
    """Return the model for this data set, on the CPU, after testing it on two samples."""
    module = model.build(dataset.shape, dataset.classes, generator, vocabulary=dataset.vocabulary)
    training = module.training
    try:
        with torch.no_grad(), seeded_globally(torch.Generator()):
            answer = module.eval()(dataset.inputs(dataset.x[:2]))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"The model cannot take samples of {dataset.name}, which are {list(dataset.shape)}: {error}"
        ) from error
    finally:
        module.train(training)
    expected = [min(2, len(dataset.x)), dataset.classes]
    if not isinstance(answer, Tensor) or list(answer.shape) != expected:
        got = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise ConfigError(f"The model answers {got} for {expected[0]} samples: it must answer {expected}, as logits.")
    return module


def flops(module: nn.Module, sample_shape: Shape, dtype: torch.dtype = torch.float32, *, backward: bool = True) -> int:
    """Return the floating-point operations of one sample's forward and backward pass, in products and convolutions.

    A multiplication and an addition are two operations. Tokens need `dtype=torch.int64`. With `backward=False`, only
    the forward pass counts.
    """
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - imports Triton, where it is installed

    training, weights = module.training, [p for p in module.parameters() if p.requires_grad]
    onednn = torch.backends.mkldnn.enabled
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        try:
            # An LSTM is then made of products that can be counted.
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
            answer = module.eval()(torch.zeros(2, *sample_shape, dtype=dtype))  # halved below: some layers refuse one
            if backward:
                torch.autograd.grad(answer.sum(), weights, allow_unused=True)
        finally:
            torch.backends.mkldnn.enabled = onednn
            module.train(training)
    return int(counter.get_total_flops()) // 2


@contextmanager
def seeded_globally(generator: torch.Generator) -> Iterator[None]:
    """Draw torch's random numbers from the generator inside the block, and restore the global streams afterwards."""
    seed = int(torch.randint(2**62, (), generator=generator))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(list(devices), device_type="cuda"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch devices that nobody has begun to use
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def _require_channels(kind: str, channels: tuple[int, ...]) -> None:
    right = len(channels) == 2 and all(width >= 1 for width in channels)
    require(right, f"channels of {kind}", channels, "two numbers, at least 1 each")


def _image(kind: str, shape: Shape, vocabulary: int | None) -> tuple[int, int, int]:
    if len(shape) != 3 or vocabulary is not None:
        what = "tokens" if vocabulary is not None else f"of the shape {list(shape)}"
        raise ConfigError(f"The model {kind} cannot take samples that are {what}: it needs [channels, height, width].")
    return shape


def _no_tokens(kind: str, vocabulary: int | None) -> None:
    if vocabulary is not None:
        raise ConfigError(f"The model {kind} cannot take tokens. Take transformer or lstm.")


def _convolutional(
    image: tuple[int, int, int],
    classes: int,
    channels: tuple[int, int],
    kernel: int,
    padding: int,
    activation: Callable[[], nn.Module],
    pool_first: bool = True,
    pool: str = "max",
) -> nn.Sequential:
    """Return two blocks of convolution, pooling and activation, then a dense layer.

    Pooling before the activation gives the same numbers as the textbook's order, since max(f(a), f(b)) is f(max(a, b))
    for every non-decreasing f, and leaves the activation a quarter of the work.
    """
    layers: dict[str, nn.Module] = {}
    in_channels, (height, width) = image[0], image[1:]
    for number, out_channels in enumerate(channels, 1):
        after = [*((f"pool{number}", make_pool()) for make_pool in POOLS[pool]), (f"activation{number}", activation())]
        layers[f"conv{number}"] = nn.Conv2d(in_channels, out_channels, kernel, padding=padding)
        layers |= dict(after if pool_first else reversed(after))
        in_channels = out_channels
        step = 2 if POOLS[pool] else 1
        height, width = ((side + 2 * padding - kernel + 1) // step for side in (height, width))
    if min(height, width) < 1:
        raise ConfigError(f"An image of {image[1]} × {image[2]} pixels is too small for two convolutions with pooling.")
    layers |= {"flat": nn.Flatten(), "head": nn.Linear(in_channels * height * width, classes)}
    return nn.Sequential(OrderedDict(layers))
