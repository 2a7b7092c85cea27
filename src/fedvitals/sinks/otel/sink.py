# SPDX-License-Identifier: Apache-2.0
"""A sink that sends spans, metrics and events to any OpenTelemetry receiver, by OTLP over HTTP.

    Monitor("runs.db", sinks=[OpenTelemetry("http://localhost:4318")])

The messages are those of the package `opentelemetry-proto`. They are sent from here, not by the SDK's exporters: these
sleep between attempts, give the same answer for a receiver that is unreachable and one that refuses, and log each
attempt, which the monitor would record and send. Here an attempt fails at once and says why, and the queue in front of
every sink waits and tries again: nothing is lost while it has room (100,000 records).
"""

from __future__ import annotations

import gzip
import http.client
import logging
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedvitals.errors import ConfigError, RecordError, unknown
from fedvitals.protocols import Sink
from fedvitals.records import Event, Finding, Metric, Record, Run, Span
from fedvitals.sinks.otel.encode import gauges, logs, traces
from fedvitals.sinks.spread import all_but
from fedvitals.transport.logs import bounded
from fedvitals.transport.otel_names import message

logger = logging.getLogger("fedvitals.telemetry")

DEFAULT = "http://localhost:4318"
SMALL = 1000  # size of a body below which compressing is not worth the time
ANSWER = 1 << 16  # bytes of an answer that are read
REFUSED = (400, 413, 422)  # these records are at fault, not the sender: the queue finds the one to blame
FAILURES = RUNS = 1000  # remembered: failures of clients, until their span comes; runs, for their names
UNKNOWN = (404, 405, 501)  # the receiver does not know this signal
LONGEST_WAIT = 60.0  # seconds that a receiver may ask us to wait


class Signal(NamedTuple):
    """One of OTLP's three signals: the records it carries, its path, and how an answer reports rejected records."""

    kinds: tuple[type, ...]
    path: str
    response: tuple[str, str]
    rejected: str


_COLLECTOR = "collector.{0}.v1.{0}_service"
TRACES = Signal((Span,), "/v1/traces", (_COLLECTOR.format("trace"), "ExportTraceServiceResponse"), "rejected_spans")
METRICS = Signal(
    (Metric,), "/v1/metrics", (_COLLECTOR.format("metrics"), "ExportMetricsServiceResponse"), "rejected_data_points"
)
LOGS = Signal(
    (Event, Finding), "/v1/logs", (_COLLECTOR.format("logs"), "ExportLogsServiceResponse"), "rejected_log_records"
)
SIGNALS = {"traces": TRACES, "metrics": METRICS, "logs": LOGS}


class OpenTelemetry(Sink):
    """A sink that sends spans, metrics and events to an OTLP/HTTP receiver: a collector, Jaeger, Tempo or fedvitals.

    The parts of a span's time are its children.

    Args:
        endpoint: The receiver's base address; by default OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.
        headers: HTTP headers, for instance an authorization; by default OTEL_EXPORTER_OTLP_HEADERS.
        nodes: The number of nodes whose metrics are sent, since each adds series of its own; spans are sent of all.
        signals: Which of «traces», «metrics» and «logs» to send.
        timeout: Seconds for one attempt.
        tls: An `ssl.SSLContext`, if the system's certificates are not the right ones.
    """

    name = "opentelemetry"
    ignores = all_but(Event, Finding, Metric, Span)

    def __init__(
        self,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        nodes: int = 200,
        signals: Sequence[str] = tuple(SIGNALS),
        timeout: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        message("common.v1.common", "AnyValue")  # reports a missing package now, and not during a run
        self.endpoint = _checked(endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT)
        self.rejected = 0  # records that a receiver accepted but did not keep
        self._headers = {**(_from_environment() if headers is None else headers)}
        self._most_nodes, self._timeout = nodes, timeout
        self._runs: dict[str, Run] = {}
        self._failures: dict[tuple[str, int | None, str | None], Event] = {}
        self._nodes: dict[str, None] = {}
        self._sent: set[int] = set()  # records of a partly delivered batch, by their id()
        self._away_until = 0.0
        self._unknown_until: dict[str, float] = {}  # by path
        self._signals = [_signal(name) for name in signals]
        self._reported: set[str] = set()
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers)

    def write(self, records: Sequence[Record], /) -> None:
        """Send the records. Raises ConnectionError, upon which they are sent again, or RecordError if they are refused.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        self._remember(records)
        # The queue repeats the same objects, whole or in halves: what was delivered is not sent twice.
        new = [record for record in records if id(record) not in self._sent and self._wanted(record)]
        for signal in self._signals:
            chosen = [record for record in new if isinstance(record, signal.kinds)]
            if chosen:
                self._deliver(signal, chosen)
                self._sent.update(map(id, chosen))
        self._sent.difference_update(map(id, records))

    def close(self) -> None:
        """Close the connection."""
        self._opener.close()

    def _remember(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Run):
                _put(self._runs, record.id, record, RUNS)
            elif isinstance(record, Event) and "exception" in record.data:
                where = record.where
                _put(self._failures, (where.run, where.round, where.node), record, FAILURES)

    def _wanted(self, record: Record) -> bool:
        """Whether to send a record: not for a metric of a node that came too late to get series of its own."""
        if not isinstance(record, Metric) or record.where.node is None or record.where.node in self._nodes:
            return True
        if len(self._nodes) < self._most_nodes:
            self._nodes[record.where.node] = None
            return True
        self._say(
            f"Metrics of more than {self._most_nodes} nodes: those of further nodes are not sent by OpenTelemetry. "
            "Their spans are, and the store has all; OpenTelemetry(nodes=) sets the number."
        )
        return False

    def _deliver(self, signal: Signal, records: Sequence[Any]) -> None:
        now = time.monotonic()
        if now < self._away_until:
            raise ConnectionError(f"{self.endpoint} asks for a pause between requests")
        if now < self._unknown_until.get(signal.path, 0.0):
            self.rejected += len(records)
            return
        if signal.path == TRACES.path:
            request = traces(self._runs, records, self._failures)
        else:
            request = (gauges if signal.path == METRICS.path else logs)(self._runs, records)
        self._post(signal, bytes(request.SerializeToString()), len(records))

    def _post(self, signal: Signal, body: bytes, count: int) -> None:
        headers = {**self._headers, "Content-Type": "application/x-protobuf"}
        if len(body) > SMALL:
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        url = self.endpoint + signal.path
        request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - http or https, as checked
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                self._heed(signal, response.read(ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                self._refused(error, signal, count)
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            raise ConnectionError(f"{self.endpoint} cannot be reached: {reason}") from error

    def _refused(self, error: urllib.error.HTTPError, signal: Signal, count: int) -> None:
        try:
            answer = error.read(ANSWER)
        except (OSError, http.client.HTTPException):
            answer = b""
        text = f"{self.endpoint}{signal.path} answers {error.code} {error.reason}: {_readable(answer)}"
        if error.code in REFUSED:
            raise RecordError(text) from error
        if error.code in UNKNOWN:  # Jaeger accepts traces and nothing else: the rest must not block them
            self._unknown_until[signal.path] = time.monotonic() + LONGEST_WAIT
            self.rejected += count
            self._say(f"{text}. Such records are left out, and tried again from minute to minute.")
            return
        wait = error.headers.get("Retry-After", "")
        if wait.isascii() and wait.isdecimal():
            self._away_until = time.monotonic() + min(float(wait), LONGEST_WAIT)
        raise ConnectionError(text) from error

    def _heed(self, signal: Signal, body: bytes) -> None:
        """Read the answer: a receiver may accept a request and drop some of it; sending it again would not help."""
        try:
            partial = message(*signal.response).FromString(body).partial_success
        except Exception:  # noqa: BLE001 - raised by protobuf; some receivers answer with a text, or with nothing
            return
        rejected = int(getattr(partial, signal.rejected))
        if rejected > 0:
            self.rejected += rejected
            self._say(f"{self.endpoint} rejected some records: {bounded(partial.error_message, 300)!r}.")

    def _say(self, text: str) -> None:
        if text not in self._reported and len(self._reported) < 100:
            self._reported.add(text)
            logger.warning("%s Logged once.", text)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send telemetry, and the token with it, to a place that nobody chose."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _signal(name: str) -> Signal:
    if name not in SIGNALS:
        raise ConfigError(unknown("signal", str(name), SIGNALS))
    return SIGNALS[name]


def _put(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    kept[key] = value
    if len(kept) > most:
        kept.pop(next(iter(kept)))


def _checked(endpoint: str) -> str:
    try:
        parts = urllib.parse.urlsplit(endpoint)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        right = False
    if not right or parts.query or parts.fragment:
        raise ConfigError(
            f"endpoint= is the base address of an OTLP receiver, such as {DEFAULT}; got {endpoint[:200]!r}."
        )
    return endpoint.rstrip("/")


def _from_environment() -> dict[str, str]:
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, _, value in pairs if name.strip() and value}


def _readable(body: bytes) -> str:
    """Return a receiver's answer, a text or protobuf's Status with one: its printable characters, up to a limit."""
    text = "".join(character if character.isprintable() else " " for character in body.decode("utf-8", "replace"))
    return bounded(" ".join(text.split()), 300) or "nothing more"
