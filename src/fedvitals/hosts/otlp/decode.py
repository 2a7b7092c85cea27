# SPDX-License-Identifier: Apache-2.0
"""Decodes OTLP messages into records: those of fedvitals exactly, those of others as far as they fit.

They come from other machines: every id, number, name, time and text is checked and bounded. Invalid records are left
out, counted and named; the rest is accepted.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedvitals.catalog import CATALOG
from fedvitals.errors import RecordError
from fedvitals.protocols import Node
from fedvitals.records import Event, Metric, Record, Span, Where, printable
from fedvitals.time_parts import of_the_whole
from fedvitals.transport import otel_names as names
from fedvitals.transport.logs import bounded
from fedvitals.transport.sender_limits import LAYER_NAME_CHARACTERS, NAME_CHARACTERS
from fedvitals.transport.sink_writer import SOURCE as MONITOR

TEXT = 4096  # bytes of a text
ATTRIBUTES, DEPTH, ITEMS = 64, 6, 1000
LONGEST = 366 * 86_400  # seconds of a span
EARLIEST, LATEST = 0.0, 4.1e9  # seconds since the epoch: until the year 2099
GROUPS, RECORDS = 1000, 20_000  # in one request
COUNTED = 2**31  # rounds and steps
SEQUENCE = 2**53

Attributes = dict[str, Any]


@dataclass(slots=True)
class DecodedRecords:
    """The records of one request, how many were left out, and why the first of them was."""

    records: list[Record] = field(default_factory=list)
    rejected: int = 0
    why: str = ""

    def leave_out(self, count: int, why: str) -> None:
        """Count records that are left out; the first reason is kept."""
        self.rejected += count
        self.why = self.why or why


class Decoder:
    """Turns OTLP requests into records. `runs` and `nodes`: those whose records are accepted.

    `sender`: the node that sent a request, which a record need not name; None: another monitor, which reports on all
    nodes. What a sender calls `round` or `server` is its own.
    """

    def __init__(self, runs: Container[str], nodes: Container[str] | None = None) -> None:
        self._runs, self._nodes = runs, nodes
        self._source = f"otlp-{os.urandom(4).hex()}"
        self._sequence = itertools.count()

    def traces(self, request: Any, sender: Node | None) -> DecodedRecords:
        """Decode a request for /v1/traces."""
        return _decoded(partial(self._span, sender), request.resource_spans, "scope_spans", "spans")

    def metrics(self, request: Any, sender: Node | None) -> DecodedRecords:
        """Decode a request for /v1/metrics."""
        taken = DecodedRecords()
        for resource, _, metrics in _scopes(request.resource_metrics, "scope_metrics", "metrics"):
            for metric in metrics:
                kind = metric.WhichOneof("data") or ""
                points = getattr(metric, kind).data_points if kind else ()
                if len(points) + len(taken.records) + taken.rejected > RECORDS:
                    raise RecordError(f"The request has more than {RECORDS} points.")
                if kind not in ("gauge", "sum"):
                    text = f"the metric {_shown(metric.name)} is no gauge and no sum, but a {kind or 'nothing'}"
                    taken.leave_out(len(points) or 1, text)
                    continue
                for point in points:
                    _add(taken, self._point, sender, metric.name, point, resource)
        return taken

    def logs(self, request: Any, sender: Node | None) -> DecodedRecords:
        """Decode a request for /v1/logs."""
        return _decoded(partial(self._log, sender), request.resource_logs, "scope_logs", "log_records")

    def _span(self, sender: Node | None, span: Any, resource: Attributes, ours: bool) -> Iterator[Record]:
        attributes = resource | _attributes(span.attributes)
        if attributes.get(names.PART) is True:  # its parent contains the same
            return
        where = self._where(attributes, sender)
        begin, end = span.start_time_unix_nano, span.end_time_unix_nano
        if not 0 < begin <= end <= begin + LONGEST * 10**9:
            raise RecordError(f"the span {_shown(span.name)} ends {(end - begin) / 10**9:.3g} s after it began")
        at, seconds = _seconds(begin), (end - begin) / 10**9
        own = _own(attributes, names.OWN) if ours else _own(attributes, "", without=resource)
        if span.status.code == 2 and not ours:  # STATUS_CODE_ERROR
            own |= {"failed": True, "error": str(attributes.get("error.type", "error"))}
            own |= {"message": bounded(span.status.message, TEXT)} if span.status.message else {}
        ids = (_identifier(span.trace_id, 16, "trace"), _identifier(span.span_id, 8, "span"))
        parent = _identifier(span.parent_span_id, 8, "parent span") if span.parent_span_id else None
        decoded = Span(where, at, _name(span.name), seconds, *ids, parent, own, *self._identity(attributes))
        yield replace(decoded, name=f"own.{decoded.name}") if of_the_whole(decoded) and sender is not None else decoded
        for event in () if ours else span.events[:16]:
            if event.name == "exception":
                yield self._exception(event, where, ids, span.name, at + seconds)

    def _exception(self, event: Any, where: Where, ids: tuple[str, str], block: str, end: float) -> Event:
        attributes = _attributes(event.attributes)
        kind, text = str(attributes.get("exception.type", "Exception")), str(attributes.get("exception.message", ""))
        data = {"error": kind, "block": _name(block), "trace": ids[0], "span": ids[1]}
        trace = attributes.get("exception.stacktrace")
        data |= {"traceback": str(trace)} if trace else {}
        at = _seconds(event.time_unix_nano) if event.time_unix_nano else end
        message = bounded(f"{data['block']}: {kind}: {text}", TEXT)
        return Event(where, at, "error", "exception", message, data, *self._identity({}))

    def _point(self, sender: Node | None, name: str, point: Any, resource: Attributes) -> Iterator[Record]:
        attributes = resource | _attributes(point.attributes)
        for exemplar in point.exemplars[:1]:
            attributes |= _attributes(exemplar.filtered_attributes)
        where = self._where(attributes, sender)
        kind = point.WhichOneof("value")
        if kind is None:
            raise RecordError(f"the metric {_shown(name)} has a point without a value")
        value = float(point.as_double if kind == "as_double" else point.as_int)
        yield Metric(where, _seconds(point.time_unix_nano), _metric(name), value, *self._identity(attributes))

    def _log(self, sender: Node | None, record: Any, resource: Attributes, ours: bool) -> Iterator[Record]:
        attributes = resource | _attributes(record.attributes)
        where = self._where(attributes, sender)
        level = names.level_of_severity(record.severity_number)
        name = _name(record.event_name) if record.event_name else "log"
        body = _value(record.body)
        data = _own(attributes, names.DATA) if ours else _own(attributes, "", without=resource)
        if not ours and len(record.trace_id) == 16 and len(record.span_id) == 8:
            data |= {"trace": record.trace_id.hex(), "span": record.span_id.hex()}
        at = _seconds(record.time_unix_nano or record.observed_time_unix_nano)
        text = bounded(body if isinstance(body, str) else repr(body), TEXT)
        yield Event(where, at, level, name, text, data, *self._identity(attributes))

    def _where(self, attributes: Attributes, sender: Node | None) -> Where:
        run = attributes.get(names.RUN, attributes.get("service.instance.id"))
        if not isinstance(run, str) or run not in self._runs:
            raise RecordError(f"the run {_shown(run)} is not expected: set the resource's attribute {names.RUN}")
        places = {place: attributes.get(name) for place, name in names.PLACES.items()}
        for place in ("node", "layer", "group"):
            places[place] = None if places[place] is None else _name(places[place], place)
        for place in ("round", "step"):
            number = places[place]
            if number is not None and (type(number) is not int or not 0 <= number < COUNTED):
                raise RecordError(f"{names.PLACES[place]} is a whole number from 0 on, got {_shown(number)}")
        places["node"] = sender if places["node"] is None else places["node"]
        if self._nodes is not None and (places["node"] is None or places["node"] not in self._nodes):
            raise RecordError(f"the node {_shown(places['node'])} is not expected: set the attribute {names.NODE}")
        return Where(run, **places)

    def _identity(self, attributes: Attributes) -> tuple[str, int]:
        """Return the record's own identity, so that duplicates are stored once; never that of our own monitor."""
        source, sequence = attributes.get(names.SOURCE), attributes.get(names.SEQUENCE)
        if isinstance(source, str) and source and type(sequence) is int and 0 <= sequence < SEQUENCE:
            source = _name(source, "source")
            return (f"otlp-{source}" if source.startswith(MONITOR) else source), sequence
        return self._source, next(self._sequence)


def _decoded(make: Callable[..., Iterable[Record]], resources: Any, scopes: str, items: str) -> DecodedRecords:
    """Return the result of `make` for each item, its resource's attributes, and whether fedvitals wrote it."""
    taken = DecodedRecords()
    for resource, ours, group in _scopes(resources, scopes, items):
        for item in group:
            _add(taken, make, item, resource, ours)
    return taken


def _add(taken: DecodedRecords, make: Callable[..., Iterable[Record]], *arguments: Any) -> None:
    try:
        taken.records += make(*arguments)
    except RecordError as error:
        taken.leave_out(1, str(error))


def _scopes(resources: Any, scopes: str, items: str) -> Iterator[tuple[Attributes, bool, Any]]:
    """Yield what belongs together: attributes of the resource, whether fedvitals wrote it, and the items.

    An empty message takes two bytes in transit but a microsecond here, so their number is checked first.
    """
    if len(resources) > GROUPS or sum(len(getattr(resource, scopes)) for resource in resources) > GROUPS:
        raise RecordError(f"The request has more than {GROUPS} resources or scopes.")
    if sum(len(getattr(scope, items)) for resource in resources for scope in getattr(resource, scopes)) > RECORDS:
        raise RecordError(f"The request has more than {RECORDS} {items}.")
    for resource in resources:
        attributes = _attributes(resource.resource.attributes)
        for scope in getattr(resource, scopes):
            yield attributes, scope.scope.name == names.SERVICE, getattr(scope, items)


def _own(attributes: Attributes, prefix: str, without: Container[str] = ()) -> Attributes:
    """Return what a record holds besides its coordinates: ours by the prefix, of others what is not ours."""
    if prefix:
        return {name.removeprefix(prefix): value for name, value in attributes.items() if name.startswith(prefix)}
    kept = (name for name in attributes if not name.startswith("fedvitals.") and name not in without)
    # `failed` and `error` are the status of our own Spans, and `parts` what their time went to.
    return {
        f"own.{name}" if name in ("failed", "error", "message", "parts") else name: attributes[name] for name in kept
    }


def _metric(name: str) -> str:
    own = name.removeprefix(names.METRIC)
    if own != name and own in CATALOG:
        return own
    # `service.name` and similar are valid; quotation marks or line breaks in a name are not.
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_.\-/ ]{0,199}", own) is None:
        raise RecordError(f"{_shown(name)} cannot be the name of a metric")
    return own if own.startswith("user.") else f"user.{own}"


def _name(name: Any, what: str = "name") -> str:
    """Return a name with escapes for characters that cannot be shown; limited as in payloads."""
    most = LAYER_NAME_CHARACTERS if what == "layer" else NAME_CHARACTERS
    if not isinstance(name, str) or not name.strip() or len(name := printable(name)) > most:
        raise RecordError(f"a {what} is a text of 1 to {most} characters, got {_shown(name)}")
    return name


def _identifier(identifier: bytes, size: int, what: str) -> str:
    if len(identifier) != size or not any(identifier):
        raise RecordError(f"a {what} id has {size} bytes that are not all 0, got {identifier[:20].hex() or 'none'}")
    return identifier.hex()


def _seconds(nanoseconds: int) -> float:
    """Return seconds since the epoch; 0 means that the sender does not know, so the current time."""
    seconds = nanoseconds / 10**9 if nanoseconds else time.time()
    if not EARLIEST <= seconds <= LATEST:
        raise RecordError(f"a time lies {seconds:.3g} s after 1970, which is past the year 2099")
    return seconds


def _attributes(pairs: Any) -> Attributes:
    return {bounded(pair.key, 256): _value(pair.value) for pair in pairs[:ATTRIBUTES]}


def _value(value: Any, depth: int = DEPTH) -> Any:
    kind = value.WhichOneof("value")
    if kind is None or (not depth and kind in ("array_value", "kvlist_value")):
        return None
    if kind == "array_value":
        return [_value(item, depth - 1) for item in value.array_value.values[:ITEMS]]
    if kind == "kvlist_value":
        return {bounded(pair.key, 256): _value(pair.value, depth - 1) for pair in value.kvlist_value.values[:ITEMS]}
    content = getattr(value, kind)
    if kind == "string_value":
        return bounded(content, 4 * TEXT)  # a traceback is longer than a message
    if kind == "bytes_value":
        return content[:TEXT].hex()
    return content


def _shown(value: Any) -> str:
    return f"'{bounded(str(value), 80)}'".encode("unicode_escape").decode() if value is not None else "without a name"
