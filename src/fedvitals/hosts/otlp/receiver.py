# SPDX-License-Identifier: Apache-2.0
"""A receiver for OpenTelemetry data, so that long client tasks can report progress before they end.

    with Receiver(monitor.host.admit, {monitor.run.id}, secret="...", host="0.0.0.0") as receiver:
        ...                                # clients POST to receiver.endpoint, by any OpenTelemetry SDK or `progress`

If a client crashes or times out, everything up to that moment has been reported. OTLP over HTTP, as protobuf or JSON,
on /v1/traces, /v1/metrics and /v1/logs. Senders are not trusted: a token identifies the node, which can only report on
itself; sizes are bounded before anything is unpacked, only expected runs (and nodes, if given) are accepted, and
`decode` checks every field. `transport.sender` and `transport.sender_limits` define what a sender may report, and how
much, as for every other host.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import threading
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any, Self

from fedvitals.errors import ConfigError, RecordError
from fedvitals.hosts.otlp.decode import DecodedRecords, Decoder
from fedvitals.hosts.otlp.tokens import is_same, sender_of
from fedvitals.protocols import Node
from fedvitals.records import Record
from fedvitals.sinks.otel.sink import LOGS, METRICS, TRACES, Signal
from fedvitals.transport.http_server import HttpServer, Refused, Request, Response
from fedvitals.transport.logs import bounded
from fedvitals.transport.otel_names import message
from fedvitals.transport.sender_limits import MESSAGE_BYTES

logger = logging.getLogger("fedvitals.telemetry")

BODY = 4 << 20  # bytes of a request, both received and unpacked: an empty message in it takes 30 times its own
AT_ONCE = 16  # requests read at the same time
SECRET_CHARACTERS = 16  # at least
WHOLE = "whole"  # marks a sender that is a monitor with its whole run
PROTOBUF, JSON = "application/x-protobuf", "application/json"
_REQUESTS: dict[str, tuple[Signal, str, Callable[[Decoder, Any, Node | None], DecodedRecords]]] = {
    "/v1/traces": (TRACES, "ExportTraceServiceRequest", Decoder.traces),
    "/v1/metrics": (METRICS, "ExportMetricsServiceRequest", Decoder.metrics),
    "/v1/logs": (LOGS, "ExportLogsServiceRequest", Decoder.logs),
}


class Receiver:
    """An HTTP server for OTLP on a thread of its own; it serves until `close` is called.

    `take` gets the records of each request, the node that sent them, and the size of the request; it returns how many
    were rejected, and why the first of them was (`monitor.host.admit` does this). It is called on one thread at a time;
    if it raises, the sender is asked to retry. `runs`: the expected run ids. `nodes`: those whose records are accepted;
    None for all.

    `secret`: every sender needs the header «Authorization: Bearer ...» with its own `sender_token(secret, node)`.
    `whole`: receive from another monitor that sends its run, instead of clients: the secret itself is its token, and it
    is believed about all nodes and the whole run. `port` 0: any free port.
    """

    def __init__(
        self,
        take: Callable[[Sequence[Record], Node | None, int], tuple[int, str] | None],
        runs: Container[str],
        *,
        secret: str,
        nodes: Container[str] | None = None,
        whole: bool = False,
        host: str = "127.0.0.1",
        port: int = 4318,
    ) -> None:
        if len(secret) < SECRET_CHARACTERS:
            raise ConfigError(
                f"secret= of an OTLP receiver has {len(secret)} characters; {SECRET_CHARACTERS} or more are needed, as "
                "from secrets.token_urlsafe(). Each client gets a token of its own: sender_token(secret, node)."
            )
        message("common.v1.common", "AnyValue")
        self.taken = self.rejected = 0  # records
        self._take = take
        self._decoder, self._whole, self._secret = Decoder(runs, nodes), whole, secret
        self._lock = threading.Lock()
        self._said: set[str] = set()
        try:
            self._server = HttpServer(
                host, port, self._sender, self._answer, _refuse, name="fedvitals-otlp", body=BODY, at_once=AT_ONCE
            )
        except OSError as error:
            raise ConfigError(
                f"The OTLP receiver cannot listen on {host}:{port} ({error}). Choose another port=; 0 takes any."
            ) from error
        self.endpoint = self._server.url

    def close(self) -> None:
        """Stop the server. A second call does nothing."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sender(self, token: str) -> Node | None:
        """Return the owner of a token, or None. A monitor that sends its whole run has no node, and is WHOLE here."""
        if self._whole:
            return WHOLE if is_same(token, self._secret) else None
        return sender_of(self._secret, token)

    def _answer(self, request: Request) -> Response:
        kind = _kind(request)
        if request.method != "POST":
            raise Refused(405, "Only POST is answered here.")
        if request.path not in _REQUESTS:
            raise Refused(404, f"There is no such path; known: {', '.join(_REQUESTS)}.")
        if kind not in (PROTOBUF, JSON):
            raise Refused(415, f"Content-Type is {PROTOBUF} or {JSON}, got '{bounded(kind, 80)}'.")
        body = _unpacked(request.body, request.headers.get("Content-Encoding", "").strip().lower())
        sender = None if self._whole else request.sender
        if sender is not None and len(body) > MESSAGE_BYTES:
            raise Refused(
                413, f"The request has {len(body)} bytes; {MESSAGE_BYTES} are the limit. Send smaller batches."
            )
        return Response(200, self._receive(request.path, kind, body, sender), kind)

    def _receive(self, path: str, kind: str, body: bytes, sender: Node | None) -> bytes:
        """Return the answer to a request whose size has been checked."""
        signal, name, decode = _REQUESTS[path]
        request = message(signal.response[0], name)
        with self._lock:  # one at a time: a request may unpack to thirty times its size
            try:
                taken = decode(self._decoder, _parsed(request, kind, body), sender)
            except RecordError as error:
                raise Refused(413, f"{error} Send smaller batches.") from error
            if taken.records:
                taken.leave_out(*self._hand_over(taken.records, sender, len(body)))
            self.rejected += taken.rejected
        response = message(*signal.response)()
        if taken.rejected:
            setattr(response.partial_success, signal.rejected, taken.rejected)
            response.partial_success.error_message = f"{taken.rejected} left out; the first: {taken.why}."
        return _written(response, kind)

    def _hand_over(self, records: Sequence[Record], sender: Node | None, size: int) -> tuple[int, str]:
        """Return how many records were rejected, and why the first of them was."""
        try:
            refused, why = self._take(records, sender, size) or (0, "")
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if cause not in self._said and len(self._said) < 100:
                self._said.add(cause)
                logger.warning("Records that came by OTLP could not be handed over (%s). Logged once.", cause)
            raise Refused(503, "The records could not be handed over; please try again.") from error
        self.taken += len(records) - refused
        return refused, why


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise Refused(415, f"Content-Encoding is gzip or none, got '{bounded(encoding, 80)}'.")
    inflater = zlib.decompressobj(31)  # for the gzip header and checksum
    try:
        unpacked = inflater.decompress(body, BODY + 1)
    except zlib.error as error:
        raise Refused(400, f"The body is not gzip: {error}.") from error
    if len(unpacked) > BODY:
        raise Refused(413, f"The request has more than {BODY} bytes when unpacked. Send smaller batches.")
    if not inflater.eof or inflater.unused_data:
        raise Refused(400, "The body does not end where its gzip does.")
    return unpacked


def _parsed(request: Any, kind: str, body: bytes) -> Any:
    try:
        if kind == PROTOBUF:
            return request.FromString(body)
        content = json.loads(body)
        if isinstance(content, dict):
            return _json_format().ParseDict(_with_bytes(content), request(), ignore_unknown_fields=True)
    except Exception as error:  # from protobuf and JSON, which between them may raise nearly anything
        what = "protobuf" if kind == PROTOBUF else "JSON"
        raise Refused(400, f"The body is no {request.DESCRIPTOR.name} in {what}: {bounded(str(error), 200)}") from error
    raise Refused(400, f"The body is a JSON {type(content).__name__}, where an object is needed.")


def _written(response: Any, kind: str) -> bytes:
    if kind == PROTOBUF:
        return bytes(response.SerializeToString())
    return str(_json_format().MessageToJson(response, indent=None)).encode()


def _kind(request: Request) -> str:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _refuse(refused: Refused, request: Request) -> Response:
    kind = PROTOBUF if _kind(request) == PROTOBUF else JSON
    later = {"Retry-After": "1"} if refused.status == 503 else {}
    return Response(refused.status, _status(refused, kind), kind, later)


def _status(refused: Refused, kind: str) -> bytes:
    """Return OTLP's error answer: a google.rpc.Status, whose code is field 1 and whose message is field 2."""
    if kind != PROTOBUF:
        return json.dumps({"code": refused.status, "message": str(refused)}).encode()
    same_fields = message("collector.trace.v1.trace_service", "ExportTracePartialSuccess")
    return bytes(same_fields(rejected_spans=refused.status, error_message=str(refused)).SerializeToString())


def _with_bytes(value: Any) -> Any:
    """Convert ids: in OTLP's JSON they are hexadecimal, while protobuf's JSON has base64."""
    if isinstance(value, list):
        return [_with_bytes(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {}
    for name, item in value.items():
        is_id = name in ("traceId", "spanId", "parentSpanId") and isinstance(item, str)
        converted[name] = base64.b64encode(bytes.fromhex(item)).decode() if is_id else _with_bytes(item)
    return converted


def _json_format() -> Any:
    return importlib.import_module("google.protobuf.json_format")  # installed with OTLP's messages, which are present
