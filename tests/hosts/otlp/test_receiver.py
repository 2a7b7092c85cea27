# SPDX-License-Identifier: Apache-2.0
"""fedvitals as the place where OpenTelemetry sends to: from itself, its own SDK, and strangers."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.client
import json
import logging
import math
import socket
import subprocess
import sys
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

from fedvitals.errors import ConfigError
from fedvitals.hosts.otlp import receiver as otlp_receiver
from fedvitals.hosts.otlp.progress import live, tell
from fedvitals.hosts.otlp.receiver import JSON, PROTOBUF, Receiver
from fedvitals.hosts.otlp.tokens import sender_token
from fedvitals.records import Event, Metric, Record, Span, Where
from fedvitals.scope import Scope
from fedvitals.sinks.otel.encode import traces
from fedvitals.sinks.otel.sink import OpenTelemetry
from fedvitals.testing import MemorySink, tiny_run
from fedvitals.transport.timing import timed
from fedvitals.transport.traceparent import carried
from support.waiting import PATIENCE, wait_until

TRACE, ROUND, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "53995c3f42cd8ad8"
AT = 1_790_000_000.25
SECRET = "a-secret-of-the-server"
TOKEN = f"Bearer {sender_token(SECRET, 'c7')}"  # of the node that sends, where no other is named


@contextlib.contextmanager
def receiving(runs=("r1",), **settings):
    """A receiver on a free port, and the records that it took."""
    found: list[Record] = []
    with Receiver(lambda records, *_: found.extend(records), runs, secret=SECRET, port=0, **settings) as receiver:
        yield receiver, found


def exporter(receiver, authorization=TOKEN):
    return OpenTelemetry(receiver.endpoint, {"Authorization": authorization})


@pytest.fixture(scope="module")
def opened():
    with receiving() as both:
        yield both


def post(receiver, path="/v1/traces", body=b"", kind=PROTOBUF, **headers):
    """Status, answer."""
    address = urllib.parse.urlsplit(receiver.endpoint)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): value for name, value in {"Authorization": TOKEN, **headers}.items()}
        connection.request("POST", path, body, {"Content-Type": kind, **named})
        response = connection.getresponse()
        return response.status, response.read()


def request_of(*spans: Span) -> bytes:
    return traces({}, spans, {}).SerializeToString()


def span(**changes) -> Span:
    where = Where("r1", 3, "c7", None, None, "edge-0")
    return dataclasses.replace(
        Span(where, AT, "client", 1.5, TRACE, CLIENT, ROUND, {"steps": 3}, "worker-1", 7), **changes
    )


def rejected(answer: bytes) -> tuple[int, str]:
    partial = service.ExportTraceServiceResponse.FromString(answer).partial_success
    return partial.rejected_spans, partial.error_message


# -- from fedvitals ---------------------------------------------------------------------------------------------------


def key(record):
    """All of a record but the name of who made it; NaN is equal to itself."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "source"}
    if isinstance(record, Metric):
        fields["value"] = float(record.value)
    if isinstance(record, Span):
        fields["seconds"] = round(record.seconds, 9)
    return repr(sorted(fields.items(), key=lambda pair: pair[0]))


@pytest.mark.thorough
def test_a_run_comes_back_as_it_was():
    kept = MemorySink()
    found: list[Record] = []
    expected: set[str] = set()
    with Receiver(lambda r, *_: found.extend(r), expected, secret=SECRET, port=0, whole=True) as receiver:
        sinks = [kept, _Announcing(exporter(receiver, f"Bearer {SECRET}"), expected)]
        tiny_run(None, sinks=sinks, detectors=[])
        assert receiver.rejected == 0
    wanted = [r for r in kept.records if isinstance(r, Span | Metric | Event)]
    assert len(wanted) > 100
    assert sorted(map(key, found)) == sorted(map(key, wanted))
    assert {record.source for record in found} == {"otlp-monitor"}, "nobody is the monitor of this process"


class _Announcing:
    """Tells the receiver which run to expect, as soon as it is known."""

    def __init__(self, sink, expected) -> None:
        self._sink, self._expected = sink, expected

    def write(self, records, /) -> None:
        self._expected.update(r.where.run for r in records if isinstance(r, Metric))
        self._sink.write(records)

    def close(self) -> None:
        self._sink.close()


def test_awkward_values_come_back():
    parts = {"wait": 0.25, "aggregate": 1.0}
    data = {"nested": {"list": [1, None, True, 2.5]}, "text": "it's «quoted»\n\N{SNOWMAN}"}
    records = [
        span(attributes={"parts": parts, "folded": True, "failed": True, "error": "ValueError"}),
        span(where=Where("r1"), parent=None, attributes={}, id="a" * 16),
        *(
            Metric(Where("r1", 0, "c7", 4, "fc"), AT, "loss", v, "worker-1", i)
            for i, v in enumerate((math.nan, -math.inf))
        ),
        Metric(Where("r1", 0), AT, "user.own metric", 1.0, "worker-1", 9),
        Event(Where("r1", 2), AT, "critical", "log", "", data, "worker-1", 10),
    ]
    with receiving(whole=True) as (receiver, found):
        exporter(receiver, f"Bearer {SECRET}").write(records)
    assert sorted(map(key, found)) == sorted(map(key, records))
    assert {record.source for record in found} == {"worker-1"}
    assert list(found[0].attributes["parts"]) == list(parts), "in their order"


# -- from OpenTelemetry's own SDK -------------------------------------------------------------------------------------


def test_the_sdk_of_opentelemetry_can_send_spans():
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    with receiving() as (receiver, found):
        headers = {"Authorization": TOKEN}
        exporter = OTLPSpanExporter(f"{receiver.endpoint}/v1/traces", headers=headers, compression=Compression.Gzip)
        provider = TracerProvider(resource=Resource({"service.name": "hospital-3", "fedvitals.run.id": "r1"}))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        # Our header, read by the other side's own code.
        context = TraceContextTextMapPropagator().extract(
            carried(Scope("r1", print, 3, trace=TRACE, span=ROUND), node="c7")
        )
        tracer = provider.get_tracer("theirs")
        place = {"fedvitals.node": "c7", "fedvitals.round": 3, "epoch": 2}
        with tracer.start_as_current_span("epoch", context=context, attributes=place):
            pass
        with contextlib.suppress(KeyError), tracer.start_as_current_span("load", attributes=place):
            raise KeyError("no file")
        provider.shutdown()
    epoch, load, event = found
    assert (epoch.trace, epoch.parent, epoch.name) == (TRACE, ROUND, "epoch")
    assert epoch.where == Where("r1", 3, "c7")
    assert epoch.attributes == {"epoch": 2}
    assert load.attributes["failed"] is True
    assert isinstance(event, Event)
    assert (event.name, event.data["error"], event.data["span"]) == ("exception", "KeyError", load.id)


def test_the_sdk_of_opentelemetry_can_send_metrics():
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    with receiving() as (receiver, found):
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{receiver.endpoint}/v1/metrics", headers={"Authorization": TOKEN})
        )
        provider = MeterProvider([reader], Resource({"fedvitals.run.id": "r1"}), shutdown_on_exit=False)
        meter = provider.get_meter("theirs")
        meter.create_gauge("fedvitals.loss").set(0.25, {"fedvitals.node": "c7", "fedvitals.round": 3})
        meter.create_counter("batches").add(4, {"fedvitals.node": "c7"})
        meter.create_histogram("sizes").record(4)
        provider.shutdown()
        assert receiver.rejected == 1, "the histogram"
    values = {(m.name, m.value, m.where.node, m.where.round) for m in found}
    assert values == {("loss", 0.25, "c7", 3), ("user.batches", 4.0, "c7", None)}


def test_logs_in_json_as_the_definition_writes_them(opened):
    receiver, found = opened
    found.clear()
    record = {
        "timeUnixNano": "1790000000250000000",
        "severityNumber": 17,
        "body": {"stringValue": "disk full"},
        "attributes": [{"key": "fedvitals.round", "value": {"intValue": "3"}}],
        "traceId": TRACE.upper(),
        "spanId": CLIENT,
        "somethingNew": 1,
    }
    resource = {"attributes": [{"key": "fedvitals.run.id", "value": {"stringValue": "r1"}}]}
    body = {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": [record]}]}]}
    status, answer = post(receiver, "/v1/logs", json.dumps(body).encode(), JSON)
    assert (status, json.loads(answer)) == (200, {})
    (event,) = found
    assert (event.where, event.at, event.level, event.name) == (Where("r1", 3, "c7"), AT, "error", "log")
    assert (event.message, event.data) == ("disk full", {"trace": TRACE, "span": CLIENT})


# -- live, out of a client that dies ----------------------------------------------------------------------------------


def test_progress_arrives_while_the_client_is_at_work():
    server = Scope("r1", print, 3, trace=TRACE, span=ROUND)
    with contextlib.ExitStack() as stack:
        receiver, found = stack.enter_context(receiving(nodes={"c7"}))
        token = sender_token(SECRET, "c7")
        scope = stack.enter_context(live(carried(server, node="c7"), receiver.endpoint, token=token))
        with timed("epoch", number=1):
            pass
        tell(scope, loss=0.5, patience=3)
        wait_until(lambda: len(found) == 3)
    one = next(record for record in found if isinstance(record, Span))
    assert (one.trace, one.parent, one.name, one.where) == (TRACE, ROUND, "epoch", Where("r1", 3, "c7"))
    assert one.attributes == {}, "a client's words need privacy level 3"
    assert {(m.name, m.value) for m in found if isinstance(m, Metric)} == {("loss", 0.5), ("user.patience", 3.0)}


DYING = """
import json, os, signal, sys, time
from fedvitals.hosts.otlp.progress import live
from fedvitals.transport.timing import timed
endpoint, headers, token = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
with live(headers, endpoint, token=token) as scope:
    with timed("first epoch"):
        pass
    sys.stdin.read(1)  # until the server has it
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
def test_a_client_that_is_killed_has_told_what_it_did_until_then():
    headers = json.dumps(carried(Scope("r1", print, 3, trace=TRACE, span=ROUND), node="c7"))
    with receiving() as (receiver, found):
        command = [sys.executable, "-c", DYING, receiver.endpoint, headers, sender_token(SECRET, "c7")]
        child = subprocess.Popen(command, stdin=subprocess.PIPE)
        wait_until(lambda: found)
        child.communicate(b"x", timeout=PATIENCE)
    assert child.returncode == -9
    assert [(r.name, r.parent, r.where.node) for r in found] == [("first epoch", ROUND, "c7")]


# -- from strangers ---------------------------------------------------------------------------------------------------


def test_only_expected_runs_and_nodes_are_taken():
    with receiving(nodes={"c7"}) as (receiver, found):
        others = [span(where=Where("r2", 1, "c7")), span(where=Where("r1", 1, "c8"))]
        status, answer = post(receiver, body=request_of(span(), *others, span(where=Where("r1", 1))))
        assert status == 200
        count, why = rejected(answer)
        assert count == 2
        assert "run 'r2'" in why or "node" in why
        assert [record.where.node for record in found] == ["c7", "c7"], "who names no node tells of itself"


def test_spans_with_names_of_the_whole_become_the_senders_own():
    spans = [span(name=name, id=f"{i:016x}") for i, name in enumerate(("round", "server", "journey", "client"), 1)]
    with receiving() as (receiver, found):
        exporter(receiver).write(spans)
    assert [record.name for record in found] == ["own.round", "own.server", "own.journey", "client"]


def test_a_token_is_needed_and_compared():
    name, _, proof = sender_token(SECRET, "c7").partition(".")
    other = sender_token(SECRET, "c8").partition(".")[0]
    wrong = ("", "Bearer wrong", SECRET, f"Bearer {SECRET}", f"Bearer {other}.{proof}", f"Bearer {name}.", "Bearer .")
    with receiving() as (receiver, found):
        for authorization in wrong:
            status, answer = post(receiver, body=request_of(span()), Authorization=authorization)
            assert status == 401
            assert b"Authorization" in answer
        assert found == []
        assert post(receiver, body=request_of(span()))[0] == 200


def test_a_monitor_that_sends_its_whole_run_shows_the_secret():
    with receiving(whole=True) as (receiver, found):
        assert post(receiver, body=request_of(span()))[0] == 401
        assert post(receiver, body=request_of(span()), Authorization=f"Bearer {SECRET}")[0] == 200
    assert len(found) == 1


def test_a_secret_that_can_be_guessed_is_refused():
    with pytest.raises(ConfigError, match="sender_token"):
        Receiver(print, {"r1"}, secret="short", port=0)


def test_a_port_that_is_taken_is_said():
    with receiving() as (receiver, _), pytest.raises(ConfigError, match="another port="):
        Receiver(print, {"r1"}, secret=SECRET, port=urllib.parse.urlsplit(receiver.endpoint).port)


@pytest.mark.parametrize(
    ("status", "path", "body", "kind", "headers"),
    [
        (404, "/v1/profiles", b"", PROTOBUF, {}),
        (404, "/v1/traces/../metrics", b"", PROTOBUF, {}),
        (415, "/v1/traces", b"", "text/plain", {}),
        (415, "/v1/traces", b"", PROTOBUF, {"Content_Encoding": "br"}),
        (400, "/v1/traces", b"not protobuf", PROTOBUF, {}),
        (400, "/v1/traces", b"not gzip", PROTOBUF, {"Content_Encoding": "gzip"}),
        (400, "/v1/traces", gzip.compress(b"", mtime=0)[:-1], PROTOBUF, {"Content_Encoding": "gzip"}),
        (400, "/v1/traces", gzip.compress(b"", mtime=0) + b"x", PROTOBUF, {"Content_Encoding": "gzip"}),
        (400, "/v1/logs", b"{", JSON, {}),
        (400, "/v1/logs", b"[]", JSON, {}),
        (400, "/v1/logs", b'{"resourceLogs": 3}', JSON, {}),
        (400, "/v1/logs", b"[" * 100_000, JSON, {}),
        (400, "/v1/traces", b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xyz"}]}]}]}', JSON, {}),
        (411, "/v1/traces", b"", PROTOBUF, {"Content_Length": "-1"}),
        (413, "/v1/traces", b"", PROTOBUF, {"Content_Length": str(1 << 40)}),
    ],
)
def test_what_is_no_request_is_answered_with_the_reason(opened, status, path, body, kind, headers):
    receiver, found = opened
    found.clear()
    got, answer = post(receiver, path, body, kind, **headers)
    assert got == status
    assert len(answer) > 20
    assert found == []


@pytest.mark.thorough
def test_a_bomb_is_refused_before_it_is_unpacked(opened):
    receiver, _ = opened
    bomb = gzip.compress(bytes(1 << 28), mtime=0)  # 256 MiB in 260 kB
    status, answer = post(receiver, body=bomb, Content_Encoding="gzip")
    assert status == 413
    assert b"unpacked" in answer


def test_many_empty_messages_are_refused_before_each_is_looked_at(opened):
    receiver, _ = opened
    status, answer = post(receiver, body=b"\x0a\x00" * 100_000)
    assert status == 413
    assert b"resources" in answer
    request = service.ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for _ in range(20_001):
        spans.add()
    status, answer = post(receiver, body=request.SerializeToString())
    assert status == 413
    assert b"spans" in answer


def test_other_methods_are_not_answered(opened):
    receiver, _ = opened
    address = urllib.parse.urlsplit(receiver.endpoint)
    with contextlib.closing(http.client.HTTPConnection(address.hostname, address.port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/v1/traces", headers={"Authorization": TOKEN})
        assert connection.getresponse().status == 405


WRONG_SPANS = {
    "no trace id": lambda s: setattr(s, "trace_id", b""),
    "an id of zeros": lambda s: setattr(s, "span_id", bytes(8)),
    "a parent that is too long": lambda s: setattr(s, "parent_span_id", b"123456789"),
    "an end before its beginning": lambda s: setattr(s, "end_time_unix_nano", s.start_time_unix_nano - 1),
    "a time in the far future": lambda s: setattr(s, "start_time_unix_nano", 2**63),
    "ten years": lambda s: setattr(s, "end_time_unix_nano", s.start_time_unix_nano + 10**18),
    "no name": lambda s: setattr(s, "name", ""),
    "a name that is too long": lambda s: setattr(s, "name", "x" * 201),
    "a round that is a text": lambda s: setattr(s.attributes[0].value, "string_value", "3"),
    "a round below 0": lambda s: setattr(s.attributes[0].value, "int_value", -1),
    "a round that is a truth": lambda s: setattr(s.attributes[0].value, "bool_value", True),
    "a node that is a number": lambda s: setattr(s.attributes[1].value, "int_value", 7),
}


@pytest.mark.parametrize("what", WRONG_SPANS)
def test_a_span_that_cannot_be_is_left_out_alone(opened, what):
    receiver, found = opened
    found.clear()
    request = service.ExportTraceServiceRequest.FromString(request_of(span(), span(id="b" * 16)))
    first = request.resource_spans[0].scope_spans[0].spans[0]
    assert [a.key for a in first.attributes[:2]] == ["fedvitals.round", "fedvitals.node"]
    WRONG_SPANS[what](first)
    status, answer = post(receiver, body=request.SerializeToString())
    assert (status, rejected(answer)[0]) == (200, 1)
    assert [record.id for record in found] == ["b" * 16]


def test_names_are_escaped_and_as_long_as_in_a_payload(opened):
    receiver, found = opened
    found.clear()
    where = [dataclasses.replace(span().where, layer="l" * size) for size in (512, 513)]
    sent = span(name="a\nb\u200dc"), span(where=where[0], id="b" * 16), span(where=where[1], id="c" * 16)
    status, answer = post(receiver, body=request_of(*sent))
    assert status == 200
    assert rejected(answer)[0] == 1
    assert "a layer is a text of 1 to 512 characters" in rejected(answer)[1]
    assert [(record.name, record.where.layer) for record in found] == [("a\\nb\\u200dc", None), ("client", "l" * 512)]


def test_what_is_too_much_is_cut(opened):
    receiver, found = opened
    found.clear()
    deep: list = []
    for _ in range(50):
        deep = [deep]
    own = {"text": "x" * 100_000, "deep": deep, **{f"a{i}": i for i in range(500)}}
    assert post(receiver, body=request_of(span(attributes=own)))[0] == 200
    (record,) = found
    assert len(record.attributes) < 64
    assert len(record.attributes["text"]) < 20_000
    assert len(repr(record.attributes["deep"])) < 50


def test_when_nobody_takes_them_the_sender_is_asked_to_come_again(caplog):
    def take(*_):
        raise OSError("disk full")

    with (
        Receiver(take, {"r1"}, secret=SECRET, port=0) as receiver,
        caplog.at_level(logging.WARNING, "fedvitals.telemetry"),
    ):
        assert [post(receiver, body=request_of(span()))[0] for _ in range(2)] == [503, 503]
    assert len(caplog.records) == 1
    assert receiver.taken == 0


def test_senders_that_say_nothing_do_not_keep_others_out():
    """The first attempt gets through, without a wait for anybody's deadline."""
    with receiving() as (receiver, found), contextlib.ExitStack() as stack:
        address = urllib.parse.urlsplit(receiver.endpoint)
        for _ in range(2 * otlp_receiver.AT_ONCE):
            silent = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            silent.send(b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert post(receiver, body=request_of(span()))[0] == 200
        assert len(found) == 1


@given(body=st.binary(max_size=300))
def test_any_bytes_are_answered(opened, body):
    receiver, _ = opened
    assert post(receiver, body=body)[0] in (200, 400)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "scopeSpans", "spans", "traceId", "attributes", "key", "value", "startTimeUnixNano"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(content=JSON_VALUES)
def test_any_json_is_answered(opened, content):
    receiver, _ = opened
    assert post(receiver, body=json.dumps(content).encode(), kind=JSON)[0] in (200, 400)
