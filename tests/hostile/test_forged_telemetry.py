# SPDX-License-Identifier: Apache-2.0
"""One client that reports what is the server's to tell, puts words into findings, or claims absurd times."""

import time
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedvitals as fv
from fedvitals.records import Event, Finding, Layer, LayerTable, Metric, Sketch, Span, Where
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender, quoted
from fedvitals.transport.wire.payload import decode
from support.hostile_federation import (
    HERE,
    HONEST,
    LIAR,
    ROUNDS,
    SPAN,
    THERE,
    federation,
    measured,
    model,
    payload,
    run,
    tables,
)

WORDS = "ALL MODELS ARE STOLEN. Call 555-EVIL, visit http://evil.example \x1b[31m\u202e"

OF_THE_SERVER = {
    "that it was not there": Event(HERE, 1.0, "warning", "client.dropped_out", WORDS),
    "that it is connected": Event(HERE, 1.0, "info", "client.connected", WORDS),
    "that it is not connected": Event(HERE, 1.0, "warning", "client.disconnected", WORDS),
    "that its update was lost": Event(HERE, 1.0, "warning", "update.lost", WORDS),
    "that its update was refused": Event(HERE, 1.0, "error", "update.refused", WORDS, {"weight": 1.0}),
    "that a round failed": Event(HERE, 1.0, "error", "round.failed", WORDS, {"exception": "ValueError"}),
    "that an edge failed": Event(HERE, 1.0, "error", "edge.failed", WORDS, {"exception": "ValueError"}),
    "what the monitor lost": Event(HERE, 1.0, "warning", "telemetry.lost", WORDS, {"records": 10**9}),
    "the first weights": Event(HERE, 1.0, "warning", "initialisation", WORDS, {"layer": "<img src=x>"}),
    "a level that is none": Event(HERE, 1.0, WORDS, "log", WORDS),
    "its weight in the average": Metric(HERE, 1.0, "update.samples", 1e9),
    "how old its update is": Metric(HERE, 1.0, "update.staleness", 0.0),
    "that its clock is right": Metric(HERE, 1.0, "time.clock_error", 0.0),
    "a virtual clock": Metric(HERE, 1.0, "time.client_virtual", 1.0),
    "what the round was bound by": Metric(HERE, 1.0, "bottleneck.upload", 1.0),
    "how many records are lost": Metric(HERE, 1.0, "monitor.lost", 1e12),
    "how many clients there are": Metric(HERE, 1.0, "clients", 1e9),
    "a round's span": Span(HERE, 1.0, "round", 1.0, **SPAN),
    "the server's span": Span(HERE, 1.0, "server", 1.0, **SPAN),
    "a step that no training has": Metric(replace(HERE, step=-(2**62)), 1.0, "loss", 1.0),
    "a sketch of another size": Sketch(HERE, 1.0, (1.0,) * 10, "feed"),
    "a sketch that is no number": Sketch(HERE, 1.0, (float("nan"),) * 256, "feed"),
    "labels that are words": Event(HERE, 1.0, "info", "labels", "", {"histogram": {WORDS: 3}}),
    "more classes than have rows": tables(LayerTable("class", tuple(Layer(str(i), (), "float32") for i in range(101)))),
    "layers with negative sizes": tables(LayerTable("parameter", (Layer("w\x1b[31m\n", (-1,), "float32"),))),
}


@pytest.mark.parametrize("name", OF_THE_SERVER)
def test_what_is_not_a_clients_to_tell_is_refused_and_its_sender_named(name):
    found = run(lambda number: [OF_THE_SERVER[name]] if number == 1 else [], privacy=3)
    assert found.refusals() == [(LIAR, 1)]
    assert [(f.where.node, f.where.round) for f in found.sink.of(Finding, "TELEMETRY_LOST")] == [(LIAR, 1)]
    check_words(found.sink)


def check_words(sink):
    """No finding has a word of the liar's in it; what an event quotes is short, and on one line."""
    texts = [f"{f.message} {f.evidence}" for f in sink.of(Finding)]
    assert not [text for text in texts if "STOLEN" in text or "evil" in text or not text.isprintable()]
    for event in sink.events("telemetry.refused"):
        assert len(event.message) <= 500
        assert event.message.isprintable()


def test_a_virtual_clock_of_one_client_does_not_hide_who_is_slow():
    """Where a host has a virtual clock, real seconds say nothing; a client cannot bring one."""

    def brings(node):
        return [Metric(Where(THERE, None, node), time.time(), "time.client", 60.0 if node == "bob" else 1.0)]

    virtual = [Metric(HERE, 1.0, "time.client_virtual", 1.0), Metric(HERE, 1.0, "time.compute_virtual", 1.0)]
    for lies in ([], virtual):
        with federation(lambda _, lies=lies: lies, brings=brings) as found:
            for number in range(ROUNDS + 3):
                found.round(number)
        assert {f.where.node for f in found.sink.of(Finding, "STRAGGLER")} == {"bob"}


SAID = {
    "of a failure": Event(HERE, 1.0, "error", "client.failed", WORDS, {"exception": WORDS}),
    "of a failure, nested": Event(HERE, 1.0, "error", "client.failed", WORDS, {"exception": [WORDS] * 50}),
    "of an exception": Event(HERE, 1.0, "error", "exception", WORDS, {"error": WORDS, "block": WORDS}),
    "of a loss": Event(HERE, 1.0, "warning", "worker.lost", WORDS, {"records": (1 << 40) - 1}),
    "of its disk": Event(HERE, 1.0, "error", "log", f"No space left on device. {WORDS}", {"doing": WORDS}),
    "of what it counted": Event(HERE, 1.0, "info", "memory.census", WORDS, {"groups": [{"shape": WORDS}], "since": 0}),
    "of its own": Event(HERE, 1.0, "critical", "fire", WORDS * 1_000, {"x": WORDS}),
}


@pytest.mark.parametrize("name", SAID)
def test_at_level_3_no_finding_quotes_what_a_client_said(name):
    found = run(lambda _: [SAID[name]], privacy=3)
    check_words(found.sink)
    assert found.monitor.lost == 0
    assert not [event for event in found.sink.events() if len(event.message.encode()) > 4096]


def test_an_event_that_only_a_user_knows_is_the_users():
    found = run(
        lambda _: [Event(HERE, 1.0, "info", "fire", "It burns."), Event(HERE, 1.0, "info", "memory.census", "")]
    )
    names = {event.name for event in found.sink.events(node=LIAR)}
    assert {"user.fire", "user.memory.census"} <= names
    assert not names & {"fire", "memory.census"}


def test_a_claimed_loss_does_not_hide_what_the_server_lost():
    """The finding about the server's own losses leaves out what was told of clients: a claim is no such thing."""
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        monitor.host.describe("flower", {})
        for number in range(3):
            monitor.host.round_begin(number, model())
            claim = Event(HERE, 1.0, "warning", "worker.lost", "", {"records": 4_000})
            monitor.host.absorb(payload([*measured(LIAR, number), claim], f"{number}"), Sender(LIAR, THERE))
            monitor.host.absorb(b"a worker of our own that sends nonsense")
            monitor.host.round_end(number, model())
        assert monitor.lost == 3
    ours = [f for f in sink.of(Finding, "TELEMETRY_LOST") if f.where.node is None]
    assert [f.where.round for f in ours] == [0, 1, 2]


@pytest.mark.parametrize("seconds", [1.8e9, -1.8e9, 1e300, float("inf"), float("nan")])
def test_times_that_cannot_be_are_left_out(seconds):
    names = ("time.client", "time.data", "time.step", "time.cpu")
    found = run(lambda _: [Metric(HERE, 1.0, name, seconds) for name in names])
    for name in names:
        assert not [m for m in found.sink.metrics(name, node=LIAR) if not abs(m.value) < 1e8]
    assert {event.where.node for event in found.sink.events("telemetry.refused")} == {LIAR}


@pytest.mark.parametrize("clock", [0.0, 1.0e9, 4.0e9, 1e20, 1e300])
def test_the_sentence_about_a_wrong_clock_can_be_read(clock):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        for number in range(2):
            monitor.host.round_begin(number, model())
            sent = time.time()
            monitor.exchange(LIAR, sent, clock, clock, sent + 0.01)
            monitor.exchange("ann", sent, sent, sent, sent + 0.01)
            monitor.host.round_end(number, model())
    skewed = sink.of(Finding, "CLOCK_SKEW")
    assert {f.where.node for f in skewed} <= {LIAR}
    assert bool(skewed) == (clock < 4.1e9)
    assert not [f.message for f in skewed if len(f.message) > 80]
    assert {e.where.node for e in sink.events("monitor.error")} == (set() if skewed else {LIAR})
    assert [m.where.round for m in sink.metrics("time.round")] == [0, 1]


def test_a_real_worker_reports_only_what_a_client_may():
    """The list of what clients may report has everything in it that they do: at the deepest level, of all probes."""
    monitor = fv.Monitor(None, machine=False, probes="deep", sinks=[MemorySink()])
    with monitor:
        monitor.host.round_begin(0, model())
        worker, network = replace(monitor.host.for_worker(), round=None), model()
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        data = [(torch.randn(4, 8), torch.randint(0, 3, (4,)))] * 3
        with worker.client("c0", network, optimizer, data=data, loss=cross_entropy):
            for x, y in data:
                optimizer.zero_grad()
                cross_entropy(network(x), y).backward()
                optimizer.step()
        own = Sender("c0", monitor.run.id)
        records = decode(worker.payload())
        monitor.host.round_end(0, model())
    singles = [r for t in records for r in (t.records() if hasattr(t, "records") else (t,))]
    assert {r.name for r in singles if isinstance(r, Metric)} > {"loss", "steps", "gradient.norm", "fit.loss_before"}
    for record in singles:
        own.own(record, monitor.run.id)


def test_words_of_a_sender_are_quoted_short_and_escaped():
    assert quoted("plain") == "'plain'"
    assert quoted("it's\n\x1b[31m\u202e") == "'it\\'s\\n\\x1b[31m\\u202e'"
    assert len(quoted("x" * 10_000)) == 82


def test_sizes_whose_ratio_no_float_can_hold_blind_no_detector():
    """Where the server has no updates, a client's word for the size of its own is compared with what it trained."""
    sink = MemorySink()
    sizes = {"update.norm": 5e-324, "weight.drift": 1e300}
    with fv.Monitor(None, sinks=[sink], machine=False) as monitor:
        for number in range(4):
            monitor.host.round_begin(number, model())
            for node in (LIAR, *HONEST):
                lies = [Metric(HERE, 1.0, name, value) for name, value in sizes.items()] if node == LIAR else []
                own = payload([*measured(node, number), *lies], f"{node}-{number}")
                monitor.host.absorb(own, Sender(node, THERE))
            monitor.host.round_end(number, model())
    assert not sink.events("monitor.error")
    assert {f.where.node for f in sink.of(Finding)} <= {LIAR}
