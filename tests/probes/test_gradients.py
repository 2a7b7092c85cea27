# SPDX-License-Identifier: Apache-2.0
"""The gradient probe against gradients that the test itself copies, in float64, just before the optimiser acts."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedvitals.stats import INFS, NANS, STEP_COLUMNS
from fedvitals.testing import MemorySink
from support.models import MODELS, Catcher, batches, close, make, make_data, train, watched

STEPS = 6
every_model = pytest.mark.parametrize("name", MODELS)


def run_client(probes, model, optimizer, *, steps=STEPS, before_step=lambda step: None) -> tuple[MemorySink, Catcher]:
    """One client-round: what the monitor recorded, and what the test saw."""
    monitor, sink = watched(probes)
    caught = Catcher(model)

    def both(step):
        before_step(step)
        caught(step)

    with monitor, monitor.round(0), monitor.client("c0", model):
        train(model, optimizer, make_data(), steps, both)
    return sink, caught


@every_model
def test_nine_statistics_of_every_step(name):
    """In `deep`, each step's nine sums per layer are those of the gradients that the optimiser is about to use."""
    model = make(name)
    sink, caught = run_client("deep", model, torch.optim.Adam(model.parameters(), 1e-2))
    for step in range(STEPS):
        close(sink.layers("gradient", node="c0", step=step).matrix, caught.rows(step))
    table = sink.table(sink.layers("gradient", node="c0").table)
    assert table.names == tuple(n for n, _ in model.named_parameters())


@every_model
def test_client_round_is_the_merge_of_its_steps(name):
    """In `standard`, one record a client-round holds the nine sums over the values of all steps."""
    model = make(name)
    sink, caught = run_client("standard", model, torch.optim.SGD(model.parameters(), 0.1))
    close(sink.layers("gradient", node="c0").matrix, caught.merged())
    close(sink.layers("gradient", node=None).matrix, caught.merged())


@every_model
def test_step_norms(name):
    """Largest (with its step), mean and last norm, whole and per layer, are those of the twin."""
    model = make(name)
    sink, caught = run_client("standard", model, torch.optim.SGD(model.parameters(), 0.1))
    norms = caught.norms()
    close(sink.value("gradient.norm", node="c0"), norms.mean())
    close(sink.value("gradient.norm_max", node="c0", step=int(norms.argmax())), norms.max())
    close(sink.value("gradient.norm_last", node="c0", step=STEPS - 1), norms[-1])
    change = np.abs(np.diff(norms)) / norms[:-1]
    close(sink.value("gradient.change", node="c0", step=1 + int(change.argmax())), change.max(), 1e-4)
    per_layer = np.array([[float(g.norm()) for g in step] for step in caught.steps])
    found = sink.layers("gradient.steps", node="c0")
    close(found.get("norm_mean"), per_layer.mean(0))
    close(found.get("norm_max"), per_layer.max(0))
    assert found.get("norm_max_step").tolist() == per_layer.argmax(0).tolist()
    close(found.get("norm_last"), per_layer[-1])
    # A layer whose gradient is 0 up to rounding (a bias before batch norm) has no change worth comparing.
    steady = per_layer.min(0) > 1e-6
    layer_change = np.abs(np.diff(per_layer, axis=0))[:, steady] / per_layer[:-1, steady]
    close(found.get("change_max")[steady], layer_change.max(0), 1e-3)


def test_light_keeps_the_norm_at_exit():
    """In `light` there is only the norm of the gradients that stand when the scope closes."""
    model = make("mlp")
    sink, caught = run_client("light", model, torch.optim.SGD(model.parameters(), 0.1))
    close(sink.value("gradient.norm_last", node="c0"), caught.norms()[-1])
    assert sink.value("steps", node="c0") == STEPS
    assert "gradient.norm" not in sink.names()


def test_spike_in_one_step_is_kept():
    """One step of twenty with a gradient a thousand times as large is seen in the client-round's record."""
    model = make("mlp")

    def spike(step):
        if step == 3:
            for p in model.parameters():
                p.grad *= 1000

    sink, caught = run_client("standard", model, torch.optim.Adam(model.parameters()), steps=20, before_step=spike)
    close(sink.value("gradient.norm_max", node="c0", step=3), caught.norms()[3])
    found = sink.layers("gradient.steps", node="c0").matrix
    assert (found[:, STEP_COLUMNS.index("norm_max_step")] == 3).all()
    assert sink.value("gradient.change", node="c0", step=3) > 100


def test_change_against_the_previous_round():
    """The relative change of the mean norm is told from a client's second round on, for each client apart."""
    monitor, sink = watched()
    wanted = {}
    with monitor:
        for number in range(2):
            with monitor.round(number):
                for client in range(2):
                    model = make("mlp", seed=10 * number + client)
                    caught = Catcher(model)
                    with monitor.client(f"c{client}", model):
                        train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(seed=client), 3, caught)
                    wanted[number, client] = caught.norms().mean()
    assert not sink.metrics("gradient.change_round", round=0)
    for client in range(2):
        before, after = wanted[0, client], wanted[1, client]
        close(sink.value("gradient.change_round", node=f"c{client}", round=1), abs(after - before) / before, 1e-4)


@every_model
def test_gradient_accumulation_is_measured_once_per_step(name):
    """With three backward passes per optimiser step, a step is measured once, with the accumulated gradient."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched("deep")
    caught = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for i, (x, y) in enumerate(batches(make_data(), 6)):
            (functional.cross_entropy(model(x), y) / 3).backward()
            if i % 3 == 2:
                caught()
                optimizer.step()
                optimizer.zero_grad()
    assert sink.value("steps", node="c0") == 2
    for step in range(2):
        close(sink.layers("gradient", node="c0", step=step).matrix, caught.rows(step))
    assert not sink.metrics("gradient.norm_unclipped")


def test_parameters_without_gradient():
    """Frozen parameters are left out; unused ones give rows of nothing. Neither disturbs the others."""
    model = nn.ModuleDict({"used": nn.Linear(12, 3), "frozen": nn.Linear(3, 3), "unused": nn.Linear(5, 5)})
    for p in model["frozen"].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched()
    caught = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 3):
            optimizer.zero_grad()
            functional.cross_entropy(model["frozen"](model["used"](x)), y).backward()
            caught()
            optimizer.step()
    found = sink.layers("gradient", node="c0")
    close(found.matrix, caught.merged()[[0, 1, 4, 5]])
    assert found.get("count").tolist() == [108, 9, 0, 0]
    assert sink.layers("gradient.steps", node="c0").get("steps").tolist() == [3, 3, 0, 0]


def test_tied_weights_count_once():
    """A matrix that serves in two places is one layer, with the sum of both gradients."""
    torch.manual_seed(0)
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    second.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Linear(12, 3))
    sink, caught = run_client("standard", model, torch.optim.SGD(model.parameters(), 0.1))
    found = sink.layers("gradient", node="c0")
    close(found.matrix, caught.merged())
    assert sink.table(found.table).names == ("0.weight", "0.bias", "2.bias", "3.weight", "3.bias")


@pytest.mark.parametrize("set_to_none", [True, False])
@every_model
def test_zero_grad_either_way(name, set_to_none):
    """Freed and zeroed gradients are measured alike: no address is kept from one step to the next."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor, sink = watched("deep")
    caught = Catcher(model)
    with monitor, monitor.round(0), monitor.client("c0", model):
        for x, y in batches(make_data(), 5):
            optimizer.zero_grad(set_to_none=set_to_none)
            functional.cross_entropy(model(x), y).backward()
            caught()
            optimizer.step()
    for step in range(5):
        close(sink.layers("gradient", node="c0", step=step).matrix, caught.rows(step))
    assert not sink.metrics("gradient.norm_unclipped")


def test_nonfinite_gradients_do_not_poison_the_rest():
    """NaN and Inf are counted; sums and norms are those of the finite values."""
    model = make("mlp")

    def poison(step):
        if step == 2:  # the last one: the weights are spoilt after it
            model[0].weight.grad[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sink, caught = run_client("deep", model, optimizer, steps=3, before_step=poison)
    row = sink.layers("gradient", node="c0", step=2).matrix[0]
    close(row, caught.rows(2)[0])
    assert (row[NANS], row[INFS]) == (1, 2)
    assert sink.value("gradient.nonfinite", node="c0") == 3
    assert np.isfinite(sink.value("gradient.norm", node="c0"))


def test_histogram_counts_every_value():
    """In `deep`, the octaves of a client-round hold as many values as there were gradients, by sign."""
    model = make("mlp")
    sink, caught = run_client("deep", model, torch.optim.SGD(model.parameters(), 0.1))
    found = sink.layers("gradient.histogram", node="c0").matrix
    negative = [sum(int((s[i] < 0).sum()) for s in caught.steps) for i in range(4)]
    positive = [sum(int((s[i] > 0).sum()) for s in caught.steps) for i in range(4)]
    assert found[:, :64].sum(1).tolist() == negative
    assert found[:, 64:].sum(1).tolist() == positive
