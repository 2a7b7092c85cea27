# SPDX-License-Identifier: Apache-2.0
"""The data sets by name, and how one is loaded: found, decoded once, kept in a cache, and known by its digest."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.data import cache as data_cache
from fedvitals.lab.data.arrays import Arrays, Checked, checked, digest
from fedvitals.lab.data.files import CIFAR10, FashionMNIST
from fedvitals.lab.data.gtsrb import GTSRB
from fedvitals.lab.data.small import Digits, Synthetic
from fedvitals.lab.data.sources import Progress, download_folder, fetch, places, user_cache
from fedvitals.lab.streams import stream

DATASETS = (Digits, Synthetic, GTSRB, FashionMNIST, CIFAR10)

Described = Digits | Synthetic | GTSRB | FashionMNIST | CIFAR10


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and labels in memory, for training and for the server's test."""

    name: str
    x: Tensor  # [N, ...]: uint8 (images, divided by 255 when used), float32, or int64 (tokens)
    y: Tensor  # [N], int64
    test_x: Tensor
    test_y: Tensor
    groups: Tensor | None  # [N], int64: which training samples belong together; None: nothing is known
    classes: int
    digest: str  # sha256 of the arrays as they are here
    divisor: float = 255.0  # of uint8 images, when used

    def inputs(self, x: Tensor) -> Tensor:
        """Samples as a model takes them: float32, images from 0 to 1 by default; tokens stay whole numbers."""
        return x.to(torch.float32).div_(self.divisor) if x.dtype == torch.uint8 else x

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample, such as (3, 32, 32)."""
        return tuple(self.x.shape[1:])

    @property
    def vocabulary(self) -> int | None:
        """How many tokens there are, where the samples are tokens."""
        if self.x.dtype != torch.int64:
            return None
        return int(max(self.x.max(), self.test_x.max())) + 1


def named(name: str) -> Described:
    """The data set with this name, with its usual settings; `fashion-mnist` is as good as `fashion_mnist`."""
    kinds: dict[str, Any] = {str(kind.__struct_config__.tag): kind for kind in DATASETS}
    try:
        found: Described = kinds[name.replace("-", "_").lower()]()
    except KeyError:
        raise ConfigError(unknown("data set", name, kinds)) from None
    return found


def load(
    description: Described | Arrays | str,
    folder: str | os.PathLike[str] | None = None,
    cache: Path | None = None,
) -> Dataset:
    """The data set: from `folder`, else FEDVITALS_DATA, ../shared/data or an earlier download.

    `cache` is where decoded images are kept for the next time; by default below the user's own cache.
    """
    described = named(description) if isinstance(description, str) else description
    if _remembered is None or isinstance(described, Arrays):
        return _load(described, folder, cache)
    key = (described, None if folder is None else os.fspath(folder), cache)
    if key not in _remembered:
        _remembered[key] = _load(described, folder, cache)
    return _remembered[key]


def remember() -> None:
    """From now on, load each data set once: for a process that runs many experiments on the same few."""
    global _remembered  # noqa: PLW0603 - of this process, as it says
    _remembered = {} if _remembered is None else _remembered


_remembered: dict[Any, Dataset] | None = None


def _load(described: Described | Arrays, folder: str | os.PathLike[str] | None, cache: Path | None) -> Dataset:
    if isinstance(described, Arrays):
        arrays, known = described, None
    elif isinstance(described, Digits | Synthetic):
        arrays, known = described.make(), None
    else:
        sources, read = described.find(places(folder))
        kind = str(described.__struct_config__.tag)
        arrays, known = data_cache.through(cache or user_cache(), kind, sources, read)
    found = checked(arrays)
    if isinstance(described, GTSRB | FashionMNIST | CIFAR10) and (described.samples or described.test_samples):
        found, known = _fewer(found, described.samples, described.test_samples), None
    return Dataset(
        arrays.name,
        found.x,
        found.y,
        found.test_x,
        found.test_y,
        found.groups,
        found.classes,
        known or digest(found),
        getattr(described, "divisor", 255.0),
    )


def download(name: str, folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> list[Path]:
    """The official files of a data set, fetched into the folder where `load` will find them, and verified."""
    described = named(name)
    if isinstance(described, Digits | Synthetic):
        return []
    target = download_folder() if folder is None else Path(folder)
    return [fetch(source, target, progress) for source in described.sources]


def _fewer(found: Checked, samples: int | None, test_samples: int | None) -> Checked:
    """A part of the data set, the same each time, in the order of the whole."""
    keep, keep_test = _chosen(len(found.y), samples, "train"), _chosen(len(found.test_y), test_samples, "test")
    groups = None if found.groups is None else found.groups[keep]
    return replace(
        found,
        x=found.x[keep],
        y=found.y[keep],
        groups=groups,
        test_x=found.test_x[keep_test],
        test_y=found.test_y[keep_test],
    )


def _chosen(length: int, wanted: int | None, part: str) -> Tensor:
    if wanted is None or wanted >= length:
        return torch.arange(length)
    return torch.randperm(length, generator=stream(0, "fewer", part))[:wanted].sort().values
