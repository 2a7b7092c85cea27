# SPDX-License-Identifier: Apache-2.0
"""Layer statistics add up in any order, and say of sums what numpy says of the raw values."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedvitals import stats
from fedvitals.stats import FAMILIES, STATISTICS, derive, empty_sums, merge, pack, pack_entries, statistics_of, unpack
from support.conditions import holds_for_each

MERGEABLE = [name for name, family in FAMILIES.items() if family.merge is not None]
SUMS = [name for name, family in FAMILIES.items() if family.columns is STATISTICS]

values = st.floats(-1e6, 1e6, allow_subnormal=False) | st.sampled_from([0.0, np.nan, np.inf, -np.inf])
tensors = hnp.arrays(np.float64, hnp.array_shapes(max_dims=1, min_side=0, max_side=20), elements=values)


def sums_of(*tensors: np.ndarray) -> np.ndarray:
    """The slow readable twin of the kernels: one row of nine sums for each tensor."""
    rows = empty_sums(len(tensors))
    for row, tensor in zip(rows, tensors, strict=True):
        finite = tensor[np.isfinite(tensor)].astype(np.float64)
        row[stats.COUNT] = tensor.size
        row[stats.SUM] = finite.sum()
        row[stats.SUM_SQUARES] = (finite**2).sum()
        row[stats.SUM_MAGNITUDES] = np.abs(finite).sum()
        if finite.size:
            row[stats.MIN], row[stats.MAX] = finite.min(), finite.max()
        row[stats.ZEROS] = (tensor == 0).sum()
        row[stats.NANS] = np.isnan(tensor).sum()
        row[stats.INFS] = np.isinf(tensor).sum()
    return rows


@st.composite
def step_rows(draw):
    """Two layers' rows as a few training steps would leave them: norms are not negative, steps are whole."""
    rows = np.zeros((2, len(stats.STEP_COLUMNS)))
    for row in rows:
        norms = draw(st.lists(st.floats(0.001, 1e6) | st.just(0.0), min_size=1, max_size=5))
        begin = draw(st.integers(0, 50))
        changes = np.abs(np.diff(norms)) / np.maximum(norms[:-1], 1e-9) if len(norms) > 1 else np.zeros(1)
        row[:] = (
            len(norms),
            sum(norms),
            max(norms),
            begin + int(np.argmax(norms)),
            norms[-1],
            begin + len(norms) - 1,
            changes.max(),
            begin + int(np.argmax(changes)) + (len(norms) > 1),
        )
    return rows


@st.composite
def matrices(draw, count=3):
    """A mergeable family and some of its matrices [2 layers × columns]."""
    family = draw(st.sampled_from(MERGEABLE))
    columns = FAMILIES[family].columns
    if columns is STATISTICS:
        return family, [sums_of(draw(tensors), draw(tensors)) for _ in range(count)]
    if columns is stats.STEP_COLUMNS:
        return family, [draw(step_rows()) for _ in range(count)]
    counts = hnp.arrays(np.float64, (2, len(columns)), elements=st.integers(0, 10**6).map(float))
    return family, [draw(counts) for _ in range(count)]


def same(left: np.ndarray, right: np.ndarray) -> None:
    # Sums of mixed signs cancel: the tolerance is relative to the terms (at most 60 values of 1e6, squared 1e12).
    np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-6)


@given(matrices())
def test_merge_is_associative(drawn):
    family, (a, b, c) = drawn
    same(merge(family, [merge(family, [a, b]), c]), merge(family, [a, merge(family, [b, c])]))
    same(merge(family, [merge(family, [a, b]), c]), merge(family, [a, b, c]))


@given(matrices(count=2))
def test_merge_is_commutative(drawn):
    family, (a, b) = drawn
    same(merge(family, [a, b]), merge(family, [b, a]))


@given(matrices(count=1))
def test_merge_has_a_neutral_element(drawn):
    family, (a,) = drawn
    empty = empty_sums(2) if FAMILIES[family].columns is STATISTICS else np.zeros_like(a)
    np.testing.assert_array_equal(merge(family, [a, empty]), a)
    np.testing.assert_array_equal(merge(family, [empty, a]), a)


@given(st.lists(tensors, min_size=1, max_size=4))
def test_merged_sums_are_those_of_all_values_together(parts):
    merged = functools.reduce(lambda a, b: merge("gradient", [a, b]), [sums_of(part) for part in parts])
    same(merged, sums_of(np.concatenate(parts)))


def test_ratios_cannot_be_merged():
    with pytest.raises(ValueError, match=r"'update\.alignment' holds ratios"):
        merge("update.alignment", [np.zeros((1, 3))] * 2)


def test_the_largest_step_keeps_its_place_and_the_last_is_that_of_the_last_step():
    #          steps sum  max at last at change at
    early = np.array([[3, 6.0, 3.0, 2, 1.0, 2, 0.5, 1]])
    late = np.array([[2, 5.0, 3.0, 3, 2.0, 4, 0.7, 4]])
    expected = [[5, 11.0, 3.0, 2, 2.0, 4, 0.7, 4]]
    np.testing.assert_array_equal(merge("gradient.steps", [early, late]), expected)
    np.testing.assert_array_equal(merge("gradient.steps", [late, early]), expected)


def test_a_norm_that_is_nan_is_the_largest_and_keeps_its_step():
    ill = np.array([[1, np.nan, np.nan, 7, np.nan, 7, np.nan, 7]])
    well = np.array([[1, 5.0, 5.0, 3, 5.0, 3, 0.1, 3]])
    for order in ([ill, well], [well, ill]):
        merged = merge("gradient.steps", order)
        assert np.isnan(merged[0, 2])
        assert merged[0, 3] == merged[0, 7] == 7


# --- what derives from the sums --------------------------------------------------------------------------------------


@given(tensors)
def test_derived_statistics_are_those_of_numpy(tensor):
    finite = tensor[np.isfinite(tensor)]
    nothing = finite.size == 0
    expected = {
        "mean": np.nan if nothing else finite.mean(),
        "std": np.nan if nothing else finite.std(),
        "l2": np.linalg.norm(finite),
        "rms": np.nan if nothing else np.sqrt((finite**2).mean()),
        "absmax": np.nan if nothing else np.abs(finite).max(),
        "mean_magnitude": np.nan if nothing else np.abs(finite).mean(),
        "sparsity": np.nan if tensor.size == 0 else (tensor == 0).mean(),
        "finite": finite.size,
        "nans": np.isnan(tensor).sum(),
        "infs": np.isinf(tensor).sum(),
    }
    # The variance is a difference of two sums: what they lose in rounding grows with the largest value.
    # Under 1e-150 squares vanish even in float64.
    slack = 1e-150 + 1e-7 * (0 if nothing else np.abs(finite).max())
    for statistic, value in expected.items():
        np.testing.assert_allclose(derive("weight", sums_of(tensor), statistic)[0], value, rtol=1e-9, atol=slack)


def test_fractions_of_units_and_the_mean_norm():
    health = np.array([[8.0, 2.0, 1.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(derive("activation.health", health, "dead_fraction"), [0.25, np.nan])
    np.testing.assert_array_equal(derive("activation.health", health, "saturated_fraction"), [0.125, np.nan])
    np.testing.assert_array_equal(derive("activation.health", health, "sign_diversity"), [0.5, np.nan])
    steps = np.array([[4, 10.0, 5, 1, 2, 3, 0.5, 1]])
    np.testing.assert_array_equal(derive("gradient.steps", steps, "norm_mean"), [2.5])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_statistic_that_is_listed_can_be_derived_with_leading_axes(family):
    matrix = np.ones((3, 2, len(FAMILIES[family].columns)))
    for statistic in statistics_of(family):
        assert derive(family, matrix, statistic).shape == (3, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_statistic_is_answered_with_what_exists(family):
    matrix = np.ones((1, len(FAMILIES[family].columns)))
    with pytest.raises(ValueError, match=f"Unknown statistic 'median' of family '{family}'. Known: ") as caught:
        derive(family, matrix, "median")
    assert holds_for_each(name in str(caught.value) for name in statistics_of(family))


# --- storage ---------------------------------------------------------------------------------------------------------


def round_trip(family: str, matrix: np.ndarray) -> np.ndarray:
    packed = pack(family, matrix)
    assert packed.dtype == np.float32
    return unpack(family, packed)


@given(st.sampled_from(SUMS), tensors, tensors)
def test_pack_and_unpack_keep_the_sums(family, first, second):
    matrix = sums_of(first, second)
    back = round_trip(family, matrix)
    for column in set(range(9)) - {stats.SUM}:
        np.testing.assert_allclose(back[:, column], matrix[:, column], rtol=1e-6, atol=1e-30)
    # A sum may cancel to nearly nothing; it is as good as the magnitudes that went into it.
    assert np.all(np.abs(back[:, stats.SUM] - matrix[:, stats.SUM]) <= 1e-6 * matrix[:, stats.SUM_MAGNITUDES] + 1e-30)


_ANYTHING = st.sampled_from((0.0, 1.0, -2.5, 7.0, 1e30, -1e200, np.inf, -np.inf, np.nan))


@given(hnp.arrays(np.float64, (3, 2, 9), elements=_ANYTHING))
def test_packed_sums_are_those_of_each_row_by_itself(matrices):
    """Whatever stands in them: mean, spread and magnitude are 0 where nothing finite was counted, and for NaN."""
    packed = pack("gradient", matrices)
    np.testing.assert_array_equal(pack_entries("gradient", matrices), packed.transpose(1, 2, 0))
    with np.errstate(all="ignore"):
        plain = matrices[..., :3].astype(np.float32).transpose(1, 2, 0)
        np.testing.assert_array_equal(pack_entries("update.alignment", matrices[..., :3]), plain)
        for row, alike in zip(matrices.reshape(-1, 9), packed.reshape(-1, 9), strict=True):
            finite = row[stats.COUNT] - row[stats.NANS] - row[stats.INFS]
            mean, square, magnitude = row[stats.SUM : stats.MIN] / finite
            means = np.array((mean, np.sqrt(np.maximum(square - mean * mean, 0)), magnitude))
            expected = row.astype(np.float32)
            expected[stats.SUM : stats.MIN] = [x if finite > 0 and x == x else 0.0 for x in means]  # noqa: PLR0124
            np.testing.assert_array_equal(alike, expected)


def test_values_whose_squares_overflow_float32_survive():
    tensor = np.array([1e30, -2e30, 3e30])
    back = round_trip("gradient", sums_of(tensor))
    np.testing.assert_allclose(derive("gradient", back, "l2")[0], np.linalg.norm(tensor), rtol=1e-6)
    np.testing.assert_allclose(derive("gradient", back, "std")[0], tensor.std(), rtol=1e-6)
    np.testing.assert_allclose(derive("gradient", back, "absmax")[0], 3e30, rtol=1e-6)


def test_values_beyond_float32_and_even_float64_squares_give_no_warning():
    with np.errstate(over="ignore"):
        matrix = sums_of(np.array([1e200, 2e200]), np.array([1.0, 2.0]))
    back = round_trip("weight", matrix)
    assert np.isinf(derive("weight", back, "absmax")[0])
    np.testing.assert_allclose(derive("weight", back, "std")[1], 0.5)
    assert np.isinf(pack("gradient.steps", np.full((1, 8), 1e39))).all()


def test_a_small_spread_around_a_large_mean_survives():
    tensor = 1000 + 1e-3 * np.random.default_rng(0).standard_normal(5000)
    matrix = sums_of(tensor)
    # Had the sums themselves been stored in float32, the spread would be gone.
    drowned = matrix.astype(np.float32).astype(np.float64)
    assert abs(derive("weight", drowned, "std")[0] / tensor.std() - 1) > 0.5
    np.testing.assert_allclose(derive("weight", round_trip("weight", matrix), "std")[0], tensor.std(), rtol=1e-3)


def test_empty_rows_and_rows_without_a_finite_value():
    matrix = np.concatenate([empty_sums(1), sums_of(np.array([np.nan, np.inf, -np.inf]))])
    np.testing.assert_array_equal(round_trip("update", matrix), matrix)
    assert np.isnan(derive("update", matrix, "mean")).all()
    np.testing.assert_array_equal(derive("update", matrix, "nans"), [0, 1])
    np.testing.assert_array_equal(derive("update", matrix, "infs"), [0, 2])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SUMS])
def test_other_families_are_stored_as_they_are(family):
    matrix = np.arange(2.0 * len(FAMILIES[family].columns)).reshape(2, -1)
    np.testing.assert_array_equal(round_trip(family, matrix), matrix)
