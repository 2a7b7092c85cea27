# SPDX-License-Identifier: Apache-2.0
"""Inner products of updates by layer, piece by piece.

A piece of all updates stays in the processor's cache while it is multiplied, and its products are written into memory
that is reused for the next piece and the next round. Nothing as long as an update is allocated: where a server returns
its free memory to the system after each round (NVFlare does), new pages cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import sums_of_parts
from fedvitals.probes.snapshot import pieces_of
from fedvitals.stats import SUM, Array

PIECE = 1 << 18  # numbers of all updates processed at a time
SHORTEST = 1 << 13  # of each update: with fewer, the calls cost more than the arithmetic
KEPT = 4 << 20  # maximum numbers that a workspace keeps for one use
PIECE_AWAY = 1 << 28  # on a device: there is no cache to fit, and each call has its cost


class Workspace:
    """Memory for pieces of updates, kept between rounds unless it is large or on a device, which the training needs."""

    def __init__(self) -> None:
        self._vectors: dict[str, Tensor] = {}

    def rows(self, use: str, like: Tensor, height: int, width: int) -> Tensor:
        """Return [height, width] of the type and device of `like`, uninitialised; one for each `use` at a time."""
        vector, size = self._vectors.get(use), height * width
        if vector is None or vector.numel() < size or vector.dtype != like.dtype or not like.is_cpu:
            vector = like.new_empty(size)
            if like.is_cpu and size <= KEPT:
                self._vectors[use] = vector
        return vector[:size].view(height, width)


class UpdateRows:
    """Updates of equal length as the rows of a matrix, without a copy if they are contiguous in memory."""

    def __init__(self, vectors: Sequence[Tensor], workspace: Workspace, use: str) -> None:
        """`use`: of the workspace, for a range that must be copied."""
        self._vectors, self.matrix = vectors, as_matrix(vectors)
        self._workspace, self._use = workspace, use

    def at(self, place: slice) -> Tensor:
        """Return a range of coordinates of all updates, [updates, ...], valid until the next call."""
        if self.matrix is not None:
            return self.matrix[:, place]
        parts = [vector[place] for vector in self._vectors]
        return torch.stack(parts, out=self._workspace.rows(self._use, parts[0], len(parts), len(parts[0])))


def piece_length(vectors: Sequence[Tensor]) -> int:
    """Return how many coordinates of these updates are processed at a time."""
    return max(SHORTEST, PIECE // len(vectors)) if vectors[0].is_cpu else max(1024, PIECE_AWAY // len(vectors))


def products_by_layer(
    vectors: Sequence[Tensor],
    sizes: Sequence[int],
    before: Sequence[Tensor] = (),
    places: Sequence[int] = (),
    workspace: Workspace | None = None,
) -> tuple[Array, Array, Array]:
    """Return, by layer: each update times the sum of all, that sum times itself, and some updates times earlier ones.

    These are [updates, layers], [layers] and [earlier, layers]. `before`: the earlier vectors; `places`: the index of
    the update that each is multiplied with.
    """
    workspace = workspace or Workspace()
    rows = UpdateRows(vectors, workspace, "updates")
    earlier = UpdateRows(before, workspace, "earlier updates") if before else None
    chosen = slice(None) if len(places) == len(vectors) else [*places]
    count, height = len(vectors), len(vectors) + 1 + len(before)
    products = np.zeros((height, len(sizes)))
    for piece in pieces_of(tuple(sizes), piece_length(vectors)):
        place = slice(piece.start, piece.stop)
        own, of_piece = rows.at(place), workspace.rows("products", vectors[0], height, piece.stop - piece.start)
        total = torch.sum(own, 0, out=of_piece[count])
        torch.mul(own, total, out=of_piece[:count])
        if earlier is not None:
            torch.mul(own[chosen], earlier.at(place), out=of_piece[count + 1 :])
        total.square_()
        sums = np.asarray(torch.as_tensor(sums_of_parts(of_piece, piece.sizes)).cpu())[..., SUM]
        products[:, [layer for layer, _, _ in piece.parts]] += sums
    return products[:count], products[count], products[count + 1 :]


def as_matrix(vectors: Sequence[Tensor]) -> Tensor | None:
    """Return the vectors as [clients, D] without a copy if they are the rows of one matrix, else None."""
    first, last, size = vectors[0], vectors[-1], vectors[0].numel()
    address, length = first.data_ptr(), size * first.element_size()
    for v in vectors:
        if v.data_ptr() != address or v.shape != first.shape or v.dtype != first.dtype or not v.is_contiguous():
            return None
        address += length
    # Memory between two parts of one allocation is part of it, too.
    if first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return None
    return first.as_strided((len(vectors), size), (size, 1))
