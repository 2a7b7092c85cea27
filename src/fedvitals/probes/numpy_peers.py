# SPDX-License-Identifier: Apache-2.0
"""How one client's update compares with those of the same round, by NumPy: the numbers of `probes.peers`.

Everything derives from the products of every update with every other, as a whole and for the layers compared
separately. They are computed piece by piece in float64, so that no copy of all updates is needed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.probes.peer_columns import (
    BACK,
    BIAS,
    CLASS_ENTROPY,
    CLASSES,
    CLASSES_MIN,
    COSINE,
    FIRST,
    HEAD,
    NEAREST,
    ROUNDS_BACK,
    RUN_OF_SIGNS,
    SIGNS,
    STEP,
    LayerSlice,
    PeerLayout,
    sign_stride,
    spread_rows,
)
from fedvitals.stats import SUM_SQUARES, Array

Values = npt.NDArray[Any]
NUMBERS_AT_ONCE = 1 << 20  # of all updates, as float64
NOTHING = 1e-10  # square below which the others cancel out, so that there is no direction to compare with


class PastArrayModels:
    """The global models with which the last rounds began, if they fit into `memory` bytes."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._past: deque[tuple[int, Values]] = deque(maxlen=ROUNDS_BACK + 1)

    def add(self, number: int, parameters: Sequence[Values]) -> None:
        """Add the model that a round begins with. If a round begins again, its last model counts."""
        if (ROUNDS_BACK + 1) * sum(values.nbytes for values in parameters) > self._memory or not parameters:
            self._past.clear()
            return
        if self._past and self._past[-1][0] == number:
            self._past.pop()
        self._past.append((number, np.concatenate([np.asarray(values).reshape(-1) for values in parameters])))

    def backwards(self, size: int) -> Array | None:
        """Return [k, size]: the differences from the newest model to the earlier ones, newest first; None if none."""
        if len(self._past) < 2 or any(model.size != size for _, model in self._past):
            return None
        *past, now = (model.astype(np.float64) for _, model in self._past)
        return np.stack(past[::-1]) - now

    def steps_back(self, sizes: Sequence[int]) -> dict[int, Array]:
        """Return, by rounds ago, each layer's sum of the earlier model minus the newest; {} for other layer sizes."""
        if len(self._past) < 2 or any(model.size != sum(sizes) for _, model in self._past):
            return {}
        *past, (number, now) = ((number, model.astype(np.float64)) for number, model in self._past)
        ends = np.cumsum(sizes)[:-1]
        return {
            number - earlier: np.array([part.sum() for part in np.split(model - now, ends)])
            for earlier, model in reversed(past)
        }


def peer_rows(vectors: Sequence[Values], sums: Array, layout: PeerLayout, models: PastArrayModels) -> Array:
    """Return [clients, PEER_COLUMNS] of updates that are finite and of equal layout; `sums`: [clients, layers, 9].

    A client that sent only zeros has no direction: it is ignored, and its own row is NaN.
    """
    rows = spread_rows(sums)
    norms = np.sqrt(sums[..., SUM_SQUARES].sum(axis=1))
    whole = _products(vectors, slice(0, vectors[0].size))
    with np.errstate(all="ignore"):
        cosines = _cosines(whole)
        rows[:, COSINE] = _to_others(cosines)
        np.fill_diagonal(cosines, -np.inf)
        rows[:, NEAREST] = np.nanmax(np.where(np.isnan(cosines), -np.inf, cosines), axis=1)
        for column, piece in ((FIRST, layout.first), (HEAD, layout.head), (BIAS, layout.bias)):
            if piece is not None:
                rows[:, column] = _to_others(_cosines(_products(vectors, piece.place)))
        if layout.head is not None:
            rows[:, [CLASSES, CLASSES_MIN, CLASS_ENTROPY]] = _to_classes(vectors, layout.head)
        _to_models(rows, vectors, norms, models.backwards(vectors[0].size))
        rows[:, SIGNS] = _agreement(vectors)
    rows[np.isinf(rows)] = np.nan
    rows[norms == 0] = np.nan
    return rows


def _products(vectors: Sequence[Values], place: slice) -> Array:
    """Return the inner products [clients, clients] over a range of coordinates."""
    products = np.zeros((len(vectors), len(vectors)))
    width = max(1024, NUMBERS_AT_ONCE // len(vectors))
    for first in range(place.start, place.stop, width):
        piece = np.stack([vector[first : min(first + width, place.stop)] for vector in vectors]).astype(np.float64)
        products += piece @ piece.T
    return products


def _cosines(products: Array) -> Array:
    """Return the cosines [clients, clients]; NaN to and from an update of zeros."""
    norms = np.sqrt(np.diag(products))
    return np.asarray(np.clip(products / np.where(norms > 0, np.outer(norms, norms), np.nan), -1, 1))


def _to_others(cosines: Array) -> Array:
    """Return each client's cosine to the sum of the others' unit vectors."""
    known = np.nan_to_num(cosines)
    with_others = known.sum(axis=1) - np.diag(known)
    squares = known.sum() - 2 * known.sum(axis=1) + np.diag(known)
    cosines_to_others = np.where(squares > NOTHING, with_others / np.sqrt(squares), np.nan)
    return np.asarray(np.where(np.diag(known) > 0, np.clip(cosines_to_others, -1, 1), np.nan))


def _to_classes(vectors: Sequence[Values], head: LayerSlice) -> Array:
    """Return [clients, 3], comparing each row of the head (one per class) with the others' rows.

    These are the mean and smallest cosine, and the entropy of the rows.
    """
    own = np.stack([vector[head.place] for vector in vectors]).astype(np.float64).reshape(len(vectors), head.rows, -1)
    norms = np.sqrt((own**2).sum(axis=(1, 2)))
    units = own * np.where(norms > 0, 1 / norms, 0.0)[:, None, None]
    others = units.sum(axis=0) - units
    sizes = np.sqrt((own**2).sum(axis=2))
    squares = (others**2).sum(axis=2)
    cosines = (own * others).sum(axis=2) / sizes / np.sqrt(squares)
    known = (sizes > 0) & (squares > NOTHING)
    cosines = np.clip(np.where(known, cosines, np.nan), -1, 1)
    weights = np.where(known, sizes, 0.0)
    mean = np.where(known, weights * cosines, 0.0).sum(axis=1) / weights.sum(axis=1)
    moved = known & (sizes > 0.5 * sizes.mean(axis=1, keepdims=True))
    least = np.where(moved, cosines, np.inf).min(axis=1)
    entropy = np.full(len(own), np.nan)
    if head.rows > 1:
        shares = sizes**2 / (sizes**2).sum(axis=1, keepdims=True)
        entropy = -np.where(shares > 0, shares * np.log(shares), 0.0 * shares).sum(axis=1) / math.log(head.rows)
    return np.stack([mean, least, entropy], axis=1)


def _to_models(rows: Array, vectors: Sequence[Values], norms: Array, models: Array | None) -> None:
    """Set the cosines along the last step of the global model, and back to its state some rounds ago."""
    if models is None:
        return
    dots = np.stack([models @ vector.astype(np.float64) for vector in vectors], axis=1)
    lengths = np.linalg.norm(models, axis=1)[:, None]
    cosines = np.clip(np.where(lengths > 0, dots / norms / lengths, np.nan), -1, 1)
    rows[:, STEP] = -cosines[0]
    rows[:, BACK] = np.fmax.reduce(cosines, axis=0)


def _agreement(vectors: Sequence[Values]) -> Array:
    """Return the share of each client's signs that equals the sign of the sum of the others' signs, without zeros."""
    every = sign_stride(len(vectors), vectors[0].size)
    whole = vectors[0].size if every == 1 else vectors[0].size // RUN_OF_SIGNS * RUN_OF_SIGNS
    width = whole if every == 1 else RUN_OF_SIGNS
    parts = [vector[:whole].reshape(-1, max(1, width))[::every] for vector in vectors]
    signs = np.sign(np.stack([part.reshape(-1) for part in parts])).astype(np.int8)
    total = signs.sum(axis=0, dtype=np.int64)
    agreement = np.full(len(vectors), np.nan)
    for i, own in enumerate(signs):
        others = np.sign(total - own)
        counted = (own != 0) & (others != 0)
        if counted.any():
            agreement[i] = float((own == others)[counted].mean())
    return agreement
