# SPDX-License-Identifier: Apache-2.0
"""A 256-dimensional count sketch of vectors, computed on their device.

Each coordinate is multiplied by a random sign and added to one of 256 buckets. Inner products between sketches estimate
inner products between vectors: E⟨s(a), s(b)⟩ = ⟨a, b⟩, and the standard error of a cosine is about 1/16.

Nothing random is drawn or stored: signs and buckets are hashes of a coordinate's index (`sketch_hash`). Sums are
float64, and their order depends only on the vector's length, so that equal vectors on one device have equal sketches,
bit for bit. CPUs use LLVM (`cpu/sketch_ir`), GPUs Triton (`cuda/sketch`), all else torch; they agree up to rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels.cpu import jit
from fedvitals.kernels.cuda import loading
from fedvitals.kernels.cuda.sums import DTYPES, device_context
from fedvitals.kernels.sketch_hash import SIZE, VERSION, by_torch

__all__ = ["COSINE_ERROR", "SIZE", "VERSION", "by_torch", "by_triton", "count_sketch"]

COSINE_ERROR = SIZE**-0.5
_ROWS_PER_PART = 64  # rows of 256 coordinates that one program on a GPU sums, at least
_PARTS = 1024  # of a vector, at most


def count_sketch(vectors: Tensor, start: int = 0) -> Tensor:
    """Sketch `[..., D]` along the last axis; returns `[..., 256]` in float64 on the same device.

    `start`, a multiple of 256, is the place of the first coordinate in a longer vector: the sketches of its parts add
    up to its own.
    """
    rows = vectors.detach().reshape(math.prod(vectors.shape[:-1]), vectors.shape[-1])
    if rows.dtype not in (torch.float32, torch.float64) and not (rows.is_cuda and rows.dtype in DTYPES):
        rows = rows.float()
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    result = _by_kernel(rows, start)
    return (by_torch(rows, start) if result is None else result).view(*vectors.shape[:-1], SIZE)


def _by_kernel(rows: Tensor, start: int) -> Tensor | None:
    """Return the sketches by a compiled kernel, or None where this device has none."""
    if rows.is_cpu:
        kernel = jit.load_kernel().kernel
        return None if kernel is None else _by_llvm(kernel, rows, start)
    if rows.is_cuda and not torch.cuda.is_current_stream_capturing():
        with device_context(rows.device):
            if loading.load_kernels().kernels is not None:
                return by_triton(rows, start)
    return None


def _by_llvm(kernel: jit.Kernel, rows: Tensor, start: int) -> Tensor:
    totals = np.zeros((len(rows), 2 * SIZE))
    size = rows.element_size()
    first = rows.data_ptr() - start * size  # where the longer vector would begin
    end = start + rows.shape[1]
    kernel.sketches[rows.dtype](first, rows.stride(0) * size, len(rows), start, end, totals.ctypes.data)
    return torch.from_numpy(totals[:, :SIZE] + totals[:, SIZE:])


def by_triton(rows: Tensor, start: int = 0) -> Tensor:
    """Return the sketches by Triton: one program per part of a vector, then one per vector that adds its parts."""
    from fedvitals.kernels.cuda import sketch as device_sketch  # noqa: PLC0415 - imports Triton

    blocks = -(-rows.shape[1] // SIZE)
    each = max(_ROWS_PER_PART, -(-blocks // _PARTS))
    parts = -(-blocks // each)
    partial = torch.empty(len(rows), parts, SIZE, dtype=torch.float64, device=rows.device)
    sketches = torch.zeros(len(rows), SIZE, dtype=torch.float64, device=rows.device)
    if partial.numel():
        device_sketch.sketch_parts[(parts, len(rows))](
            rows, rows.stride(0), rows.shape[1], start // SIZE, each, partial
        )
        device_sketch.add_parts[(len(rows),)](partial, parts, sketches)
    return sketches
