# SPDX-License-Identifier: Apache-2.0
"""Products of updates by layer, piece by piece, against those of whole layers in float64."""

import numpy as np
import pytest
import torch

from fedvitals.probes import layer_products
from fedvitals.probes.layer_products import Workspace, products_by_layer

SIZES = [700, 0, 1500, 1, 3000]


def vectors(count, seed=0, dtype=torch.float32):
    drawn = torch.randn(count, sum(SIZES), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return [row.clone() for row in drawn]


def by_layer(a, b):
    products = (a.double() * b.double()).split(SIZES)
    return [float(part.sum()) for part in products]


@pytest.fixture(params=[1, 1 << 18])
def piece(request, monkeypatch):
    monkeypatch.setattr(layer_products, "PIECE", request.param)
    monkeypatch.setattr(layer_products, "SHORTEST", 1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [0, 1]), (5, [1, 4]), (5, [])])
@pytest.mark.usefixtures("piece")
def test_products_are_those_of_whole_layers(count, places, dtype):
    own, before = vectors(count, dtype=dtype), vectors(len(places), seed=1, dtype=dtype)
    total = torch.stack(own).double().sum(0)
    with_total, total_squares, with_before = products_by_layer(own, SIZES, before, places)
    near = {"rtol": 1e-5, "atol": 1e-3}
    np.testing.assert_allclose(with_total, [by_layer(vector, total) for vector in own], **near)
    np.testing.assert_allclose(total_squares, by_layer(total, total), **near)
    expected = [by_layer(own[place], earlier) for place, earlier in zip(places, before, strict=True)]
    np.testing.assert_allclose(with_before, np.reshape(expected, (len(places), len(SIZES))), **near)


def test_a_workspace_gives_the_same_memory_again():
    workspace, like = Workspace(), torch.zeros(1)
    large, other = workspace.rows("a", like, 4, 100), workspace.rows("b", like, 4, 100)
    small = workspace.rows("a", like, 2, 50)
    assert small.shape == (2, 50)
    assert small.data_ptr() == large.data_ptr() != other.data_ptr()
    assert workspace.rows("a", like.double(), 2, 50).dtype == torch.float64


def test_rows_of_one_matrix_are_not_copied():
    matrix = torch.randn(3, 10)
    assert layer_products.UpdateRows([*matrix], Workspace(), "a").at(slice(2, 5)).data_ptr() == matrix[:, 2:].data_ptr()
