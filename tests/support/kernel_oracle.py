# SPDX-License-Identifier: Apache-2.0
"""The nine statistics by exact summation, and how close a kernel has to come."""

import math

import numpy as np
import torch

from fedvitals import stats

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


EXACT_COLUMNS = [stats.COUNT, stats.MIN, stats.MAX, stats.ZEROS, stats.NANS, stats.INFS]


SUM_COLUMNS = [stats.SUM, stats.SUM_SQUARES, stats.SUM_MAGNITUDES]


INF, NAN = math.inf, math.nan


def oracle(values):
    """The nine statistics by exact summation."""
    numbers = torch.as_tensor(values).double().flatten().tolist()
    finite = [x for x in numbers if math.isfinite(x)]
    return [
        len(numbers),
        math.fsum(finite),
        math.fsum(x * x for x in finite),
        math.fsum(map(abs, finite)),
        min(finite, default=INF),
        max(finite, default=-INF),
        finite.count(0.0),
        sum(map(math.isnan, numbers)),
        sum(map(math.isinf, numbers)),
    ]


def assert_close(got, expected, relative=3e-6):
    """Counts and extremes exactly; the sum against the sum of magnitudes, since a sum may cancel."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got[..., EXACT_COLUMNS], expected[..., EXACT_COLUMNS])
    error = np.abs(got[..., SUM_COLUMNS] - expected[..., SUM_COLUMNS])
    scale = np.abs(expected[..., [stats.SUM_MAGNITUDES, stats.SUM_SQUARES, stats.SUM_MAGNITUDES]])
    assert (error <= relative * scale).all(), (got, expected)


def random(size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
