# SPDX-License-Identifier: Apache-2.0
"""The columns of the family `update.peers`, for both modules that compute it: `peers` (torch) and `numpy_peers`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedvitals.records import LayerTable
from fedvitals.stats import PEER_COLUMNS, SUM_MAGNITUDES, SUM_SQUARES, Array

COSINE, FIRST, HEAD, STEP, BACK, NEAREST, SIGNS, CLASSES, CLASSES_MIN, CLASS_ENTROPY, BIAS, SPREAD = range(
    len(PEER_COLUMNS)
)
ROUNDS_BACK = 5
MOST_CLIENTS = 1 << 16  # whose previous update is kept (a sketch is 2 KB); those absent longest are forgotten first
MOST_SIGNS = 65_536  # coordinates whose signs are compared
RUN_OF_SIGNS = 64  # neighbouring values read together: reading one costs as much as reading all of them
SIGNS_TOGETHER = 8 << 20  # of all clients; with many clients, fewer of each


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """One layer of a flat update: its index, its slice, and its number of rows as a matrix."""

    layer: int
    place: slice
    rows: int


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """The layers compared separately; None if a model has no such layer, or it is unknown."""

    first: LayerSlice | None = None  # the first and the last weight of two or more dimensions
    head: LayerSlice | None = None
    bias: LayerSlice | None = None  # of the head
    dense: LayerSlice | None = None  # the first two-dimensional weight other than a token embedding


def layout_of(table: LayerTable) -> PeerLayout:
    """Return where the first weight, the head and its bias are in a model with these parameters."""
    shapes = [layer.shape for layer in table.layers]
    sizes = [math.prod(shape) for shape in shapes]
    ends = np.cumsum(sizes, dtype=int).tolist()

    def piece(layer: int) -> LayerSlice:
        return LayerSlice(layer, slice(ends[layer] - sizes[layer], ends[layer]), shapes[layer][0])

    weights = [i for i, shape in enumerate(shapes) if len(shape) >= 2 and sizes[i]]
    if not weights:
        return PeerLayout()
    head = weights[-1]
    biased = head + 1 < len(shapes) and shapes[head + 1] == shapes[head][:1]
    dense = next((i for i in weights if len(shapes[i]) == 2 and "embed" not in table.layers[i].name.lower()), None)
    bias = piece(head + 1) if biased else None
    return PeerLayout(piece(weights[0]), piece(head), bias, None if dense is None else piece(dense))


def spread_rows(sums: Array) -> Array:
    """Return the rows of clients with only the nine sums: NaN, and how evenly their updates are spread."""
    rows = np.full((len(sums), len(PEER_COLUMNS)), np.nan)
    count, squares, magnitudes = (sums[..., i].sum(axis=1) for i in (0, SUM_SQUARES, SUM_MAGNITUDES))
    with np.errstate(divide="ignore", invalid="ignore"):
        rows[:, SPREAD] = np.where(squares > 0, magnitudes / np.sqrt(squares * count), np.nan)
    return rows


def sign_stride(clients: int, length: int) -> int:
    """Return n such that one in n runs of neighbouring signs is compared, to limit their number."""
    most = min(MOST_SIGNS, max(RUN_OF_SIGNS, SIGNS_TOGETHER // clients))
    return 1 if length <= most else math.ceil(length / RUN_OF_SIGNS / (most // RUN_OF_SIGNS))
