# SPDX-License-Identifier: Apache-2.0
"""One page over HTTP, /metrics, for whoever may read it: few threads, short patience, no word in the user's log."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOCAL = ("127.0.0.1", "localhost", "::1")
PATIENCE_SECONDS = 5.0  # with a client that says or takes nothing
AT_ONCE = 8  # scrapes; more are turned away

Render = Callable[[str], tuple[bytes, str]]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, token: str | None, render: Render) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token, self.render = token, render
        self.places = threading.BoundedSemaphore(AT_ONCE)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As `socketserver` does it: `http.server` asks the name service for a name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE_SECONDS
    server_version, sys_version = "fedvitals", ""

    def do_GET(self) -> None:
        if not self._allowed():
            self._answer(401, b"This page needs a token: Authorization: Bearer ...\n", "text/plain; charset=utf-8")
        elif self.path.partition("?")[0] not in ("/metrics", "/"):
            self._answer(404, b"The metrics are at /metrics.\n", "text/plain; charset=utf-8")
        else:
            self._answer(200, *self.server.render(self.headers.get("Accept", "")))

    def _allowed(self) -> bool:
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.token}"
        return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("utf-8", "replace"))

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's word
        """Nothing: a line for each scrape would fill the user's log."""


class Page:
    """Serves what `render` gives, on a thread of its own, until closed; OSError when the port is taken."""

    def __init__(self, host: str, port: int, token: str | None, render: Render) -> None:
        server = self._server = _Server(host, port, token, render)
        self.port = server.server_port
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/metrics"
        # A socket that a forked child (a data loader's worker) holds open would keep the port taken after our end.
        if hasattr(os, "register_at_fork"):
            reference = weakref.ref(server)
            os.register_at_fork(after_in_child=lambda: _let_go(reference()))
        self._thread = threading.Thread(
            target=server.serve_forever, args=(0.1,), name="fedvitals-prometheus-page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_SECONDS)


def _let_go(server: _Server | None) -> None:
    if server is not None:
        with contextlib.suppress(OSError):
            server.socket.close()
