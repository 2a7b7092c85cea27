# SPDX-License-Identifier: Apache-2.0
"""Medians are those of NumPy, to the last bit."""

import warnings

import numpy as np
import pytest

from fedvitals.diagnosis.medians import column_medians, finite_median


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 101, 700])
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.95, 1.0])
def test_they_are_those_of_numpy(rows: int, missing: float) -> None:
    chance = np.random.default_rng(rows)
    values = chance.normal(size=(rows, 17)) * 10.0 ** chance.integers(-12, 12, size=(rows, 17))
    values[chance.random(values.shape) < 0.05] = np.inf
    values[chance.random(values.shape) < missing] = np.nan
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # of columns without a value
        expected = np.nanmedian(values, axis=0)
    np.testing.assert_array_equal(column_medians(values), expected)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_the_median_of_finite_values_passes_over_all_others(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    expected = np.median(values) if count else np.nan
    np.testing.assert_array_equal(finite_median([*values, np.nan, np.inf, -np.inf]), expected)
