# SPDX-License-Identifier: Apache-2.0
"""What a GPU computes otherwise than single clients would: unbiased all the same, and tried here on a processor."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedvitals import lab
from fedvitals.probes.deflation import by_decomposition, by_squaring
from fedvitals.probes.nonlinearity import nonlinearity_coefficient
from fedvitals.probes.scale import gradient_scale, scale, summary
from fedvitals.probes.stacked.full_gradient import stacked_full_gradient
from fedvitals.probes.stacked.model import StackModel
from fedvitals.probes.stacked.nonlinearity import stacked_nonlinearity
from fedvitals.probes.stacked.scale import deflated, measure_scale, scale_samples, scale_summaries, stacked_scale
from fedvitals.probes.stacked.scale_graph import ScaleGraph
from fedvitals.probes.stacked.signs import BufferedSigns, DeviceSigns, HostSigns, joint_seed
from fedvitals.stack import Stack

STACKABLE = [
    (lab.paper_cnn(), (3, 14, 14), 5),
    (lab.paper_cnn(scenario="exploding"), (3, 14, 14), 5),
    (lab.paper_cnn(scenario="vanishing"), (3, 14, 14), 5),
    (lab.cnn(), (1, 8, 8), 5),
    (lab.mlp(), (12,), 4),
    (lab.logistic(), (12,), 4),
    (lab.resnet18(norm="group"), (3, 8, 8), 3),
    (lab.transformer(), (3, 8, 8), 3),
]
SEEDS = [3, 14, 15]


def stack_of(modules, **settings):
    states = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in modules])
    nodes = [f"c{i}" for i in range(len(modules))]
    return StackModel(Stack(nodes, [None] * len(nodes), modules[0], states, lambda count: (count, count), **settings))


def dense(clients=3, classes=4, **settings):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes)) for _ in range(clients)]
    return stack_of(layers, **settings), torch.randn(clients, 5, 6)


def by_hand(states, x):
    """The same as `dense`, as a host would write it."""
    first, a, second, b = states.split([48, 8, 32, 4], 1)
    hidden = torch.tanh(torch.baddbmm(a[:, None], x, first.view(-1, 8, 6).mT))
    return torch.baddbmm(b[:, None], hidden, second.view(-1, 4, 8).mT)


def graph_of(model, x):
    """Inputs, outputs, W·Wᵀ of the last layer and ‖J‖_F²."""
    inputs = x.clone().requires_grad_()
    outputs = model.apply(inputs, slice(None))
    rows = [torch.autograd.grad(outputs[..., k].sum(), inputs, retain_graph=True)[0] for k in range(outputs.shape[2])]
    weight = model.tensors()["2.weight"].double()
    return inputs, outputs, weight @ weight.mT, torch.stack(rows).double().square().sum((0, 3))


def a_direction(gram, u):
    """Of any unit vector: nothing that comes from knowing the eigenvectors."""
    found = by_squaring(gram)
    along = torch.einsum("ci,cij,cj->c", u, gram, u)[:, None]
    return type(found)(u, along, torch.einsum("cii->c", gram)[:, None] - along)


@pytest.mark.parametrize("kind", ["decomposition", "squaring", "first", "any"])
def test_estimate_is_unbiased_whatever_the_direction(kind):
    """Over all 16 vectors of signs, not over a sample of them: so the mean is the expectation, to the last digits."""
    model, x = dense()
    inputs, outputs, gram, exact = graph_of(model, x)
    u = torch.zeros(3, 4, dtype=torch.float64)
    u[:, 0] = 1
    random = functional.normalize(torch.randn(3, 4, dtype=torch.float64), dim=1)
    direction = {
        "decomposition": lambda: by_decomposition(gram),
        "squaring": lambda: by_squaring(gram),
        "first": lambda: a_direction(gram, u),
        "any": lambda: a_direction(gram, random),
    }[kind]()
    signs = [torch.tensor(row).expand_as(outputs) for row in itertools.product((-1.0, 1.0), repeat=4)]
    draws = torch.stack([deflated(inputs, outputs, gram, direction, each) for each in signs])
    np.testing.assert_allclose(draws.mean(0), exact, rtol=2e-6)


def test_squaring_spreads_no_more_than_the_decomposition():
    """2,000 draws for each of 20 clients, whose last layers have eigenvalues close together."""
    model, x = dense(20, 12)
    x = x[:, :1].expand(-1, 2000, -1)
    inputs, outputs, gram, exact = graph_of(model, x)
    signs = DeviceSigns([1], torch.device("cpu"))(outputs, slice(None), 1)[0]
    spread = {
        way: deflated(inputs, outputs, gram, way(gram), signs).std(1) / exact[:, 0]
        for way in (by_decomposition, by_squaring)
    }
    assert float(spread[by_squaring].mean() / spread[by_decomposition].mean()) < 1.1
    assert bool((spread[by_squaring] < 1.3 * spread[by_decomposition]).all())


@pytest.mark.thorough
@pytest.mark.parametrize("outputs", [1, 2, 43, 300])
@pytest.mark.parametrize("size", [1e-60, 1.0, 1e70])
def test_squaring_finds_the_leading_direction(outputs, size):
    stream = torch.Generator().manual_seed(0)
    weight = torch.randn(4, outputs, 50, generator=stream, dtype=torch.float64)
    weight[1] = weight[1, :, :1] * weight[1, :1]  # of rank one
    weight[2] = torch.eye(outputs, 50)  # no direction is better than another
    gram = size * weight @ weight.mT
    best, found = by_decomposition(gram), by_squaring(gram)
    np.testing.assert_allclose(torch.linalg.vector_norm(found.u, dim=1), 1, rtol=1e-12)
    np.testing.assert_allclose(found.along, best.along, rtol=0.01)
    np.testing.assert_allclose(found.along + found.rest, best.along + best.rest, rtol=1e-9)
    nothing = by_squaring(0 * gram)
    assert not any(bool(part.any()) for part in (nothing.u, nothing.along, nothing.rest))


@pytest.mark.thorough
def test_signs_of_one_stream_estimate_as_well():
    """The GPU's way as a whole: over 400 seeds the mean of (GSC)² is that of the exact one."""
    model, x = dense()
    exact = scale_samples(model, x, SEEDS, exact=True)[0].square()
    draws = [measure_scale(model, x, DeviceSigns([s], x.device), exact=False)[0].square() for s in range(400)]
    mean, error = torch.stack(draws).mean(0), torch.stack(draws).std(0) / 20
    assert bool(((mean - exact).abs() <= 4.5 * error + 1e-6 * exact).all())


def test_signs_are_kept_where_they_are():
    outputs = [torch.zeros(3, 5, 4), torch.zeros(3, 2, 4)]
    drawn, kept = DeviceSigns(SEEDS, torch.device("cpu")), BufferedSigns(torch.device("cpu"))
    for _ in range(2):
        kept.rewind()
        buffers = [kept(each, slice(None), 2) for each in outputs]
    places = [b.data_ptr() for b in buffers]
    kept.fill(SEEDS)
    kept.rewind()
    for each, place in zip(outputs, places, strict=True):
        found = kept(each, slice(None), 2)
        assert found.data_ptr() == place
        assert torch.equal(found, drawn(each, slice(None), 2))
        assert set(found.unique().tolist()) == {-1, 1}
    assert joint_seed([1, 2]) != joint_seed([12]) != joint_seed([2, 1])
    alone = HostSigns([15])(outputs[0][:1], slice(None), 2)
    assert torch.equal(HostSigns(SEEDS)(outputs[0][2:], slice(2, 3), 2), alone)


def test_samples_are_those_of_single_clients():
    model, x = dense()
    module = model.own_copy()
    for exact in (False, True):
        found = scale_samples(model, x, SEEDS, exact=exact)
        for client, seed in enumerate(SEEDS):
            model.load(module, client)
            wanted = torch.stack(gradient_scale(module, x[client], seed=seed, exact=exact))
            np.testing.assert_allclose(found[:, client], wanted, rtol=2e-5)
        assert torch.equal(ScaleGraph()(model, x, SEEDS, exact=exact), found)  # nothing to record on a processor


def test_summaries_are_those_of_each_client():
    """Of several steps at once, with samples that are 0, not finite, or all lost."""
    samples = torch.rand(2, 3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    samples[0, 0, 1, 2:5] = torch.tensor([math.nan, math.inf, -math.inf])
    samples[1, 0, 2] = math.nan
    samples[:, 1, 3, 1:] = math.nan
    samples[0, 2, 4, :3] = 0
    found = scale_summaries(samples)
    for step, client in itertools.product(range(3), range(6)):
        own = samples[:, step, client]
        wanted = {**summary("scale.gsc", own[0]), **summary("scale.sensitivity", own[1])}
        for name in found:
            if name.startswith(("scale.gsc", "scale.sensitivity")):
                np.testing.assert_allclose(found[name][step, client], wanted.get(name, math.nan), rtol=1e-12)
    assert found["scale.zero_samples"][2].tolist() == [0, 0, 0, 0, 3, 0]
    assert found["scale.nonfinite_samples"][0].tolist() == [0, 3, 0, 0, 0, 0]
    assert found["scale.images"].tolist() == [[8] * 6] * 3
    told = stacked_scale(scale(), *dense(), SEEDS, lambda *_, **__: samples[:, 0])
    assert told["scale.sensitivity_error"].tolist()[2] is None
    assert told["scale.gsc"].tolist()[1] == pytest.approx(summary("g", samples[0, 0, 1])["g"])


def test_the_hosts_own_forward_pass_is_used_where_it_serves():
    calls = []

    def forward(states, x):
        calls.append(states.shape)
        return by_hand(states, x)

    (own, x), (plain, _) = dense(forward=forward), dense()
    found, wanted = (scale_samples(m, x, SEEDS) for m in (own, plain))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert calls == [(3, 92)]
    y = torch.randint(0, 4, (3, 5))
    found, wanted = (stacked_full_gradient(m, x, y, functional.cross_entropy) for m in (own, plain))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-6)
    assert len(calls) == 2
    # Kernels written by hand cannot be differentiated twice: that goes through the module.
    np.testing.assert_allclose(*(stacked_nonlinearity(m, x, SEEDS) for m in (own, plain)))
    assert len(calls) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(STACKABLE)))
def test_nonlinearity_is_that_of_single_clients(number):
    model, shape, classes = STACKABLE[number]
    stream = torch.Generator().manual_seed(1)
    stack = stack_of([model.build(shape, classes, stream) for _ in SEEDS])
    if model == lab.logistic():  # which begins at 0
        stack.states.normal_(generator=stream)
    x = 0.3 * torch.randn(3, 7, *shape, generator=stream)
    module, wanted = stack.own_copy(), []
    for client, seed in enumerate(SEEDS):
        stack.load(module, client)
        wanted.append(nonlinearity_coefficient(module, x[client], seed=seed))
    np.testing.assert_allclose(stacked_nonlinearity(stack, x, SEEDS), wanted, rtol=1e-4)


def test_nonlinearity_of_tokens_and_of_outputs_that_do_not_vary():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.table(x)).mean(1))

    torch.manual_seed(0)
    stack, x = stack_of([Tokens() for _ in SEEDS]), torch.randint(0, 9, (3, 8, 4))
    stack.states[2] = 0
    module = stack.own_copy()
    stack.load(module, 1)
    found = stacked_nonlinearity(stack, x, SEEDS)
    assert found[1] == nonlinearity_coefficient(module, x[1], seed=SEEDS[1])
    assert math.isnan(found[2])
    dead, x = dense()
    dead.states[0] = 0
    assert np.isnan(stacked_nonlinearity(dead, x, SEEDS)).tolist() == [True, False, False]
    assert np.isnan(stacked_nonlinearity(dead, x[:, :1], SEEDS)).all()
