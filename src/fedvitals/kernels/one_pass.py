# SPDX-License-Identifier: Apache-2.0
"""Nine statistics of many tensors in one pass over memory."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedvitals.errors import RecordError
from fedvitals.kernels import fallback, layout
from fedvitals.kernels.cpu import jit
from fedvitals.kernels.cuda import sums as device_sums
from fedvitals.stats import STATISTICS, Array, empty_sums

_COLUMNS = len(STATISTICS)


def sums(tensors: Sequence[Tensor | None], *, clients: bool = False) -> Array | Tensor:
    """Return `[layers, 9]`: the columns `stats.STATISTICS` of every tensor, in float64; None gives the row of an empty
    one.

    The count is over all values, the other statistics over the finite ones. With `clients` every tensor has a leading
    client axis and the result is `[clients, layers, 9]`. CPU tensors give a numpy array; tensors on another device give
    a tensor there, without synchronising. Complex numbers count as two real ones. Of a sharded tensor the shard of
    this process is measured.
    """
    tensors = [None if tensor is None else layout.local(tensor) for tensor in tensors]
    count = _clients(tensors) if clients else None
    kernel = jit.load_kernel().kernel
    if kernel is not None and tensors:
        rows = _call(kernel, tensors) if count is None else _call_clients(kernel, tensors, count)
        if rows is not None:
            return rows
    result = device_sums.sums(tensors, count)
    if result is None:
        result = fallback.sums(tensors, count)
    return result.numpy() if result.is_cpu else result


def sums_of_parts(values: Tensor, sizes: tuple[int, ...]) -> Array | Tensor:
    """Return the sums of a contiguous vector's parts, which have these sizes, as `[parts, 9]` like `sums`.

    For a matrix with such a vector in each row, return `[rows, parts, 9]`.
    """
    rows: Array | Tensor | None
    if values.is_cuda:
        rows = device_sums.sums_of_parts(values, sizes)
    else:
        rows = _call_parts(values, sizes) if values.is_cpu and values.is_contiguous() else None
    return sums(values.split(sizes, dim=-1), clients=values.dim() > 1) if rows is None else rows


def _call_parts(values: Tensor, sizes: tuple[int, ...]) -> Array | None:
    """Return the rows by one call of the kernel; None if it does not support these values. No part becomes a tensor."""
    kernel = jit.load_kernel().kernel
    function = None if kernel is None else kernel.functions.get(values.dtype)
    rows = math.prod(values.shape[:-1])
    if kernel is None or function is None or not sizes or not rows:
        return None
    table = np.empty((rows, len(sizes), 3), np.int64)
    table[..., 0] = function
    table[..., 1] = np.arange(rows)[:, None] * values.shape[-1] + _starts(sizes)
    table[..., 1] *= values.element_size()
    table[..., 1] += values.data_ptr()
    table[..., 2] = sizes
    return _fill(kernel, table.tobytes(), rows * len(sizes)).reshape(*values.shape[:-1], len(sizes), _COLUMNS)


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.cumsum((0, *sizes[:-1]), dtype=np.int64)


def _call(kernel: jit.Kernel, tensors: Sequence[Tensor | None]) -> Array | None:
    """Return the rows by one call of the kernel, or None if a tensor is on another device.

    This runs at every training step, and for a small model the overhead per tensor costs more than the reading. The
    addresses are read each time: torch frees gradients between steps and allocates them elsewhere.
    """
    functions = kernel.functions
    table: list[int] = []
    alive = []  # copies must outlive the call
    try:
        for tensor in tensors:
            if tensor is None:
                table += kernel.nothing
                continue
            if not tensor.is_cpu:
                return None
            values = tensor
            function = functions.get(tensor.dtype)
            if function is None or not tensor.is_contiguous():
                values = layout.flat(tensor, functions)
                alive.append(values)
                function = functions[values.dtype]
            table += (function, values.data_ptr(), values.numel())
    except RuntimeError:  # torch refuses the question for some layouts: raise a clearer error
        for tensor in tensors:
            if tensor is not None:
                layout.readable(tensor)
        raise
    return _rows(kernel, table).reshape(-1, _COLUMNS)


def _call_clients(kernel: jit.Kernel, tensors: Sequence[Tensor | None], clients: int) -> Array | None:
    """Like `_call`, with a table row for every client's part of every tensor."""
    if not clients:
        return empty_sums(0, len(tensors))
    lines: list[tuple[int, int, int, int]] = []
    alive = []
    for tensor in tensors:
        if tensor is None:
            lines.append((*kernel.nothing, 0))
            continue
        if not tensor.is_cpu:
            return None
        values = layout.flat(tensor, kernel.functions, clients=True)
        alive.append(values)
        stride = values.stride(0) * values.element_size()
        lines.append((kernel.functions[values.dtype], values.data_ptr(), values.numel() // clients, stride))
    table = [
        number
        for client in range(clients)
        for function, address, length, stride in lines
        for number in (function, address + client * stride, length)
    ]
    return _rows(kernel, table).reshape(clients, -1, _COLUMNS)


def _rows(kernel: jit.Kernel, table: list[int]) -> Array:
    """Return the rows of a table, which has three numbers per row: function, address, length."""
    return _fill(kernel, struct.pack(f"{len(table)}q", *table), len(table) // 3)


def _fill(kernel: jit.Kernel, table: bytes, count: int) -> Array:
    # ctypes passes its own arrays faster than numpy's; numpy then views the same memory.
    memory: Any = (ctypes.c_double * (count * _COLUMNS))()
    kernel.call(table, count, memory)
    rows: Array = np.frombuffer(memory)
    return rows


def _clients(tensors: Sequence[Tensor | None]) -> int:
    """Return the length of the leading axis, which all tensors must share; 0 if there is no tensor."""
    lengths = {tuple(tensor.shape[:1]) for tensor in tensors if tensor is not None}
    if len(lengths) > 1 or () in lengths:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors if tensor is not None)
        raise RecordError(
            f"Tensors of several clients could not be measured: the first axis differs among the shapes {shapes}. "
            "Stack every layer as [clients, ...], with the same clients in each."
        )
    return next(iter(lengths))[0] if lengths else 0
