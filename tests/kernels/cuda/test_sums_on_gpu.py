# SPDX-License-Identifier: Apache-2.0
"""The statistics on CUDA: what the CPU says of the same numbers, inside a captured graph too, and nobody waits."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals import stats
from fedvitals.kernels import GradientRecorder, device_backend, fallback, histogram, sums
from fedvitals.kernels.cuda.sums import DeviceRing
from fedvitals.probes.stacked.recorder import StackHistogram, StackRecorder
from fedvitals.resources.client_memory import ClientMemory
from fedvitals.testing import MemorySink
from support.conditions import holds_for_each

pytestmark = pytest.mark.gpu

EXACT = [stats.COUNT, stats.MIN, stats.MAX, stats.ZEROS, stats.NANS, stats.INFS]
SUMS = [stats.SUM, stats.SUM_SQUARES, stats.SUM_MAGNITUDES]
DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}


def needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@contextlib.contextmanager
def nobody_waits():
    """Whatever waits for the device in here fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(0)


def assert_close(got, expected, relative=1e-6):
    got, expected = (np.asarray(torch.as_tensor(rows).cpu()) for rows in (got, expected))
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got[..., EXACT], expected[..., EXACT])
    error = np.abs(got[..., SUMS] - expected[..., SUMS])
    scale = np.abs(expected[..., [stats.SUM_MAGNITUDES, stats.SUM_SQUARES, stats.SUM_MAGNITUDES]])
    assert (error <= relative * scale).all(), (error / np.maximum(scale, 1e-300)).max()


def random(size, dtype=torch.float32, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_kinds(dtype):
    """Lengths around all edges, from any beginning; what is not finite, and what squares out of range."""
    whole = random(300_000, dtype)
    found = [whole[begin : begin + n] for begin, n in enumerate((0, 1, 3, 511, 512, 2047, 2048, 2049, 9001, 200_003))]
    odd = whole[:70_001].clone()
    odd[[0, 40_000, 70_000]] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    odd[5:500], odd[600:700] = 0.0, -0.0
    found += [odd, torch.full((5000,), torch.nan, dtype=dtype), torch.zeros(5000, dtype=dtype), whole[::3]]
    found += [whole[:6000].view(60, 100).t(), whole[:6000].view(10, 6, 10, 10).to(memory_format=torch.channels_last)]
    found += [(whole[:9001].float() * 10.0**power).to(dtype) for power in (-40, -25, -13, -5, 3, 18, 20, 37)]
    return found


def test_the_kernel_runs():
    needs_cuda()
    assert device_backend().name == "triton", device_backend()


@pytest.mark.parametrize("name", [*DTYPES])
def test_a_list_of_tensors_gives_what_the_cpu_gives(name):
    needs_cuda()
    tensors = all_kinds(DTYPES[name])
    got = sums([tensor.cuda() for tensor in tensors])
    assert got.is_cuda
    assert_close(got, fallback.sums(tensors))


def test_a_mixture_of_types_none_and_clients():
    needs_cuda()
    mixed = [random(5000, dtype, i) for i, dtype in enumerate(DTYPES.values())] * 2
    mixed += [None, torch.empty(0), torch.arange(9), torch.complex(random(50), random(50, seed=1))]
    assert_close(sums([None if t is None else t.cuda() for t in mixed]), fallback.sums(mixed))
    stacked = [random((7, 40, 30)), None, random((7, 3000), torch.bfloat16), random((7, 500))[:, 3:80], random(7)]
    got = sums([None if t is None else t.cuda() for t in stacked], clients=True)
    assert_close(got, fallback.sums(stacked, 7))


def test_many_values_and_the_same_bits_again():
    needs_cuda()
    values = torch.randn(100_000_003, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) + 0.5
    values[77_777_777] = torch.nan
    first = sums([values, values[:1000]])
    assert_close(first, fallback.sums([values, values[:1000]]))
    assert torch.equal(first, sums([values, values[:1000]]))


SIZES, TRAINED = [432, 16, 4608, 32, 70_001, 43], [True, True, True, False, True, True]


def test_a_ring_inside_a_captured_graph():
    """Replayed without any call of ours; it goes on at its begin, and reads the matrix as it is by then."""
    needs_cuda()
    ring = DeviceRing(SIZES, TRAINED, 20, 4, "cuda")
    wide = torch.zeros(20, sum(SIZES) + 5, device="cuda")
    matrix, slot = wide[:, : sum(SIZES)], torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring.record(matrix, slot)
        slot += 1
    kept = []
    for step in range(6):
        now = random((20, sum(SIZES)), seed=step) * 10.0 ** (4 * step)
        now[step, 100:200] = torch.nan
        kept.append(now)
        matrix.copy_(now)
        with nobody_waits():
            graph.replay()
    assert int(slot) == 6
    for step in range(2, 6):
        layers = [part if there else None for part, there in zip(kept[step].split(SIZES, 1), TRAINED, strict=True)]
        assert_close(ring.ring[step % 4], fallback.sums(layers, 20))


def test_stacked_gradients_are_recorded_without_waiting():
    needs_cuda()
    recorder, counter = StackRecorder(20, SIZES, TRAINED), StackHistogram(20, SIZES, TRAINED)
    twin, other = StackRecorder(20, SIZES, TRAINED), StackHistogram(20, SIZES, TRAINED)
    for step in range(3):
        matrix = random((20, sum(SIZES)), seed=step)
        on_device = matrix.cuda()
        with nobody_waits() if step else contextlib.nullcontext():
            recorder.record(step, on_device)
            counter.record(on_device)
        twin.record(step, matrix)
        other.record(matrix)
    assert_close(recorder.take(), twin.take())
    np.testing.assert_array_equal(counter.take(), other.take())


def test_histograms_without_waiting():
    needs_cuda()
    tensors = [random(5000), random(300, torch.bfloat16), torch.zeros(10)]
    on_device = [tensor.cuda() for tensor in tensors]
    with nobody_waits():
        found = histogram(on_device)
    np.testing.assert_array_equal(found.cpu().numpy(), histogram(tensors))


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    return model.to("cuda", dtype)


def batch(seed, dtype=torch.float32):
    stream = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 3, 8, 8, generator=stream), torch.randint(0, 5, (16,), generator=stream)
    return x.to("cuda", dtype), y.cuda()


@pytest.mark.parametrize("name", [*DTYPES])
def test_gradients_that_move_are_recorded_without_waiting(name):
    needs_cuda()
    dtype = DTYPES[name]
    model = network(dtype)
    parameters, kept = [*model.parameters()], []
    recorder = GradientRecorder([*parameters, None])
    for step in range(70):  # more than a block holds
        model.zero_grad(set_to_none=True)
        x, y = batch(step, dtype)
        functional.cross_entropy(model(x), y).backward()
        if step == 5:
            parameters[1].grad = None  # the general way, between the others
        kept.append([None if p.grad is None else p.grad.clone() for p in parameters])
        with nobody_waits() if step else contextlib.nullcontext():
            recorder.record(step)
            if step == 7:
                recorder.scale(torch.full((), 4.0, device="cuda"))
    steps, rows = recorder.take()
    assert steps == [*range(70)]
    kept[7] = [gradient / 4 for gradient in kept[7]]
    for step in (0, 1, 5, 6, 7, 63, 64, 69):
        home = [None if gradient is None else gradient.cpu() for gradient in kept[step]]
        assert_close(rows[step], fallback.sums([*home, None]))


def trained(model, probes="standard", scaler=None, optimizer=None, precision=None):
    """Its monitor's records, and the true norm of every step's gradients."""
    sink, norms = MemorySink(), []
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
    dtype = next(model.parameters()).dtype
    monitor = fv.Monitor(None, sinks=[sink], probes=probes, strict=True)
    with monitor, monitor.round(0, model), monitor.client("a", model):
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(step, dtype)
            with torch.autocast("cuda", precision) if precision else contextlib.nullcontext():
                loss = functional.cross_entropy(model(x), y)
            factor = 1.0 if scaler is None else scaler.get_scale()
            (loss if scaler is None else scaler.scale(loss)).backward()
            gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()]) / factor
            norms.append(float(gradients.norm()))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    own = [r for r in sink.metrics() if r.where.node == "a"]
    return {r.name: r.value for r in own}, norms


@pytest.mark.parametrize("name", [*DTYPES])
def test_hooks_on_a_user_s_model(name):
    needs_cuda()
    told, norms = trained(network(DTYPES[name]))
    np.testing.assert_allclose(told["gradient.norm"], np.mean(norms), rtol=1e-5)
    np.testing.assert_allclose(told["gradient.norm_max"], max(norms), rtol=1e-5)
    assert told["gradient.nonfinite"] == 0


@pytest.mark.parametrize("name", ["plain", "fused"])
def test_mixed_precision_with_a_scaler(name):
    """A fused optimiser is given scaled gradients, and they are told as they truly are."""
    needs_cuda()
    model = network()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=name == "fused")
    told, norms = trained(model, "standard", scaler, optimizer, torch.float16)
    np.testing.assert_allclose(told["gradient.norm"], np.mean(norms), rtol=1e-5)


def test_watching_changes_nothing():
    needs_cuda()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    model = network()
    plain, watched = copy.deepcopy(model), copy.deepcopy(model)
    trained(watched)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step)
        functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    assert holds_for_each(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_the_peak_of_a_stack_is_shared_among_its_clients():
    needs_cuda()
    torch.zeros(1 << 27, device="cuda")  # an earlier peak, which is nobody's
    memory, states = ClientMemory(), torch.zeros(10, 1000, device="cuda")
    assert memory.begin_stack(states.cpu()) is None
    assert memory.end_stack(None, 10) == {}
    device = memory.begin_stack(states)
    held = torch.cuda.memory_allocated()
    torch.zeros(1 << 20, device="cuda")
    told = memory.end_stack(device, 10)
    assert held + (4 << 20) <= 10 * told["memory.cuda_allocated"] < held + (8 << 20)
    assert told["memory.cuda_reserved"] >= told["memory.cuda_allocated"]
