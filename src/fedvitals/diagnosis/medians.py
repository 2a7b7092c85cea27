# SPDX-License-Identifier: Apache-2.0
"""Medians of many columns at once: the same numbers as `numpy.nanmedian`, with a single sort."""

from __future__ import annotations

import numpy as np

from fedvitals.stats import Array


def column_medians(values: Array) -> Array:
    """Return the median of each column over the values that are not NaN; NaN for a column without any."""
    ordered, count = np.sort(values, axis=0), np.count_nonzero(~np.isnan(values), axis=0)  # NaN are sorted last
    columns = np.arange(values.shape[1])
    with np.errstate(all="ignore"):
        return np.asarray((ordered[np.maximum(count - 1, 0) // 2, columns] + ordered[count // 2, columns]) / 2)
