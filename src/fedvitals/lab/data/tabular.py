# SPDX-License-Identifier: Apache-2.0
"""Data sets of vectors and of series: those that ship with scikit-learn, and generated time series."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from fedvitals.errors import MissingExtraError
from fedvitals.lab.data.arrays import TEST_SHARE, Arrays
from fedvitals.lab.description import Description, require
from fedvitals.lab.streams import stream


class Tabular(Description, frozen=True):
    """One of scikit-learn's own tables, each column scaled to mean 0 and variance 1.

    Args:
        name: `diabetes` (442 samples) and `linnerud` (20 samples, 3 numbers each) have numbers as targets, scaled
            likewise; `breast_cancer` (569), `wine` (178) and `iris` (150) have classes.
    """

    name: Literal["diabetes", "linnerud", "breast_cancer", "wine", "iris"] = "breast_cancer"

    def __post_init__(self) -> None:
        known = ("diabetes", "linnerud", "breast_cancer", "wine", "iris")
        require(self.name in known, "name of tabular", self.name, f"one of {', '.join(known)}")

    def make(self) -> Arrays:
        try:
            from sklearn import datasets  # noqa: PLC0415 - an extra, and slow
        except ModuleNotFoundError as error:
            raise MissingExtraError("scikit-learn", "lab", "The data set tabular") from error
        table: Any = getattr(datasets, f"load_{self.name}")()
        targets = np.asarray(table.target)
        y = targets.astype(np.int64) if targets.dtype.kind in "iu" and targets.ndim == 1 else _scaled(targets)
        return Arrays(_scaled(table.data), y, name=self.name)


def _scaled(columns: Any) -> np.ndarray[Any, Any]:
    numbers = np.asarray(columns, np.float64)
    spread = numbers.std(0)
    scaled: np.ndarray[Any, Any] = (numbers - numbers.mean(0)) / np.where(spread > 0, spread, 1)
    return scaled.astype(np.float32)


class TimeSeries(Description, frozen=True):
    """Generated series, each a sum of two seasons, a random walk and noise; the target is the next value. The windows
    of one series are a group, for the partitions `natural` and `group_per_client`. The last fifth of each series is
    the test set.

    Args:
        series: How many are generated.
        length: Values in a series.
        steps: Values in a sample, which is [steps, 1].
        noise: The noise's standard deviation.
        seed: The seed of the data, apart from the experiment's.
    """

    series: int = 40
    length: int = 200
    steps: int = 24
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.series >= 1, "series of time_series", self.series, "at least 1")
        require(self.steps >= 1, "steps of time_series", self.steps, "at least 1")
        least = 5 * (self.steps + 1)
        require(self.length >= least, "length of time_series", self.length, f"at least {least}: five windows")
        require(self.noise >= 0, "noise of time_series", self.noise, "0 or more")

    def make(self) -> Arrays:
        generator = stream(self.seed, "time series")
        periods = 6 + 18 * torch.rand(self.series, 2, 1, generator=generator)
        phases = 2 * torch.pi * torch.rand(self.series, 2, 1, generator=generator)
        sizes = 0.5 + torch.rand(self.series, 2, 1, generator=generator)
        times = torch.arange(self.length, dtype=torch.float32)
        values = (sizes * torch.sin(2 * torch.pi * times / periods + phases)).sum(1)
        values += 0.05 * torch.randn(self.series, self.length, generator=generator).cumsum(1)
        values += self.noise * torch.randn(self.series, self.length, generator=generator)
        windows = values.unfold(1, self.steps + 1, 1)  # [series, windows, steps + 1]
        last = windows.shape[1] - round(windows.shape[1] * TEST_SHARE)
        # Windows that overlap the test's first are left out of training.
        train, test = windows[:, : last - self.steps], windows[:, last:]
        groups = torch.arange(self.series).repeat_interleave(train.shape[1])
        train, test = train.flatten(0, 1), test.flatten(0, 1)
        x, test_x = (part[:, :-1, None].contiguous() for part in (train, test))
        y, test_y = (part[:, -1].contiguous() for part in (train, test))
        return Arrays(x, y, test_x, test_y, groups, name="time_series")
