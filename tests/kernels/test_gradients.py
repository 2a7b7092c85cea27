# SPDX-License-Identifier: Apache-2.0
"""Recording gradients step by step says what the general way says."""

import numpy as np
import pytest
import torch
from torch import nn

from fedvitals.kernels import GradientRecorder, sums
from fedvitals.kernels.cpu import jit


def model_with_gradients(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)).to(dtype)
    model(torch.randn(2, 3, 8, 8, dtype=dtype)).square().sum().backward()
    return model


def recorded(recorder, parameters):
    """Record a step; what the general way says of it."""
    recorder.record(len(recorder._steps))
    return np.asarray(sums([p.grad for p in parameters]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_general_way(dtype):
    """Bit for bit, whatever the type, at each of many steps (more than one block of memory holds)."""
    parameters = list(model_with_gradients(dtype).parameters())
    recorder, expected = GradientRecorder(parameters), []
    for _ in range(100):
        for p in parameters:
            p.grad = p.grad * 1.01  # a new tensor, elsewhere
        expected.append(recorded(recorder, parameters))
    steps, rows = recorder.take()
    assert steps == list(range(100))
    assert np.array_equal(rows, np.stack(expected))


def test_what_is_unusual_is_measured_all_the_same():
    """Missing gradients, other layouts, layers of another optimiser, between steps that are as usual."""
    parameters = list(model_with_gradients().parameters())
    recorder, expected = GradientRecorder(parameters), []
    whole = [p.grad for p in parameters]
    for change in (None, torch.zeros(1).expand(4), whole[1], None):
        parameters[1].grad = change
        expected.append(recorded(recorder, parameters))
    parameters[0].grad = whole[0].to(memory_format=torch.channels_last)
    expected.append(recorded(recorder, parameters))
    assert np.array_equal(recorder.take()[1], np.stack(expected))
    foreign = GradientRecorder([None, *parameters[1:]])
    foreign.record(7)
    assert foreign.take()[0] == [7]
    assert np.array_equal(foreign.take()[1][0], sums([None, *(p.grad for p in parameters[1:])]))


def test_nothing_recorded_and_nothing_to_record():
    assert GradientRecorder(list(model_with_gradients().parameters())).take()[1].shape == (0, 4, 9)
    empty = GradientRecorder([])
    empty.record(0)
    assert empty.take()[1].shape == (1, 0, 9)


def test_a_changed_parameter_is_seen():
    """A type or size that changed after preparing is read as it is: nothing outside the gradient is touched."""
    model = model_with_gradients()
    parameters = list(model.parameters())
    recorder = GradientRecorder(parameters)
    model.double()
    parameters[0].grad = torch.full_like(parameters[0], 0.5)
    expected = [recorded(recorder, parameters)]
    parameters[1].data = parameters[1].data[:2]  # as pruning does
    parameters[1].grad = torch.ones(2, dtype=torch.float64)
    expected.append(recorded(recorder, parameters))
    assert expected[1][1, 0] == 2
    assert np.array_equal(recorder.take()[1], np.stack(expected))


def test_a_scaled_step_is_corrected():
    """Gradients that a fused optimiser holds times a scale are told as they truly are; the other steps stay."""
    parameters = list(model_with_gradients().parameters())
    recorder = GradientRecorder(parameters)
    true = recorded(recorder, parameters)
    for turn in range(70):
        for p in parameters:
            p.grad.mul_(1024)
        recorder.record(turn + 1)
        recorder.scale(torch.tensor(1024.0))
        for p in parameters:
            p.grad.div_(1024)
    recorder.record(71)
    rows = recorder.take()[1]
    assert rows.shape[0] == 72
    assert np.array_equal(rows, np.broadcast_to(true, rows.shape))


def test_sparse_gradients_are_measured_by_their_values():
    """An embedding with sparse=True: the rows that were touched."""
    table = nn.Embedding(100, 4, sparse=True)
    table(torch.tensor([3, 5, 5])).square().sum().backward()
    recorder = GradientRecorder([table.weight])
    recorder.record(0)
    dense = table.weight.grad.to_dense()
    row = recorder.take()[1][0, 0]
    assert row[0] == 8  # two rows of four
    assert row[2] == pytest.approx(float(dense.double().square().sum()))


def test_without_the_kernel(monkeypatch):
    """The torch fallback serves it, too."""
    monkeypatch.setattr(jit, "load_kernel", lambda: jit.LoadedKernel(None, "test"))
    parameters = list(model_with_gradients().parameters())
    recorder = GradientRecorder(parameters)
    expected = recorded(recorder, parameters)
    assert np.array_equal(recorder.take()[1][0], expected)
