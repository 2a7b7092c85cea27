# SPDX-License-Identifier: Apache-2.0
"""An HTTP server for one page, /metrics, with an optional token."""

from __future__ import annotations

from collections.abc import Callable

from fedvitals.transport.http_server import HttpServer, Refused, Request, Response

AT_ONCE = 8  # scrapes
PLAIN = "text/plain; charset=utf-8"

Render = Callable[[str], tuple[bytes, str]]


class Page:
    """Serves what `render` returns, on threads of its own, until it is closed. OSError: the port is taken."""

    def __init__(self, host: str, port: int, token: str | None, render: Render) -> None:
        self._render = render
        name = "fedvitals-prometheus-page"
        self._server = HttpServer(host, port, token, self._answer, _refuse, name=name, at_once=AT_ONCE)
        self.port, self.url = self._server.port, f"{self._server.url}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "The metrics are read by GET /metrics.")
        if request.path.partition("?")[0] not in ("/metrics", "/"):
            raise Refused(404, "The metrics are at /metrics.")
        return Response(200, *self._render(request.headers.get("Accept", "")))


def _refuse(refused: Refused, _request: Request) -> Response:
    return Response(refused.status, f"{refused}\n".encode(), PLAIN)
