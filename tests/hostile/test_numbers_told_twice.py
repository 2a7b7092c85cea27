# SPDX-License-Identifier: Apache-2.0
"""A training measures each number once: who tells it twice is named, and no honest client does."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.records import Finding, Metric
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from support.hostile_federation import HERE, LIAR, run

LIES = {
    "healthy gradients": [Metric(HERE, 1.0, "gradient.norm", 0.5)],
    "fewer steps": [Metric(HERE, 1.0, "steps", 1.0)],
    "the same once more": [Metric(HERE, 1.0, "weight.norm", 2.0)],
}


@pytest.mark.parametrize("name", LIES)
def test_who_tells_a_measured_number_twice_is_named_and_the_first_value_stands(name):
    found = run(lambda _: LIES[name])
    sink, lie = found.sink, LIES[name][0]
    honest = {"gradient.norm": 1.0, "steps": 10.0, "weight.norm": 2.0}[lie.name]
    assert {m.value for m in sink.metrics(lie.name, node=LIAR)} == {honest}
    assert len(sink.metrics(lie.name, node=LIAR)) == 5
    assert {node for node, _ in found.refusals()} == {LIAR}
    assert {f.where.node for f in sink.of(Finding, "TELEMETRY_LOST")} == {LIAR}


def test_what_users_log_may_come_often():
    often = [Metric(HERE, 1.0, "loss", 0.5), Metric(HERE, 1.0, "user.own", 1.0), Metric(HERE, 2.0, "user.own", 2.0)]
    found = run(lambda _: often)
    assert not found.refusals()
    assert {m.value for m in found.sink.metrics("user.own", node=LIAR)} == {1.0, 2.0}


@pytest.mark.parametrize("probes", ["light", "standard", "deep"])
def test_honest_clients_are_not_refused_be_they_identical(probes):
    """All clients train on the same batches from the same model, so that all their numbers are the same."""
    sink = MemorySink()
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    inputs, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
    with fv.Monitor(None, sinks=[sink], machine=False, privacy=3, probes=probes) as monitor:
        monitor.host.describe("test", {})
        for number in range(3):
            monitor.host.round_begin(number, shared)
            for node in ("a", "b", "c", "d"):
                payload, update = trained(monitor, node, shared, inputs, labels)
                monitor.host.absorb(payload, Sender(node, monitor.run.id))
                monitor.updates(number, {node: update})
            monitor.host.round_end(number, shared)
    assert len(sink.metrics("steps")) == 12
    assert not sink.events("telemetry.refused"), [event.message for event in sink.events("telemetry.refused")]


def trained(monitor, node, shared, inputs, labels):
    model = copy.deepcopy(shared)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    worker = replace(monitor.host.for_worker(), round=None)
    with worker.client(node, model, optimizer):
        for batch, targets in zip(inputs.split(16), labels.split(16), strict=True):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            worker.log(loss=float(loss.detach()))
    update = [(new - old).detach() for new, old in zip(model.parameters(), shared.parameters(), strict=True)]
    return worker.payload(most=32 << 10), update
