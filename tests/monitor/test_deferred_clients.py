# SPDX-License-Identifier: Apache-2.0
"""Clients on a device are reported when their results have arrived, at the latest when the round ends."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.errors import ConfigError
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


def train_nothing(monitor, names):
    """A round in which these clients only open and close."""
    with monitor.round(0):
        for name in names:
            with monitor.client(name, network()):
                pass


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


@pytest.mark.parametrize("updates", [2, 4])
def test_updates_on_their_way_count_as_kept(updates):
    size = 4 * sum(p.numel() for p in network().parameters())
    with Pretending(), fv.Monitor(None, probes="standard", update_memory=updates * size, strict=True) as monitor:
        with monitor.round(0):
            for name in "abcdefgh":
                with monitor.client(name, network()):
                    pass
            waiting = monitor._run.clients._unsettled._waiting
            assert sum(pending._kept_bytes for _, pending, _ in waiting) <= updates * size
        assert monitor._run.kit.updates._expected == 0


def test_what_a_probe_fills_again_is_taken_as_it_was():
    sink, numbers, tensor = MemorySink(), np.zeros(()), torch.zeros((), dtype=torch.float64)

    def count(_view):
        numbers[...] += 1
        tensor.add_(1)
        return {"array": numbers, "tensor": tensor}

    with Pretending(), fv.Monitor(None, sinks=[sink], probes=["light", count], strict=True) as monitor:
        train_nothing(monitor, "abc")
    for name in ("user.array", "user.tensor"):
        assert [metric.value for metric in sink.metrics(name)] == [1, 2, 3]


def test_a_report_that_fails_leaves_the_round_closed_and_the_others_reported():
    sink = MemorySink()

    def fails_for_a(view):
        return {"gradient": torch.zeros(3)} if view.node == "a" else {}  # of no shape that the family has

    with Pretending(), fv.Monitor(None, sinks=[sink], probes=["light", fails_for_a], strict=True) as monitor:
        with pytest.raises(ConfigError, match="This family wants"):
            train_nothing(monitor, "ab")
        with monitor.round(1):
            pass
        assert "b" in reported(monitor, sink)
    assert not sink.events("round.unclosed")
    assert [m.where.round for m in sink.metrics("time.round")] == [0, 1]


def test_a_thinned_budget_is_told_of_the_client_that_it_belongs_to():
    sink, schedule = MemorySink(), fv.budget(5)

    def never_granted(_view):
        return {}

    probes = ["light", (never_granted, schedule)]
    with Pretending(), fv.Monitor(None, sinks=[sink], probes=probes, strict=True) as monitor, monitor.round(0):
        for name in "abc":
            model = network()
            with monitor.client(name, model):
                train(model)
                schedule.asked, schedule.granted = 4, 1
    events = [(event.where.node, event.data["asked"], event.data["granted"]) for event in sink.events("budget")]
    assert events == [("a", 4, 1), ("b", 4, 1), ("c", 4, 1)]
