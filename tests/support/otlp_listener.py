# SPDX-License-Identifier: Apache-2.0
"""An OTLP/HTTP receiver that knows nothing of fedvitals: it parses with OpenTelemetry's own messages, and keeps all."""

from __future__ import annotations

import contextlib
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


class Listener:
    """Keeps what it gets. `refuse(path, request)` may give (status, headers, body) instead; it can go and come back."""

    def __init__(self) -> None:
        self.requests: list = []  # path, message
        self.headers: list = []
        self.refuse = lambda path, request: None
        self.port, self._server = 0, None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def spans(self) -> list:
        return [s for r in self.of("/v1/traces") for a in r.resource_spans for b in a.scope_spans for s in b.spans]

    def points(self) -> list:
        """Name, unit and point of each gauge's value."""
        return [
            (m.name, m.unit, point)
            for r in self.of("/v1/metrics")
            for a in r.resource_metrics
            for b in a.scope_metrics
            for m in b.metrics
            for point in m.gauge.data_points
        ]

    def logs(self) -> list:
        return [s for r in self.of("/v1/logs") for a in r.resource_logs for b in a.scope_logs for s in b.log_records]

    def of(self, path: str) -> list:
        return [request for where, request in self.requests if where == path]


def _handler(listener: Listener):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = KINDS[self.path].FromString(body)
            status, headers, answer = listener.refuse(self.path, request) or (200, {}, b"")
            if status == 200:
                listener.requests.append((self.path, request))
                listener.headers.append(dict(self.headers))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(answer)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_) -> None: ...

    return Handler


@contextlib.contextmanager
def listening():
    listener = Listener()
    try:
        yield listener
    finally:
        listener.stop()


def attributes_of(pairs) -> dict:
    """Attributes as a dict."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
