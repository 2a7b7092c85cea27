# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs, interpreted, against plain Python sums. Run by kernels/cuda/test_sums.py in its own process."""

import numpy as np
import pytest
import torch

from fedvitals import stats
from fedvitals.kernels import count_sketch
from fedvitals.kernels.cuda import loading
from fedvitals.kernels.cuda.sums import DeviceRing, Tuning, list_partition, sums_of_list
from fedvitals.kernels.sketch import by_torch, by_triton
from support.kernel_oracle import FLOATS, INF, NAN, assert_close, oracle, random

SMALL = Tuning(most=2048, items=1)  # an item is one tile: the interpreter is slow
LONG = Tuning(most=8192, items=1)


def measured(tensors, tuning=SMALL):
    loaded = loading.load_kernels()
    assert loaded.kernels, loaded.reason
    return sums_of_list(loaded.kernels, tensors, None, tuning).numpy()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lengths_and_beginnings_around_all_edges(dtype):
    whole = random(6200, dtype)
    begins, lengths = [0, 1, 2, 3, 0, 1, 7, 5, 3], [0, 1, 2, 2047, 2048, 2049, 4095, 4097, 6144]
    tensors = [whole[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    assert_close(measured(tensors), [oracle(tensor) for tensor in tensors])


def test_an_item_of_several_tiles():
    tensors = [random(20_000)[3:], random(16_384), random(8191)]
    assert_close(measured(tensors, LONG), [oracle(tensor) for tensor in tensors], relative=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_that_are_not_finite(dtype):
    tensors = []
    for place, bad in ((0, [NAN]), (2047, [INF, -INF]), (2099, [-INF]), (300, [NAN, INF, -INF, NAN])):
        tensor = random(2100 + len(bad), dtype)
        tensor[place : place + len(bad)] = torch.tensor(bad, dtype=dtype)
        tensors.append(tensor)
    tensors += [torch.full((600,), NAN, dtype=dtype), torch.full((600,), -INF, dtype=dtype)]
    assert_close(measured(tensors), [oracle(tensor) for tensor in tensors])


def test_squares_beyond_the_range_of_float32():
    powers = [-45, -40, -30, -25, -23, -20, -15, -13, -12, -5, 5, 15, 18, 19, 20, 30, 37]
    tensors = [(random(700, torch.float64) * 10.0**power).float() for power in powers]
    mixed = random(5000) * 1e-3
    mixed[600], mixed[3000:] = 3e38, mixed[3000:] * 1e-30
    wide = [random(600, torch.float64) * scale for scale in (1e-150, 1e150)]
    tensors = [*tensors, mixed, *wide]
    assert_close(measured(tensors), [oracle(tensor) for tensor in tensors])


def test_zeros_of_both_signs_and_nothing_else():
    some = random(1300)
    some[::3], some[1::7] = 0.0, -0.0
    tensors = [some, torch.zeros(700) * -1, some.half(), torch.zeros(0), None]
    assert_close(measured(tensors), [*map(oracle, tensors[:4]), stats.empty_sums(1)[0]])


def test_a_constant_does_not_drift():
    value = float(torch.tensor(0.1))
    row = [20_000, 20_000 * value, 20_000 * value**2, 20_000 * value, value, value, 0, 0, 0]
    assert_close(measured([torch.full((20_000,), 0.1)], LONG), [row], relative=1e-6)


def test_layouts_and_types_that_need_a_copy_and_that_need_none():
    x = random(600)
    tensors = [x.view(20, 30).t(), x[::2], x[:20].view(20, 1).expand(20, 30), torch.arange(9), torch.complex(x, -x)]
    expected = [oracle(torch.view_as_real(t) if t.is_complex() else t) for t in tensors]
    assert_close(measured(tensors), expected)


def test_clients_of_a_list():
    kernels = loading.load_kernels().kernels
    stacked = [random((3, 7, 11)), None, random((3, 700), torch.bfloat16), random((3, 20))[:, 3:9]]
    got = sums_of_list(kernels, stacked, 3, SMALL).numpy()
    expected = [[stats.empty_sums(1)[0] if t is None else oracle(t[i]) for t in stacked] for i in range(3)]
    assert_close(got, np.array(expected))


def test_the_way_memory_is_cut_is_kept():
    before = list_partition.cache_info().hits
    for _ in range(3):
        measured([random(77)])
    assert list_partition.cache_info().hits >= before + 2


SIZES, TRAINED = [7, 2081, 40, 12], [True, True, False, True]


@pytest.mark.parametrize("layout", ["wide", "columns", "half"])
def test_a_ring_of_steps(layout):
    """Whatever the slot, the stride and the type; the ring begins anew at its end."""
    clients = 1 if layout == "half" else 2
    ring = DeviceRing(SIZES, TRAINED, clients, 2, "cpu", SMALL)
    for slot in (0, 3):
        matrix = random((clients, 2140), seed=slot) * 10.0 ** (6 * slot)
        matrix[0, 3:6] = torch.tensor([NAN, 0.0, INF])
        if layout == "wide":
            matrix = torch.cat([matrix, matrix[:, :3]], 1)[:, :2140]
        elif layout == "columns":
            matrix = matrix.t().contiguous().t()
        elif layout == "half":
            matrix = matrix.clamp(-6e4, 6e4).half()
        ring.record(matrix, torch.tensor([slot]))
        pairs = zip(matrix.split(SIZES, dim=1), TRAINED, strict=True)
        rows = [stats.empty_sums(clients) if not t else [oracle(r) for r in p] for p, t in pairs]
        assert_close(ring.ring[slot % 2].numpy(), np.stack([np.asarray(r) for r in rows], axis=1))
    assert ring.ring.shape == (2, clients, 4, 9)


def test_nobody_trains():
    ring = DeviceRing([3], [False], 2, 1, "cpu", SMALL)
    ring.record(torch.ones(2, 3), torch.tensor([0]))
    np.testing.assert_array_equal(ring.ring[0].numpy(), stats.empty_sums(2, 1))


@pytest.mark.parametrize("length", [1, 255, 257, 5000, 256 * 130 + 7])
def test_sketches_are_those_of_the_cpu(length):
    vectors = random(3 * length, torch.float64).view(3, length)
    torch.testing.assert_close(by_triton(vectors), by_torch(vectors), rtol=0, atol=1e-10)
    torch.testing.assert_close(by_triton(vectors.float()), count_sketch(vectors.float()), rtol=0, atol=1e-10)
    assert torch.equal(by_triton(vectors[1:2])[0], by_triton(vectors)[1])
