# SPDX-License-Identifier: Apache-2.0
"""Samples and labels as plain arrays: what a reader of a data set gives, and what a user brings of their own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.streams import stream

TEST_SHARE = 0.2  # of a data set that comes without a test set


@dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays or tensors: samples [N, ...] and whole-number labels [N], for training and for the server's test.

    Images are [N, channels, height, width], sequences [N, steps, features], vectors [N, features], tokens whole
    numbers [N, steps]. uint8 is divided by 255 when it is used. Without a test set, a fixed fifth becomes one. `groups`
    says which samples belong together (one person, one physical sign): the partition `natural` deals by it.
    """

    x: Any
    y: Any
    test_x: Any = None
    test_y: Any = None
    groups: Any = None
    classes: int | None = None  # of the labels; None: the largest label and one
    name: str = "arrays"

    def __repr__(self) -> str:
        """By its digest: two are told apart by what is in them, not by the few numbers that numpy would print."""
        return f"Arrays(name={self.name!r}, digest={digest(checked(self))[:16]!r})"


@dataclass(frozen=True)
class Checked:
    """The same as tensors of the types that a data set has; `groups` is None or int64 [N]."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    groups: Tensor | None
    classes: int


def checked(arrays: Arrays) -> Checked:
    """The arrays as tensors of the right types, or an error that says which of them cannot be used, and why."""
    if (arrays.test_x is None) != (arrays.test_y is None):
        raise ConfigError("Only one of test_x and test_y was given. Give both, or neither.")
    x, y = _samples("x", arrays.x), _labels("y", arrays.y)
    _same_length("x", x, "y", y)
    groups = None if arrays.groups is None else _labels("groups", arrays.groups)
    if groups is not None:
        _same_length("x", x, "groups", groups)
    if arrays.test_x is None:
        x, y, test_x, test_y, groups = _with_test(x, y, groups)
    else:
        test_x, test_y = _samples("test_x", arrays.test_x), _labels("test_y", arrays.test_y)
        _same_length("test_x", test_x, "test_y", test_y)
        if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
            raise ConfigError(
                f"Training and test samples differ: {list(x.shape[1:])} {x.dtype} and {list(test_x.shape[1:])} "
                f"{test_x.dtype}. Give both in the same form."
            )
    found = int(torch.cat([y, test_y]).max()) + 1
    if arrays.classes is not None and arrays.classes < found:
        raise ConfigError(f"A label is {found - 1}, but classes is {arrays.classes}: it must be at least {found}.")
    return Checked(x, y, test_x, test_y, groups, arrays.classes or found)


def digest(found: Checked) -> str:
    """sha256, in hex, over the arrays' types, shapes and bytes: the same data give the same on every machine."""
    total = hashlib.sha256()
    for name in ("x", "y", "test_x", "test_y", "groups"):
        tensor: Tensor | None = getattr(found, name)
        if tensor is not None:
            total.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
            total.update(np.ascontiguousarray(tensor.numpy()).data)
    return total.hexdigest()


def _tensor(name: str, given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given.detach().cpu().contiguous()
    array = np.asarray(given)
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"The array {name} holds {array.dtype}: it must hold numbers.")
    if (array.dtype.kind == "u" and array.dtype.itemsize > 1) or not array.dtype.isnative:
        array = array.astype(np.int64 if array.dtype.kind in "iu" else np.float32)
    # A read-only array would make torch warn; one that can be written to is shared, not copied.
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())


def _samples(name: str, given: Any) -> Tensor:
    tensor = _tensor(name, given)
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


def _labels(name: str, given: Any) -> Tensor:
    tensor = _tensor(name, given)
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ConfigError(
            f"The array {name} is {list(tensor.shape)} {tensor.dtype}: it must be [samples] whole numbers."
        )
    tensor = tensor.to(torch.int64)
    if not len(tensor) or int(tensor.min()) < 0:
        raise ConfigError(f"The array {name} is empty or holds a negative number: they must count from 0.")
    return tensor


def _same_length(name: str, one: Tensor, other_name: str, other: Tensor) -> None:
    if len(one) != len(other):
        raise ConfigError(f"There are {len(one)} of {name} and {len(other)} of {other_name}: they must be as many.")


def _with_test(x: Tensor, y: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """A fifth set aside as the test set, the same one each time; whole groups, where there are any."""
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
