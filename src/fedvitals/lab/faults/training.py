# SPDX-License-Identifier: Apache-2.0
"""Faults of local training: its settings, gradients, state and machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of, require
from fedvitals.lab.faults.fault import (
    AboveOne,
    Count,
    Family,
    Fault,
    Index,
    Layer,
    Positive,
    RunFault,
    Share,
    layer_name,
    missing_layer_message,
    weight_names,
)

if TYPE_CHECKING:
    from fedvitals.lab.local import Local

MEGABYTE = 1 << 20


class WrongLearningRate(Fault, frozen=True):
    """A client that is configured with a different learning rate.

    Args:
        factor: Its learning rate, as a multiple of the others'.
    """

    factor: Positive = 10.0
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor != 1, "factor of wrong_learning_rate", self.factor, "another number than 1")

    def local(self, settings: Local) -> Local:
        rate = settings.optimizer.learning_rate * self.factor
        optimizer = msgspec.structs.replace(settings.optimizer, learning_rate=rate)
        return msgspec.structs.replace(settings, optimizer=optimizer)


class FrozenLayer(Fault, frozen=True):
    """A forgotten `requires_grad = False`: one layer gets no gradient and stays unchanged.

    Args:
        layer: The layer, by its name, or by its place among the weight tensors.
    """

    layer: Layer = 0

    def gradient(self, gradients: Mapping[str, Tensor], step: int, stream: torch.Generator) -> None:  # noqa: ARG002
        name = layer_name([*gradients], self.layer)
        if name is not None:
            gradients[name].zero_()


class NotFinite(Fault, frozen=True):
    """A division by zero or an overflow: one number of a layer's gradient is NaN or infinite, at one step.

    Args:
        value: «nan», «inf» or «-inf».
        layer: The layer, by its name, or by its place among the weight tensors.
        at_step: The local step at which it happens.
    """

    value: Literal["nan", "inf", "-inf"] = "nan"
    layer: Layer = 0
    at_step: Index = 0
    family: ClassVar[Family] = "aggregation"
    issue: ClassVar[str] = "nan_gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.value in ("nan", "inf", "-inf"), "value of not_finite", self.value, '"nan", "inf" or "-inf"')

    def gradient(self, gradients: Mapping[str, Tensor], step: int, stream: torch.Generator) -> None:  # noqa: ARG002
        name = layer_name([*gradients], self.layer)
        if step == self.at_step and name is not None:
            gradient = gradients[name]
            gradient[(0,) * gradient.dim()] = float(self.value)


class Float16Underflow(Fault, frozen=True):
    """Mixed precision without loss scaling: gradients go through float16, and the small ones become 0.

    Below 2⁻¹⁴ ≈ 6.1e-5, float16's smallest normal number, they are flushed; above 65,504 they become infinite.
    """

    issue: ClassVar[str] = "vanishing_gradient"

    def gradient(self, gradients: Mapping[str, Tensor], step: int, stream: torch.Generator) -> None:  # noqa: ARG002
        for gradient in gradients.values():
            half = gradient.half()
            gradient.copy_(half.masked_fill(half.abs() < torch.finfo(torch.float16).tiny, 0.0))


class BrokenBatchNorm(Fault, frozen=True):
    """Wrong batch norm statistics: the running mean is shifted and the running variance too large, by `factor`.

    Training in batches does not use them, so only an evaluation of the averaged model reveals the fault.

    Args:
        factor: How far the running mean is shifted, and how many times too large the running variance is.
    """

    factor: AboveOne = 1000.0
    issue: ClassVar[str] = "batch_norm_statistics"
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def check_tensors(self, names: tuple[str, ...]) -> None:
        if not any(name.endswith("running_var") for name in names):
            raise ConfigError(
                "The model has no batch norm, so broken_batch_norm changes nothing. Take a model with running "
                'statistics, such as ResNet-18 with norm = "batch".'
            )

    def state(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:  # noqa: ARG002
        for name, tensor in tensors.items():
            if name.endswith("running_mean"):
                tensor.add_(self.factor)
            elif name.endswith("running_var"):
                tensor.mul_(self.factor)


# -- the machine ------------------------------------------------------------------------------------------------------


class Crash(Fault, frozen=True):
    """A bug in a client's own code: an exception during local training.

    Args:
        at_step: The local step at which the exception is raised.
        message: Its text.
    """

    at_step: Index = 0
    message: str = "an error on purpose, made by the lab"

    def step(self, step: int) -> None:
        if step == self.at_step:
            raise RuntimeError(self.message)


class MemoryHog(Fault, frozen=True):
    """A client on which memory is allocated at one step, as by a leak or by another program.

    Args:
        megabytes: How much memory is allocated.
        at_step: The local step at which it happens.
        fatal: Whether the allocation fails, and the client with it.
    """

    megabytes: Count = 256
    at_step: Index = 0
    fatal: bool = False
    issue: ClassVar[str] = "out_of_memory"

    def step(self, step: int) -> None:
        if step != self.at_step:
            return
        if self.fatal:
            raise MemoryError(f"{self.megabytes} MB could not be allocated.")
        torch.ones(self.megabytes * MEGABYTE, dtype=torch.uint8)  # written to, so that the system has to give it


class DiskFull(Fault, frozen=True):
    """A client that cannot write its checkpoint: no space left on its disk.

    Args:
        at_step: The local step at which writing fails.
    """

    at_step: Index = 0

    def step(self, step: int) -> None:
        if step == self.at_step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "checkpoint.pt")


# -- the first model --------------------------------------------------------------------------------------------------


def _matrices(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the weights of linear and convolutional layers; those of norms are left out."""
    return [tensors[name] for name in weight_names([*tensors]) if tensors[name].dim() >= 2]


class ExplodingInitialisation(RunFault, frozen=True):
    """A wrong gain in the initialisation: every weight matrix of the initial model is `factor` times too large.

    Args:
        factor: How many times too large every weight matrix of the initial model is.
    """

    factor: AboveOne = 10.0
    issue: ClassVar[str] = "exploding_gradient"

    def initial(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:  # noqa: ARG002
        for weight in _matrices(tensors):
            weight.mul_(self.factor)


class VanishingInitialisation(RunFault, frozen=True):
    """A wrong gain in the initialisation: every weight matrix of the initial model is too small.

    Args:
        factor: The number, below 1, that every weight matrix is multiplied by.
    """

    factor: Positive = 0.01
    issue: ClassVar[str] = "vanishing_gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor < 1, "factor of vanishing_initialisation", self.factor, "below 1")

    def initial(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:  # noqa: ARG002
        for weight in _matrices(tensors):
            weight.mul_(self.factor)


class _Units(RunFault, frozen=True):
    """Base class of faults in which units of one layer start where their activation has no slope."""

    share: Share = 0.9
    layer: Layer = 0
    strength: Positive = 100.0

    def check_tensors(self, names: tuple[str, ...]) -> None:
        name, kind = layer_name(names, self.layer), kind_of(type(self).__name__)
        if name is None:
            raise ConfigError(missing_layer_message(self.layer, names, kind))
        if _bias(name) == name or _bias(name) not in names:
            known = [weight for weight in weight_names(names) if _bias(weight) in names]
            raise ConfigError(
                f"The layer '{name}' has no bias for {kind} to act on. With one: {', '.join(known) or 'none'}."
            )

    def biases(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the layer's biases, and the indices of the affected units."""
        self.check_tensors(tuple(tensors))
        bias = tensors[_bias(layer_name([*tensors], self.layer) or "")]
        return bias, torch.randperm(len(bias), generator=stream)[: max(1, round(self.share * len(bias)))]


def _bias(weight: str) -> str:
    head, dot, last = weight.rpartition(".")
    return f"{head}{dot}{last.replace('weight', 'bias')}"


class DeadUnits(_Units, frozen=True):
    """Dead ReLUs: the biases of a share of a layer's units are far below 0.

    With LeakyReLU, such units still have a slope, and recover.

    Args:
        share: The share of the layer's units that is dead.
        layer: The layer, by its name, or by its place among the weight tensors.
        strength: How far below 0 their biases are.
    """

    def initial(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:
        bias, struck = self.biases(tensors, stream)
        bias[struck] = -self.strength


class SaturatedUnits(_Units, frozen=True):
    """Saturated sigmoid or tanh units: the biases of a share of a layer's units are far from 0, positive or
    negative.

    Args:
        share: The share of the layer's units that is saturated.
        layer: The layer, by its name, or by its place among the weight tensors.
        strength: How far from 0 their biases are.
    """

    def initial(self, tensors: Mapping[str, Tensor], stream: torch.Generator) -> None:
        bias, struck = self.biases(tensors, stream)
        signs = torch.randint(0, 2, (len(struck),), generator=stream).to(bias.dtype) * 2 - 1
        bias[struck] = signs * self.strength


FAULTS = (
    *(WrongLearningRate, FrozenLayer, NotFinite, Float16Underflow, BrokenBatchNorm, Crash, MemoryHog, DiskFull),
    *(ExplodingInitialisation, VanishingInitialisation, DeadUnits, SaturatedUnits),
)
