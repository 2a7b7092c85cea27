# SPDX-License-Identifier: Apache-2.0
"""Clients on a device are reported when their results have arrived, at the latest when the round ends."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.records import Span
from fedvitals.testing import MemorySink
from support.pretended_device import Pretending, away, on_device


def network():
    torch.manual_seed(0)
    return on_device(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.05, foreach=False)
    for step in range(steps):
        stream = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=stream), torch.randint(0, 3, (8,), generator=stream)
        optimizer.zero_grad()
        functional.cross_entropy(model(away(x)), away(y)).backward()
        optimizer.step()


@pytest.fixture
def monitored():
    """A strict monitor inside of which tensors may lie on the pretended device, and what it records."""
    sink = MemorySink()
    with Pretending(), fv.Monitor(None, sinks=[sink], probes="standard", strict=True, detectors=()) as monitor:
        yield monitor, sink


def reported(monitor, sink):
    """The clients that were reported so far."""
    assert monitor._run.lifecycle.flush(10.0)
    return [metric.where.node for metric in sink.metrics("time.client")]


def test_a_client_is_reported_when_the_round_ends_in_the_order_in_which_they_ended(monitored):
    monitor, sink = monitored
    with monitor.round(0):
        for name in ("b", "a", "c"):
            with monitor.client(name, network()):
                pass
            assert not reported(monitor, sink)
    assert reported(monitor, sink) == ["b", "a", "c"]


def test_what_was_trained_is_measured_although_the_model_changes_before_the_report(monitored):
    monitor, sink = monitored
    model = network()
    before = torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])
    with monitor.round(0):
        with monitor.client("a", model):
            train(model)
        after = torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
    assert monitor.flush()
    assert sink.value("update.norm", node="a", round=0) == pytest.approx(float((after - before).norm()), rel=1e-5)


@pytest.mark.parametrize("ask", ["flush", "findings"])
def test_who_asks_for_everything_gets_the_clients_that_have_ended(monitored, ask):
    monitor, sink = monitored
    with monitor.round(0):
        with monitor.client("a", network()):
            pass
        assert not reported(monitor, sink)
        getattr(monitor, ask)()
        assert reported(monitor, sink) == ["a"]


def test_what_the_host_holds_counts_more_than_what_was_trained(monitored):
    monitor, sink = monitored
    model = network()
    with monitor.round(0):
        with monitor.client("a", model):
            train(model)
        monitor.updates(0, {"a": [torch.full(p.shape, 2.0) for p in model.parameters()]})
    weights = sum(p.numel() for p in model.parameters())
    assert monitor.flush()
    assert sink.value("update.norm", node="a") == pytest.approx(2.0 * weights**0.5)


def test_an_edge_counts_its_clients(monitored):
    monitor, sink = monitored
    with monitor.round(0), monitor.edge("edge-0", network()):
        with monitor.client("a", network()):
            pass
        assert not reported(monitor, sink)
    assert reported(monitor, sink) == ["a"]


def test_a_round_that_is_discarded_reports_nobody(monitored):
    monitor, sink = monitored
    monitor.host.round_begin(0)
    with monitor.client("a", network()):
        pass
    monitor.host.discard()
    with monitor.round(1), monitor.client("b", network()):
        pass
    assert reported(monitor, sink) == ["b"]


def test_outside_of_a_round_a_client_is_reported_at_once(monitored):
    monitor, sink = monitored
    with monitor.client("a", network()):
        pass
    assert reported(monitor, sink) == ["a"]


def test_a_client_that_fails_is_reported_with_its_error(monitored):
    monitor, sink = monitored
    with monitor.round(0):
        with pytest.raises(ZeroDivisionError), monitor.client("a", network()):
            _ = 1 / 0
        with monitor.client("b", network()):
            pass
    assert reported(monitor, sink) == ["a", "b"]
    assert [event.where.node for event in sink.events("client.failed")] == ["a"]
    spans = {span.where.node: span.attributes["failed"] for span in sink.of(Span, "client")}
    assert spans == {"a": True, "b": False}


def test_results_on_their_way_keep_neither_model_nor_optimiser_alive(monitored):
    monitor, sink = monitored
    with monitor.round(0):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, foreach=False)
        with monitor.client("a", model, optimizer):
            functional.cross_entropy(model(away(torch.randn(8, 6))), away(torch.randint(0, 3, (8,)))).backward()
            optimizer.step()
        assert not reported(monitor, sink)
        alive = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
        gc.disable()  # what is in no cycle is gone at once: on a device, nobody collects garbage before memory is short
        try:
            del model, optimizer
            assert not [reference() for reference in alive if reference() is not None]
        finally:
            gc.enable()
    assert reported(monitor, sink) == ["a"]
