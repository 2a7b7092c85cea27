# SPDX-License-Identifier: Apache-2.0
"""Encodes records as OTLP messages: spans as spans, metrics as gauges, events and findings as log records.

A gauge has few attributes, since each combination becomes a separate series in the backend: the node, but no round.
Round, step and layer are in the point's exemplar, as `filtered_attributes`: OTLP's own place for attributes left out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import fedvitals
from fedvitals.records import Event, Finding, Metric, Run, Span, Where
from fedvitals.time_parts import unfold
from fedvitals.transport import otel_names as names
from fedvitals.transport.logs import bounded
from fedvitals.transport.otel_names import message

Kind = TypeVar("Kind", Span, Metric, Event | Finding)
Failures = Mapping[tuple[str, int | None, str | None], Event]  # by run, round and node

DEPTH = 8  # of nested values; deeper ones become text
VALUES = 1000  # in one list or mapping
LONGEST = 16_384  # bytes of a text
_TRACE, _SPAN = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
_ERROR = 2  # STATUS_CODE_ERROR
_INTERNAL = 1  # SPAN_KIND_INTERNAL
_SAMPLED = 1


def traces(runs: Mapping[str, Run], spans: Iterable[Span], failures: Failures) -> Any:
    """Return a request for /v1/traces: each span, followed by the parts of its time."""
    request = message("collector.trace.v1.trace_service", "ExportTraceServiceRequest")()
    for run, scoped, spans_of_run in _scoped(request, "spans", runs, spans):
        for span in spans_of_run:
            failure = failures.get((run, span.where.round, span.where.node)) if _failed(span) else None
            _span(scoped.spans, span, failure)
            for part in unfold(span):
                _span(scoped.spans, part, None, is_part=True)
    return request


def gauges(runs: Mapping[str, Run], metrics: Iterable[Metric]) -> Any:
    """Return a request for /v1/metrics: one gauge per name, one point per value."""
    request = message("collector.metrics.v1.metrics_service", "ExportMetricsServiceRequest")()
    for _, scoped, metrics_of_run in _scoped(request, "metrics", runs, metrics):
        gauge_of: dict[str, Any] = {}
        for metric in metrics_of_run:
            points = gauge_of.get(metric.name)
            if points is None:
                named = scoped.metrics.add(name=names.METRIC + text(metric.name), unit=names.unit_of(metric.name))
                points = gauge_of[metric.name] = named.gauge.data_points
            _point(points, metric)
    return request


def logs(runs: Mapping[str, Run], events: Iterable[Event | Finding]) -> Any:
    """Return a request for /v1/logs: events and findings."""
    request = message("collector.logs.v1.logs_service", "ExportLogsServiceRequest")()
    for _, scoped, events_of_run in _scoped(request, "logs", runs, events):
        for event in events_of_run:
            _log(scoped.log_records, event)
    return request


def _scoped(
    request: Any, signal: str, runs: Mapping[str, Run], records: Iterable[Kind]
) -> Iterator[tuple[str, Any, list[Kind]]]:
    """Yield each run, its part of the request with its description, and its records."""
    by_run: dict[str, list[Kind]] = {}
    for record in records:
        by_run.setdefault(record.where.run, []).append(record)
    scope = message("common.v1.common", "InstrumentationScope")(name=names.SERVICE, version=fedvitals.__version__)
    for run, records_of_run in by_run.items():
        whole = getattr(request, f"resource_{signal}").add()
        _describe(whole.resource, runs, run)
        yield run, getattr(whole, f"scope_{signal}").add(scope=scope), records_of_run


def _describe(resource: Any, runs: Mapping[str, Run], run: str) -> None:
    known = runs.get(run)
    attributes: dict[str, Any] = {
        "service.name": names.SERVICE,
        "service.instance.id": run,
        "service.version": fedvitals.__version__,
        "telemetry.sdk.name": names.SERVICE,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": fedvitals.__version__,
        names.RUN: run,
    }
    if known is not None:
        attributes |= {names.RUN_NAME: known.name, names.HOST: known.host, names.TOPOLOGY: known.topology}
    fill(resource.attributes, attributes)


def _span(spans: Any, span: Span, failure: Event | None, *, is_part: bool = False) -> None:
    begin = nanoseconds(span.at)
    encoded = spans.add(
        trace_id=trace_id(span.trace, span.where),
        span_id=span_id(span.id),
        parent_span_id=b"" if span.parent is None else span_id(span.parent),
        flags=_SAMPLED,
        name=text(span.name) or "span",
        kind=_INTERNAL,
        start_time_unix_nano=begin,
        end_time_unix_nano=begin + nanoseconds(span.seconds),
    )
    fill(encoded.attributes, names.places(span.where))
    fill(encoded.attributes, {names.OWN + name: value for name, value in span.attributes.items()})
    if is_part:
        fill(encoded.attributes, {names.PART: True})
        return
    fill(encoded.attributes, {names.SOURCE: span.source, names.SEQUENCE: span.sequence})
    if _failed(span):
        data = {} if failure is None else failure.data
        kind = str(data.get("exception") or data.get("error") or span.attributes.get("error") or "")
        words = str(span.attributes.get("message") or (failure.message if failure is not None else "") or kind)
        encoded.status.code, encoded.status.message = _ERROR, bounded(words)
        fill(encoded.attributes, {"error.type": kind or "_OTHER"})
        _exception(encoded, kind, words, failure, span)


def _failed(span: Span) -> bool:
    return bool(span.attributes.get("failed") or span.attributes.get("error"))


def _exception(encoded_span: Any, kind: str, words: str, failure: Event | None, span: Span) -> None:
    """Add the event «exception» to the span, as the conventions require; none if nothing is known of it."""
    if not kind:
        return
    at = failure.at if failure is not None else span.at + span.seconds
    event = encoded_span.events.add(name="exception", time_unix_nano=nanoseconds(at))
    trace = None if failure is None else failure.data.get("traceback")
    attributes = {"exception.type": kind, "exception.message": words, "exception.stacktrace": trace}
    fill(event.attributes, attributes)


def _point(points: Any, metric: Metric) -> None:
    where, at, value = metric.where, nanoseconds(metric.at), float(metric.value)
    point = points.add(time_unix_nano=at, as_double=value)
    fill(point.attributes, {names.RUN: where.run, names.NODE: where.node})
    exemplar = point.exemplars.add(time_unix_nano=at, as_double=value)
    fill(exemplar.filtered_attributes, names.places(where, "round", "step", "layer", "group"))
    fill(exemplar.filtered_attributes, {names.SOURCE: metric.source, names.SEQUENCE: metric.sequence})


def _log(records: Any, record: Event | Finding) -> None:
    if isinstance(record, Finding):
        name, level = names.FINDING + record.issue, names.FINDING_LEVELS.get(record.severity, "warning")
        suspects = [suspect.node for suspect in record.suspects]
        data: Mapping[str, Any] = {"confidence": record.confidence, "suspects": suspects, **record.evidence}
    else:
        name, level, data = record.name, record.level, record.data
    at = nanoseconds(record.at)
    encoded = records.add(
        time_unix_nano=at,
        observed_time_unix_nano=at,
        severity_number=names.SEVERITIES.get(level, 9),
        severity_text=text(level),
        event_name=text(name),
    )
    put(encoded.body, record.message)
    fill(encoded.attributes, names.places(record.where))
    fill(encoded.attributes, {names.DATA + key: value for key, value in data.items()})
    fill(encoded.attributes, {names.SOURCE: record.source, names.SEQUENCE: record.sequence})
    trace, span = data.get("trace"), data.get("span")
    if _is(_TRACE, trace) and _is(_SPAN, span):
        encoded.trace_id, encoded.span_id = bytes.fromhex(str(trace)), bytes.fromhex(str(span))


# -- values -----------------------------------------------------------------------------------------------------------


def trace_id(trace: str, where: Where) -> bytes:
    """Return our own id if it is a W3C id; otherwise one derived from it, or from the run if there is none."""
    return bytes.fromhex(trace) if _is(_TRACE, trace) else _digest(f"{trace}/{where.run}", 16)


def span_id(span: str) -> bytes:
    return bytes.fromhex(span) if _is(_SPAN, span) else _digest(span, 8)


def nanoseconds(seconds: float) -> int:
    """Return a time in nanoseconds, at least 0; NaN becomes 0, which OTLP reads as unknown."""
    if not 0 <= seconds < 2**33:  # OTLP cannot represent more; NaN does not pass the comparison either
        return 0
    whole = math.floor(seconds)
    return whole * 10**9 + round((seconds - whole) * 1e9)  # a single product would lose the last three digits


def text(value: str, limit: int = 256) -> str:
    """Return text cut to a number of bytes."""
    return value if len(value) <= limit and value.isascii() else bounded(value, limit)


def fill(pairs: Any, attributes: Mapping[str, Any]) -> None:
    """Add attributes by name, in their order, to a list of attributes, leaving out None.

    In place: building separate messages and copying them into others takes twice the time.
    """
    for name, value in attributes.items():
        if value is not None:
            pair = pairs.add(key=text(str(name)))
            put(pair.value, value)


def put(target: Any, value: Any, depth: int = DEPTH) -> None:
    """Set an OTLP value: boolean, number, text, list or mapping; any other type becomes text."""
    if value is None:
        return
    if isinstance(value, str):
        target.string_value = text(value, LONGEST)
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, Mapping) and depth:
        target.kvlist_value.SetInParent()
        for name, item in [*value.items()][:VALUES]:
            pair = target.kvlist_value.values.add(key=text(str(name)))
            put(pair.value, item, depth - 1)
    elif isinstance(value, list | tuple) and depth:
        target.array_value.SetInParent()
        for item in value[:VALUES]:
            put(target.array_value.values.add(), item, depth - 1)
    else:
        target.string_value = text(str(value), LONGEST)


def _is(pattern: re.Pattern[str], text: Any) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None and text.strip("0") != ""


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=size).digest()
