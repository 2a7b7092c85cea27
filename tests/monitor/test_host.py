# SPDX-License-Identifier: Apache-2.0
"""What a host tells a monitor besides clients: scalars of nodes, spans of its clock, events, what was really sent."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedvitals as fv
from fedvitals.protocols import NullObserver, Observer
from fedvitals.records import LayerStats, Span
from fedvitals.stats import COUNT, SUM, SUM_SQUARES
from fedvitals.testing import MemorySink
from support.models import make, make_data, train, watched

NODES = ["c0", "c1", "c2", "c3"]


def test_both_observers_have_every_method_of_the_protocol():
    monitor, _ = watched()
    with monitor:
        assert isinstance(monitor.host, Observer)
        assert isinstance(NullObserver(), Observer)


def test_a_scalar_of_several_nodes_is_one_of_each():
    told = []
    for together in (True, False):
        monitor, sink = watched()
        with monitor, monitor.round(3), monitor.client("c1", group="edge-0"):
            if together:
                monitor.host.log_each("mood", {"c7": 1, "c1": 2.0, 5: torch.tensor(3.0)})
            else:
                for node, value in (("c7", 1), ("c1", 2.0), (5, torch.tensor(3.0))):
                    monitor.host.log({"mood": value}, node=node)
        told.append([(r.where, r.name, r.value) for r in sink.metrics("user.mood")])
        told[-1] = [(where.round, where.node, where.group, name, value) for where, name, value in told[-1]]
    assert told[0] == told[1] != []


def test_scalars_of_a_node_and_of_the_round():
    monitor, sink = watched()
    with monitor, monitor.round(3):
        monitor.log({"accuracy": 0.5}, node="c7")
        monitor.log({"accuracy": torch.tensor(0.25)})
        monitor.log(patience=2)
        with monitor.client("c1", group="edge-0"):
            monitor.log({"mood": 1.0})
            monitor.log({"mood": 2.0}, node="c1")
            monitor.log({"mood": 3.0}, node="server")
    told = [(r.where.round, r.where.node, r.where.group, r.name, r.value) for r in sink.metrics()]
    assert (3, "c7", None, "accuracy", 0.5) in told
    assert (3, None, None, "accuracy", 0.25) in told
    assert (3, None, None, "user.patience", 2.0) in told
    assert [t for t in told if t[3] == "user.mood"] == [
        (3, "c1", "edge-0", "user.mood", 1.0),
        (3, "c1", "edge-0", "user.mood", 2.0),
        (3, "server", None, "user.mood", 3.0),
    ]


def test_loss_of_an_open_client_that_the_host_names_is_its_loss():
    monitor, sink = watched()
    with monitor, monitor.round(0):
        model, data = make("mlp"), make_data()
        with monitor.client("c0", model, data=data, loss=functional.cross_entropy):
            monitor.log({"loss": 0.125}, node="c0")
    assert [r.value for r in sink.metrics("loss")] == [0.125]


def test_span_on_a_virtual_clock_stands_after_the_start_of_the_run():
    monitor, sink = watched()
    with monitor:
        monitor.host.span(None, "set-up", 0.0, 1.5, clock="virtual")  # before any round
        with monitor.round(0):
            monitor.host.span("c4", "upload", 12.5, 3.0, clock="virtual", lost=True)
            outer = sink  # the round's own span is written at its end
    spans = {s.name: s for s in outer.of(Span)}
    started = monitor.run.started
    assert started > 0
    assert (spans["set-up"].at, spans["set-up"].where.node) == (started, None)
    upload = spans["upload"]
    assert (upload.at, upload.seconds) == (started + 12.5, 3.0)
    assert (upload.where.round, upload.where.node) == (0, "c4")
    assert upload.attributes == {"clock": "virtual", "lost": True}
    assert upload.parent == spans["round"].id
    assert upload.trace == spans["round"].trace
    assert upload.id != spans["round"].id


def test_event_at_a_node():
    monitor, sink = watched()
    with monitor, monitor.round(1):
        monitor.host.event("warning", "client.dropped", "c3 went away.", node="c3", data={"after": 2.5})
        monitor.host.event("info", "clusters.merged", "cluster-0 and cluster-1 are one.")
    (dropped,) = sink.events("client.dropped")
    assert (dropped.level, dropped.where.round, dropped.where.node) == ("warning", 1, "c3")
    assert dropped.data == {"after": 2.5}
    (merged,) = sink.events("clusters.merged")
    assert merged.where.node is None


def test_host_is_never_stopped_by_what_it_tells():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        monitor.host.event("wraning", "x", "y")
        monitor.host.event("info", "x", None)
        monitor.host.span("c0", "upload", "soon", 1.0)
        monitor.log({"loss": "high"}, node="c0")
        monitor.log({"loss": 1.0}, node="c0")
    told = [e.message for e in sink.events("monitor.error")]
    assert len(told) == 4
    assert any("Did you mean 'warning'?" in text for text in told)
    assert [r.value for r in sink.metrics("loss")] == [1.0]


def test_privacy_holds_for_what_a_host_tells_of_a_client():
    monitor, sink = watched(privacy=1)
    with monitor, monitor.round(0):
        monitor.log({"accuracy": 0.5}, node="c7")
        monitor.log({"accuracy": 0.25}, node="server")
        monitor.host.event("warning", "client.dropped", "c3 said something", node="c3", data={"words": "secret"})
        monitor.host.span("c3", "upload", 1.0, 2.0, clock="virtual", words="secret")
    assert [r.where.node for r in sink.metrics("accuracy")] == ["server"]
    (event,) = sink.events("client.dropped")
    assert "said something" not in event.message
    assert event.data == {}
    (span,) = [s for s in sink.of(Span) if s.name == "upload"]
    assert "words" not in span.attributes


def test_closed_run_takes_nothing_more():
    monitor, sink = watched(strict=False)
    with monitor, monitor.round(0):
        pass
    count = len(sink.records)
    monitor.host.span(None, "late", 0.0, 1.0)
    monitor.host.event("info", "late", "late")
    assert len(sink.records) == count


# -- what was really sent ---------------------------------------------------------------------------------------------


def federate(sent_by, *, through_worker, **settings):
    """One round of four clients in two edges; `sent_by(node, update)` is what leaves the client."""
    monitor, sink = watched(**settings)
    honest = {}
    with monitor, monitor.round(0):
        sent, observer = {}, monitor.host.for_worker() if through_worker else monitor
        for i, node in enumerate(NODES):
            model = make("mlp")
            before = [p.detach().clone() for p in model.parameters()]
            with observer.client(node, model, group=f"edge-{i // 2}"):
                train(model, torch.optim.SGD(model.parameters(), 0.1), make_data(seed=i), 3)
            honest[node] = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
            sent[node] = sent_by(node, honest[node])
        if through_worker:
            monitor.host.absorb(observer.payload())
        monitor.updates(0, sent)
    return sink, honest


def newest_update(sink, node):
    return [r for r in sink.of(LayerStats) if r.family == "update" and r.where.node == node and r.where.round == 0]


@pytest.mark.parametrize("through_worker", [False, True])
def test_server_sees_what_a_byzantine_client_sent(through_worker):
    """Its own telemetry is honest about a training whose result it did not send."""

    def flipped(node, update):
        return [-2 * part for part in update] if node == "c1" else update

    sink, honest = federate(flipped, through_worker=through_worker)
    plain, _ = federate(lambda _, update: update, through_worker=through_worker)
    for node in NODES:
        told = newest_update(sink, node)
        assert len(told) == (2 if node == "c1" else 1)
        wanted = np.array([float(part.double().sum()) for part in honest[node]]) * (-2 if node == "c1" else 1)
        np.testing.assert_allclose(told[-1].matrix[:, SUM], wanted, rtol=1e-5, atol=1e-6)
    first, last = newest_update(sink, "c1")
    np.testing.assert_allclose(last.matrix[:, SUM_SQUARES], 4 * first.matrix[:, SUM_SQUARES], rtol=1e-5)
    assert (last.where.group, last.table) == ("edge-0", first.table)
    # The edge's and the round's sums are of what was sent, too, and count nobody twice.
    for node in ("edge-0", None):
        (found,), (before,) = newest_update(sink, node), newest_update(plain, node)
        np.testing.assert_array_equal(found.matrix[:, COUNT], before.matrix[:, COUNT])
        more = 3 * newest_update(plain, "c1")[0].matrix[:, SUM_SQUARES]
        np.testing.assert_allclose(found.matrix[:, SUM_SQUARES], before.matrix[:, SUM_SQUARES] + more, rtol=1e-5)
    assert sink.value("clients") == 4
    cosines = [s.value("update.cosine_mean", node="c1") for s in (sink, plain)]
    assert cosines[0] == pytest.approx(-cosines[1], rel=1e-4)


@pytest.mark.parametrize("spoil", [float("nan"), float("inf")])
def test_update_that_is_not_finite_is_told(spoil):
    def broken(node, update):
        if node == "c2":
            update = [part.clone() for part in update]
            update[0][0, 0] = spoil
        return update

    sink, _ = federate(broken, through_worker=True)
    assert len(newest_update(sink, "c2")) == 2
    assert len(newest_update(sink, "c1")) == 1


def test_rounding_is_not_another_update():
    """Half an ulp here and there is how a host computes, not what a client did."""
    sink, _ = federate(lambda _, update: [(part + 1.0) - 1.0 for part in update], through_worker=True)
    assert all(len(newest_update(sink, node)) == 1 for node in NODES)


def test_update_of_other_layers_is_not_told_in_place_of_the_clients():
    sink, _ = federate(lambda _, update: [torch.cat([-part.flatten() for part in update])], through_worker=True)
    assert all(len(newest_update(sink, node)) == 1 for node in NODES)


def test_brief_preset_tells_no_sums_of_updates():
    sink, _ = federate(lambda _, update: [-part for part in update], through_worker=False, probes="light")
    assert not [r for r in sink.of(LayerStats) if r.family == "update"]


def test_work_of_a_host_that_fails_is_reported_once_and_costs_the_all_clear():
    def read():
        raise ValueError("no such reply")

    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        monitor.host.round_begin(0)
        assert [monitor.host.guarded("reading a reply", read, node) for node in ("c1", "c1", "c2", None)] == [None] * 4
        assert monitor.host.guarded("reading a reply", lambda: 3) == 3
        monitor.host.round_end(0)
        words = str(monitor.findings())
    assert [event.where.node for event in sink.events("monitor.error")] == ["c1", "c2", None]
    assert "reading a reply failed in round 0 (ValueError)" in words
    assert "what was measured of c1 and c2 is incomplete" in words
