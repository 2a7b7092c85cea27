# SPDX-License-Identifier: Apache-2.0
"""The difference of two models of arrays, piece by piece, against the whole difference at once."""

import numpy as np
import pytest
import torch

from fedvitals.kernels import count_sketch, sums
from fedvitals.probes import array_difference
from fedvitals.probes.array_difference import ArrayDifference

SHAPES = [(3, 5), (), (700,), (0,), (256, 2), (1,), (41, 31)]


def model(seed, dtype=np.float32):
    drawn = np.random.default_rng(seed)
    return [np.asarray(drawn.standard_normal(shape), dtype) for shape in SHAPES]


def differences(before, after):
    """The twin: each layer's difference as it is."""
    wide = np.float64 if any(own.dtype == np.float64 for own in after) else np.float32
    pairs = zip(before, after, strict=True)
    return [torch.from_numpy(np.asarray(b - a, wide).reshape(-1)) for a, b in pairs]


@pytest.fixture(params=[256, 512, 1 << 20])
def piece(request, monkeypatch):
    monkeypatch.setattr(array_difference, "PIECE", request.param)


@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float32)])
@pytest.mark.usefixtures("piece")
def test_sums_and_sketch_are_those_of_the_whole(dtypes):
    before, after = model(0, dtypes[0]), model(1, dtypes[1])
    whole = differences(before, after)
    difference = ArrayDifference(before, after)
    rows, sketch = difference.measure()
    np.testing.assert_allclose(rows, sums(whole), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sketch, count_sketch(torch.cat(whole)), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(difference.sums(), rows)
    assert torch.equal(difference.tensors().vector, torch.cat(whole))
    assert difference.nbytes == torch.cat(whole).nbytes


@pytest.mark.usefixtures("piece")
def test_what_is_not_finite_is_counted_in_its_layer():
    before, after = model(0), model(1)
    after[2][[0, 300, 699]] = np.nan, np.inf, -np.inf
    rows, sketch = ArrayDifference(before, after).measure()
    np.testing.assert_allclose(rows, sums(differences(before, after)), rtol=1e-6, atol=1e-6)
    assert rows[2, -2:].tolist() == [1, 2]
    assert not torch.isfinite(sketch).all()


@pytest.mark.usefixtures("piece")
def test_without_a_model_before_it_is_the_model_itself():
    after = model(1)
    rows, _ = ArrayDifference(None, after).measure()
    np.testing.assert_allclose(rows, sums([torch.from_numpy(own).reshape(-1) for own in after]), rtol=1e-6, atol=1e-6)


def test_equal_updates_have_equal_sketches_to_the_last_bit():
    first, again = (ArrayDifference(model(0), model(1)).measure() for _ in range(2))
    assert torch.equal(first[1], again[1])


def test_a_model_without_arrays_is_nothing():
    rows, sketch = ArrayDifference([], []).measure()
    assert rows.shape == (0, 9)
    assert not sketch.any()
