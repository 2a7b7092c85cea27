# SPDX-License-Identifier: Apache-2.0
"""NaN is never drawn as 0: what plots show of layers with values that are not finite."""

import numpy as np
import pytest

from fedvitals.stats import STATISTICS
from fedvitals.views.shown_statistics import shown_statistic


def row(**columns):
    return [columns.get(column, 0.0) for column in STATISTICS]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"count": 8, "nans": 8}, np.nan),
        ({"count": 8, "nans": 6, "zeros": 2}, np.nan),  # the gradients of a dead unit, and NaN everywhere else
        ({"count": 8, "infs": 6, "zeros": 2}, np.nan),
        ({"count": 8, "nans": 6, "zeros": 1, "sum_squares": 9.0}, 3.0),
        ({"count": 8, "zeros": 8}, 0.0),
        ({}, 0.0),
    ],
)
def test_zeros_beside_nan_are_no_size(columns, expected):
    matrix = np.array([row(**columns)])
    assert shown_statistic("gradient", matrix, "l2") == pytest.approx([expected], nan_ok=True)
    assert shown_statistic("gradient", matrix, "zeros") == columns.get("zeros", 0)
