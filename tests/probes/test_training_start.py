# SPDX-License-Identifier: Apache-2.0
"""Weights that a loop loads inside of a client's scope: the update is measured from where the training began."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedvitals.probes.snapshot import FEW
from support.hooks import hooks_left
from support.models import make_data, watched


def small():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def large():
    """More parameters than are compared one by one."""
    model = nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 200), nn.ReLU(), nn.Linear(200, 3))
    assert sum(p.numel() for p in model.parameters()) > FEW
    return model


def by_state(model, source):
    model.load_state_dict(source.state_dict())


def by_copy(model, source):
    with torch.no_grad():
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            p.copy_(q)


def by_data(model, source):
    for p, q in zip(model.parameters(), source.parameters(), strict=True):
        p.data.copy_(q.data)


def by_vector(model, source):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(source.parameters()).detach(), model.parameters())


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double()


def one_round(load, factory=small, probes="standard", optimised=True, shown=True, after=lambda model: None):
    """Two clients, each with a model that has trained elsewhere; the norms of their updates, and what was recorded."""
    torch.manual_seed(0)
    shared, own, norms = factory(), {name: factory() for name in "ab"}, {}
    data = make_data()
    monitor, sink = watched(probes)
    with monitor, monitor.round(0, shared if shown else None):
        for name, model in own.items():
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            with monitor.client(name, model, data=data, loss=functional.cross_entropy):
                load(model, shared)
                for _ in range(3):
                    model.zero_grad()
                    functional.cross_entropy(model(data[0]), data[1]).backward()
                    if optimised:
                        optimizer.step()
                    else:
                        with torch.no_grad():
                            for p in model.parameters():
                                p.sub_(0.05 * p.grad)
                after(model)
            norms[name] = float((vector(model) - vector(shared)).norm())
            assert not hooks_left(model, optimizer)
            assert not model._load_state_dict_post_hooks
    return norms, sink, shared, data


@pytest.mark.parametrize("load", [by_state, by_copy, by_data, by_vector])
@pytest.mark.parametrize("factory", [small, large])
@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
def test_the_update_is_measured_from_the_global_model(load, factory, probes):
    norms, sink, _, _ = one_round(load, factory, probes)
    assert {node: sink.value("update.norm", node=node) for node in norms} == pytest.approx(norms, rel=1e-5)
    assert not sink.events("update.base")


def test_the_fit_of_the_received_model_is_that_of_the_loaded_weights():
    _, sink, shared, (x, y) = one_round(by_state, probes="deep")
    with torch.no_grad():
        expected = float(functional.cross_entropy(shared.eval()(x), y))
    assert len(sink.metrics("fit.loss_before", node="a")) == 1
    assert sink.value("fit.loss_before", node="a") == pytest.approx(expected, rel=1e-5)


def test_loops_without_an_optimiser_are_followed_by_what_they_load():
    norms, sink, _, _ = one_round(by_state, optimised=False)
    assert {node: sink.value("update.norm", node=node) for node in norms} == pytest.approx(norms, rel=1e-5)


def test_without_a_global_model_the_change_of_base_is_said_once():
    norms, sink, _, _ = one_round(by_state, shown=False)
    assert {node: sink.value("update.norm", node=node) for node in norms} == pytest.approx(norms, rel=1e-5)
    (event,) = sink.events("update.base")
    assert (event.level, event.where.node) == ("info", "a")
    assert "monitor.round(number, model)" in event.message


def test_other_weights_than_the_global_models_are_said_and_measured_from_it():
    def load_and_shift(model, source):
        by_state(model, source)
        with torch.no_grad():
            model[0].weight += 1.0

    norms, sink, _, _ = one_round(load_and_shift)
    assert {node: sink.value("update.norm", node=node) for node in norms} == pytest.approx(norms, rel=1e-5)
    (event,) = sink.events("update.base")
    assert "others than the round's global model" in event.message


def test_a_checkpoint_that_is_restored_after_training_is_its_outcome():
    kept = {}

    def remember(model, source):
        by_state(model, source)
        kept[id(model)] = copy.deepcopy({k: v + 0.5 for k, v in model.state_dict().items()})

    norms, sink, _, _ = one_round(remember, after=lambda model: model.load_state_dict(kept[id(model)]))
    assert {node: sink.value("update.norm", node=node) for node in norms} == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("factory", [small, large])
def test_a_personal_model_is_measured_from_itself(factory):
    """Where a client's model is its own and nothing is loaded, the global model is not its start."""
    norms, sink, _, _ = one_round(lambda model, source: None, factory)
    assert sink.value("update.norm", node="a") < 0.5 * norms["a"]
    assert not sink.events("update.base")


def test_a_model_of_nan_is_not_taken_for_replaced():
    def factory():
        model = small()
        with torch.no_grad():
            model[0].bias[0] = float("nan")
        return model

    _, sink, _, _ = one_round(lambda model, source: None, factory)
    assert not sink.events("update.base")
