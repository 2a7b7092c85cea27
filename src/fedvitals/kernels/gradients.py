# SPDX-License-Identifier: Apache-2.0
"""The nine sums of the same parameters' gradients, step after step: `sums` with everything prepared that stays.

For a small model the reading of memory is nothing and the asking is all. The table for the kernel and the memory for
its results are made once. Address, type, length and layout of a gradient are asked at every step: torch frees gradients
between steps and allocates them elsewhere, and a user may replace a parameter's data at any time.
"""

from __future__ import annotations

import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedvitals.kernels import jit
from fedvitals.kernels.one_pass import sums
from fedvitals.stats import STATISTICS, Array

_COLUMNS = len(STATISTICS)
_ROOM = 32  # results per block of memory: blocks are not reused, since results are views of them


class GradientSums:
    """Call it: `[layers, 9]` of the gradients as they are now. One thread at a time."""

    def __init__(self, parameters: Sequence[Tensor | None]) -> None:
        self._parameters = parameters
        kernel = jit.loaded().kernel
        plain = all(p is not None and p.is_cpu for p in parameters)
        self._kernel = kernel if plain and parameters else None
        if self._kernel is None:
            return
        dtypes = [p.dtype for p in parameters if p is not None]
        lengths = [p.numel() for p in parameters if p is not None]
        if any(dtype not in self._kernel.functions for dtype in dtypes):
            self._kernel = None
            return
        places = range(1, 3 * len(parameters), 3)
        self._known = list(zip(parameters, dtypes, lengths, places, strict=True))
        lines = [(self._kernel.functions[d], 0, n) for d, n in zip(dtypes, lengths, strict=True)]
        self._table = array.array("q", [number for line in lines for number in line])
        self._table_address = self._table.buffer_info()[0]
        self._free = 0

    def __call__(self) -> Array | Tensor:
        kernel = self._kernel
        if kernel is None:
            return self._anyhow()
        table = self._table
        for parameter, dtype, length, place in self._known:
            gradient = parameter.grad  # type: ignore[union-attr]
            if gradient is None or gradient.dtype is not dtype or gradient.numel() != length:
                return self._anyhow()
            if not gradient.is_contiguous():
                return self._anyhow()
            table[place] = gradient.data_ptr()
        if not self._free:
            self._block = np.empty((_ROOM, len(self._known), _COLUMNS))
            self._address, self._free = self._block.ctypes.data, _ROOM
        self._free -= 1
        row: Array = self._block[self._free]
        kernel.call(self._table_address, len(self._known), self._address + self._free * row.nbytes)
        return row

    def _anyhow(self) -> Array | Tensor:
        """Another device, a missing gradient, an unusual layout: the general way, which looks at each tensor."""
        return sums([None if p is None else p.grad for p in self._parameters])
