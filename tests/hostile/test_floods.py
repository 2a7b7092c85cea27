# SPDX-License-Identifier: Apache-2.0
"""One client whose telemetry is small on the wire and large in memory: bounded before it is expanded, and named."""

import contextlib
import threading

import pytest

import fedvitals as fv
from fedvitals.measurements import Measurements, stamped
from fedvitals.records import Event, Finding, LayerStats, Metric, Span, Where
from fedvitals.store import open_reader
from fedvitals.transport.sender import Sender
from fedvitals.transport.wire.payload import encode
from support.hostile_federation import HERE, HONEST, LIAR, SPAN, THERE, federation, measured, model, payload, run

ROUND_RECORDS = 5_000


def kept_of(sink, node=LIAR):
    return [r for r in sink.records if r.source.startswith(f"sender/{node}")]


def test_a_small_payload_does_not_become_many_records():
    """807 bytes that stood for 55,000 records, and took the server 1.2 seconds."""
    flood = payload([Metric(HERE, 1.0, "loss", 1.0) for _ in range(55_000)], "flood")
    assert len(flood) < 1_000
    with federation(lambda _: []) as found:
        found.monitor.host.round_begin(0, found.model)
        found.monitor.host.absorb(flood, Sender(LIAR, THERE))
        found.monitor.host.round_end(0, found.model)
    assert not found.sink.metrics("loss", node=LIAR)
    assert found.refusals() == [(LIAR, 0)]
    assert [f.where.node for f in found.sink.of(Finding, "TELEMETRY_LOST")] == [LIAR]


def test_many_messages_have_together_what_one_may_have():
    """Twenty messages a round, of records that one message may hold; and of messages that cannot be read."""
    with federation(lambda _: []) as found:
        for number in range(2):
            found.monitor.host.round_begin(number, found.model)
            for i in range(20):
                many = [Metric(HERE, 1.0, "user.x", 1.0) for _ in range(1_000)]
                found.monitor.host.absorb(payload(many, f"{number}-{i}"), Sender(LIAR, THERE))
            for _ in range(200):
                found.monitor.host.absorb(b"fv, but not a payload", Sender("mallory", THERE))
            for node in HONEST:
                found.monitor.host.absorb(payload(measured(node, number), f"{node}-{number}"), Sender(node, THERE))
            found.monitor.host.round_end(number, found.model)
    assert len(found.sink.metrics("user.x")) == 2 * ROUND_RECORDS
    for node in HONEST:
        assert len(found.sink.metrics("loss", node=node)) == 2
    refused = found.sink.events("telemetry.refused")
    assert {event.where.node for event in refused} == {LIAR, "mallory"}
    assert len(refused) == 2 * 2 * 4, "three with their reason, and one that counts the rest"
    assert sum(e.data["messages"] for e in refused if e.where.node == "mallory") == 2 * 200


GROWING = {
    "names of metrics": lambda name: Metric(HERE, 1.0, f"user.{name}", 1.0),
    "names of layers": lambda name: Metric(Where(THERE, None, LIAR, None, name), 1.0, "loss", 1.0),
    "names of spans": lambda name: Span(HERE, 1.0, name, 0.1, **SPAN),
    "names of events": lambda name: Event(HERE, 1.0, "info", name, ""),
    "groups": lambda name: Metric(Where(THERE, None, LIAR, None, None, name), 1.0, "loss", 1.0),
}


@pytest.mark.parametrize("what", GROWING)
def test_the_names_that_one_client_brings_to_a_store_are_bounded(what, tmp_path):
    store = tmp_path / "runs.db"
    found = run(lambda number: [GROWING[what](f"{number}-{i}") for i in range(2_000)], rounds=4, store=store)
    with open_reader(store) as reader:
        ((symbols,),) = reader.database.rows("SELECT COUNT(*) FROM symbol")
        ((delivered,),) = reader.database.rows("SELECT COUNT(*) FROM delivered")
    assert symbols < 600
    assert delivered < 50
    assert {event.where.node for event in found.sink.events("telemetry.refused")} <= {LIAR}


@pytest.mark.parametrize("sources", [True, False])
def test_sources_and_gaps_in_their_numbers_cost_the_store_nothing(tmp_path, sources):
    """What has been delivered is remembered by source and number: 4,000 sources, or 4,000 gaps in one."""
    store = tmp_path / "runs.db"
    with federation(lambda _: [], store=store) as found:
        for number in range(3):
            found.monitor.host.round_begin(number, found.model)
            many = [
                stamped(Metric(HERE, 1.0, "loss", 1.0), f"{number}-{i}" if sources else "one", 2 * i + 10_000 * number)
                for i in range(4_000)
            ]
            found.monitor.host.absorb(encode(many), Sender(LIAR, THERE))
            found.monitor.host.round_end(number, found.model)
    with open_reader(store) as reader:
        ((delivered,),) = reader.database.rows("SELECT COUNT(*) FROM delivered")
    assert delivered < 10
    assert len(found.sink.metrics("loss", node=LIAR)) == (0 if sources else 12_000)


def test_the_budget_of_a_message_is_the_servers():
    with federation(lambda _: []) as found:
        found.monitor.host.round_begin(0, found.model)
        own = payload([Metric(HERE, 1.0, f"user.{i}", i / 7) for i in range(100)], "own")
        found.monitor.host.absorb(own, Sender(LIAR, THERE, budget=len(own) - 1))
        found.monitor.host.absorb(own, Sender("ann", THERE, budget=len(own)))
        found.monitor.host.round_end(0, found.model)
    assert not kept_of(found.sink)
    assert found.refusals()[0] == (LIAR, 0)
    assert "are its limit" in found.sink.events("telemetry.refused")[0].message


class Slow:
    """A sink that takes nothing before it is told to."""

    def __init__(self):
        self.open, self.records = threading.Event(), []

    takes_measurements = True

    @contextlib.contextmanager
    def opened_at_the_end(self):
        try:
            yield
        finally:
            self.open.set()

    def write(self, records, /):
        self.open.wait()
        self.records += [r for t in records for r in (t.records() if isinstance(t, Measurements) else (t,))]


def test_a_flood_does_not_thin_what_honest_clients_tell():
    """The sinks stand still for five rounds in which one client sends all that it may, and far more than that."""
    slow, network = Slow(), model()
    with fv.Monitor(None, sinks=[slow], machine=False, detectors=[]) as monitor, slow.opened_at_the_end():
        monitor.host.describe("flower", {})
        for number in range(5):
            monitor.host.round_begin(number, network)
            for i, many in enumerate((4_000, 20_000) * 5):
                flood = [Metric(HERE, 1.0, "user.x", 1.0) for _ in range(many)]
                monitor.host.absorb(payload(flood, f"{number}-{i}"), Sender(LIAR, THERE))
            for node in HONEST:
                monitor.host.absorb(payload(measured(node, number), f"{node}-{number}"), Sender(node, THERE))
                monitor.updates(number, {node: [p.detach() for p in network.parameters()]})
            monitor.host.round_end(number, network)
    for node in HONEST:
        of_node = [r for r in slow.records if getattr(r, "where", None) is not None and r.where.node == node]
        assert len([r for r in of_node if isinstance(r, LayerStats) and r.family == "update"]) == 5
        assert len([r for r in of_node if isinstance(r, Metric) and r.name == "loss"]) == 5
    assert monitor.lost == 0
