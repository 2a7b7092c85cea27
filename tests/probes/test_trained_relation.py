# SPDX-License-Identifier: Apache-2.0
"""What a received update is of the trained one, by nine sums of each layer."""

import copy
import math

import numpy as np
import pytest
import torch

import fedvitals as fv
from fedvitals.kernels import sums
from fedvitals.probes.numpy_peers import PastArrayModels
from fedvitals.probes.peers import PastModels
from fedvitals.probes.trained_relation import distance_if_negated, factor_between, rounds_behind
from fedvitals.records import Metric
from fedvitals.store import MemoryStore
from support.models import mlp

SHAPES = ((16, 8), (16,), (4, 16), (4,))
SIZES = [128, 16, 64, 4]


def layers(seed, scale=0.01):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in SHAPES]


def rows(tensors):
    return np.asarray(torch.as_tensor(sums(tensors)))


@pytest.mark.parametrize("factor", [-1.0, 10.0, 0.01, -0.3, 1e6])
def test_a_multiple_is_recognised_with_its_sign(factor):
    trained = layers(0)
    assert factor_between(rows(trained), rows([t * factor for t in trained])) == pytest.approx(factor, rel=1e-3)


def test_rounding_to_half_precision_does_not_hide_a_multiple():
    trained = layers(0)
    sent = [(t * -2).half().float() for t in trained]
    assert factor_between(rows(trained), rows(sent)) == pytest.approx(-2, rel=0.01)


@pytest.mark.parametrize(
    "sent",
    [
        layers(1),  # somebody else's
        [a + 0.2 * b for a, b in zip(layers(0), layers(2), strict=True)],  # with noise
        [layers(0)[0] * 2, *layers(0)[1:]],  # one layer alone
        [torch.zeros(shape) for shape in SHAPES],
        [torch.full(shape, float("inf")) for shape in SHAPES],
    ],
)
def test_what_is_no_multiple_has_no_factor(sent):
    assert factor_between(rows(layers(0)), rows(sent)) is None


def past_models(kind):
    models = kind(1 << 20)
    for number in range(4):
        tensors = layers(10 + number, scale=0.1)
        models.add(number, tensors if kind is PastModels else [t.numpy() for t in tensors])
    return models.steps_back(SIZES)


@pytest.mark.parametrize("kind", [PastModels, PastArrayModels])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_an_update_added_to_an_old_model_tells_how_old_it_is(kind, rounds):
    trained, now, old = layers(0), layers(13, scale=0.1), layers(13 - rounds, scale=0.1)
    sent = [(o + t) - n for t, n, o in zip(trained, now, old, strict=True)]
    assert rounds_behind(rows(trained), rows(sent), past_models(kind)) == rounds


def test_noise_is_no_old_model():
    sent = [a + b for a, b in zip(layers(0), layers(7), strict=True)]
    assert rounds_behind(rows(layers(0)), rows(sent), past_models(PastModels)) is None
    assert PastModels(1 << 20).steps_back(SIZES) == {}


def total(tensors):
    return sum(float(t.sum()) for t in tensors), sum(float(t.abs().sum()) for t in tensors)


def test_two_sums_of_all_weights_tell_a_negated_update():
    trained = [t + 0.002 for t in layers(0)]
    signed, absolute = total(trained)
    sent = [-t.half().float() for t in trained]
    assert distance_if_negated((signed, absolute), rows(sent)) == pytest.approx(2 * abs(signed) / absolute, rel=0.01)


@pytest.mark.parametrize(
    ("trained", "sent"),
    [
        (total(layers(0)), layers(0)),
        (total(layers(0)), layers(1)),
        (total(layers(0)), [-2 * t for t in layers(0)]),
        (total([t - t.mean() for t in layers(0)]), [t.mean() - t for t in layers(0)]),  # no sign to be seen
        ((0.0, 0.0), [torch.zeros(shape) for shape in SHAPES]),
        (total(layers(0)), [torch.full(shape, float("inf")) for shape in SHAPES]),
        ((math.nan, math.nan), layers(0)),  # nothing reported
        ((math.inf, math.inf), layers(0)),
    ],
)
def test_two_sums_say_nothing_of_other_updates(trained, sent):
    assert distance_if_negated(trained, rows(sent)) is None


def test_where_layers_are_private_a_client_that_sends_its_update_negated_is_named():
    memory = MemoryStore(everything=True)
    with fv.Monitor(None, sinks=[memory], strict=True, machine=False, host="pipes") as monitor:  # privacy level 2
        torch.manual_seed(0)
        shared, x = mlp(), torch.randn(10, 12)
        for number in range(3):
            monitor.host.round_begin(number, shared)
            updates = {}
            for i, name in enumerate(["a", "b", "c"]):
                worker, model = monitor.host.for_worker(), copy.deepcopy(shared)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                with worker.client(name, model):
                    model(x + i).square().mean().backward()
                    optimizer.step()
                monitor.host.absorb(worker.payload(), name)
                pairs = zip(model.parameters(), shared.parameters(), strict=True)
                updates[name] = [(q - p if name == "b" else p - q).detach() for p, q in pairs]
            monitor.updates(number, updates)
            monitor.host.round_end(number, shared)
        assert "b sends what it trained with its sign flipped" in str(monitor.findings())
    factors = [metric for metric in memory.records(monitor.run.id, Metric) if metric.name == "update.factor"]
    assert {(metric.where.node, metric.value) for metric in factors} == {("b", -1.0)}
