# SPDX-License-Identifier: Apache-2.0
"""Records the nine sums of the same parameters' gradients at every step, with all preparation done once.

For a small model the overhead per tensor outweighs the reading of memory. So the kernel's table and the memory for its
results are created once, and a step leaves no Python object behind. Address, type, length and layout of a gradient are
read at every step: torch frees gradients between steps and allocates them elsewhere, and a user may replace a
parameter's data at any time.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import layout
from fedvitals.kernels.cpu import jit
from fedvitals.kernels.cuda import gradients as device_gradients
from fedvitals.kernels.one_pass import sums
from fedvitals.stats import STATISTICS, Array

_COLUMNS = len(STATISTICS)
_FIRST_BLOCK_STEPS = 32  # steps that the first block of memory holds; each further one is as large as all before


class GradientRecorder:
    """Call `record(step)` before each optimiser step and `take()` at the end, from one thread at a time."""

    __slots__ = ("_address", "_blocks", "_call", "_device", "_free", "_kernel", "_known", "_odd", "_parameters", "_row",
                 "_steps", "_table")  # fmt: skip

    def __init__(self, parameters: Sequence[Tensor | None]) -> None:
        self._parameters = parameters
        self._steps: list[int] = []
        self._odd: dict[int, Array | Tensor] = {}  # by position: steps recorded in the general way
        self._blocks: list[Array] = []
        self._free, self._row = 0, len(parameters) * _COLUMNS * 8
        kernel = jit.load_kernel().kernel
        lines: list[int] = []
        self._known: list[tuple[Tensor, torch.dtype, int, int]] = []
        for parameter in parameters:
            usable = parameter is not None and parameter.is_cpu and layout.local(parameter) is parameter
            if parameter is None or not usable or kernel is None or parameter.dtype not in kernel.functions:
                self._kernel, self._device = None, device_gradients.for_parameters(parameters)
                return
            self._known.append((parameter, parameter.dtype, parameter.numel(), len(lines) + 1))
            lines += (kernel.functions[parameter.dtype], 0, parameter.numel())
        self._kernel, self._device = kernel, None
        self._table = array.array("q", lines)
        # The kernel's arguments: the table's address, the number of tensors, the address of the results.
        self._call = array.array("q", [self._table.buffer_info()[0], len(parameters), 0])
        self._address = self._call.buffer_info()[0]

    def record(self, step: int) -> None:
        """Measure the gradients as they are now."""
        if self._kernel is None:
            return self._record_general(step)
        table = self._table
        for parameter, dtype, length, place in self._known:
            gradient = parameter.grad
            if (
                gradient is None
                or gradient.dtype is not dtype
                or gradient.numel() != length
                or not gradient.is_contiguous()
            ):
                return self._record_general(step)
            table[place] = gradient.data_ptr()
        if not self._free:
            self._allocate_block()
        self._kernel.call_at(self._address)
        self._call[2] += self._row
        self._free -= 1
        self._steps.append(step)
        return None

    def scale(self, factor: float | Tensor) -> None:
        """Correct the last step, whose gradients were `factor` times the true ones."""
        place = len(self._steps) - 1
        rows = self._odd.get(place)
        if self._device is not None:
            self._device.finish()
        if rows is None:
            rows = self._rows()[place]
        _scale(rows, factor)

    @property
    def apart(self) -> list[Tensor | Array]:
        """The rows of steps recorded in the general way, possibly on a device: for the caller to copy to the host."""
        if self._device is not None:
            self._device.finish()
        return [*self._odd.values()]

    def forget_parameters(self) -> None:
        """Keep no parameter alive: nothing more will be recorded."""
        if self._device is not None:
            self._device.finish()
        self._parameters, self._known, self._device = [None] * len(self._parameters), [], None

    def take(self, on_host: Sequence[Array] | None = None) -> tuple[list[int], Array]:
        """Return the steps, and [steps, layers, 9] on the host.

        `on_host` are the rows that are `apart`, in the same order, if the caller has copied them.
        """
        rows = self._rows()
        copied = [np.asarray(torch.as_tensor(odd).cpu()) for odd in self.apart] if on_host is None else on_host
        for place, own in zip(self._odd, copied, strict=True):
            rows[place] = own
        return self._steps, rows

    def _rows(self) -> Array:
        if len(self._blocks) > 1:
            self._blocks = [np.concatenate(self._blocks)[: len(self._steps)]]
            self._free = 0  # the next step begins a new block
        if not self._blocks:
            return np.empty((0, len(self._parameters), _COLUMNS))
        return self._blocks[0][: len(self._steps)]

    def _allocate_block(self) -> None:
        room = max(_FIRST_BLOCK_STEPS, len(self._steps))
        block = np.empty((room, len(self._parameters), _COLUMNS))
        self._blocks.append(block)
        self._free = room
        if self._kernel is not None:
            self._call[2] = block.ctypes.data

    def _record_general(self, step: int) -> None:
        """Record in the general way, tensor by tensor: another device, a missing gradient or an unusual layout."""
        rows: Array | Tensor | None = None if self._device is None else self._device.record()
        if rows is None:
            rows = sums([None if p is None else _dense(p.grad) for p in self._parameters])
        if not self._free:
            self._allocate_block()
        self._odd[len(self._steps)] = rows
        self._free -= 1
        if self._kernel is not None:
            self._call[2] += self._row
        self._steps.append(step)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return the stored values of a sparse gradient: an embedding's untouched rows are neither counted nor read."""
    if gradient is not None and gradient.is_sparse:
        return gradient.coalesce().values()
    return gradient


def _scale(rows: Any, factor: float | Tensor) -> None:
    """Divide nine sums by the factor that the values were multiplied with, and the squares by its square."""
    factor = factor if isinstance(rows, Tensor) else float(factor)
    rows[:, 1:6] /= factor
    rows[:, 2] /= factor
