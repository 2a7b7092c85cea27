# SPDX-License-Identifier: Apache-2.0
"""The data sets by name, and how one is located, decoded, cached and identified by its digest."""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.data import cache as data_cache
from fedvitals.lab.data.arrays import Arrays, CheckedArrays, check_arrays, digest, labels_of
from fedvitals.lab.data.gtsrb import GTSRB
from fedvitals.lab.data.image_archives import CIFAR10, FashionMNIST
from fedvitals.lab.data.small import Digits, Synthetic
from fedvitals.lab.data.sources import Progress, PublishedDataset, download_folder, fetch, search_folders, user_cache
from fedvitals.lab.data.tabular import Tabular, TimeSeries
from fedvitals.lab.data.text import Text
from fedvitals.lab.streams import stream

GENERATED = (Digits, Synthetic, Tabular, TimeSeries, Text)  # without files of their own
DATASETS = (*GENERATED, GTSRB, FashionMNIST, CIFAR10)

DatasetDescription = Digits | Synthetic | Tabular | TimeSeries | Text | GTSRB | FashionMNIST | CIFAR10


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and targets in memory, for training and for the server's test.

    `targets` says what y is: «classes» (int64 [N]), «numbers» (float32 [N, K]), «labels» (float32 [N, L] of 0 and 1),
    «tokens» (int64 [N, steps]), «tasks» (float32 [N, tasks]), or «inputs»: the model is to give back its inputs, and y
    has classes for partitions only.
    """

    name: str
    x: Tensor  # [N, ...]: uint8 (images, divided by 255 when used), float32, or int64 (tokens)
    y: Tensor  # [N, ...]
    test_x: Tensor
    test_y: Tensor
    groups: Tensor | None  # [N], int64: which training samples belong together; None: nothing is known
    classes: int  # that partitions distinguish
    digest: str  # sha256 of the arrays as they are here
    divisor: float = 255.0  # of uint8 images, when used
    targets: str = "classes"
    outputs: tuple[int, ...] = ()  # of the model: numbers per sample, or per step, of each task
    public: Tensor | None = None  # samples that nobody holds, for pretraining

    def inputs(self, x: Tensor) -> Tensor:
        """Return samples as model inputs: float32, images scaled to 0–1 by default; tokens stay integers."""
        return x.to(torch.float32).div_(self.divisor) if x.dtype == torch.uint8 else x

    def pairs(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return samples as model inputs, and what the model is to answer."""
        inputs = self.inputs(x)
        return inputs, inputs if self.targets == "inputs" else y

    @functools.cached_property
    def labels(self) -> Tensor:
        """One class for each training sample, [N] int64, by which partitions deal samples."""
        return labels_of(self.targets, self.outputs, self.y)

    @property
    def per_step(self) -> bool:
        """Whether a model answers for each step of a sample, instead of for the sample."""
        return self.targets == "tokens"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, such as (3, 32, 32)."""
        return tuple(self.x.shape[1:])

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens, or None if the samples are not tokens."""
        if self.x.dtype != torch.int64:
            return None
        largest = int(max(self.x.max(), self.test_x.max())) + 1
        return max(largest, self.outputs[0]) if self.per_step else largest  # a model may predict what it has not read


def dataset_named(name: str) -> DatasetDescription:
    """Return the description of a data set by its name, with default settings; `-` and `_` are interchangeable."""
    kinds: dict[str, Any] = {str(kind.__struct_config__.tag): kind for kind in DATASETS}
    try:
        description: DatasetDescription = kinds[name.replace("-", "_").lower()]()
    except KeyError:
        raise ConfigError(unknown("data set", name, kinds)) from None
    return description


def load(
    description: DatasetDescription | Arrays | str,
    folder: str | os.PathLike[str] | None = None,
    cache: Path | None = None,
) -> Dataset:
    """Load a data set from `folder`, else from FEDVITALS_DATA, ../shared/data or an earlier download.

    `cache` is the folder for decoded images; by default it is below the user's own cache.
    """
    described = dataset_named(description) if isinstance(description, str) else description
    if _remembered is None or isinstance(described, Arrays):
        return _load(described, folder, cache)
    key = (described, None if folder is None else os.fspath(folder), cache)
    if key not in _remembered:
        _remembered[key] = _load(described, folder, cache)
    return _remembered[key]


def remember() -> None:
    """From now on, load each data set only once in this process. For processes that run many experiments."""
    global _remembered  # noqa: PLW0603 - of this process, as it says
    _remembered = {} if _remembered is None else _remembered


_remembered: dict[Any, Dataset] | None = None


def _load(described: DatasetDescription | Arrays, folder: str | os.PathLike[str] | None, cache: Path | None) -> Dataset:
    if isinstance(described, Arrays):
        arrays, known_digest = described, None
    elif isinstance(described, GENERATED):
        arrays, known_digest = described.make(), None
    else:
        sources, read = described.find(search_folders(folder))
        kind = str(described.__struct_config__.tag)
        arrays, known_digest = data_cache.load_or_build(cache or user_cache(), kind, sources, read)
    checked = check_arrays(arrays)
    if isinstance(described, PublishedDataset) and (described.samples or described.test_samples):
        checked, known_digest = _subset(checked, described.samples, described.test_samples), None
    divisor = getattr(described, "divisor", 255.0)
    return Dataset(arrays.name, **vars(checked), digest=known_digest or digest(checked), divisor=divisor)


def download(name: str, folder: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> list[Path]:
    """Download and verify the official files of a data set into the folder where `load` finds them; returns their
    paths.
    """
    described = dataset_named(name)
    if isinstance(described, GENERATED):
        return []
    target = download_folder() if folder is None else Path(folder)
    return [fetch(source, target, progress) for source in described.sources]


def _subset(arrays: CheckedArrays, samples: int | None, test_samples: int | None) -> CheckedArrays:
    """Return a fixed subset of the data set, in the original order."""
    keep = _subset_indices(len(arrays.y), samples, "train")
    keep_test = _subset_indices(len(arrays.test_y), test_samples, "test")
    groups = None if arrays.groups is None else arrays.groups[keep]
    test_x, test_y = arrays.test_x[keep_test], arrays.test_y[keep_test]
    return dataclasses.replace(arrays, x=arrays.x[keep], y=arrays.y[keep], test_x=test_x, test_y=test_y, groups=groups)


def _subset_indices(length: int, wanted: int | None, part: str) -> Tensor:
    if wanted is None or wanted >= length:
        return torch.arange(length)
    return torch.randperm(length, generator=stream(0, "fewer", part))[:wanted].sort().values
