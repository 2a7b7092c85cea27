# SPDX-License-Identifier: Apache-2.0
"""Medians that pass over missing values, faster than NumPy's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from fedvitals.stats import Array


def finite_median(values: Iterable[float]) -> float:
    """Return the median of the values that are finite; NaN if there are none."""
    known = sorted(float(value) for value in values if math.isfinite(value))
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else math.nan


def column_medians(values: Array) -> Array:
    """Return the median of each column over the values that are not NaN; NaN for a column without any.

    The same numbers as `numpy.nanmedian`, with a single sort.
    """
    ordered, count = np.sort(values, axis=0), np.count_nonzero(~np.isnan(values), axis=0)  # NaN are sorted last
    columns = np.arange(values.shape[1])
    with np.errstate(all="ignore"):
        return np.asarray((ordered[np.maximum(count - 1, 0) // 2, columns] + ordered[count // 2, columns]) / 2)
