# SPDX-License-Identifier: Apache-2.0
"""The sink for OpenTelemetry, against a receiver that is not ours: what arrives, and what happens when it does not."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
import threading

import pytest
import torch

from fedvitals.catalog import MEASURES
from fedvitals.errors import ConfigError, MissingExtraError, RecordError
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Event, Finding, Metric, Run, Span, Suspect, Where
from fedvitals.sinks.otel import sink as otel_module
from fedvitals.sinks.otel.sink import OpenTelemetry
from fedvitals.testing import check_sink, tiny_run
from fedvitals.transport import otel_names
from fedvitals.transport import queue as queue_module
from fedvitals.transport.queue import Queue
from support.conditions import holds_for_each
from support.otlp_listener import attributes_of, listening
from support.paths import ROOT
from support.waiting import wait_until

TRACE, ROUND, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "53995c3f42cd8ad8"
AT = 1_790_000_000.25


@pytest.fixture
def listener():
    with listening() as listener:
        yield listener


@pytest.fixture
def quick(monkeypatch):
    """Back-off of milliseconds instead of seconds."""
    monkeypatch.setattr(queue_module, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(queue_module, "LONGEST_DELAY", 0.02)


def span(name="client", node="c7", **attributes) -> Span:
    return Span(Where("r1", 3, node, group="edge-0"), AT, name, 1.5, TRACE, CLIENT, ROUND, attributes, "monitor", 7)


def metrics(count: int, node="c7") -> list[Metric]:
    return [Metric(Where("r1", i, node), AT + i, "loss", float(i), "monitor", i) for i in range(count)]


def send(listener, *records, **settings) -> OpenTelemetry:
    sink = OpenTelemetry(listener.endpoint, **settings)
    sink.write(records)
    sink.close()
    return sink


def test_a_span_keeps_its_ids_parent_and_times(listener):
    send(listener, Run("r1", "digits", "lab", "hierarchical"), span(steps=20))
    (found,) = listener.spans()
    assert (found.trace_id.hex(), found.span_id.hex(), found.parent_span_id.hex()) == (TRACE, CLIENT, ROUND)
    assert found.name == "client"
    assert found.start_time_unix_nano == 1_790_000_000_250_000_000
    assert found.end_time_unix_nano - found.start_time_unix_nano == 1_500_000_000
    assert found.status.code == 0
    attributes = attributes_of(found.attributes)
    place = {"fedvitals.round": 3, "fedvitals.node": "c7", "fedvitals.group": "edge-0", "fedvitals.span.steps": 20}
    assert place.items() <= attributes.items()
    resource = attributes_of(listener.of("/v1/traces")[0].resource_spans[0].resource.attributes)
    wanted = {"service.name": "fedvitals", "service.instance.id": "r1", "fedvitals.run.name": "digits"}
    assert wanted.items() <= resource.items()


def test_parts_of_a_span_become_its_children(listener):
    send(listener, span(parts={"data": 0.5, "forward": 1.0}))
    parent, data, forward = listener.spans()
    assert [s.name for s in (data, forward)] == ["data", "forward"]
    assert {data.parent_span_id, forward.parent_span_id} == {parent.span_id}
    assert data.end_time_unix_nano == forward.start_time_unix_nano
    assert forward.end_time_unix_nano == parent.end_time_unix_nano
    assert attributes_of(data.attributes)["fedvitals.part"] is True


def test_a_failed_client_has_an_error_and_its_exception(listener):
    sink = OpenTelemetry(listener.endpoint)
    with Monitor(None, run="failing", sinks=[sink], detectors=[]) as monitor, monitor.round(0):
        with pytest.raises(ZeroDivisionError), monitor.client("c1"):
            raise ZeroDivisionError("division by zero")
        with monitor.client("c2"):
            pass
    spans = {attributes_of(s.attributes).get("fedvitals.node"): s for s in listener.spans() if s.name == "client"}
    failed, fine = spans["c1"], spans["c2"]
    assert failed.status.code == 2
    assert "division by zero" in failed.status.message
    assert attributes_of(failed.attributes)["error.type"] == "ZeroDivisionError"
    (event,) = failed.events
    assert event.name == "exception"
    exception = attributes_of(event.attributes)
    assert exception["exception.type"] == "ZeroDivisionError"
    assert "raise ZeroDivisionError" in exception["exception.stacktrace"]
    assert (fine.status.code, len(fine.events)) == (0, 0)
    (log,) = [log for log in listener.logs() if log.event_name == "client.failed"]
    assert log.severity_number == 17


def test_metrics_are_gauges_with_few_attributes(listener):
    values = [0.5, math.nan, math.inf]
    sent = [Metric(Where("r1", i, "c7", step=4), AT, "loss", value) for i, value in enumerate(values)]
    send(listener, *sent, Metric(Where("r1", 1), AT, "time.round", 2.0), Metric(Where("r1"), AT, "user.x", 1.0))
    points = listener.points()
    assert {(name, unit) for name, unit, _ in points} == {
        ("fedvitals.loss", "1"),
        ("fedvitals.time.round", "s"),
        ("fedvitals.user.x", ""),
    }
    losses = [point for name, _, point in points if name == "fedvitals.loss"]
    assert [repr(point.as_double) for point in losses] == ["0.5", "nan", "inf"]
    # A round in the attributes would make a new series in each round.
    assert {tuple(attributes_of(point.attributes)) for point in losses} == {("fedvitals.run.id", "fedvitals.node")}
    assert [attributes_of(p.exemplars[0].filtered_attributes)["fedvitals.round"] for p in losses] == [0, 1, 2]


def test_nodes_beyond_a_limit_make_no_series_and_it_is_said_once(listener, caplog):
    sent = [Metric(Where("r1", 1, f"c{i}"), AT, "loss", 1.0) for i in range(10)]
    with caplog.at_level(logging.WARNING, "fedvitals.telemetry"):
        sink = OpenTelemetry(listener.endpoint, nodes=3)
        sink.write([*sent, span(node="c9")])
        sink.write([*sent, Metric(Where("r1", 1), AT, "accuracy", 1.0)])
    nodes = [attributes_of(point.attributes).get("fedvitals.node") for _, _, point in listener.points()]
    assert nodes == ["c0", "c1", "c2", "c0", "c1", "c2", None]
    assert len(listener.spans()) == 1
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", [measure.name for measure in MEASURES])
def test_every_unit_is_one_of_ucum(name):
    unit = otel_names.unit_of(name)
    assert re.fullmatch(r"(s|By|1|%|\{[a-z_]+\})(/(s|By|1|\{[a-z_]+\}))?", unit), unit
    assert not unit.endswith("s}") or unit == "{class}"


def test_events_and_findings_are_log_records(listener):
    event = Event(Where("r1", 2, "c7"), AT, "error", "exception", "it broke", {"trace": TRACE, "span": CLIENT})
    finding = Finding(Where("r1", 2), AT, "label_flip", "critical", 0.9, "c7!", {"z": 4.5}, (Suspect("c7", 0.9),))
    send(listener, event, finding)
    one, two = listener.logs()
    assert (one.event_name, one.body.string_value, one.severity_number) == ("exception", "it broke", 17)
    assert (one.trace_id.hex(), one.span_id.hex()) == (TRACE, CLIENT)
    assert (two.event_name, two.severity_text) == ("finding.label_flip", "error")
    assert attributes_of(two.attributes)["fedvitals.data.z"] == 4.5


def test_the_contract_of_sinks_holds(listener):
    check_sink(lambda: OpenTelemetry(listener.endpoint))
    assert len(listener.spans()) == 3
    assert holds_for_each(any(s.trace_id) for s in listener.spans()), "an id of zeros is none"


def test_no_provider_of_the_user_is_touched(listener):
    from opentelemetry import metrics as metrics_api
    from opentelemetry import trace as trace_api

    before = trace_api.get_tracer_provider(), metrics_api.get_meter_provider()
    send(listener, span(), *metrics(3))
    assert (trace_api.get_tracer_provider(), metrics_api.get_meter_provider()) == before


# -- when the receiver is away ----------------------------------------------------------------------------------------


def train(monitor: Monitor | None, rounds: int, between=lambda number: None) -> torch.Tensor:
    """A training with or without a monitor; gives its weights."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    for number in range(rounds):
        between(number)
        if monitor is not None:
            monitor.host.round_begin(number, model)
            monitor.host.client_begin("c1", model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(3, 4) * number / 30).square().sum().backward()
        optimizer.step()
        if monitor is not None:
            monitor.host.client_end("c1")
            monitor.host.round_end(number, model)
    return model.weight.detach().clone()


@pytest.mark.thorough
def test_a_receiver_that_is_down_costs_nothing_and_gets_everything_later(listener, quick, caplog):
    """The bar: nothing lost within the queue, training unaffected.

    Scaled: the longest pause between attempts is 1/250 of the real one, and the outage lasts for 15 failed attempts.
    """
    alone = train(None, 30)
    sink = OpenTelemetry(listener.endpoint)
    monitor = Monitor(None, run="outage", sinks=[sink], detectors=[])
    waiting = []

    def between(number: int) -> None:
        if number == 5:
            assert monitor.flush()
            listener.stop()
        if number == 25:
            *_, queue = monitor._run.spine.emission.writer._queues
            waiting.append(queue.pending)
            wait_until(lambda: queue._attempts_failed >= 15)
            listener.start()

    with caplog.at_level(logging.WARNING, "fedvitals.telemetry"):
        watched = train(monitor, 30, between)
        assert monitor.flush()
        monitor.close()
    assert torch.equal(alone, watched)
    assert waiting[0] > 100, "twenty rounds went on meanwhile"
    assert monitor.lost == 0
    rounds = [attributes_of(s.attributes)["fedvitals.round"] for s in listener.spans() if s.name == "round"]
    assert sorted(rounds) == list(range(30)), "each once: what got through is not sent again"
    clients = [attributes_of(s.attributes)["fedvitals.round"] for s in listener.spans() if s.name == "client"]
    assert sorted(clients) == list(range(30))
    lengths = [p for name, _, p in listener.points() if name == "fedvitals.time.round"]
    assert len(lengths) == 30
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2, messages
    assert "cannot be reached" in messages[0]
    assert "works again" in messages[1]


def test_beyond_the_queue_the_oldest_go_and_are_counted(listener, quick):
    port = listener.port
    listener.stop()
    queue = Queue(OpenTelemetry(f"http://127.0.0.1:{port}"), bulk=100)
    sent = metrics(150)
    queue.put_many(sent[:10])
    wait_until(lambda: queue._failures > 2)  # the first ten are held by the worker
    queue.put_many(sent[10:])
    listener.start()
    assert queue.flush() is False
    queue.close()
    assert queue.lost == {"queue full": 40}
    arrived = [point.as_double for _, _, point in listener.points()]
    assert arrived == [*range(10), *range(50, 150)]


def test_what_got_through_is_not_sent_again_when_the_rest_fails(listener, quick):
    trouble = threading.Event()
    trouble.set()
    listener.refuse = lambda path, _: (503, {}, b"") if path == "/v1/metrics" and trouble.is_set() else None
    queue = Queue(OpenTelemetry(listener.endpoint))
    queue.put_many([span(), *metrics(3)])
    wait_until(lambda: queue._failures > 3)
    trouble.clear()
    assert queue.flush()
    queue.close()
    assert len(listener.spans()) == 1
    assert len(listener.points()) == 3


def test_a_record_that_is_refused_is_left_out_alone(listener, quick):
    def refuse(path, request):
        sent = [m.name for a in request.resource_metrics for b in a.scope_metrics for m in b.metrics]
        bad = "fedvitals.user.bad" in sent
        return (400, {}, b"bad name") if bad else None

    listener.refuse = refuse
    bad = Metric(Where("r1", 1, "c7"), AT, "user.bad", 1.0)
    queue = Queue(OpenTelemetry(listener.endpoint))
    queue.put_many([*metrics(5), bad, *metrics(5)])
    queue.flush()
    queue.close()
    assert queue.lost == {"bad record": 1}
    assert len(listener.points()) == 10


def test_a_signal_that_a_receiver_does_not_know_does_not_stop_the_others(listener, caplog):
    """Jaeger takes traces, and answers 404 to metrics and logs."""
    listener.refuse = lambda path, _: (404, {}, b"404 page not found") if path != "/v1/traces" else None
    sink = OpenTelemetry(listener.endpoint)
    with caplog.at_level(logging.WARNING, "fedvitals.telemetry"):
        for _ in range(3):
            sink.write([span(), *metrics(2)])
    sink.close()
    assert len(listener.spans()) == 3
    assert sink.rejected == 6
    assert len(caplog.records) == 1
    assert "404" in caplog.text


def test_who_asks_to_be_left_alone_is(listener, monkeypatch):
    asked = []

    def refuse(path, _):
        asked.append(path)
        return 429, {"Retry-After": "30"}, b"busy"

    listener.refuse = refuse
    sink = OpenTelemetry(listener.endpoint)
    for _ in range(3):
        with pytest.raises(ConnectionError, match=r"429|asks for a pause"):
            sink.write([span()])
    assert len(asked) == 1
    now = otel_module.time.monotonic()
    monkeypatch.setattr(otel_module.time, "monotonic", lambda: now + 31)
    listener.refuse = lambda path, _: None
    sink.write([span()])
    assert len(listener.spans()) == 1


def test_a_receiver_that_keeps_only_some_is_not_asked_again(listener, caplog):
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

    partial = service.ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    answer = service.ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    listener.refuse = lambda path, _: (200, {}, answer)
    with caplog.at_level(logging.WARNING, "fedvitals.telemetry"):
        sink = send(listener, span(), span(), span())
    assert sink.rejected == 2
    assert "too old" in caplog.text


def test_redirects_are_not_followed(listener):
    with listening() as elsewhere:
        listener.refuse = lambda path, _: (307, {"Location": elsewhere.endpoint + path}, b"")
        with pytest.raises(ConnectionError, match="307"):
            send(listener, span(), headers={"Authorization": "Bearer secret"})
        assert elsewhere.requests == []


def test_an_answer_of_garbage_is_as_good_as_none(listener):
    listener.refuse = lambda path, _: (200, {}, b"\xff\xfe<html>")
    send(listener, span())
    assert len(listener.spans()) == 1


def test_headers_and_endpoint_come_from_the_environment(listener, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", listener.endpoint + "/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-tenant=7")
    OpenTelemetry().write([span()])
    headers = {name.lower(): value for name, value in listener.headers[0].items()}
    assert headers["authorization"] == "Bearer abc"
    assert headers["x-tenant"] == "7"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://host", "http://", "http://h:99999", "http://h/?a=b"])
def test_an_endpoint_that_cannot_be_meant_is_refused(endpoint):
    with pytest.raises(ConfigError, match="base address"):
        OpenTelemetry(endpoint)


def test_a_signal_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'traces'"):
        OpenTelemetry(signals=["trace"])


def test_without_the_package_it_says_what_to_install(monkeypatch):
    otel_names.message.cache_clear()
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'fedvitals[otel]'")):
        OpenTelemetry()
    otel_names.message.cache_clear()


def test_a_refusal_quotes_the_receiver(listener):
    listener.refuse = lambda path, _: (413, {}, b"too\nlarge \x00")
    with pytest.raises(RecordError, match=r"413 .*too large"):
        send(listener, span())


@pytest.mark.thorough
def test_a_whole_run_arrives(listener):
    monitor = tiny_run(None, sinks=[OpenTelemetry(listener.endpoint)], detectors=[])
    spans = listener.spans()
    ids = {s.span_id for s in spans}
    assert len({s.trace_id for s in spans}) == 1
    assert holds_for_each(s.parent_span_id in ids for s in spans if s.parent_span_id)
    assert sum(s.name == "round" for s in spans) == 3
    assert sum(s.name == "client" for s in spans) == 12
    assert monitor.lost == 0


def test_the_page_names_every_attribute():
    page = (ROOT / "docs" / "opentelemetry.md").read_text(encoding="utf-8")
    known = [v for k, v in vars(otel_names).items() if k.isupper() and str(v).startswith("fedvitals.")]
    for name in [*known, *otel_names.PLACES.values(), otel_names.FINDING]:
        assert name in page, name
    assert f"{queue_defaults('bulk'):,}" in page
    assert f"{queue_defaults('important'):,}" in page


def queue_defaults(name: str) -> int:
    return inspect.signature(Queue).parameters[name].default
