# SPDX-License-Identifier: Apache-2.0
"""Data sets as plain arrays: the output of the data set readers, and the form for a user's own data."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.streams import stream

TEST_SHARE = 0.2  # of a data set that comes without a test set
NUMBER_BINS = 10  # into which partitions divide targets that are numbers


@dataclass(frozen=True, eq=False)
class Arrays:
    """Samples [N, ...] and their targets, for training and for the server's test; arrays or tensors.

    Images are [N, channels, height, width], sequences [N, steps, features], vectors [N, features], tokens integers
    [N, steps]. uint8 is divided by 255 when used.

    Targets are classes (integers [N]), numbers (floats [N] or [N, K]), several labels (booleans [N, L]), or one
    token per step (integers [N, steps]; -100 does not count).

    Args:
        x: The inputs.
        y: Their targets.
        test_x: Inputs of the server's test; without them a fixed fifth of the samples becomes the test set.
        test_y: Their targets.
        groups: Which samples belong together (one person, one physical sign), for the partitions `natural` and
            `group_per_client`.
        classes: The number of classes; None: the largest label plus one.
        name: The name that is kept with the run.
        tasks: The outputs of each task, such as (10, 1): each column of the targets is a task, here a class out of
            10 and a number.
        reconstruct: Whether the model's targets are its inputs; y then only says who gets which samples.
        public: Samples that nobody holds, for pretraining.
    """

    x: Any
    y: Any
    test_x: Any = None
    test_y: Any = None
    groups: Any = None
    classes: int | None = None  # of the labels; None: the largest label and one
    name: str = "arrays"
    tasks: tuple[int, ...] | None = None  # the outputs of each task: its classes, or 1 for a number
    reconstruct: bool = False
    public: Any = None  # samples that nobody holds, for pretraining

    def __repr__(self) -> str:
        """Identify the arrays by their digest, since numpy's own repr shows only a few numbers."""
        return f"Arrays(name={self.name!r}, digest={digest(check_arrays(self))[:16]!r})"


@dataclass(frozen=True)
class CheckedArrays:
    """Validated arrays as tensors of a data set's types; `groups` is None or int64 [N]. See `Dataset`."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    groups: Tensor | None
    classes: int
    targets: str = "classes"
    outputs: tuple[int, ...] = ()
    public: Tensor | None = None


def check_arrays(arrays: Arrays) -> CheckedArrays:
    """Return the arrays as tensors of the right types, or raise ConfigError naming the array that cannot be used and
    why.
    """
    if (arrays.test_x is None) != (arrays.test_y is None):
        raise ConfigError("Only one of test_x and test_y was given. Give both, or neither.")
    x, (targets, y) = _samples("x", arrays.x), _targets("y", arrays)
    _require_same_length("x", x, "y", y)
    groups = None if arrays.groups is None else _labels("groups", arrays.groups)
    if groups is not None:
        _require_same_length("x", x, "groups", groups)
    if arrays.test_x is None:
        x, y, test_x, test_y, groups = _split_off_test(x, y, groups)
    else:
        test_x, (_, test_y) = _samples("test_x", arrays.test_x), _targets("test_y", arrays)
        _require_same_length("test_x", test_x, "test_y", test_y)
        if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
            raise ConfigError(
                f"Training and test samples differ: {list(x.shape[1:])} {x.dtype} and {list(test_x.shape[1:])} "
                f"{test_x.dtype}. Give both in the same form."
            )
    public = None if arrays.public is None else _samples("public", arrays.public)
    classes, outputs = _sizes(arrays, targets, y, test_y)
    if arrays.reconstruct:
        targets, outputs = "inputs", (math.prod(x.shape[1:]),)
    return CheckedArrays(x, y, test_x, test_y, groups, classes, targets, outputs, public)


def _targets(name: str, arrays: Arrays) -> tuple[str, Tensor]:
    """Return the kind of the targets (see `Dataset.targets`) and the targets as a tensor of its type."""
    tensor = _tensor(name, getattr(arrays, name))
    if tensor.dim() == 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool and arrays.tasks is None:
        return "classes", _labels(name, tensor)
    if tensor.dim() not in (1, 2) or not len(tensor) or tensor.is_complex():
        raise ConfigError(
            f"The array {name} is {list(tensor.shape)} {tensor.dtype}: it must be [samples] or [samples, several]."
        )
    if arrays.tasks is not None:
        if tensor.dim() != 2 or tensor.shape[1] != len(arrays.tasks):
            raise ConfigError(
                f"The array {name} is {list(tensor.shape)}: it needs a column for each of {arrays.tasks}."
            )
        return "tasks", _finite(name, tensor)
    if tensor.dtype == torch.bool:
        return "labels", tensor.view(len(tensor), -1).to(torch.float32)
    if tensor.is_floating_point():
        return "numbers", _finite(name, tensor).view(len(tensor), -1)
    return "tokens", tensor.to(torch.int64)


def _finite(name: str, tensor: Tensor) -> Tensor:
    tensor = tensor.to(torch.float32)
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"The array {name} holds NaN or infinity. Remove those samples, or replace the values.")
    return tensor


def _sizes(arrays: Arrays, targets: str, y: Tensor, test_y: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the number of classes that partitions distinguish, and the numbers of a model's outputs."""
    if arrays.classes is not None and targets not in ("classes", "tokens"):
        raise ConfigError(f"There are {arrays.classes} classes, but the array y does not hold whole numbers.")
    if targets in ("numbers", "labels"):
        return (NUMBER_BINS if targets == "numbers" else y.shape[1]), (y.shape[1],)
    if targets == "tasks":
        outputs = tuple(arrays.tasks or ())
        return next((count for count in outputs if count > 1), NUMBER_BINS), outputs
    classes = int(max(y.max(), test_y.max())) + 1
    if arrays.classes is not None and arrays.classes < classes:
        raise ConfigError(f"A label is {classes - 1}, but classes is {arrays.classes}: it must be at least {classes}.")
    classes = arrays.classes or classes
    return classes, (classes,)


def labels_of(targets: str, outputs: tuple[int, ...], y: Tensor) -> Tensor:
    """Return one class for each sample, [N] int64, by which partitions deal samples.

    Numbers are divided into ten bins of equal size, several labels are represented by the first that holds, tokens by
    the most frequent, and tasks by the first of classes.
    """
    if targets in ("classes", "inputs") and y.dim() == 1:
        return y
    if targets == "labels":
        return y.argmax(1)
    if targets == "tokens":
        return y.mode(1).values.clamp(min=0)
    place = 0 if targets == "numbers" else next((task for task, count in enumerate(outputs) if count > 1), 0)
    column = y[:, place]
    if targets == "tasks" and outputs[place] > 1:
        return column.long()
    ranks = torch.empty(len(column), dtype=torch.int64)
    ranks[column.argsort(stable=True)] = torch.arange(len(column))
    return ranks * NUMBER_BINS // len(column)


def digest(arrays: CheckedArrays) -> str:
    """Return the sha256, in hex, of the arrays' types, shapes and bytes; equal data give equal digests on every
    machine.
    """
    total = hashlib.sha256()
    for name in ("x", "y", "test_x", "test_y", "groups", "public"):
        tensor: Tensor | None = getattr(arrays, name)
        if tensor is not None:
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            total.update(np.ascontiguousarray(tensor.numpy()).data)
    return total.hexdigest()


def _tensor(name: str, array_like: Any) -> Tensor:
    if isinstance(array_like, Tensor):
        return array_like.detach().cpu().contiguous()
    array = np.asarray(array_like)
    if array.dtype.kind not in "iufb":
        raise ConfigError(f"The array {name} holds {array.dtype}: it must hold numbers.")
    if (array.dtype.kind == "u" and array.dtype.itemsize > 1) or not array.dtype.isnative:
        array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
    # A read-only array would make torch warn; one that can be written to is shared, not copied.
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())


def _samples(name: str, array_like: Any) -> Tensor:
    tensor = _tensor(name, array_like)
    if tensor.dim() < 2 or not tensor.numel():
        raise ConfigError(f"The array {name} has the shape {list(tensor.shape)}: it must be [samples, ...], not empty.")
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise ConfigError(f"The array {name} holds {tensor.dtype}: it must hold whole or floating-point numbers.")
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"The array {name} holds NaN or infinity. Remove those samples, or replace the values.")
    elif tensor.dtype != torch.uint8:
        tensor = tensor.to(torch.int64)
        if tensor.dim() != 2 or int(tensor.min()) < 0:
            raise ConfigError(
                f"The array {name} holds whole numbers ({list(tensor.shape)}, from {int(tensor.min())}): tokens must "
                "be [samples, steps] and not negative. Convert anything else to float32, or images to uint8."
            )
    return tensor


def _labels(name: str, array_like: Any) -> Tensor:
    tensor = _tensor(name, array_like)
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ConfigError(
            f"The array {name} is {list(tensor.shape)} {tensor.dtype}: it must be [samples] whole numbers."
        )
    tensor = tensor.to(torch.int64)
    if not len(tensor) or int(tensor.min()) < 0:
        raise ConfigError(f"The array {name} is empty or holds a negative number: they must count from 0.")
    return tensor


def _require_same_length(name: str, first: Tensor, second_name: str, second: Tensor) -> None:
    if len(first) != len(second):
        raise ConfigError(f"There are {len(first)} of {name} and {len(second)} of {second_name}: they must be as many.")


def _split_off_test(
    x: Tensor, y: Tensor, groups: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Split off a fixed fifth as the test set, by whole groups where there are groups."""
    if len(y) < 2:
        raise ConfigError(
            f"{len(y)} sample cannot be split into training and test set. Give at least 2, or a test set."
        )
    generator = stream(0, "test split")
    wanted = max(1, round(len(y) * TEST_SHARE))
    if groups is None:
        test = torch.randperm(len(y), generator=generator)[:wanted]
    else:
        _, member = groups.unique(return_inverse=True)
        sizes = torch.bincount(member)
        if len(sizes) < 2:
            raise ConfigError("All samples are of one group, which cannot be split. Give a test set.")
        order = torch.randperm(len(sizes), generator=generator)
        taken = order[: max(1, min(len(sizes) - 1, int((sizes[order].cumsum(0) <= wanted).sum())))]
        test = torch.nonzero(torch.isin(member, taken)).flatten()
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[test] = False
    test = torch.nonzero(~keep).flatten()
    return x[keep], y[keep], x[test], y[test], None if groups is None else groups[keep]
