# SPDX-License-Identifier: Apache-2.0
"""Nine statistics of many tensors in one reading of memory, histograms and sketches: what probes measure with.

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
from fedvitals.kernels.one_pass import sums
from fedvitals.kernels.sketch import count_sketch
from fedvitals.stats import Array

__all__ = ["Backend", "GradientRecorder", "backend", "count_sketch", "device_backend", "histogram", "sums"]


@dataclass(frozen=True, slots=True)
class Backend:
    """What computes the statistics in this process, and why: "llvm" (on a GPU "triton"), or "torch"."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def backend() -> Backend:
    """Which implementation serves CPU tensors here. Compiles the kernel if nothing did so before."""
    loaded = jit.loaded()
    return Backend("llvm" if loaded.kernel else "torch", loaded.reason)


def device_backend() -> Backend | None:
    """Which one serves tensors on a GPU; None where there is none. Compiles, too."""
    if not torch.cuda.is_available():
        return None
    loaded = loading.loaded()
    return Backend("triton" if loaded.kernels else "torch", loaded.reason)


def histogram(tensors: Sequence[Tensor | None]) -> Array | Tensor:
    """`[layers, 128]`: how many values have which sign and binary exponent; columns are `stats.HISTOGRAM_COLUMNS`."""
    result = exponents.histogram(tensors)
    return result.numpy() if result.is_cpu else result
