# SPDX-License-Identifier: Apache-2.0
"""What must hold of any numbers: statistics of parts merge to those of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvitals import kernels, stats

numbers = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 3e38, -3e38]),
)
# A list repeated is longer than a turn of the fast loop, which short lists never reach.
parts = st.lists(st.builds(lambda values, times: values * times, st.lists(numbers, max_size=12), st.integers(1, 40)))


def assert_same(got, expected):
    exact = [stats.COUNT, stats.MIN, stats.MAX, stats.ZEROS, stats.NANS, stats.INFS]
    np.testing.assert_array_equal(got[exact], expected[exact])
    for column, scale in (
        (stats.SUM, stats.SUM_MAGNITUDES),
        (stats.SUM_SQUARES, stats.SUM_SQUARES),
        (stats.SUM_MAGNITUDES, stats.SUM_MAGNITUDES),
    ):
        assert abs(got[column] - expected[column]) <= 3e-6 * expected[scale]


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(parts)
def test_sums_of_parts_merge_to_the_sums_of_the_whole(lists):
    tensors = [torch.tensor(values, dtype=torch.float32) for values in lists] or [None]
    whole = torch.tensor([value for values in lists for value in values], dtype=torch.float32)
    assert_same(stats.merge("gradient", list(kernels.sums(tensors))), kernels.sums([whole])[0])


@pytest.mark.thorough
@settings(deadline=None, max_examples=100)
@given(parts)
def test_every_value_is_in_a_bin_or_counted_as_zero_or_not_finite(lists):
    tensor = torch.tensor([value for values in lists for value in values], dtype=torch.float32)
    row = kernels.sums([tensor])[0]
    assert kernels.histogram([tensor]).sum() == row[stats.COUNT] - row[[stats.ZEROS, stats.NANS, stats.INFS]].sum()
