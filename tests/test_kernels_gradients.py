# SPDX-License-Identifier: Apache-2.0
"""The prepared way to the gradients' sums says what the general way says."""

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals.kernels import GradientSums, sums


def model_with_gradients(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)).to(dtype)
    model(torch.randn(2, 3, 8, 8, dtype=dtype)).square().sum().backward()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_general_way(dtype):
    """Bit for bit, whatever the type, and at every call anew."""
    model = model_with_gradients(dtype)
    parameters = list(model.parameters())
    prepared = GradientSums(parameters)
    for factor in (1, 2, 3):
        for p in parameters:
            p.grad = p.grad * factor  # a new tensor, elsewhere
        assert np.array_equal(prepared(), sums([p.grad for p in parameters]))


def test_results_are_not_overwritten_by_later_ones():
    """A result stays what it was while hundreds of others are made."""
    parameters = list(model_with_gradients().parameters())
    prepared = GradientSums(parameters)
    first = prepared()
    copy = first.copy()
    for _ in range(200):
        parameters[0].grad.mul_(1.01)
        prepared()
    assert np.array_equal(first, copy)


def test_what_is_unusual_is_measured_all_the_same():
    """Missing gradients, other layouts, a changed type, layers of another optimiser, no layers at all."""
    parameters = list(model_with_gradients().parameters())
    prepared = GradientSums(parameters)
    parameters[1].grad = None
    assert np.array_equal(prepared(), sums([p.grad for p in parameters]))
    parameters[1].grad = torch.zeros(1).expand(4)
    assert np.array_equal(prepared(), sums([p.grad for p in parameters]))
    parameters[0].grad = parameters[0].grad.to(memory_format=torch.channels_last)
    assert np.array_equal(prepared(), sums([p.grad for p in parameters]))
    foreign = GradientSums([None, *parameters[1:]])
    assert np.array_equal(foreign(), sums([None, *(p.grad for p in parameters[1:])]))
    assert GradientSums([])().shape == (0, 9)


def test_a_changed_type_is_seen():
    """A parameter that became float64 after preparing is read as float64."""
    model = model_with_gradients()
    parameters = list(model.parameters())
    prepared = GradientSums(parameters)
    model.double()
    parameters[0].grad = torch.full_like(parameters[0], 0.5)
    assert np.array_equal(prepared(), sums([p.grad for p in parameters]))
    parameters[1].data = parameters[1].data[:2]  # as pruning does
    parameters[1].grad = torch.ones(2, dtype=torch.float64)
    assert prepared()[1, 0] == 2


def test_without_the_kernel(monkeypatch):
    """The torch fallback serves it, too."""
    from fedvitals.kernels import jit

    monkeypatch.setattr(jit, "loaded", lambda: jit.Loaded(None, "test"))
    parameters = list(model_with_gradients().parameters())
    assert np.allclose(GradientSums(parameters)(), sums([p.grad for p in parameters]))
