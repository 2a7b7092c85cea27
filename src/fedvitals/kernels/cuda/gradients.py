# SPDX-License-Identifier: Apache-2.0
"""Records the nine sums of a user's gradients on a GPU at every step without synchronising, for `GradientRecorder`.

Gradients move: torch frees them between steps and allocates them elsewhere. Their addresses are therefore collected at
every step in pinned memory of the host, from where the kernel reads them. A step starts one kernel, which leaves
partial sums; one more for many steps makes rows of them. The rows stay on the device until they are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedvitals.kernels import layout
from fedvitals.kernels.cuda import loading
from fedvitals.kernels.cuda.sums import (
    DTYPES,
    TUNING,
    combine,
    launch_partials,
    list_partition,
    partials_for,
    stream_of,
)
from fedvitals.stats import STATISTICS

_COLUMNS = len(STATISTICS)
_STEPS_PER_BLOCK = 64  # steps that a block of memory holds, at most
_BLOCK_BYTES = 16 << 20  # of partial sums


def for_parameters(parameters: Sequence[Tensor | None]) -> DeviceGradients | None:
    """Return a recorder for these parameters, or None if they are not on one GPU that our kernels support."""
    present = [p for p in parameters if p is not None]
    if not present or not all(p.is_cuda and p.device == present[0].device and p.dtype in DTYPES for p in present):
        return None
    if any(layout.local(p) is not p for p in present):
        return None  # sharded: their gradients have no address
    if torch.cuda.is_current_stream_capturing() or loading.load_kernels().kernels is None:
        return None
    return DeviceGradients(parameters, present[0].device)


class DeviceGradients:
    """Records the gradients of a model's parameters on one GPU; call `record()` before each optimiser step."""

    def __init__(self, parameters: Sequence[Tensor | None], device: torch.device) -> None:
        self._device = device
        self._known = [(p, None, 0) if p is None else (p, p.dtype, p.numel()) for p in parameters]
        self._lengths = tuple(length for _, _, length in self._known)
        self._kinds = tuple(dtype or torch.float32 for _, dtype, _ in self._known)
        self._kernels = loading.load_kernels().kernels
        self._pinned: Tensor | None = None  # the block that is being filled
        self._stream: int | None = None
        self._addresses: list[int] = []  # of the step before
        self._waiting = self._done = 0  # steps in the block, and how many of them have rows
        self._places: list[Tensor] = []  # free ones, of a block of pinned memory
        self._read: deque[tuple[Tensor, Any]] = deque()  # full blocks, each with the event after which it is free

    def record(self) -> Tensor | None:
        """Return the rows [layers, 9] that the device will fill, or None if each tensor must be measured separately."""
        addresses = self._gather()
        if addresses is None or torch.cuda.is_current_stream_capturing():
            return None  # a graph would replay with the addresses of today
        stream = stream_of(self._device)
        if stream != self._stream:
            self.finish()
            self._stream = stream
            self._cut = list_partition(self._lengths, self._kinds, 1, self._device, stream, TUNING)
            self._addresses = []
            self._begin_block()
        elif self._waiting == len(self._partials):
            self.finish()
            self._begin_block()
        if addresses != self._addresses:  # torch mostly gives gradients the memory that they had at the step before
            self._addresses = addresses
            self._pointers = self._written(addresses)
        step = self._waiting
        launch_partials(self._kernels, self._cut, self._pointers, None, self._partials[step])
        self._waiting += 1
        return self._rows[step]

    def _gather(self) -> list[int] | None:
        """Return where the gradients lie now, 0 for a layer without; None unless all can be read as expected.

        This runs at every step for every layer. What could make the kernel read beyond a gradient is asked each time: a
        user may move, resize or convert a layer between two steps.
        """
        index, addresses = self._device.index, []
        for parameter, dtype, length in self._known:
            if parameter is None:
                addresses.append(0)
                continue
            gradient = parameter.grad
            if (
                gradient is None
                or gradient.dtype is not dtype
                or gradient.numel() != length
                or gradient.get_device() != index
            ):
                return None
            if not gradient.is_contiguous() and (gradient.layout is not torch.strided or not layout.is_dense(gradient)):
                return None
            addresses.append(gradient.data_ptr())
        return addresses

    def finish(self) -> None:
        """Start what fills the rows of all steps recorded so far."""
        first, last = self._done, self._waiting
        if last > first:
            self._done = last
            combine(self._kernels, self._cut, self._partials[first], self._rows[first], steps=last - first)

    def _written(self, addresses: list[int]) -> Tensor:
        """Return the addresses in pinned memory, which the kernel reads. Each step has its own: nothing waits."""
        if not self._places:
            self._places = [*self._free_block(len(addresses))]
        place = self._places.pop()
        place.numpy()[:] = addresses
        return place

    def _free_block(self, count: int) -> Tensor:
        """Return pinned memory for the addresses of many steps: a block that has been read, or a new one."""
        pinned = self._device.type == "cuda"
        if pinned and self._pinned is not None:
            read = torch.cuda.Event()
            read.record()
            self._read.append((self._pinned, read))
        if self._read and self._read[0][1].query():
            self._pinned = self._read.popleft()[0]
        else:
            self._pinned = torch.empty(_STEPS_PER_BLOCK, count, dtype=torch.int64, pin_memory=pinned)
        return self._pinned

    def _begin_block(self) -> None:
        each = partials_for(self._cut, torch.device("meta")).nbytes
        steps = max(1, min(_STEPS_PER_BLOCK, _BLOCK_BYTES // each))
        self._partials = partials_for(self._cut, self._device, steps)
        self._rows = torch.empty(steps, len(self._known), _COLUMNS, dtype=torch.float64, device=self._device)
        self._waiting = self._done = 0
