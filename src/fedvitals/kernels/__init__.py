# SPDX-License-Identifier: Apache-2.0
"""Nine statistics of many tensors in one pass over memory, histograms and count sketches, for the probes.

>>> import torch
>>> sums([torch.tensor([3.0, -4.0, 0.0])]).tolist()
[[3.0, -1.0, 25.0, 7.0, -4.0, 3.0, 1.0, 0.0, 0.0]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvitals.kernels import exponents
from fedvitals.kernels.cpu import jit
from fedvitals.kernels.cuda import loading
from fedvitals.kernels.gradients import GradientRecorder
from fedvitals.kernels.layout import is_sharded, local
from fedvitals.kernels.one_pass import sums, sums_of_parts
from fedvitals.kernels.sketch import count_sketch
from fedvitals.stats import Array

__all__ = [
    "Backend", "GradientRecorder", "backend", "count_sketch", "device_backend", "histogram", "is_sharded", "local",
    "sums", "sums_of_parts",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Backend:
    """What computes the statistics in this process, and why: "llvm" (on a GPU "triton"), or "torch"."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def backend() -> Backend:
    """Return the implementation for CPU tensors. Compiles the kernel on the first call."""
    loaded = jit.load_kernel()
    return Backend("llvm" if loaded.kernel else "torch", loaded.reason)


def device_backend() -> Backend | None:
    """Return the implementation for GPU tensors, or None without a GPU. Compiles the kernels on the first call."""
    if not torch.cuda.is_available():
        return None
    loaded = loading.load_kernels()
    return Backend("triton" if loaded.kernels else "torch", loaded.reason)


def histogram(tensors: Sequence[Tensor | None]) -> Array | Tensor:
    """Return `[layers, 128]`: the number of values by sign and binary exponent; columns are
    `stats.HISTOGRAM_COLUMNS`.
    """
    result = exponents.histogram(tensors)
    return result.numpy() if result.is_cpu else result
