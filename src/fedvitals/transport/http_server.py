# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for public clients: few requests at a time, short deadlines, and no lines in the user's log.

    server = HttpServer("127.0.0.1", 4318, None, answer, refuse, name="fedvitals-otlp")

It can be reached by strangers. The sender is identified by the headers, before a body is read. A connection has a
deadline from the moment it is accepted, at which its socket is shut down however slowly it sends. When all places are
taken, a new connection gets that of the oldest one that has not shown its token (or, without tokens, its whole
request), so that idle connections keep nobody out.
"""

from __future__ import annotations

import contextlib
import email.message
import hmac
import http.server
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("fedvitals.telemetry")

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # names of this machine that other machines cannot reach
AT_ONCE = 16  # requests
HEAD_SECONDS, BODY_SECONDS, READ_SECONDS = 5.0, 30.0, 5.0  # from accept to admission; for a body; for one read
LEFT_BYTES, LEFT_SECONDS = (
    8 << 20,
    1.0,
)  # of a rejected body: read and discarded, so that the answer gets through
SWEEP_SECONDS = 0.1  # between two checks of the deadlines


class Refused(Exception):  # noqa: N818 - an answer rather than an error of ours
    """The reason why a request is rejected, and its HTTP status."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client."""

    method: str
    path: str
    headers: email.message.Message
    body: bytes = b""
    sender: str | None = None  # whose token it came with, if the server distinguishes tokens


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to a request."""

    status: int
    body: bytes
    kind: str  # its Content-Type
    headers: Mapping[str, str] = field(default_factory=dict)


Token = str | Callable[[str], str | None] | None


class HttpServer:
    """Serves the result of `answer`, on threads of its own, until closed; OSError if the port is taken.

    `answer` may raise Refused; `refuse` turns that into a response. `body`: bytes read of a request, 0 for none.
    `token`: the one that all requests need, or a function that returns the owner of a token (None if it has none).
    Without a token, only requests addressed to this machine by its own name are served, since a page in a browser can
    send to it under another; such a server belongs on a `host` of LOOPBACK.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: Token,
        answer: Callable[[Request], Response],
        refuse: Callable[[Refused, Request], Response],
        *,
        name: str,
        body: int = 0,
        at_once: int = AT_ONCE,
    ) -> None:
        server = self._server = _Server(host, port, token, answer, refuse, body, at_once)
        self.port = server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        _OPEN.add(server)
        self._thread = threading.Thread(target=server.serve_forever, args=(SWEEP_SECONDS,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests; those in progress are completed. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut(math.inf)
        self._thread.join(READ_SECONDS)


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection that is being served: its deadline, and whether it has been admitted."""

    socket: socket.socket
    until: float
    admitted: bool = False


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        token: Token,
        answer: Callable[[Request], Response],
        refuse: Callable[[Refused, Request], Response],
        body: int,
        at_once: int,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token, self.answer, self.refuse, self.body, self._most = token, answer, refuse, body, at_once
        self._lock = threading.Lock()
        self.places: dict[socket.socket, _Connection] = {}  # oldest first
        self._spare = threading.BoundedSemaphore(4 * at_once)  # connections whose place was taken need a moment to end
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind as `socketserver` does: `http.server` would look up the host's name, which may take seconds."""
        super(http.server.HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._enter(request):
            self.shutdown_request(request)  # the sender will try again
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the signature is not ours
        """Ignore connections that hang up."""
        logger.debug("A request over HTTP broke off.")

    def service_actions(self) -> None:
        """Check deadlines, between two requests and ten times a second."""
        self.cut(time.monotonic())

    def cut(self, now: float) -> None:
        """Shut down connections past their deadline, which ends any read or write on them at once."""
        with self._lock:
            late = [place for place in self.places.values() if place.until < now]
        for place in late:
            _shut(place.socket)

    def _enter(self, request: socket.socket) -> bool:
        with self._lock:
            if len(self.places) >= self._most:
                oldest = next((place for place in self.places.values() if not place.admitted), None)
                if oldest is None:
                    return False
                del self.places[oldest.socket]
                _shut(oldest.socket)
            if not self._spare.acquire(blocking=False):
                return False
            self.places[request] = _Connection(request, time.monotonic() + HEAD_SECONDS)
            return True

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self.places.pop(request, None)
        self._spare.release()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "fedvitals", ""
    timeout = READ_SECONDS

    def do_GET(self) -> None:
        place = self.server.places.get(self.connection) or _Connection(self.connection, 0.0)
        request, is_read = Request(self.command, self.path, self.headers), False
        try:
            sender = self._sender()
            place.admitted = self.server.token is not None
            if self.command == "POST" and self.server.body:
                size = self._size()
                place.until = time.monotonic() + BODY_SECONDS
                request = Request(self.command, self.path, self.headers, self._body(size), sender)
            is_read, place.admitted, place.until = True, True, math.inf
            answer = self.server.answer(request)
        except Refused as refused:
            answer = self.server.refuse(refused, request)
        place.until = time.monotonic() + HEAD_SECONDS
        self._reply(answer)
        if not is_read:
            self._forget_body()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = do_GET  # noqa: N815 - the names are not ours

    def _sender(self) -> str | None:
        """Return the owner of the request's token, if known; Refused without a valid token."""
        token = self.server.token
        if token is None:
            name = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]").lower()
            if name not in LOOPBACK:
                raise Refused(403, "Without a token, only requests to 127.0.0.1 or localhost are answered.")
            return None
        authorization = self.headers.get("Authorization", "")
        if callable(token):
            sender = token(authorization.removeprefix("Bearer ")) if authorization.startswith("Bearer ") else None
            if sender is None:
                raise Refused(
                    401, "The header «Authorization: Bearer ...» with a token of this server is missing or wrong."
                )
            return sender
        wanted = f"Bearer {token}"
        if not hmac.compare_digest(authorization.encode("utf-8", "replace"), wanted.encode("utf-8", "replace")):
            raise Refused(401, "The header «Authorization: Bearer ...» with this server's token is missing or wrong.")
        return None

    def _size(self) -> int:
        length, most = self.headers.get("Content-Length", ""), self.server.body
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise Refused(411, "The header Content-Length is missing, or no number.")
        if int(length) > most:
            raise Refused(413, f"The request has {length} bytes; {most} are the limit. Send smaller batches.")
        return int(length)

    def _body(self, size: int) -> bytes:
        pieces = []
        while size > 0:
            piece = self.rfile.read1(min(size, 1 << 16))
            if not piece:
                raise Refused(400, f"The request broke off {size} bytes before its end.")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _reply(self, answer: Response) -> None:
        self.send_response(answer.status)
        more = {"WWW-Authenticate": "Bearer"} if answer.status == 401 else {}
        length = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        for name, value in {**length, **more, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _forget_body(self) -> None:
        """Discard the rest of the body: unread data would reset the connection, and lose our answer."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LEFT_SECONDS)
            left, until = LEFT_BYTES, time.monotonic() + LEFT_SECONDS
            while left > 0 and time.monotonic() < until:
                piece = self.connection.recv(1 << 16)
                if not piece:
                    return
                left -= len(piece)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's word
        """Do nothing: a line for each request would fill the user's log."""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


_OPEN: weakref.WeakSet[_Server] = weakref.WeakSet()


def _let_go() -> None:
    """Close sockets in a forked child (a data loader's worker), which would keep the port taken after we close it."""
    for server in list(_OPEN):
        for closing in (server.socket, *list(server.places)):
            with contextlib.suppress(OSError):
                closing.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
