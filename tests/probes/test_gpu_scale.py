# SPDX-License-Identifier: Apache-2.0
"""Gradient scale, nonlinearity and whole-set gradients of stacked clients on CUDA: right, quick, without waiting."""

import contextlib
import sys
import time

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedvitals import lab
from fedvitals.lab.stacked.plans import available_plans
from fedvitals.probes.scale import gradient_scale, scale
from fedvitals.probes.stacked.full_gradient import stacked_full_gradient
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.stacked.nonlinearity import stacked_nonlinearity
from fedvitals.probes.stacked.scale import scale_samples, scale_summaries, stacked_scale
from fedvitals.probes.stacked.scale_graph import ScaleGraph
from fedvitals.stack import Stack
from support.conditions import holds_for_each

pytestmark = pytest.mark.gpu

CASES = {
    "paper_cnn": (lab.paper_cnn(), (3, 32, 32), 43),
    "exploding": (lab.paper_cnn(scenario="exploding"), (3, 32, 32), 43),
    "mlp": (lab.mlp(), (3, 8, 8), 10),
    "resnet18": (lab.resnet18(norm="group"), (3, 16, 16), 10),
    "transformer": (lab.transformer(), (3, 16, 16), 10),
}


def stack_of(name, clients, device="cuda", seed=0):
    """Clients whose states differ a little from the model's first weights; the same on every device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, shape, classes = CASES[name]
    stream = torch.Generator().manual_seed(seed)
    module = model.build(shape, classes, stream)
    start = torch.cat([p.detach().flatten() for p in module.parameters()])
    states = start * (1 + 0.2 * torch.randn(clients, len(start), generator=stream))
    nodes = [f"c{i}" for i in range(clients)]
    found = Stack(nodes, [None] * clients, module.to(device), states.to(device), lambda count: (count, count))
    return StackModel(found), lambda n: torch.rand(clients, n, *shape, generator=stream).to(device)


@contextlib.contextmanager
def exact_arithmetic():
    """Float32 that is float32, and the same convolution each time."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def nothing_waits():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tell(text):
    sys.stdout.write(f"{text}\n")


@pytest.mark.parametrize("name", [*CASES])
def test_exact_samples_are_those_of_a_processor(name):
    (there, images), (here, same) = stack_of(name, 4), stack_of(name, 4, "cpu")
    with exact_arithmetic():
        found = scale_samples(there, images(6), [1, 2, 3, 4], exact=True).cpu()
    wanted = scale_samples(here, same(6), [1, 2, 3, 4], exact=True)
    off = (found / wanted - 1).abs()
    # Rounding decides which of two nearly equal pixels a max pool takes: hardly ever, and then by little.
    assert float(off.median()) < 1e-4, off
    assert float(off.max()) < 1e-2, off


@pytest.mark.parametrize("name", ["paper_cnn", "transformer"])
def test_estimates_surround_the_exact_value(name):
    model, images = stack_of(name, 6)
    x = images(8)
    with exact_arithmetic():
        exact = scale_samples(model, x, [0], exact=True)[0].square()
        draws = torch.stack([scale_samples(model, x, [seed])[0].square() for seed in range(40)])
        alone = torch.stack([gradient_scale(model.module, x[0], seed=seed)[0].square() for seed in range(40)])
        single = gradient_scale(model.module, x[0], exact=True)[0].square()
    for found, wanted in ((draws, exact), (alone, single)):
        off = (found.mean(0) - wanted).abs() / (found.std(0) / 40**0.5 + 1e-5 * wanted)
        assert float(off.max()) < 6, off
        assert float((found.std(0) / wanted).mean()) < 0.5


@pytest.mark.parametrize("name", [*CASES])
def test_nothing_waits_for_the_device(name):
    model, images = stack_of(name, 5)
    x = images(8)
    scale_summaries(scale_samples(model, x, [1]))
    with nothing_waits():
        scale_summaries(scale_samples(model, x, [1]))
        scale_summaries(scale_samples(model, x, [1], exact=True))


@pytest.mark.parametrize("name", [*CASES])
def test_replay_gives_what_the_ordinary_way_gives(name):
    graph = ScaleGraph()
    with exact_arithmetic():
        for number, (clients, count) in enumerate([(5, 8), (5, 8), (5, 8), (4, 3)]):
            model, images = stack_of(name, clients, seed=number)
            x, seeds = images(count), [*range(number, number + clients)]
            model.module = graph_module(name)  # the same one in all rounds, as in a run
            first = graph(model, x, seeds)
            model.states.mul_(1.05)
            with nothing_waits():
                again = graph(model, x, seeds)
            wanted = scale_samples(model, x, seeds)
            assert not graph.failures, graph.failures
            assert not torch.equal(first, again)  # a result of its own, which a replay does not overwrite
            np.testing.assert_allclose(again.cpu(), wanted.cpu(), rtol=1e-5)


_MODULES = {}


def graph_module(name):
    if name not in _MODULES:
        _MODULES[name] = stack_of(name, 1)[0].module
    return _MODULES[name]


def own_way(model):
    """The lab's: its first plan for this module."""
    plan = available_plans(model.module, model.states.device)[0]
    sizes = [p.numel() for _, p in model.parameters]

    def forward(states, x):
        parts = zip(model.parameters, states.split(sizes, 1), strict=True)
        return plan.outputs({name: part.view(-1, *p.shape) for (name, p), part in parts}, x)

    return forward


@pytest.mark.parametrize("name", ["paper_cnn", "exploding", "mlp", "resnet18"])
def test_the_labs_own_forward_pass_gives_the_same(name):
    model, images = stack_of(name, 5)
    x, y, graph = images(8), torch.arange(40).view(5, 8) % 10, ScaleGraph()
    with exact_arithmetic():
        wanted = scale_samples(model, x, [1, 2, 3, 4, 5])
        (rows,) = stacked_full_gradient(model, x, y.cuda(), functional.cross_entropy)
        model.forward = own_way(model)
        (same,) = stacked_full_gradient(model, x, y.cuda(), functional.cross_entropy)
        found, again = scale_samples(model, x, [1, 2, 3, 4, 5]), graph(model, x, [1, 2, 3, 4, 5])
        with nothing_waits():
            graph(model, x, [1, 2, 3, 4, 5])
    assert not graph.failures, graph.failures
    off = (found / wanted - 1).abs()
    assert float(off.median()) < 1e-4, off
    assert float(off.max()) < 1e-2, off
    np.testing.assert_allclose(again.cpu(), found.cpu(), rtol=1e-5)
    rows, same = (np.asarray(torch.as_tensor(each).cpu()) for each in (rows, same))
    np.testing.assert_allclose(same[..., 3], rows[..., 3], rtol=1e-3)


def test_what_cannot_be_recorded_is_measured_all_the_same():
    model, images = stack_of("mlp", 3)
    x, graph = images(4), ScaleGraph()

    def waits(states, samples):
        assert float(states.sum()) != 0.1  # looks at a value: no recording survives that
        rows = [functional.linear(samples[i].flatten(1), states[i][: 192 * 64].view(64, 192)) for i in range(3)]
        return torch.stack(rows)[..., :10]

    model.forward = waits
    np.testing.assert_allclose(graph(model, x, [1]).cpu(), scale_samples(model, x, [1]).cpu(), rtol=1e-6)
    assert len(graph.failures) == 1
    model.forward = None
    assert bool(graph(model, images(5), [1]).isfinite().all())  # and the next shape is recorded again
    assert len(graph.failures) == 1


def test_metrics_come_home():
    model, images = stack_of("paper_cnn", 5)
    found = stacked_scale(scale(), model, images(16), [1, 2, 3, 4, 5], ScaleGraph())
    assert found["scale.images"].tolist() == [16] * 5
    assert holds_for_each(value > 0 for value in found["scale.gsc"].tolist())


@pytest.mark.parametrize("name", [*CASES])
def test_nonlinearity_is_that_of_a_processor(name):
    (there, images), (here, same) = stack_of(name, 4), stack_of(name, 4, "cpu")
    with exact_arithmetic():
        found = stacked_nonlinearity(there, images(16), [1, 2, 3, 4])
    np.testing.assert_allclose(found, stacked_nonlinearity(here, same(16), [1, 2, 3, 4]), rtol=1e-3)


@pytest.mark.parametrize("name", ["paper_cnn", "mlp"])
def test_whole_set_gradient_is_that_of_a_processor(name):
    (there, images), (here, same) = stack_of(name, 4), stack_of(name, 4, "cpu")
    y = torch.arange(4 * 70).view(4, 70) % 10
    with exact_arithmetic():
        (found,) = stacked_full_gradient(there, images(70), y.cuda(), functional.cross_entropy)
    (wanted,) = stacked_full_gradient(here, same(70), y, functional.cross_entropy)
    found = np.asarray(torch.as_tensor(found).cpu())
    np.testing.assert_allclose(found[..., 3], np.asarray(wanted)[..., 3], rtol=1e-3)  # the sum of magnitudes


def test_twenty_iterations_are_timed():
    """Printed, not judged: the paper's CNN, 100 clients of 32 images, 20 times; and the whole set once."""
    model, images = stack_of("paper_cnn", 100)
    x, graph, own = images(32), ScaleGraph(), ScaleGraph()
    quick = model.with_states(model.states)
    quick.forward = own_way(model)
    seeds = [*range(100)]
    ways = {
        "vmap": lambda: scale_samples(model, x, seeds),
        "vmap in a graph": lambda: graph(model, x, seeds),
        "the lab's plan": lambda: scale_samples(quick, x, seeds),
        "the lab's plan in a graph": lambda: own(quick, x, seeds),
    }
    for way, measure in ways.items():
        for _ in range(3):
            measure()
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = torch.stack([measure() for _ in range(20)], 1)
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        tell(f"GSC 100 x 32 x 20, {way}: {1e3 * (time.perf_counter() - began):.1f} ms, host {1e3 * host:.1f} ms")
        assert found.shape == (2, 20, 100, 32)
    assert not graph.failures + own.failures
    began = time.perf_counter()
    told = scale_summaries(found)
    torch.cuda.synchronize()
    tell(f"summaries of 20 steps: {1e3 * (time.perf_counter() - began):.1f} ms")
    assert told["scale.gsc"].shape == (20, 100)
    whole = images(313)
    for measure in (
        lambda: scale_samples(quick, whole, seeds),
        lambda: stacked_nonlinearity(model, whole[:, :64], seeds),
    ):
        measure()
        torch.cuda.synchronize()
        began = time.perf_counter()
        measure()
        torch.cuda.synchronize()
        tell(f"GSC of 313 images, then NLC of 64: {1e3 * (time.perf_counter() - began):.1f} ms")
    tell(f"most memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
