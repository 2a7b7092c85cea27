# SPDX-License-Identifier: Apache-2.0
"""Where a round's time went, on the real clock: the server's parts, groups, and journeys of clients elsewhere."""

import time

import pytest

from fedvitals.errors import ConfigError, RecordError
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Span, Where
from fedvitals.resources.time_ledger import Exchange, Ledger
from fedvitals.testing import MemorySink
from fedvitals.time_parts import edge_span, parts_of, unfold
from support.conditions import holds_for_each

NAP = 0.03


def watched(**settings):
    sink = MemorySink()
    return sink, Monitor(None, sinks=[sink], detectors=(), strict=True, **settings)


def test_the_servers_parts_fill_the_round():
    sink, monitor = watched()
    with monitor:
        for number in range(2):
            with monitor.round(number):
                for node in ("c0", "c1"):
                    with monitor.client(node):
                        time.sleep(NAP)
                with monitor.part("aggregate"):
                    time.sleep(NAP)
                monitor.host.spent("evaluate", 0.5 * NAP)
                time.sleep(0.5 * NAP)
    rounds = {span.where.round: span for span in sink.of(Span, "round")}
    for span in sink.of(Span, "server"):
        parts, whole = parts_of(span), rounds[span.where.round]
        assert list(parts) == ["wait", "aggregate", "evaluate", "measure"]
        # Times since 1970 in float64 are exact to 2.4e-7 s only, and the span's length is a difference of two.
        assert span.seconds == pytest.approx(whole.seconds, abs=2e-6)
        assert 3.5 * NAP <= sum(parts.values()) <= whole.seconds + 2e-6
        assert parts["wait"] >= 2 * NAP
        assert (span.parent, span.attributes["folded"]) == (whole.id, True)
        assert abs(span.at - whole.at) < whole.seconds
        assert sink.value("time.aggregate", round=whole.where.round) == pytest.approx(parts["aggregate"])
        assert NAP <= parts["aggregate"] <= whole.seconds


def test_a_group_without_a_scope_of_its_own_gets_a_span_around_its_members():
    sink, monitor = watched()
    with monitor, monitor.round(0), monitor.edge("edge-0"), monitor.client("c0"):
        time.sleep(NAP)
    with watched()[1] as other, other.round(0):
        pass
    sink, monitor = watched()
    with monitor, monitor.round(0):
        for node, group in (("c0", "ring-0"), ("c1", "ring-0"), ("c2", "ring-1")):
            with monitor.client(node, group=group):
                time.sleep(NAP)
    edges = {span.where.node: span for span in sink.of(Span, "edge")}
    (whole,) = sink.of(Span, "round")
    assert set(edges) == {"ring-0", "ring-1"}
    assert edges["ring-0"].seconds >= 2 * NAP
    assert edges["ring-1"].seconds >= NAP
    assert sum(edge.seconds for edge in edges.values()) <= whole.seconds * (1 + 1e-6)  # one after the other
    for span in sink.of(Span, "client"):
        edge = edges[span.where.group]
        assert span.parent == edge.id == edge_span(whole.id, edge.where.node)
        assert edge.parent == whole.id
        assert edge.at <= span.at
        assert span.at + span.seconds <= edge.at + edge.seconds + 1e-6


def exchange(monitor, node, *, ahead=0.0, down=0.2, before=0.1, train=1.0, up=2.0):
    """A client on another machine, whose clock is ahead, tells what it did; its records come home."""
    worker = monitor.host.for_worker()
    sent = time.time()
    with worker.client(node):
        pass
    payload = worker.payload()
    return (
        sent,
        (sent, sent + down + ahead, sent + down + before + train + ahead, sent + down + before + train + up),
        payload,
    )


def test_a_client_elsewhere_is_seen_from_being_asked_to_the_rounds_end():
    sink, monitor = watched(host="flower")
    with monitor, monitor.round(0):
        monitor.host.expect("c7")
        _, times, payload = exchange(monitor, "c7", ahead=-3600.0)
        monitor.exchange("c7", *times)
        monitor.host.absorb(payload)
    (journey,), (client,), (whole,) = (sink.of(Span, name) for name in ("journey", "client", "round"))
    parts = parts_of(journey)
    assert list(parts) == ["download", "queue", "data", "compute", "upload", "wait"]
    assert min(parts.values()) >= 0
    # One hour behind beyond doubt; what is left open is how 2.2 s of travelling divide.
    assert journey.attributes["clock_offset"] == pytest.approx(-3600.9, abs=0.5)
    assert journey.attributes["clock_error"] == pytest.approx(1.1, abs=0.5)
    assert client.parent == journey.id
    assert journey.parent == whole.id
    metrics = {m.name: m.value for m in sink.metrics() if m.where.node == "c7"}
    assert metrics["time.clock_error"] == pytest.approx(-3599.8, abs=0.5)
    assert metrics["time.upload"] == parts["upload"]


def test_on_one_clock_the_parts_are_those_that_were():
    ledger = Ledger()
    ledger.begin("a" * 16, 100.0)
    ledger.exchange("c0", Exchange(100.0, 100.5, 104.0, 107.0))
    told = {"parts": {"data": 1.0, "forward": 2.0}, "folded": True}
    ledger.trained(Span(Where("r", 0, "c0"), 101.0, "client", 2.5, "", "b" * 16, None, told))
    (server, journey) = ledger.close(110.0)
    assert journey.parts == {"download": 0.5, "queue": 0.5, "data": 1.0, "compute": 2.0, "upload": 3.0, "wait": 3.0}
    assert (journey.began, journey.seconds) == (100.0, 10.0)
    assert server.parts == {"wait": 7.0}


def test_a_client_that_lies_about_its_times_stays_within_what_the_server_saw():
    ledger = Ledger()
    ledger.begin("a" * 16, 100.0)
    ledger.exchange("c0", Exchange(100.0, 100.5, 104.0, 107.0))
    ledger.trained(Span(Where("r", 0, "c0"), 5.0, "client", 1e9, "", "b" * 16, None, {"parts": {"data": 1e300}}))
    journey = ledger.close(110.0)[1]
    assert min(journey.parts.values()) >= 0
    assert journey.seconds == pytest.approx(10.0)


def test_wrong_use_is_told():
    ledger = Ledger()
    with pytest.raises(ConfigError, match="aggregate"):
        ledger.spent("agregate", 1.0, "server")
    with pytest.raises(RecordError, match="before it began"):
        ledger.exchange("c0", Exchange(10.0, 0.0, 1.0, 9.0))


def test_parts_unfold_to_spans_that_follow_each_other():
    told = {"parts": {"download": 1.0, "compute": 2.0, "nonsense": 5.0, "upload": -1.0}, "clock": "virtual"}
    span = Span(Where("r", 3, "c0"), 50.0, "journey", 3.0, "f" * 32, "c" * 16, None, told)
    inner = unfold(span)
    assert [(s.name, s.at, s.seconds) for s in inner] == [("download", 50.0, 1.0), ("compute", 51.0, 2.0)]
    assert {s.parent for s in inner} == {span.id}
    assert len({s.id for s in inner}) == 2
    assert unfold(span)[0].id == inner[0].id
    assert holds_for_each(s.attributes == {"clock": "virtual"} for s in inner)
