# SPDX-License-Identifier: Apache-2.0
"""Faults of a client's own samples. A fault draws the same random numbers for a client in every round."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of, require
from fedvitals.lab.faults.fault import Fault, Index, Positive, SampleForm, Several, Share


def draw_affected(count: int, rate: float, stream: torch.Generator) -> Tensor:
    """Return a mask of the affected samples among `count`."""
    return torch.rand(count, generator=stream) < rate


def check_labels(labels: tuple[int, ...], classes: int, kind: str) -> None:
    """Raise ConfigError if one of the labels is no class of the data set."""
    wrong = [label for label in labels if label >= classes]
    if wrong:
        raise ConfigError(f"There is no class {wrong[0]} for {kind}: the data set has the classes 0 to {classes - 1}.")


def refuse_tokens(fault: Fault, form: SampleForm) -> None:
    """Raise ConfigError if the samples consist of tokens, which cannot be added to or multiplied."""
    if form.tokens:
        raise ConfigError(f"The fault {kind_of(type(fault).__name__)} changes numbers, and the samples are tokens.")


class LabelNoise(Fault, frozen=True):
    """A client with random wrong labels: some are replaced, each by a random other class. Of targets per step, a share
    of the steps is replaced; targets that are no classes are exchanged between samples.

    Args:
        rate: The share of the labels that is replaced.
    """

    rate: Share = 0.8
    strength_field: ClassVar[str | None] = "rate"

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        if y.is_floating_point():
            rows = draw_affected(len(y), self.rate, stream).nonzero().flatten()
            wrong = y.clone()
            wrong[rows] = y[rows.roll(1)]
            return x, wrong
        struck = draw_affected(y.numel(), self.rate, stream).view(y.shape)
        away = torch.randint(1, max(classes, 2), y.shape, generator=stream)
        return x, torch.where(struck & (y >= 0), (y + away.to(y.dtype)) % classes, y)


class LabelFlip(Fault, frozen=True):
    """A client that labels samples of one class as another class.

    Args:
        source: The class that is relabelled.
        target: The label that it gets.
        rate: The share of the samples of class `source` that is relabelled.
    """

    source: Index = 0
    target: Index = 1
    rate: Share = 1.0
    strength_field: ClassVar[str | None] = "rate"

    def __post_init__(self) -> None:
        super().__post_init__()
        what = f"target of {kind_of(type(self).__name__)}"
        require(self.source != self.target, what, self.target, "another class than its source")

    def check_classes(self, classes: int) -> None:
        check_labels((self.source, self.target), classes, kind_of(type(self).__name__))

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        self.check_classes(classes)
        struck = draw_affected(len(y), self.rate, stream) & (y == self.source)
        return x, torch.where(struck, torch.full_like(y, self.target), y)


class MissingClasses(Fault, frozen=True):
    """A client that never sees some classes: its samples of them are removed.

    Args:
        missing: The classes whose samples are removed.
    """

    missing: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "missing", tuple(self.missing))
        fits = bool(self.missing) and all(isinstance(label, int) and label >= 0 for label in self.missing)
        require(fits, "missing of missing_classes", self.missing, "a list of classes, such as [0, 3]")

    def check_classes(self, classes: int) -> None:
        check_labels(self.missing, classes, "missing_classes")

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self.check_classes(classes)
        kept = ~torch.isin(y, torch.tensor(self.missing, dtype=y.dtype))
        if not kept.any():
            raise ConfigError(
                f"Without the classes {list(self.missing)} a client has no sample left: it holds only those. "
                "Let missing_classes name fewer classes, or other nodes."
            )
        return x[kept], y[kept]


class InputNoise(Fault, frozen=True):
    """A client whose inputs have noise added to them, as from a bad sensor.

    Args:
        deviation: The noise's standard deviation, as a multiple of that of the client's data.
    """

    deviation: Positive = 1.0
    strength_field: ClassVar[str | None] = "deviation"

    def check_samples(self, form: SampleForm) -> None:
        refuse_tokens(self, form)

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        noise = torch.randn(x.shape, generator=stream, dtype=x.dtype)
        return x + noise * (self.deviation * x.std(correction=0)), y


class InputScale(Fault, frozen=True):
    """A client whose inputs are not normalised, such as pixels from 0 to 255 instead of 0 to 1.

    Args:
        factor: The number that every input is multiplied by.
    """

    factor: Positive = 255.0
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor != 1, "factor of input_scale", self.factor, "another number than 1, which changes nothing")

    def check_samples(self, form: SampleForm) -> None:
        refuse_tokens(self, form)

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return x * self.factor, y


class GroupLeftBehind(Fault, frozen=True):
    """A group of clients with rotated inputs, which the average model serves worse.

    Images are rotated by 180°, other inputs reversed.

    Args:
        share: The share of each client's samples whose inputs are rotated.
    """

    share: Share = 1.0
    needs_others: ClassVar[bool] = True
    strength_field: ClassVar[str | None] = "share"

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        turned = x.flip(-1) if x.dim() <= 2 else x.flip((-2, -1))
        struck = draw_affected(len(y), self.share, stream).view(-1, *[1] * (x.dim() - 1))
        return torch.where(struck, turned, x), y


class DominantClient(Fault, frozen=True):
    """A client much larger than the others. Its samples are repeated, so an average weighted by samples is nearly its
    model.

    Args:
        factor: How many times as many samples it has, and correctly reports.
    """

    factor: Several = 20
    needs_others: ClassVar[bool] = True

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return x.repeat(self.factor, *[1] * (x.dim() - 1)), y.repeat(self.factor, *[1] * (y.dim() - 1))


class ChannelsSwapped(Fault, frozen=True):
    """Channels in the wrong order, such as BGR for RGB: the first and the last channel change places.

    In vectors and sequences, the first and the last feature change places.
    """

    issue: ClassVar[str] = "input_scale"

    def check_samples(self, form: SampleForm) -> None:
        channels = form.shape[0] if len(form.shape) == 3 else form.shape[-1]
        if form.tokens or channels < 2:
            raise ConfigError(
                f"There is nothing to swap for channels_swapped: a sample is {list(form.shape)}"
                f"{', of tokens' if form.tokens else ''}. Take samples of two channels or features at least."
            )

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        axis = 1 if x.dim() == 4 else -1
        order = torch.arange(x.shape[axis])
        order[[0, -1]] = order[[-1, 0]]
        return x.index_select(axis, order), y


class SameBatch(Fault, frozen=True):
    """A client that trains on the same mini-batch at every step of every round, as with a stuck data loader."""

    issue: ClassVar[str] = "unusual_client"

    def order(self, order: Tensor, samples: int, stream: torch.Generator) -> Tensor:
        batch = torch.randperm(samples, generator=stream)[torch.arange(order.shape[1]) % samples]
        return batch.expand_as(order)


FAULTS = (
    *(LabelNoise, LabelFlip, MissingClasses, InputNoise, InputScale, GroupLeftBehind, DominantClient),
    *(ChannelsSwapped, SameBatch),
)
