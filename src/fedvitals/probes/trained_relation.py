# SPDX-License-Identifier: Apache-2.0
"""The exact relation of a received update to the trained one, from the nine sums known of both.

Only tested if the two differ. A multiplied update has every sum of every layer multiplied accordingly; one that was
added to an old model differs by the old model minus the current one, whose sums the server knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedvitals.stats import COUNT, INFS, MAX, MIN, NANS, SUM, SUM_MAGNITUDES, SUM_SQUARES, Array

TOLERANCE = 0.01  # of a layer's size: half precision rounds each value by up to 0.4 %
SUMMED = 1e-3  # of the sum of all sizes: rounding hardly shows in it
NEGLIGIBLE = 1e-6  # share of ‖d‖² below which rounding dominates a layer's sums
EXACT = 2e-4  # of a layer's magnitude, for sums of full precision


def sum_distances(own: Array, got: Array) -> Array:
    """Return each layer's largest relative difference between two sets of nine sums, up to 1; [..., 9] → [...].

    Differences are relative to the magnitude of the values as received, since sums may cancel to nearly 0. 1 means that
    a count differs, or that the difference exceeds the whole magnitude.
    """
    counts = [COUNT, NANS, INFS]
    size = got[..., SUM_MAGNITUDES]
    largest = np.abs(np.where(np.isfinite(got[..., [MIN, MAX]]), got[..., [MIN, MAX]], 0.0)).max(axis=-1)
    limits = ((SUM, size), (SUM_MAGNITUDES, size), (SUM_SQUARES, got[..., SUM_SQUARES]), (MIN, largest), (MAX, largest))
    worst = np.where((own[..., counts] == got[..., counts]).all(axis=-1), 0.0, 1.0)
    with np.errstate(all="ignore"):  # clients may report infinity
        for column, limit in limits:
            equal = own[..., column] == got[..., column]  # also two zeros of an empty layer, and two infinities
            share = np.abs(got[..., column] - own[..., column]) / limit
            worst = np.maximum(worst, np.where(equal, 0.0, np.where(np.isnan(share), 1.0, np.minimum(share, 1.0))))
    return worst


def factor_between(trained: Array, received: Array) -> float | None:
    """Return k if the received update is k times the trained one in every layer that counts, else None.

    Both are [layers, 9]. k is negative if every sum has changed its sign. A layer whose update has no sign (a sum of
    about 0) is tested by its smallest and largest value.
    """
    squares = received[:, SUM_SQUARES]
    before, after = float(trained[:, SUM_SQUARES].sum()), float(squares.sum())
    if not (0 < before < math.inf and 0 < after < math.inf):
        return None
    size = math.sqrt(after) / math.sqrt(before)
    counted = squares > NEGLIGIBLE * after
    for factor in (size, -size) if math.isfinite(size) else ():
        if (sum_distances(_multiplied(trained[counted], factor), received[counted]) <= TOLERANCE).all():
            return factor
    return None


def distance_if_negated(trained: Sequence[float], received: Array) -> float | None:
    """Return how far an update is from the trained one if it is that one negated, else None.

    `trained`, of a client that reports no sums by layer: the sum of all its weights' changes, and that of their sizes.
    None, too, if the changes cancel out, so that their sum has no sign.
    """
    difference, absolute = trained
    total, size = float(received[:, SUM].sum()), float(received[:, SUM_MAGNITUDES].sum())
    limit = SUMMED * size
    if not (abs(size - absolute) <= limit and abs(total + difference) <= limit and abs(total) > TOLERANCE * size):
        return None
    return min(1.0, 2 * abs(total) / size)


def _multiplied(rows: Array, factor: float) -> Array:
    """Return the nine sums of the same values, each multiplied by a factor."""
    multiplied = rows.copy()
    with np.errstate(all="ignore"):
        multiplied[:, SUM] *= factor
        multiplied[:, SUM_SQUARES] *= factor * factor
        multiplied[:, SUM_MAGNITUDES] *= abs(factor)
        ends = rows[:, [MIN, MAX]] * factor
    multiplied[:, [MIN, MAX]] = np.sort(ends, axis=1)
    return multiplied


def rounds_behind(trained: Array, received: Array, back: Mapping[int, Array]) -> int | None:
    """Return n if the received update is the trained one added to the global model of n rounds ago, else None.

    `back`: by rounds ago, each layer's sum of that model minus the current one.
    """
    with np.errstate(all="ignore"):
        difference, size = received[:, SUM] - trained[:, SUM], received[:, SUM_MAGNITUDES]
    if not np.isfinite(difference).all() or not (np.abs(difference) > 10 * EXACT * size).any():
        return None
    for rounds, sums in back.items():
        if sums.shape == difference.shape and (np.abs(difference - sums) <= EXACT * size).all():
            return rounds
    return None
