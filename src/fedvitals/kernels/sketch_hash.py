# SPDX-License-Identifier: Apache-2.0
"""The definition of the count sketch: which sign and which bucket a coordinate gets, and the whole of it by torch.

Coordinates are taken in rows of 256. Each row is rotated by a random number of buckets, so that a column of a weight
matrix whose width is a multiple of 256 is spread over all buckets. Signs and rotations are hashes of the index:

    sign(i)   = top bit of mix(low(i) ^ (high(i) · HIGH_FACTOR))     low, high: the two 32-bit halves of i
    bucket(i) = (i + (mix(i // 256 ^ ROW_SEED) >> 24)) mod 256

A change of any of this needs a new VERSION: sketches of two versions are never compared.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

VERSION = 2  # version 1 drew its signs from a random stream
SIZE = 256
ROW_SEED = 0x5BD1E995
HIGH_FACTOR = 0x9E3779B9
MIX_FACTORS = (0x7FEB352D, 0x846CA68B)
_LOW = 0xFFFFFFFF
_ROWS_AT_ONCE = 2048  # rows of 256 coordinates: a few megabytes at a time


def by_torch(vectors: Tensor, start: int = 0) -> Tensor:
    """Sketch the rows of `[vectors, D]` on any device; returns `[vectors, 256]` in float64.

    `start`, a multiple of 256, is the place of the first coordinate.
    """
    exact = torch.device("cpu") if vectors.device.type == "mps" else vectors.device  # MPS has no float64
    total = torch.zeros(len(vectors), SIZE, dtype=torch.float64, device=exact)
    lane = torch.arange(SIZE, device=vectors.device)
    for place in range(0, vectors.shape[1], SIZE * _ROWS_AT_ONCE):
        values = vectors[:, place : place + SIZE * _ROWS_AT_ONCE]
        rows = -(-values.shape[1] // SIZE)
        values = functional.pad(values, (0, rows * SIZE - values.shape[1])).unflatten(1, (rows, SIZE))
        first = (start + place) // SIZE
        row = torch.arange(first, first + rows, device=vectors.device)[:, None]
        column = (lane - (_mix(row ^ ROW_SEED) >> 24)) & (SIZE - 1)  # of the coordinate that falls into each bucket
        index = row * SIZE + column
        negative = _mix((index ^ (index >> 32) * HIGH_FACTOR) & _LOW) >> 31 == 1
        chosen = values.gather(2, column.expand(len(vectors), -1, -1))
        total += torch.where(negative, -chosen, chosen).to(exact, torch.float64).sum(1)
    return total


def _mix(x: Tensor) -> Tensor:
    """Return a 32-bit hash, whose upper bits are well mixed, of an int64 tensor that holds 32-bit numbers."""
    x = (x ^ x >> 16) * MIX_FACTORS[0] & _LOW
    return (x ^ x >> 15) * MIX_FACTORS[1] & _LOW
