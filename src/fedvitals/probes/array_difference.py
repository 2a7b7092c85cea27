# SPDX-License-Identifier: Apache-2.0
"""The difference between two models of NumPy arrays, measured piece by piece.

The layers are treated as one long vector, of which a piece is subtracted, summed and sketched while it is in the cache.
So each model is read once, and a difference that is not kept is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedvitals.kernels import count_sketch, sums
from fedvitals.kernels.sketch import SIZE
from fedvitals.probes.snapshot import PIECE, pieces_of
from fedvitals.probes.view import FlatTensors
from fedvitals.stats import Array, empty_sums, merge_sums

Values = npt.NDArray[Any]


class ArrayDifference:
    """What was added to the arrays `before` to get `after`; if `before` is None, `after` itself.

    Both have equal shapes. The arrays must not change while this is in use. `room` returns the vector for the whole.
    """

    def __init__(
        self, before: Sequence[Values] | None, after: Sequence[Values], room: Callable[..., Values] = np.empty
    ) -> None:
        self._room = room
        self._after = [array.reshape(-1) for array in after]
        self._before = None if before is None else [array.reshape(-1) for array in before]
        self._shapes = [array.shape for array in after]
        double = any(array.dtype == np.float64 for array in after)
        self._dtype = np.dtype(np.float64 if double else np.float32)
        self.length = sum(array.size for array in after)

    @property
    def nbytes(self) -> int:
        """The bytes of the difference as one vector."""
        return self.length * self._dtype.itemsize

    def tensors(self) -> FlatTensors:
        """Return the whole difference by layer, contiguous in one vector."""
        vector = self._room(self.length, self._dtype)
        place = 0
        for layer, array in enumerate(self._after):
            self._subtract(layer, 0, array.size, vector[place : place + array.size])
            place += array.size
        return FlatTensors(torch.from_numpy(vector), self._shapes)

    def sums(self) -> Array:
        """Return the nine sums of each layer, [layers, 9]."""
        return self._measure(None)

    def measure(self) -> tuple[Array, Tensor]:
        """Return the nine sums of each layer, [layers, 9], and the sketch of the whole, [256]."""
        sketch = torch.zeros(SIZE, dtype=torch.float64)
        return self._measure(sketch), sketch

    def _measure(self, sketch: Tensor | None) -> Array:
        """Return the sums; adds the sketch to `sketch` if given."""
        rows = empty_sums(len(self._after))
        piece = np.empty(min(PIECE, self.length), self._dtype)
        for cut in pieces_of(tuple(array.size for array in self._after), PIECE):
            place, views = 0, []
            for layer, first, last in cut.parts:
                view = piece[place : place + last - first]
                self._subtract(layer, first, last, view)
                views.append(torch.from_numpy(view))
                place += last - first
            for (layer, _, _), row in zip(cut.parts, np.asarray(sums(views)), strict=True):
                rows[layer] = merge_sums(np.stack([rows[layer], row]))
            if sketch is not None:
                sketch += count_sketch(torch.from_numpy(piece[:place]), cut.start)
        return rows

    def _subtract(self, layer: int, first: int, last: int, out: Values) -> None:
        after = self._after[layer][first:last]
        if self._before is None:
            np.copyto(out, after, casting="same_kind")
        else:
            np.subtract(after, self._before[layer][first:last], out=out, casting="same_kind")
