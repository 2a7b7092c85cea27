# SPDX-License-Identifier: Apache-2.0
"""256 numbers that stand for an update of any size: angles and distances between updates survive.

Each coordinate gets a random sign and falls into one of 256 buckets (a count sketch): E⟨s(a), s(b)⟩ = ⟨a, b⟩, and the
standard error of a cosine is about 1/16. Signs come from a stream of their own with a fixed seed, so that sketches of
different runs can be compared and the user's random numbers are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIZE = 256
COSINE_ERROR = SIZE**-0.5
# One more than the size, and prime: no layer's width lines up with the buckets, whatever its columns hold.
_FOLD = 257
_CHUNK = _FOLD * 16384  # about 4 M values: the signs are made piece by piece, never for a whole large model
_AT_ONCE = _FOLD * 1024  # values of a large vector: a megabyte that stays in the cache, not new memory each time


class Sketcher:
    """Sketches vectors, or rows of a matrix, along their last axis; keeps the signs when they are few."""

    def __init__(self) -> None:
        self._signs: dict[tuple[int, int, str], Tensor] = {}

    def __call__(self, vectors: Tensor) -> Tensor:
        """[..., D] → [..., 256], in float64."""
        total = torch.zeros(*vectors.shape[:-1], _FOLD, dtype=torch.float64, device=vectors.device)
        for piece, values in enumerate(vectors.split(_CHUNK, dim=-1)):
            length = values.shape[-1]
            signs = self._signs_of(piece, length, vectors.device)
            whole = length // _FOLD * _FOLD
            if vectors.dim() == 1 and whole > _AT_ONCE:
                self._add_large(total, values[:whole], signs[:whole])
                total[: length - whole] += values[whole:] * signs[whole:]
                continue
            signed = values * signs
            total += signed[..., :whole].unflatten(-1, (-1, _FOLD)).sum(-2) if whole else 0
            total[..., : length - whole] += signed[..., whole:]
        total[..., 0] += total[..., SIZE]
        return total[..., :SIZE]

    def _add_large(self, total: Tensor, values: Tensor, signs: Tensor) -> None:
        scratch = values.new_empty(_AT_ONCE)
        for part, own in zip(values.split(_AT_ONCE), signs.split(_AT_ONCE), strict=True):
            total += torch.mul(part, own, out=scratch[: len(part)]).view(-1, _FOLD).sum(0)

    def _signs_of(self, piece: int, length: int, device: torch.device) -> Tensor:
        key = (piece, length, str(device))
        if key not in self._signs:
            if len(self._signs) >= 8:
                self._signs.clear()
            stream = torch.Generator().manual_seed(0x5EED + piece)
            bits = torch.randint(0, 2, (length,), generator=stream, dtype=torch.int8)
            self._signs[key] = (bits * 2 - 1).float().to(device)
        return self._signs[key]
