# SPDX-License-Identifier: Apache-2.0
"""Statistics of layers as plots show them: a layer with NaN and nothing else but zeros is NaN, never 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvitals.stats import FAMILIES, STATISTICS, derive

COUNTS = frozenset({"count", "zeros", "nans", "infs", "finite", "sparsity"})


def shown_statistic(family: str, matrix: Any, statistic: str) -> NDArray[np.float64]:
    """Return one statistic of every layer, `[..., layers, columns]` → `[..., layers]`, as `stats.derive` does.

    Sums exclude values that are not finite, so that those of a layer full of NaN are 0; here they are NaN. So are those
    of a layer whose finite values are all 0, such as a dead unit's gradients beside those of NaN. Counts stay.
    """
    values = np.asarray(derive(family, matrix, statistic), np.float64)
    if FAMILIES[family].columns is not STATISTICS or statistic in COUNTS:
        return values
    count, finite, zeros = (derive(family, matrix, column) for column in ("count", "finite", "zeros"))
    return np.where((count > finite) & (finite <= zeros), np.nan, values)


def measured_layers(family: str, matrix: Any) -> NDArray[np.bool_] | None:
    """Return which layers were measured, `[..., layers]`, to distinguish NaN from absence; None if unknown."""
    return derive(family, matrix, "count") > 0 if FAMILIES[family].columns is STATISTICS else None
