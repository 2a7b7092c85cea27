# SPDX-License-Identifier: Apache-2.0
"""Replies that lie: whatever rides in them, the round goes on, the model is the same, and the liar is named alone."""

import time
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as some

import fedvitals as fv
from fedvitals.errors import RecordError
from fedvitals.hosts.envelope_checks import FIELDS, VERSION
from fedvitals.hosts.flower import reply_envelope
from fedvitals.hosts.flower.replies import read_reply
from fedvitals.hosts.flower.reply_envelope import EMPTY_PAYLOAD, KEY
from fedvitals.hosts.flower.server_rounds import ClientRequest, ServerRounds
from fedvitals.measurements import stamped
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Span,
    Suspect,
    Transfer,
    Where,
)
from fedvitals.stats import empty_sums
from fedvitals.store import open_reader
from fedvitals.store.read.queries import list_runs
from fedvitals.time_parts import JOURNEY, ROUND
from fedvitals.transport.sender_limits import MESSAGE_BYTES
from fedvitals.transport.wire.fields import Limits
from fedvitals.transport.wire.payload import decode, encode
from support.conditions import holds_for_each
from support.flower.federation import client_app, federate, node_of, numbers, rewritten, training, watched, with_mod

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

LIAR, OTHERS = "101", {"100", "102", "103"}
HERE = Where("flower-7")
SPAN = {"trace": "0" * 32, "id": "0" * 16}


@pytest.fixture(scope="module")
def honest():
    """The model of the same federation without us."""
    return numbers(federate(FedAvg(), client_app())[0].arrays)


def lied_to(change, *, phase="train", **monitor):
    """A run in which one node's telemetry is what `change` makes of it."""
    with watched(**monitor) as (own, sink):
        result, _ = federate(FedAvg(), with_mod(), own, fate=rewritten(change, node=LIAR, phase=phase))
    return numbers(result.arrays), sink


def check_refused(model, sink, honest):
    """Both rounds went on, the liar is named in both, and nobody else."""
    assert model == honest
    assert [span.where.round for span in sink.of(Span, ROUND)] == [1, 2]
    assert [(e.where.node, e.where.round) for e in sink.events("telemetry.refused")] == [(LIAR, 1), (LIAR, 2)]
    assert {span.where.node for span in sink.of(Span, "client")} == OTHERS
    assert holds_for_each({*e.data["answered"]} == {*OTHERS, LIAR} for e in sink.events("cohort"))


def with_fields(**changes):
    return lambda record: ConfigRecord({**record, **changes})


def without(name):
    return lambda record: ConfigRecord({key: value for key, value in record.items() if key != name})


def payload(*records, source="somewhere"):
    """A letter with these records in the place of what was measured."""
    sent = encode([stamped(record, source, i) for i, record in enumerate(records)])
    return with_fields(payload=sent)


# -- the record itself ------------------------------------------------------------------------------------------------

WRONG = {
    "a MetricRecord": lambda _: MetricRecord({"version": VERSION}),
    "an ArrayRecord": lambda _: ArrayRecord({"a": Array(np.zeros(3, np.float32))}),
    "nothing in it": lambda _: ConfigRecord(),
    "a newer version": with_fields(version=VERSION + 1),
    "a version of another kind": with_fields(version=True),
    "no version": without("version"),
    "too much": with_fields(payload=bytes(MESSAGE_BYTES + 1)),
    "one field too many": with_fields(extra=1.0),
    **{f"no {name}": without(name) for name in FIELDS if name != "version"},
    "text for bytes": with_fields(payload="fv"),
    "a list for bytes": with_fields(payload=[b"fv", b"fv"]),
    "text for a time": with_fields(received="noon"),
    "a whole number for a time": with_fields(replied=17),
    "less than no work": with_fields(cpu=-0.1),
    "work that is no number": with_fields(cpu=float("nan")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_record_that_is_not_ours_is_refused_and_its_sender_named(name, honest):
    check_refused(*lied_to(WRONG[name]), honest)


@pytest.mark.parametrize("name", ["a MetricRecord", "a newer version", "less than no work"])
def test_so_it_is_in_an_evaluation(name, honest):
    model, sink = lied_to(WRONG[name], phase="evaluate")
    assert model == honest
    assert {(e.where.node, e.data["phase"]) for e in sink.events("telemetry.refused")} == {(LIAR, "evaluate")}
    assert len(sink.of(Span, "client")) == 8


# -- what it carries --------------------------------------------------------------------------------------------------

TABLE = LayerTable("parameter", (Layer("w", (3,), "float32"),))
MANY = (TABLE, *(LayerTable("parameter", (Layer(f"w{i}", (1,), "float32"),)) for i in range(1000)))
FORGED = {
    "random bytes": with_fields(payload=b"\x00\x01\x02" * 40),
    "a beginning and no more": lambda r: ConfigRecord({**r, "payload": r["payload"][:-5]}),
    "another node's": payload(Metric(replace(HERE, node="102"), 1.0, "loss", 9.0)),
    "the server's": payload(Metric(replace(HERE, node="server"), 1.0, "loss", 9.0)),
    "another run's": payload(Metric(Where("flower-8", None, LIAR), 1.0, "loss", 9.0)),
    "another run's run": payload(Run("flower-8", "other")),
    "the whole round's": payload(Span(HERE, 1.0, ROUND, 5.0, **SPAN)),
    "another's journey": payload(Span(HERE, 1.0, JOURNEY, 5.0, **SPAN)),
    "a finding": payload(Finding(HERE, 1.0, "BYZANTINE", "critical", 1.0, "It is 102!", {}, (Suspect("102", 1.0),))),
    "an action": payload(Action(HERE, 1.0, "BYZANTINE 102", "quarantine", "102")),
    "bytes that it never sent": payload(Transfer(HERE, 1.0, "102", "server", 10**12, 10**12)),
    "who is with whom": payload(Event(HERE, 1.0, "info", "groups", "", {"edge-0": ["102"]})),
    "who was there": payload(Event(HERE, 1.0, "info", "cohort", "", {"asked": ["102"]})),
    "that nothing could be added up": payload(Event(HERE, 1.0, "error", "aggregation.failed", "")),
    "labels without counts": payload(Event(HERE, 1.0, "info", "labels", "", {"histogram": {"0": "many"}})),
    "labels by the dozen": payload(Event(HERE, 1.0, "info", "labels", "", {"histogram": [12]})),
    "a round far ahead": payload(Metric(replace(HERE, round=10**9), 1.0, "loss", 0.0)),
    "a round that is over": payload(Metric(replace(HERE, round=1, node=LIAR), 1.0, "loss", 0.0)),
    "layers that nobody knows": payload(LayerStats(HERE, 1.0, "update", empty_sums(1), "feed")),
    "more kinds of models than a run can have": payload(Run("flower-7", "flower", tables=MANY)),
    "as if it were the monitor": payload(Metric(replace(HERE, node="102"), 1.0, "loss", 9.0), source="monitor"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_not_its_own_to_tell_is_refused_whole(name, honest, losses):
    model, sink = lied_to(FORGED[name])
    check_refused(model, sink, honest)
    assert not [r for r in sink.records if isinstance(r, Finding | Action)]
    assert not [run for run in sink.of(Run) if TABLE in run.tables]
    assert {node: [m.value for m in sink.metrics("loss", node=node)] for node in OTHERS} == losses


@pytest.fixture(scope="module")
def losses():
    """What each client's loss is where nobody lies."""
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor)
    return {node: [m.value for m in sink.metrics("loss", node=node)] for node in OTHERS}


def test_of_nobody_means_of_its_sender():
    """A number of the whole federation cannot be told by one of its clients."""
    _, sink = lied_to(payload(Metric(HERE, 1.0, "accuracy", 1.0)))
    assert {m.where.node for m in sink.metrics("accuracy") if m.value == 1.0} == {LIAR}
    assert holds_for_each(0 <= m.value <= 1 for m in sink.metrics("time.worked", node=None))


def test_whatever_a_client_says_of_itself_no_detector_stumbles():
    """Each of these is its own to tell, and none of them can be."""
    lies = [
        *(Metric(HERE, 1.0, name, float("nan")) for name in ("loss", "steps", "gradient.norm")),
        Event(HERE, 1.0, "info", "labels", "", {"histogram": {"0": 0, "1": 10**11}}),
        Event(HERE, 1.0, "info", "memory.census", "", {"groups": "all", "since": {}, "until": -1}),
        Event(HERE, 1.0, "error", "client.failed", "", {"exception": {"a": 1}}),
        Event(HERE, 1.0, "error", "log", "No space left on device", {"doing": 7}),
        Span(HERE, 1.0, "client", -5.0, **SPAN, attributes={"parts": {"data": -1, "compute": "x"}, "failed": "maybe"}),
    ]  # fmt: skip
    with watched(detectors="standard", privacy=3) as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=4, fate=rewritten(payload(*lies), node=LIAR))
    assert {(e.where.node, e.data["left_out"]) for e in sink.events("telemetry.refused")} == {(LIAR, 1)}
    assert {found.where.node for found in sink.of(Finding)} == {LIAR}


def test_nobody_can_use_up_anothers_sequence_numbers():
    """What was delivered is stored once: who sends in another's name first would silence it."""
    sources = []

    def fate(request, reply):
        return rewritten(lambda r: taken(r, sources), node=LIAR)(request, reply)

    def taken(record, sources):
        source = decode(record["payload"])[-1].source
        sources.append(source)
        stolen = [Metric(HERE, 1.0, "loss", float(i)) for i in range(50)]
        names = (source, f"102/{source}", f"103/{source}")
        return payload(*stolen, source=names[len(sources) % 3])(record)

    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=4, fate=fate)
    assert len(sources) == 4
    assert len([s for s in sink.of(Span, "client") if s.where.node in OTHERS]) == 12


def test_a_client_may_send_much_and_pays_for_itself_alone(tmp_path, honest):
    """As many records as there is room for, twice: the store takes the others' as ever."""
    many = [Metric(replace(HERE, node=LIAR, step=i), 1.0, f"user.{i % 50}", float(i)) for i in range(20_000)]
    change = payload(*many)
    with watched() as (monitor, sink):
        result, _ = federate(FedAvg(), with_mod(), monitor, fate=rewritten(change, node=LIAR))
    assert numbers(result.arrays) == honest
    assert {span.where.node for span in sink.of(Span, "client", round=2)} == OTHERS


def test_more_records_than_anybody_needs_are_refused_though_they_are_small(honest):
    """Deflated, they are a few kilobytes."""
    endless = Limits(bytes=1 << 30, head=1 << 30, records=1 << 30)
    bomb = encode([Metric(replace(HERE, node=LIAR), 1.0, "loss", 1.0)] * 110_000, endless)
    assert len(bomb) < MESSAGE_BYTES
    check_refused(*lied_to(with_fields(payload=bomb)), honest)


# -- times that could be, and are not ---------------------------------------------------------------------------------


YEAR = 365 * 86400.0


def of_a_clock(ahead, *, its_records):
    """Telemetry of a machine whose clock is wrong; or of one that says so, while its records are of today."""

    def change(record):
        times = {name: record[name] + ahead for name in ("received", "replied", "started")}
        sent = [r if isinstance(r, Run) else replace(r, at=r.at + ahead) for r in decode(record["payload"])]
        return ConfigRecord({**record, **times, **({"payload": encode(sent)} if its_records else {})})

    return change


@pytest.mark.parametrize("ahead", [YEAR, -YEAR, 30.0])
@pytest.mark.parametrize("its_records", [True, False])
def test_a_clock_that_is_wrong_bends_no_time_of_the_server(ahead, its_records, honest):
    model, sink = lied_to(of_a_clock(ahead, its_records=its_records))
    assert model == honest
    check_times_of_server(sink)
    assert sink.value("time.clock_error", node=LIAR, round=1) == pytest.approx(ahead, abs=1)


def check_times_of_server(sink):
    """All clients' telemetry is there, and no Span is longer than its round."""
    assert len(sink.of(Span, "client")) == len(sink.of(Span, JOURNEY)) == 8
    for number in (1, 2):
        (whole,) = sink.of(Span, ROUND, round=number)
        for span in sink.of(Span, round=number):
            assert whole.at - 0.001 <= span.at
            assert span.at + span.seconds <= whole.at + whole.seconds + 0.1  # a clock's reading or two
    assert holds_for_each(0 <= m.value <= 1 for m in sink.metrics("time.worked"))


SET_WHILE_IT_WORKED = {
    "back by seconds": lambda r: ConfigRecord({**r, "received": r["replied"] + 2.0}),
    "back by a day": lambda r: ConfigRecord({**r, "replied": r["received"] - 86400.0}),
    "ahead by an hour": lambda r: ConfigRecord({**r, "replied": r["replied"] + 3600.0}),
    "ahead by years": lambda r: ConfigRecord({**r, "replied": r["replied"] + 1e9}),
}


@pytest.mark.parametrize("name", SET_WHILE_IT_WORKED)
def test_a_clock_that_is_set_while_a_client_works_costs_only_the_times(name, honest):
    model, sink = lied_to(SET_WHILE_IT_WORKED[name])
    assert model == honest
    assert not sink.events("telemetry.refused")
    assert [(e.where.node, e.where.round, e.level) for e in sink.events("client.clock")] == [
        (LIAR, 1, "info"),
        (LIAR, 2, "info"),
    ]
    check_times_of_server(sink)
    assert not sink.metrics("time.clock_error")
    assert len(sink.metrics("time.cpu", node=LIAR)) >= 2


UNDATED = {
    "a time that is none": with_fields(received=float("nan")),
    "a time without end": with_fields(replied=float("inf")),
    "a time before all times": with_fields(received=-1.0),
    "a time after 2099": with_fields(replied=4.2e9),
    "a process of no age": with_fields(started=float("nan")),
}


@pytest.mark.parametrize("name", UNDATED)
def test_times_outside_of_1970_to_2099_are_refused_alone(name, honest):
    model, sink = lied_to(UNDATED[name])
    assert model == honest
    assert [(e.where.node, e.where.round) for e in sink.events("telemetry.refused")] == [(LIAR, 1), (LIAR, 2)]
    check_times_of_server(sink)
    assert not sink.metrics("time.clock_error")


@pytest.mark.parametrize(
    ("hours", "fast", "latency"), [(1, 20e-6, 0.002), (6, 50e-6, 0.5), (24, 30e-6, 1.0), (24, 100e-6, 0.01)]
)
def test_a_clock_that_runs_slightly_fast_is_no_lie(hours, fast, latency):
    """A round of hours, by the times that such a client tells: it seems to have worked longer than it was away."""
    messages = []
    federate(FedAvg(), with_mod(), nodes=2, rounds=1, fate=lambda *both: messages.append(both) or both[1])
    request, reply = messages[0]
    seconds, at = 3600.0 * hours, time.time()
    sent = at - seconds - latency
    received = sent + latency / 2
    times = {"received": received, "replied": received + seconds * (1 + fast), "started": sent, "cpu": seconds}
    reply.content[KEY] = ConfigRecord({**reply.content[KEY], **times})
    with watched() as (monitor, sink):
        rounds = ServerRounds(monitor)
        rounds.begin(1)
        read_reply(rounds, ClientRequest(request, node_of(request), "train", 1, sent, 1000), reply, at)
        rounds.end()
    assert not sink.events("telemetry.refused")
    assert not sink.events("client.clock")
    (client,), (journey,) = sink.of(Span, "client"), sink.of(Span, JOURNEY)
    assert sent <= client.at <= client.at + client.seconds <= at
    away = sum(seconds for part, seconds in journey.attributes["parts"].items() if part != "wait")
    assert away == pytest.approx(at - sent, abs=1e-3)
    assert sink.value("time.cpu", node=node_of(request), round=1) == seconds


def test_a_small_number_is_a_number(honest):
    model, sink = lied_to(with_fields(cpu=5e-324))
    assert model == honest
    assert [m.value for m in sink.metrics("time.cpu", node=LIAR, round=1)][:1] == [5e-324]


def test_processor_time_that_no_machine_has_is_refused(honest):
    check_refused(*lied_to(with_fields(cpu=1e300)), honest)


def test_a_reply_in_anothers_name_is_told_of_the_one_that_was_asked(honest):
    def fate(request, reply):
        if node_of(request) == LIAR:
            reply.metadata.__dict__["_src_node_id"] = 102
        return reply

    with watched() as (monitor, sink):
        result, _ = federate(FedAvg(), with_mod(), monitor, fate=fate)
    assert numbers(result.arrays) == honest
    refused = sink.events("telemetry.refused")
    assert {e.where.node for e in refused} == {LIAR}
    assert holds_for_each("102" in e.message for e in refused)
    assert len(sink.of(Span, "client", node="102")) == 2


# -- anything at all --------------------------------------------------------------------------------------------------

VALUES = some.one_of(
    some.integers(-(2**63), 2**63 - 1), some.floats(), some.booleans(), some.binary(max_size=60), some.text(max_size=9),
    some.lists(some.floats(), max_size=3), some.lists(some.binary(max_size=5), max_size=3),
)  # fmt: skip
NAMES = some.one_of(some.sampled_from([*FIELDS]), some.text(max_size=8))


@given(some.dictionaries(NAMES, VALUES, max_size=8), some.booleans())
@settings(max_examples=300)
def test_whatever_lies_under_the_key_is_a_letter_or_a_clear_error(fields, complete):
    whole = {"version": 1, "payload": b"", "received": 1.0, "replied": 2.0, "started": 0.0, "cpu": 0.0}
    record = ConfigRecord({**whole, **fields} if complete else fields)
    try:
        envelope = reply_envelope.read_envelope(record, 7, "7", 1.0)
    except RecordError:  # anything else would fail
        return
    assert reply_envelope.read_envelope(envelope.record(), 7, "7", 1.0) == envelope


@given(some.binary(max_size=300))
@settings(max_examples=15)
def test_whatever_bytes_come_a_round_is_a_round(data):
    with watched() as (monitor, sink):
        federate(FedAvg(), with_mod(), monitor, rounds=1, fate=rewritten(with_fields(payload=data), node=LIAR))
    refused = [e.where.node for e in sink.events("telemetry.refused")]
    assert refused == ([LIAR] if data not in (b"", EMPTY_PAYLOAD) else [])
    assert {span.where.node for span in sink.of(Span, "client")} == OTHERS


def test_a_store_on_disk_takes_what_is_left(tmp_path):
    """Numbers at the edge of what a database can hold."""
    odd = payload(
        Metric(replace(HERE, step=2**62), 1e300, "user.odd", float("nan")),
        Event(HERE, -1e300, "error", "client.failed", "x" * 20_000, {"exception": "x" * 20_000}),
        Span(HERE, 0.0, "client", 1e300, **SPAN),
    )
    with fv.Monitor(tmp_path / "runs.db", machine=False) as monitor:
        federate(FedAvg(), with_mod(), monitor, rounds=3, fate=rewritten(odd, node=LIAR))
        assert monitor.flush()
        assert monitor.lost == 0
    with open_reader(tmp_path / "runs.db") as reader:
        (run,) = list_runs(reader)
        losses = reader.history(run.id).latest("loss", 3)
        assert {*losses} >= OTHERS


def test_our_key_is_free_for_others_where_nobody_watches():
    """The mod does not write over a record of the user's own."""

    def train(message, context):
        reply = training(message, context)
        reply.content[KEY] = ConfigRecord({"own": 1})
        return reply

    app = client_app(fv.flower.client_mod(), train=train)
    kept = []

    def fate(request, reply):
        if request.metadata.message_type == "train":
            kept.append(dict(reply.content[KEY]))
        return reply

    federate(FedAvg(), app, rounds=1, fate=fate)
    assert kept == [{"own": 1}] * 4


def test_statistics_of_more_layers_than_there_are_are_left_out_alone(losses):
    """The rest of the message counts: a malformed record costs only itself."""
    statistics = LayerStats(HERE, 1.0, "update", empty_sums(2), TABLE.digest)
    _, sink = lied_to(payload(Run("flower-7", "flower", tables=(TABLE,)), statistics))
    assert TABLE.digest not in {record.table for record in sink.of(LayerStats)}
    assert {node: [m.value for m in sink.metrics("loss", node=node)] for node in OTHERS} == losses
