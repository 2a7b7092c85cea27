# SPDX-License-Identifier: Apache-2.0
"""Shared memory for the states of batches, some of which may be kept after their batch.

A tape keeps updates for a round or two. Where it does, a batch's states are written into spare rows, which belong to
the tape until it lets go of their lease: nothing is copied. Where no spare rows are left, a batch has only its slot,
which the next batch overwrites.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque

import torch
from torch import Tensor

SPARE_BYTES = 512 << 20  # at most; they take memory only once they are used


class StateLease:
    """The right to read the states of a batch. Their rows are used again once nobody holds the lease."""

    __slots__ = ("_returned", "count", "first")

    def __init__(self, first: int, count: int, returned: deque[tuple[int, int]]) -> None:
        self.first, self.count, self._returned = first, count, returned

    def __del__(self) -> None:  # on any thread; `StateSlots.lease` does the rest on its own
        self._returned.append((self.first, self.count))


class StateSlots:
    """Slots of `rows` states each, followed by spare rows for two rounds of the same number of states.

    All of them are rows of the matrix `states`, in memory that forked processes share.
    """

    def __init__(self, slots: int, rows: int, size: int) -> None:
        self._first_spare = slots * rows
        spare = min(2 * rows, SPARE_BYTES // (4 * size)) if size else 0
        count = (self._first_spare + spare) * size
        self._memory = mmap.mmap(-1, max(1, 4 * count))
        self.states = torch.frombuffer(self._memory, dtype=torch.float32, count=count).view(-1, size)
        self._width = 0  # rows of each spare lease
        self._free: list[int] = []  # the first row of each spare lease that can be had; the last was used last
        self._leased: dict[int, int] = {}  # first row and number of rows
        self._returned: deque[tuple[int, int]] = deque()

    def rows(self, first: int, count: int) -> Tensor:
        """Return so many states, [count, size]."""
        return self.states[first : first + count]

    def lease(self, count: int) -> StateLease | None:
        """Return a lease of so many spare rows that follow each other; None where there are none."""
        while self._returned:
            first, width = self._returned.popleft()
            del self._leased[first]
            if width == self._width:
                self._free.append(first)
        if count != self._width:
            self._divide(count)
        if not self._free:
            return None
        first = self._free.pop()
        self._leased[first] = count
        return StateLease(first, count, self._returned)

    def _divide(self, width: int) -> None:
        """Divide the spare rows that nobody holds into leases of another width."""
        self._width, self._free = width, []
        first = self._first_spare
        for held, end in itertools.chain(sorted((f, f + n) for f, n in self._leased.items()), [(len(self.states), 0)]):
            self._free += range(first, held - width + 1, width) if width else ()
            first = end
        self._free.reverse()
