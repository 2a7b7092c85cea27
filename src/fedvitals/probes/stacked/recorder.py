# SPDX-License-Identifier: Apache-2.0
"""Records the nine sums of stacked clients' gradients, and their histograms, at every step.

For a hundred clients of a small model the kernel's table has hundreds of addresses. It is created once, and only
shifted if the matrix has moved since the step before. On a device the sums stay there until the end.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import sums
from fedvitals.kernels.cpu import jit
from fedvitals.kernels.cuda.sums import MatrixSums, upload
from fedvitals.kernels.exponents import count_values
from fedvitals.stats import EXPONENTS, LOWEST_EXPONENT, STATISTICS, Array

_COLUMNS = len(STATISTICS)
_TOGETHER = 1 << 22  # values on a device that wait to be counted; as many as are counted in one go
_FIRST_BLOCK_STEPS = 32  # steps that the first block of memory holds; each further one is as large as all before

# IEEE 754 in 32 bits: a sign, 8 bits of exponent, 23 of mantissa
_FIELDS, _MANTISSA, _BIAS, _MAGNITUDE = 256, 23, 127, 0x7FFFFFFF


class StackRecorder:
    """Call `record(step, gradients)` before each optimiser step and `take()` at the end. `keep=False`: only the last
    step.

    `sizes` are the numbers of values of the layers; one that is not `trained` is measured as absent.
    """

    def __init__(self, clients: int, sizes: Sequence[int], trained: Sequence[bool], *, keep: bool = True) -> None:
        self._clients, self._sizes, self._trained, self._keep = clients, [*sizes], [*trained], keep
        self.steps: list[int] = []
        self._blocks: list[Array] = []
        self._free = 0
        self._odd: dict[int, Array | Tensor] = {}  # by place: steps that went the general way
        self._waiting: dict[int, Tensor] = {}  # by place: steps that are kept on a device, to be counted together
        self._on_device: MatrixSums | None = None
        self._kernel = jit.load_kernel().kernel
        self._address: tuple[int, int] | None = None  # of the matrix behind the table: address, and row length
        self._table = np.zeros((clients, len(self._sizes), 3), np.int64)
        self._call = array.array("q", [self._table.ctypes.data, clients * len(self._sizes), 0])
        self._arguments = self._call.buffer_info()[0]

    def record(self, step: int, gradients: Tensor) -> None:
        """Measure the gradients, [clients, weights], as they are now."""
        if not self._keep:
            self.steps.clear()
            self._odd.clear()
            self._waiting.clear()
            self._blocks.clear()
            self._free = 0
        if not self._free:
            self._allocate_block()
        if self._point_at(gradients) and self._kernel is not None:
            place = len(self._blocks[-1]) - self._free
            self._call[2] = self._blocks[-1][place].ctypes.data
            self._kernel.call_at(self._arguments)
        elif gradients.is_cpu:
            self._odd[len(self.steps)] = sums(self._layers(gradients), clients=True)
        else:
            self._defer(gradients)
        self._free -= 1
        self.steps.append(step)

    def take(self) -> Array:
        """Return [steps, clients, layers, 9] on the host; the only synchronisation with a device."""
        self._count()
        rows = np.concatenate(self._blocks)[: len(self.steps)] if self._blocks else self._new_block(0)
        on_device = {place: odd for place, odd in self._odd.items() if isinstance(odd, Tensor)}
        if on_device:
            rows[[*on_device]] = torch.stack([*on_device.values()]).cpu().numpy()
        for place, odd in self._odd.items():
            if not isinstance(odd, Tensor):
                rows[place] = odd
        return rows

    def _defer(self, gradients: Tensor) -> None:
        """Measure on a device: immediately by our kernel; without it, keep a copy and measure several steps
        together.
        """
        if gradients.is_cuda and self._on_device is None:
            self._on_device = MatrixSums(self._sizes, self._trained, self._clients, gradients.device)
        if self._on_device is not None and self._on_device.supports(gradients):
            shape = (self._clients, len(self._sizes), _COLUMNS)
            rows = self._odd[len(self.steps)] = torch.empty(shape, dtype=torch.float64, device=gradients.device)
            self._on_device.measure(gradients, rows)
            return
        self._waiting[len(self.steps)] = gradients.clone()
        if len(self._waiting) * gradients.numel() >= _TOGETHER:
            self._count()

    def _count(self) -> None:
        if self._waiting:
            stacked = torch.cat([*self._waiting.values()])
            rows = torch.as_tensor(sums(self._layers(stacked), clients=True))
            self._odd.update(zip(self._waiting, rows.split(self._clients), strict=True))
            self._waiting.clear()

    def _layers(self, gradients: Tensor) -> list[Tensor | None]:
        parts = gradients.split(self._sizes, dim=1)
        return [part if trained else None for part, trained in zip(parts, self._trained, strict=True)]

    def _point_at(self, gradients: Tensor) -> bool:
        """Point the table into this matrix; returns False if the kernel cannot read it directly."""
        if self._kernel is None or not gradients.is_cpu or gradients.dtype is not torch.float32:
            return False
        if gradients.stride(1) != 1 and gradients.shape[1] > 1:
            return False
        here = (gradients.data_ptr(), gradients.stride(0) * gradients.element_size())
        if here != self._address:
            lengths = np.where(self._trained, self._sizes, 0)
            starts = np.cumsum([0, *self._sizes[:-1]]) * gradients.element_size()
            self._table[..., 0] = self._kernel.functions[torch.float32]
            self._table[..., 1] = here[0] + here[1] * np.arange(self._clients)[:, None] + starts
            self._table[..., 2] = lengths
            self._address = here
        return True

    def _new_block(self, steps: int) -> Array:
        return np.empty((steps, self._clients, len(self._sizes), _COLUMNS))

    def _allocate_block(self) -> None:
        self._free = max(_FIRST_BLOCK_STEPS, len(self.steps)) if self._keep else 1
        self._blocks.append(self._new_block(self._free))


class HostSums:
    """Replaces a `StackRecorder` where the host records itself: `sums` returns [steps, clients, layers, 9].

    Nothing is measured at a step; only the wanted steps are noted, if not all.
    """

    def __init__(self, sums: Callable[[], Any], *, every: bool) -> None:
        self._sums, self._every = sums, every
        self._noted: list[int] = []
        self._rows: Array | None = None

    @property
    def steps(self) -> list[int]:
        count = len(self._sums() if self._rows is None else self._rows)
        return [*range(count)] if self._every else [step for step in self._noted if step < count]

    def record(self, step: int, gradients: Tensor) -> None:  # noqa: ARG002 - as its like
        self._rows = None
        if not self._every:
            self._noted.append(step)

    def take(self) -> Array:
        rows = self._to_host()
        return rows if self._every else rows[self.steps]

    def _to_host(self) -> Array:
        """Return the rows, copied from the device on first use."""
        if self._rows is None:
            self._rows = np.asarray(torch.as_tensor(self._sums()).detach().cpu(), dtype=np.float64)
        return self._rows


class StackHistogram:
    """The number of gradient values in each octave, by sign: [clients, layers, 128], summed over all steps."""

    def __init__(self, clients: int, sizes: Sequence[int], trained: Sequence[bool]) -> None:
        self._shape = (clients, len(sizes))
        self._trained = torch.tensor(trained)
        self._layer = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self._first: Tensor | None = None
        self._counts: Tensor | None = None

    def record(self, gradients: Tensor) -> None:
        patterns = gradients.float().contiguous().view(torch.int32)
        head = (patterns >> _MANTISSA) & (2 * _FIELDS - 1)
        # Zeros share a field with the smallest numbers: they are counted with NaN and infinity, which is left out.
        head = head.where(patterns & _MAGNITUDE != 0, _FIELDS - 1)
        counts = count_values((head + self._begin(head.device)).view(-1), self._shape[0] * self._shape[1] * 2 * _FIELDS)
        self._counts = counts if self._counts is None else self._counts + counts

    def _begin(self, device: torch.device) -> Tensor:
        """Return [clients, weights]: the offset of the counts of each value's layer."""
        if self._first is None or self._first.device != device:
            clients, layers = self._shape
            client = torch.arange(clients, device=device)[:, None] * layers
            self._first = (client + upload(self._layer, device)) * (2 * _FIELDS)
        return self._first

    def take(self) -> Array | None:
        if self._counts is None:
            return None
        counts = self._counts.cpu().double().view(*self._shape, 2, _FIELDS)
        counts[:, ~self._trained] = 0
        places = (torch.arange(_FIELDS - 1) - _BIAS - LOWEST_EXPONENT).clamp(0, EXPONENTS - 1)
        folded = torch.zeros(*self._shape, 2, EXPONENTS, dtype=torch.float64)
        folded.index_add_(3, places, counts[..., :-1])
        return np.asarray(folded.flip(2).flatten(2))  # the sign bit is 1 for negative numbers, whose bins come first
