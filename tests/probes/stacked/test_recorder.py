# SPDX-License-Identifier: Apache-2.0
"""What stacked clients are counted with: to the last bit what each client's own tensors would give."""

import numpy as np
import pytest
import torch

from fedvitals.kernels import histogram, sums
from fedvitals.probes.fit import confusion
from fedvitals.probes.stacked.fit import confusions
from fedvitals.probes.stacked.recorder import StackHistogram, StackRecorder


def matrix_of_all_kinds():
    stream = torch.Generator().manual_seed(1)
    matrix = torch.randn(5, 60, generator=stream) * torch.logspace(-44, 38, 60)
    matrix[0, 3:9] = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45])
    return matrix


SIZES, TRAINED = [7, 1, 40, 12], [True, True, False, True]


def absent(matrix, row):
    return [part if there else None for part, there in zip(matrix[row].split(SIZES), TRAINED, strict=True)]


@pytest.mark.parametrize("layout", ["rows", "wide", "columns", "double"])
def test_recorder_is_exact_however_the_matrix_lies(layout):
    matrix = matrix_of_all_kinds()
    recorder = StackRecorder(5, SIZES, TRAINED)
    wanted = []
    for step in range(40):  # more than the first block holds
        now = matrix * (1 + step)
        if layout == "wide":
            now = torch.cat([now, now], 1)[:, :60]
        elif layout == "columns":
            now = now.T.contiguous().T
        elif layout == "double":
            now = now.double()
        recorder.record(step, now)
        wanted.append([np.asarray(sums(absent(now, row))) for row in range(5)])
    assert recorder.steps == [*range(40)]
    np.testing.assert_array_equal(recorder.take(), np.array(wanted))


def test_recorder_follows_a_matrix_that_moves():
    recorder = StackRecorder(2, [3], [True])
    kept = [torch.full((2, 3), float(step)) for step in range(4)]  # all alive: each at an address of its own
    for step in (0, 1, 1, 2, 3):
        recorder.record(step, kept[step])
    assert recorder.take()[:, 0, 0, 1].tolist() == [0, 3, 3, 6, 9]


def test_recorder_may_keep_the_last_step_only():
    recorder = StackRecorder(2, [3], [True], keep=False)
    for step in range(3):
        recorder.record(step, torch.full((2, 3), float(step)))
    assert recorder.steps == [2]
    assert recorder.take()[:, 0, 0, 1].tolist() == [6]


def test_histogram_is_that_of_each_client():
    matrix = matrix_of_all_kinds()
    counter = StackHistogram(5, SIZES, TRAINED)
    counter.record(matrix)
    counter.record(matrix / 3)
    wanted = [np.asarray(histogram(absent(matrix, r))) + np.asarray(histogram(absent(matrix / 3, r))) for r in range(5)]
    np.testing.assert_array_equal(counter.take(), np.array(wanted))


@pytest.mark.parametrize("classes", [4, 700])
def test_confusions_are_those_of_each_client(classes):
    stream = np.random.default_rng(0)
    labels, guesses = stream.integers(0, 4, (2, 30, 12))
    guesses[3] = labels[3]  # nothing confused
    wanted = [confusion(*pair) for pair in zip(labels.tolist(), guesses.tolist(), strict=True)]
    shares, pairs = confusions(labels, guesses, classes)
    np.testing.assert_allclose(shares, [share for share, _ in wanted])
    np.testing.assert_array_equal(pairs, [(np.nan, np.nan) if pair is None else pair for _, pair in wanted])
    assert wanted[3] == (0.0, None)
    labels[0, 0] = -100  # a label that losses ignore
    assert len(confusions(labels, guesses, classes)[0]) == 30
