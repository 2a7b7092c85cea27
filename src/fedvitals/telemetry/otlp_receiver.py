# SPDX-License-Identifier: Apache-2.0
"""fedvitals as the place where OpenTelemetry sends to: live progress from inside long client tasks.

    with Receiver(take, runs={run.id}, token="...", host="0.0.0.0") as receiver:
        ...                                # clients POST to receiver.endpoint, by any OpenTelemetry SDK or `otel_live`

A client that crashes or times out has then told what it did until that moment. OTLP over HTTP, as protobuf or JSON, on
/v1/traces, /v1/metrics and /v1/logs. Whoever sends is not trusted: sizes are bounded before anything is unpacked, only
expected runs (and nodes, where these are given) are taken, and `otel_decode` checks every field.
"""

from __future__ import annotations

import base64
import hmac
import http.server
import importlib
import json
import logging
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any, Self

from fedvitals.errors import ConfigError, RecordError
from fedvitals.records import Record
from fedvitals.telemetry.logs import bounded
from fedvitals.telemetry.otel import LOGS, METRICS, TRACES, Signal
from fedvitals.telemetry.otel_decode import Decoder, Taken
from fedvitals.telemetry.otel_names import message

logger = logging.getLogger("fedvitals.telemetry")

BODY = 4 << 20  # bytes of a request, as it comes and unpacked: an empty message in it takes 30 times its own
AT_ONCE = 16  # requests that are read at the same time
READ_SECONDS, WHOLE_SECONDS = 5.0, 30.0  # for one read, for a whole body
LOOPBACK = ("127.0.0.1", "::1", "localhost")
PROTOBUF, JSON = "application/x-protobuf", "application/json"
_REQUESTS: dict[str, tuple[Signal, str, Callable[[Decoder, Any], Taken]]] = {
    "/v1/traces": (TRACES, "ExportTraceServiceRequest", Decoder.traces),
    "/v1/metrics": (METRICS, "ExportMetricsServiceRequest", Decoder.metrics),
    "/v1/logs": (LOGS, "ExportLogsServiceRequest", Decoder.logs),
}


class Refused(Exception):  # noqa: N818 - an answer, and no error of ours
    """Why a request is not taken, and the status to say it with."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Receiver:
    """An HTTP server on a thread of its own, from now until `close`.

    `take` gets the records of each request, on one thread at a time; if it raises, the sender is asked to come again.
    `runs`: ids that are expected. `nodes`: whose records are taken; None for all, and for the whole as well. `token`:
    needed in the header «Authorization: Bearer ...»; a must on any `host` but this machine itself. `port` 0: any free.
    """

    def __init__(
        self,
        take: Callable[[Sequence[Record]], None],
        runs: Container[str],
        *,
        nodes: Container[str] | None = None,
        host: str = "127.0.0.1",
        port: int = 4318,
        token: str | None = None,
    ) -> None:
        if not token and host not in LOOPBACK:
            raise ConfigError(
                f"A receiver on {host!r} can be reached from other machines: give it a token=, and the clients the "
                "header «Authorization: Bearer» with it; or leave host= at 127.0.0.1."
            )
        message("common.v1.common", "AnyValue")
        self.taken = self.rejected = 0  # records
        self._take, self._token, self._loopback = take, token, host in LOOPBACK
        self._decoder = Decoder(runs, nodes)
        self._lock = threading.Lock()
        self._said: set[str] = set()
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ConfigError(
                f"The OTLP receiver cannot listen on {host}:{port} ({error}). Choose another port=; 0 takes any."
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.endpoint = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="fedvitals-otlp", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Take no more. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, host: str, authorization: str) -> None:
        """Raises unless the sender may."""
        # A web page can send to this machine under a name of its own; it cannot know the token.
        if self._token is None:
            name = re.sub(r":\d+$", "", host).strip("[]").lower()
            if name not in LOOPBACK:
                raise Refused(403, "Without a token, only requests to 127.0.0.1 or localhost are taken.")
            return
        if not hmac.compare_digest(authorization.encode("latin-1", "replace"), f"Bearer {self._token}".encode()):
            raise Refused(401, "The header «Authorization: Bearer ...» with this receiver's token is missing or wrong.")

    def receive(self, path: str, kind: str, body: bytes) -> bytes:
        """The answer to a request whose size has been checked."""
        signal, name, decode = _REQUESTS[path]
        request = message(signal.response[0], name)
        with self._lock:  # one at a time: what a request unpacks to may be thirty times its size
            try:
                found = decode(self._decoder, _parsed(request, kind, body))
            except RecordError as error:
                raise Refused(413, f"{error} Send smaller batches.") from error
            self.rejected += found.rejected
            if found.records:
                self._hand_over(found.records)
        response = message(*signal.response)()
        if found.rejected:
            setattr(response.partial_success, signal.rejected, found.rejected)
            response.partial_success.error_message = f"{found.rejected} left out; the first: {found.why}."
        return _written(response, kind)

    def _hand_over(self, records: Sequence[Record]) -> None:
        try:
            self._take(records)
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            if cause not in self._said and len(self._said) < 100:
                self._said.add(cause)
                logger.warning("Records that came by OTLP could not be handed over (%s). Said once.", cause)
            raise Refused(503, "The records could not be handed over; please come again.") from error
        self.taken += len(records)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], receiver: Receiver) -> None:
        self.receiver = receiver
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name, which can take seconds."""
        super(http.server.HTTPServer, self).server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.free.acquire(blocking=False):
            self.shutdown_request(request)  # the sender tries again
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the signature is not ours
        """A sender that hangs up is no news."""
        logger.debug("A request by OTLP broke off.")


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "fedvitals", ""
    timeout = READ_SECONDS

    def do_POST(self) -> None:
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        try:
            answer, status = self._answer(kind), 200
        except Refused as refused:
            answer, status = _status(refused, kind), refused.status
        self._reply(status, answer, kind if kind in (PROTOBUF, JSON) else JSON)

    def do_GET(self) -> None:
        self._reply(405, _status(Refused(405, "Only POST is answered here."), JSON), JSON)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET  # noqa: N815 - the names are not ours

    def _answer(self, kind: str) -> bytes:
        # Read before anything is said: else the sender finds the connection cut off, and not our answer.
        body = self._body(self._size())
        if self.path not in _REQUESTS:
            raise Refused(404, f"There is no such path; known: {', '.join(_REQUESTS)}.")
        self.server.receiver.admit(self.headers.get("Host", ""), self.headers.get("Authorization", ""))
        if kind not in (PROTOBUF, JSON):
            raise Refused(415, f"Content-Type is {PROTOBUF} or {JSON}, got '{bounded(kind, 80)}'.")
        body = _unpacked(body, self.headers.get("Content-Encoding", "").strip().lower())
        return self.server.receiver.receive(self.path, kind, body)

    def _size(self) -> int:
        told = self.headers.get("Content-Length", "")
        if not (told.isascii() and told.isdecimal() and len(told) < 20):
            raise Refused(411, "The header Content-Length is missing, or no number.")
        if int(told) > BODY:
            raise Refused(413, f"The request has {told} bytes; {BODY} are the limit. Send smaller batches.")
        return int(told)

    def _body(self, size: int) -> bytes:
        pieces, until = [], time.monotonic() + WHOLE_SECONDS
        while size > 0:
            piece = self.rfile.read1(min(size, 1 << 16))
            if not piece or time.monotonic() > until:
                raise Refused(400, f"The request broke off {size} bytes before its end.")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _reply(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is not ours
        logger.debug(format, *args)


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise Refused(415, f"Content-Encoding is gzip or none, got '{bounded(encoding, 80)}'.")
    inflater = zlib.decompressobj(31)  # the header of gzip, and its check
    try:
        found = inflater.decompress(body, BODY + 1)
    except zlib.error as error:
        raise Refused(400, f"The body is not gzip: {error}.") from error
    if len(found) > BODY:
        raise Refused(413, f"The request has more than {BODY} bytes when unpacked. Send smaller batches.")
    if not inflater.eof or inflater.unused_data:
        raise Refused(400, "The body does not end where its gzip does.")
    return found


def _parsed(request: Any, kind: str, body: bytes) -> Any:
    try:
        if kind == PROTOBUF:
            return request.FromString(body)
        content = json.loads(body)
        if isinstance(content, dict):
            return _json_format().ParseDict(_with_bytes(content), request(), ignore_unknown_fields=True)
    except Exception as error:  # of protobuf and of JSON, which between them raise nearly everything
        what = "protobuf" if kind == PROTOBUF else "JSON"
        raise Refused(400, f"The body is no {request.DESCRIPTOR.name} in {what}: {bounded(str(error), 200)}") from error
    raise Refused(400, f"The body is a JSON {type(content).__name__}, where an object is needed.")


def _written(response: Any, kind: str) -> bytes:
    if kind == PROTOBUF:
        return bytes(response.SerializeToString())
    return str(_json_format().MessageToJson(response, indent=None)).encode()


def _status(refused: Refused, kind: str) -> bytes:
    """OTLP's answer to what is not taken: a google.rpc.Status, whose number is field 1 and whose text is field 2."""
    if kind != PROTOBUF:
        return json.dumps({"code": refused.status, "message": str(refused)}).encode()
    same_fields = message("collector.trace.v1.trace_service", "ExportTracePartialSuccess")
    return bytes(same_fields(rejected_spans=refused.status, error_message=str(refused)).SerializeToString())


def _with_bytes(value: Any) -> Any:
    """In OTLP's JSON ids are hexadecimal, where protobuf's JSON has base64."""
    if isinstance(value, list):
        return [_with_bytes(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, item in value.items():
        is_id = name in ("traceId", "spanId", "parentSpanId") and isinstance(item, str)
        found[name] = base64.b64encode(bytes.fromhex(item)).decode() if is_id else _with_bytes(item)
    return found


def _json_format() -> Any:
    return importlib.import_module("google.protobuf.json_format")  # comes with OTLP's messages, which are here
