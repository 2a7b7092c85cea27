# SPDX-License-Identifier: Apache-2.0
"""Parameters that neither train nor travel are left out; those that one client froze by mistake are not."""

import copy

import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.probes.view import View
from fedvitals.records import LayerStats
from fedvitals.testing import MemorySink
from support.models import make_data, watched

ADAPTER = ["1.a", "1.b", "3.weight", "3.bias"]


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that begins at zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x):
        return self.frozen(x) + x @ self.a.T @ self.b.T


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), Adapted(40, 20), nn.ReLU(), nn.Linear(20, 3))
    model[0].requires_grad_(False)
    return model


def train(model, steps=3):
    x, y = make_data()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def federation(monitor, shared, clients=3, rounds=2, change=lambda index, model: None, send=None):
    with monitor:
        for number in range(rounds):
            with monitor.round(number, shared):
                for index in range(clients):
                    model = copy.deepcopy(shared)
                    change(index, model)
                    with monitor.client(f"c{index}", model):
                        train(model)
                    if send is not None:
                        monitor.updates(number, {f"c{index}": send(model, shared)})


def layer_names(sink: MemorySink, record: LayerStats) -> list[str]:
    return [layer.name for layer in sink.table(record.table).layers]


def test_only_what_trains_is_measured():
    monitor, sink = watched()
    federation(monitor, adapted())
    families = {"gradient", "gradient.steps", "weight", "update", "update.alignment"}
    records = [record for record in sink.of(LayerStats) if record.family in families]
    assert {record.family for record in records} == families
    for record in records:
        assert layer_names(sink, record) == ADAPTER, (record.family, record.where)
    trained = sum(p.numel() for p in adapted().parameters() if p.requires_grad)
    assert int(sink.layers("update", node="c0", round=0).get("count").sum()) == trained


def test_watching_adapters_changes_no_bit_and_wakes_no_frozen_layer():
    model, twin = adapted(), adapted()
    monitor, _ = watched()
    with monitor, monitor.round(0, model), monitor.client("c0", model):
        train(model)
    train(twin)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
        assert (ours.grad is None) == (theirs.grad is None)


def test_a_layer_that_one_client_froze_is_still_compared():
    """The others train it, so it is exchanged: the client that froze it by mistake shows an update of zero there."""

    def freeze(index, model):
        if index == 1:
            model[3].requires_grad_(False)

    monitor, sink = watched()
    federation(monitor, adapted(), change=freeze)
    for index in range(3):
        record = sink.layers("update", node=f"c{index}", round=1)
        assert layer_names(sink, record) == ADAPTER
        assert (record.get("l2")[2] == 0) == (index == 1)


def test_frozen_layers_that_travel_are_measured_at_the_server():
    """A host that hands over whole models: its own table has all layers, and the frozen ones show no change."""

    def whole(model, shared):
        return [(p - q).detach() for p, q in zip(model.parameters(), shared.parameters(), strict=True)]

    monitor, sink = watched()
    federation(monitor, adapted(), send=whole)
    sizes = [p.numel() for p in adapted().parameters()]
    own = [r for r in sink.of(LayerStats) if r.family == "update" and r.where.node == "c0" and r.where.round == 0]
    assert [r.get("count").tolist() for r in own if len(r.matrix) == len(sizes)] == [sizes]


def test_a_model_in_which_nothing_trains_is_seen_whole():
    """A global model that is only averaged into, as a container with gradients switched off."""
    shared = adapted().requires_grad_(False)
    assert len(View(shared).parameters) == len([*shared.parameters()])


def test_a_container_is_seen_as_far_as_its_clients_train_it():
    """From the second round on it is known which of its layers train."""
    monitor, sink = watched()

    def thaw(_, model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in ADAPTER)

    federation(monitor, adapted().requires_grad_(False), change=thaw)
    assert layer_names(sink, sink.layers("weight", node="server", round=1)) == ADAPTER


def test_layers_unfrozen_inside_the_scope_are_told_and_then_measured():
    monitor, sink = watched()
    model = adapted()
    with monitor:
        for number in range(2):
            with monitor.round(number), monitor.client("c0", model):
                model[0].requires_grad_(True)
                train(model)
    (event,) = sink.events("layers.unfrozen")
    assert (event.where.round, event.data["layers"]) == (0, ["0.weight", "0.bias"])
    assert layer_names(sink, sink.layers("update", node="c0", round=1)) == ["0.weight", "0.bias", *ADAPTER]


def test_adapters_in_worker_processes(tmp_path):
    """What the parent knows of trained layers goes along: a worker's client that froze one still reports it."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], strict=True, machine=False) as monitor:
        shared = adapted()
        with monitor.round(0, shared):
            worker = monitor.host.for_worker()
            model = copy.deepcopy(shared)
            model[3].requires_grad_(False)
            with worker.client("c0", model):
                train(model)
            monitor.host.absorb(worker.payload())
    assert layer_names(sink, sink.layers("update", node="c0", round=0)) == ADAPTER
