# SPDX-License-Identifier: Apache-2.0
"""Robust means of vectors, coordinate by coordinate: the trimmed mean and the median (Yin et al. 2018).

A value that is not finite counts as the most extreme one of its coordinate, so that it reaches the result only if too
many vectors have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

COLUMNS = 4096  # at a time, so that a block of 100 clients stays in the cache
NUMBERS = 1 << 25  # at a time on a device, where each call has a cost: 256 MB in float64


def trimmed_mean(states: Tensor | Sequence[Tensor], fraction: float) -> Tensor:
    """Return the mean of each column of [n, size], without its ⌊fraction·n⌋ smallest and as many largest values."""
    count = len(states)
    cut = min(math.floor(fraction * count + 1e-9), (count - 1) // 2)  # 0.29 × 100 is 28.999… in floating point
    return mean_of_ranks(states, cut, count - cut)


def median(states: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the median of each column of [n, size]."""
    low, high = (len(states) - 1) // 2, len(states) // 2
    return mean_of_ranks(states, low, high + 1)


def mean_of_ranks(states: Tensor | Sequence[Tensor], first: int, last: int) -> Tensor:
    """Return the mean of the ranks `first` to `last` (excluded) of every column, [size]. NaN sorts after +Inf."""
    result = torch.empty_like(states[0])
    for part in column_blocks(states, len(result)):
        block = torch.stack([state[part] for state in states], dim=1)
        if not block.is_cpu:
            result[part] = block.sort(dim=1).values[:, first:last].mean(dim=1, dtype=torch.float64).to(result.dtype)
            continue
        ranked = block.numpy()
        ranked.sort(axis=1)  # numpy's is ten times as fast as torch's here
        with np.errstate(invalid="ignore", over="ignore"):  # Inf − Inf, if too many vectors have it
            values = ranked[:, first:last].mean(axis=1, dtype=np.float64).astype(ranked.dtype)
        result[part] = torch.from_numpy(values)
    return result


def column_blocks(states: Tensor | Sequence[Tensor], length: int) -> Iterator[slice]:
    """Yield slices that cover the coordinates from 0 to `length`, in blocks sized for the states' device."""
    width = COLUMNS if states[0].is_cpu else max(COLUMNS, NUMBERS // len(states))
    for begin in range(0, length, width):
        yield slice(begin, min(begin + width, length))
