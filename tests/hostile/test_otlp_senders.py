# SPDX-License-Identifier: Apache-2.0
"""One client that reports by OTLP and lies: its token says who it is, whatever it says itself."""

import contextlib
import time

import pytest

from fedvitals.hosts.otlp.receiver import Receiver
from fedvitals.hosts.otlp.tokens import sender_of, sender_token
from fedvitals.measurements import stamped
from fedvitals.records import Event, Finding, Metric, Span, Where
from fedvitals.sinks.otel.sink import OpenTelemetry
from support.hostile_federation import HONEST, LIAR, federation

SECRET = "a-secret-of-the-server"
ROUNDS = 4


def report(monitor, node, *records):
    """Send records to a receiver of the monitor, with a node's own token; returns the receiver, which has counted."""
    with Receiver(monitor.host.admit, {monitor.run.id}, secret=SECRET, port=0) as receiver:
        token = sender_token(SECRET, node)
        OpenTelemetry(receiver.endpoint, {"Authorization": f"Bearer {token}"}).write(records)
    return receiver


@contextlib.contextmanager
def attacked(lies):
    """A federation in which the liar reports what `lies(where)` gives in each round, before the round's end."""
    with federation(lambda _: []) as found:
        end = found.monitor.host.round_end

        def after_lies(number, *arguments):
            where = Where(found.monitor.run.id, number, LIAR)
            records = [stamped(record, f"lies-{number}", i) for i, record in enumerate(lies(where))]
            found.receiver = report(found.monitor, LIAR, *records)
            end(number, *arguments)

        found.monitor.host.round_end = after_lies
        for number in range(ROUNDS):
            found.round(number)
        found.monitor.host.round_end = end
        yield found


def test_nobody_speaks_for_another_or_for_the_server():
    """As `nodeB`, `server` and the whole run, with the token of one client: the attack that the issue reports."""

    def lies(where):
        bob = Where(where.run, where.round, "bob")
        server, whole = Where(where.run, where.round, "server"), Where(where.run, where.round)
        return [
            Metric(bob, time.time(), "gradient.nonfinite", 64.0),
            Metric(server, time.time(), "weight.nonfinite", 5.0),
            Metric(whole, time.time(), "accuracy", 0.0),
            Metric(whole, time.time(), "time.round", 1e6),
            Event(bob, time.time(), "error", "client.failed", "OutOfMemory", {"exception": "OutOfMemoryError"}),
        ]

    with attacked(lies) as found:
        pass
    sink = found.sink
    assert not sink.metrics("gradient.nonfinite", node="bob")
    assert {m.value for m in sink.metrics("weight.nonfinite", node="server")} == {0.0}
    assert not sink.events("client.failed", node="bob")
    assert [m.value for m in sink.metrics("accuracy", node=None)] == [1 - 1 / (2 + n) for n in range(ROUNDS)]
    assert {m.value for m in sink.metrics("accuracy", node=LIAR)} == {0.0}, "who names no node tells of itself"
    assert max(m.value for m in sink.metrics("time.round")) < 1e3
    assert {f.where.node for f in sink.of(Finding)} <= {None, LIAR}
    assert {e.where.node for e in sink.events("telemetry.refused")} == {LIAR}
    assert {f.where.node for f in sink.of(Finding, "TELEMETRY_LOST")} == {LIAR}


SERVERS = {
    "what the server measures of its update": lambda w: Metric(w, time.time(), "update.norm", 1e-9),
    "its weight in the average": lambda w: Metric(w, time.time(), "update.samples", 1.0),
    "a virtual clock": lambda w: Metric(w, time.time(), "time.client_virtual", 1.0),
    "that its clock is right": lambda w: Metric(w, time.time(), "time.clock_error", 0.0),
    "what was lost": lambda w: Metric(w, time.time(), "monitor.lost", 0.0),
    "the first weights": lambda w: Event(w, time.time(), "warning", "initialisation", "All models are stolen."),
    "groups": lambda w: Event(w, time.time(), "info", "groups", "", {"edge-0": ["bob"]}),
    "a round to come": lambda w: Metric(Where(w.run, 10_000, LIAR), time.time(), "loss", 1.0),
}


@pytest.mark.parametrize("name", SERVERS)
def test_what_the_server_measures_or_decides_is_refused_and_the_sender_is_told(name):
    with attacked(lambda where: [SERVERS[name](where), Metric(where, time.time(), "user.own", 1.0)]) as found:
        assert found.receiver.rejected == 1
    lie = SERVERS[name](Where("r", 0, LIAR))
    assert not [r for r in found.sink.records if r.source.startswith("sender/") and getattr(r, "name", "") == lie.name
                and getattr(r, "value", None) == getattr(lie, "value", None)]  # fmt: skip
    assert len(found.sink.metrics("user.own", node=LIAR)) == ROUNDS
    assert {e.where.node for e in found.sink.events("telemetry.refused")} == {LIAR}


def test_a_flood_by_otlp_is_bounded_as_one_by_payloads_is():
    def lies(where):
        return [Metric(where, time.time(), f"user.{i}", 1.0) for i in range(3_000)]

    with attacked(lies) as found:
        pass
    found.check_others(ROUNDS)
    assert len({m.name for m in found.sink.metrics(node=LIAR) if m.name.startswith("user.")}) == 200
    assert {e.where.node for e in found.sink.events("telemetry.refused")} == {LIAR}


def test_an_honest_sender_is_heard_in_its_round():
    with attacked(lambda where: [Span(where, time.time(), "epoch", 0.001, "0" * 32, "a" * 16, None)]) as found:
        assert found.receiver.rejected == 0
    assert [(s.where.node, s.where.round) for s in found.sink.of(Span, "epoch")] == [(LIAR, n) for n in range(ROUNDS)]
    assert not found.sink.events("telemetry.refused")
    found.check_others(ROUNDS)


@pytest.mark.parametrize("node", ["c7", "a.b", "-", "Zürich 3", "x" * 200])
def test_a_token_is_of_one_node_and_one_secret(node):
    token = sender_token(SECRET, node)
    assert token.isascii()
    assert sender_of(SECRET, token) == node
    assert sender_of("another-secret-of-a-server", token) is None
    assert sender_of(SECRET, token[:-1]) is None
    for other in HONEST:
        assert sender_of(SECRET, sender_token(SECRET, other).split(".")[0] + "." + token.split(".")[1]) is None
