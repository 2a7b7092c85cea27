# SPDX-License-Identifier: Apache-2.0
"""Activations against numbers computed by hand from the outputs; hooks that come and go; a budget that holds."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.probes.activations import activations, health, watched_modules
from fedvitals.probes.presets import Planned
from fedvitals.probes.view import View
from fedvitals.schedule import always
from support.models import MODELS, batches, close, make, make_data, train, twin_sums, watched


def outputs_of(model, x):
    """Each watched module's outputs of one forward pass, copied at once."""
    found = {name: [] for name, _ in watched_modules(model)}

    def keep(name):
        return lambda _module, _inputs, output: found[name].append(output.detach().clone())

    handles = [module.register_forward_hook(keep(name)) for name, module in watched_modules(model)]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_nine_statistics_of_every_module(name):
    """At a scheduled step, each module's row holds the sums over its output in the training's own forward pass."""
    model = make(name).eval()  # dropout and batch norm give the same twice
    x, y = make_data(16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor, sink = watched([Planned(activations, always)])
    with monitor, monitor.round(0), monitor.client("c0", model):
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = sink.layers("activation", node="c0")
    wanted = outputs_of(model, x)
    table = sink.table(found.table)
    assert table.names == tuple(wanted)
    for row, outputs in zip(found.matrix, wanted.values(), strict=True):
        joined = torch.cat([o.reshape(-1) for o in outputs]) if outputs else None
        close(row, twin_sums(joined), 1e-4)


@pytest.mark.parametrize("inplace", [False, True])
def test_dead_units(inplace):
    """Units of a ReLU that are 0 for every sample are dead; also where it works in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(inplace=inplace), nn.Linear(10, 3))
    with torch.no_grad():
        model[0].bias[:4] = -1000
    x, y = make_data()
    monitor, sink = watched(["deep", Planned(activations, always)])
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.SGD(model.parameters(), 0.0), (x, y), 3)
    found = [r for r in sink.records if getattr(r, "family", "") == "activation.health" and r.where.step is None]
    assert found[0].get("dead_fraction")[1] == pytest.approx(0.4)
    first = sink.of(type(found[0]), "activation", step=None, node="c0")[0]
    assert first.get("min")[0] < 0, "the linear layer's own output, before the ReLU overwrote it"


@pytest.mark.parametrize(("module", "large"), [(nn.Tanh(), 10.0), (nn.Sigmoid(), 20.0)])
def test_saturated_units(module, large):
    """Units of a bounded activation that lie at its ends for every sample are saturated."""
    x = torch.zeros(8, 4)
    x[:, 0], x[:, 1] = large, -large
    x[:4, 2] = large  # only for half of the samples
    assert health(module(x), module)[:3].tolist() == [4, isinstance(module, nn.Tanh), 2]


def test_sign_diversity_against_a_twin():
    """Units that are positive for some samples and negative for others, counted per channel of an image."""
    torch.manual_seed(1)
    output = torch.randn(6, 5, 4, 4)
    output[:, 0], output[:, 1], output[:, 2] = output[:, 0].abs() + 0.1, 0.0, -output[:, 2].abs() - 0.1
    assert health(output, nn.Conv2d(1, 5, 1)).tolist() == [5, 1, 0, 2]


def test_units_of_a_sequence_are_its_features():
    """A unit of [samples, places, features] is a feature; after a 1-d convolution it is a channel."""
    output = torch.rand(4, 6, 3) + 0.5
    output[..., 1] = 0
    assert health(output, nn.ReLU())[:2].tolist() == [3, 1]
    assert health(output.transpose(1, 2), nn.Conv1d(1, 3, 1))[:2].tolist() == [3, 1]


def test_module_that_runs_twice_is_merged():
    """One module used at two places of the forward pass has one row over both outputs."""
    shared = nn.Tanh()
    model = nn.Sequential(nn.Linear(12, 8), shared, nn.Linear(8, 8), shared, nn.Linear(8, 3))
    x, _ = make_data(10)
    found = activations(View(model, data=make_data(10)))
    names = [n for n, _ in watched_modules(model)]
    outputs = outputs_of(model, x)["1"]
    assert len(outputs) == 2
    close(found["activation"][names.index("1")], twin_sums(torch.cat([o.reshape(-1) for o in outputs])), 1e-4)
    assert found["activation.health"][names.index("1"), 0] == 16


@pytest.mark.parametrize("name", MODELS)
def test_hooks_exist_only_during_scheduled_steps(name):
    """With every(3), steps 0, 3 and 6 have hooks on their forward passes; the others have none, nor has the end."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched([(activations, fv.every(3))], profile=False)  # which has a hook of its own
    seen = []
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 7):
            optimizer.zero_grad()
            seen.append(any(m._forward_hooks for m in model.modules()))
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert seen == [True, False, False, True, False, False, True]
    assert not any(m._forward_hooks for m in model.modules())
    assert sink.layers("activation", node="c0").get("count")[0] > 0


@pytest.mark.thorough
def test_last_runs_once_on_own_samples():
    """At the end of the scope the probe makes a forward pass over the client's samples; without data, none."""
    for data in (make_data(), None):
        model = make("cnn")
        monitor, sink = watched([activations])
        with monitor, monitor.round(0), monitor.client("c0", model, data=data):
            train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 2)
        found = [r for r in sink.records if getattr(r, "family", "") == "activation" and r.where.node == "c0"]
        assert len(found) == (data is not None)


def test_budget_holds_with_a_slow_probe():
    """A probe of 20 ms within 10 % of a training of about 2 ms a step measures rarely, and an Event says so."""
    calls = []

    def slow(_view):
        calls.append(1)
        time.sleep(0.02)
        return {"slow": 1.0}

    monitor, sink = watched(["light", (slow, fv.budget(10))])
    model = make("mlp")
    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 250, lambda _: time.sleep(0.002))
    share = len(calls) * 0.02 / sink.value("time.client", node="c0")
    assert 0 < share < 0.13
    (event,) = sink.events("budget")
    assert event.data["probe"] == "slow"
    assert event.data["granted"] == len(calls) < event.data["asked"] == 250
    assert len(sink.metrics("user.slow", node="c0")) == len(calls)


def test_deep_measures_one_step_in_many():
    """In `deep`, at steps that do not depend on what they cost: 0 and 25 in the first round, 18 in the second."""
    monitor, sink = watched("deep")
    model = make("cnn")
    with monitor:
        for number in range(2):
            with monitor.round(number), monitor.client("c0", model):
                train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(), 40)
    assert not sink.events("budget")
    twice, once = (sink.layers("activation", node="c0", round=number) for number in range(2))
    assert (twice.get("count") == 2 * once.get("count")).all()
    assert np.isfinite(twice.get("mean")).all()


def test_compiled_models_and_torch_func_lose_no_client():
    """Activations are left out there; everything else of the client-round is still measured."""

    def by_func(model, x, y):
        own = dict(model.named_parameters())
        gradients = torch.func.grad(lambda p: functional.cross_entropy(torch.func.functional_call(model, p, (x,)), y))
        for name, gradient in gradients(own).items():
            own[name].grad = gradient

    def by_call(model, x, y):
        functional.cross_entropy(model(x), y).backward()

    for compiled, differentiate in ((True, by_call), (False, by_func)):
        model, (x, y) = make("mlp"), make_data(16)
        if compiled:
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor, sink = watched("deep", strict=True)
        with monitor, monitor.round(0), monitor.client("c0", model):
            differentiate(model, x, y)
            optimizer.step()
        assert sink.value("gradient.norm", node="c0") > 0
        assert not [r for r in sink.records if getattr(r, "family", "") == "activation"]
