# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of receiver and page: strangers can neither hold its places nor outlast its patience."""

import contextlib
import multiprocessing
import os
import socket
import socketserver
import time

import pytest

from fedvitals.transport import http_server
from fedvitals.transport.http_server import HttpServer, Response
from support.waiting import PATIENCE, wait_until


def refuse(refused, _request):
    return Response(refused.status, str(refused).encode(), "text/plain")


@contextlib.contextmanager
def serving(token=None, **settings):
    """A server that answers with the body it got."""

    def answer(request):
        return Response(200, request.body, "text/plain")

    server = HttpServer("127.0.0.1", 0, token, answer, refuse, name="test", body=1000, **settings)
    try:
        yield server
    finally:
        server.close()


def answer_to(server, text: bytes) -> bytes:
    """Everything that is answered."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(text)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def head(length=0, **headers) -> bytes:
    told = {"Host": "localhost", "Content-Length": str(length), **headers}
    return ("POST / HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in told.items()) + "\r\n").encode()


def is_closed(connection: socket.socket, drip: bytes) -> bool:
    """After one more byte."""
    with contextlib.suppress(BlockingIOError, TimeoutError):
        try:
            connection.send(drip)
            return connection.recv(100) == b""
        except OSError as error:
            return not isinstance(error, BlockingIOError | TimeoutError)
    return False


@pytest.mark.parametrize("begun", [b"POST / HTTP/1.1\r\nX: ", head(500)], ids=["in its headers", "in its body"])
def test_who_drips_is_shut_out_at_the_deadline(begun, monkeypatch):
    """However often a byte comes: not one read takes long, the whole does."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.3)
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(0.02)
        slow.sendall(begun)
        wait_until(lambda: is_closed(slow, b"x"))


def test_a_token_is_looked_at_before_a_body_is_read():
    """The answer is there though nothing of the body ever comes; with the token, the body is waited for."""
    with serving("secret") as server:
        assert b" 401 " in answer_to(server, head(900)).splitlines()[0]
        answer = answer_to(server, head(2, Authorization="Bearer secret") + b"ok")
        assert b" 200 " in answer.splitlines()[0]
        assert answer.endswith(b"ok")


def test_a_refused_body_does_not_swallow_the_answer():
    with serving("secret") as server:
        for _ in range(20):
            assert b" 401 " in answer_to(server, head(1000) + bytes(1000))
            assert b" 401 " in answer_to(server, head(1 << 30) + bytes(1 << 20))


def test_who_has_shown_the_token_keeps_the_place():
    """A crowd of strangers pushes out strangers alone."""
    with serving("secret", at_once=2) as server, contextlib.ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE))

        friend = connected()
        friend.sendall(head(4, Authorization="Bearer secret"))
        wait_until(lambda: any(place.admitted for place in server._server.places.values()))
        for _ in range(6):
            connected().sendall(b"POST")
        wait_until(lambda: len(server._server.places) == 2)
        friend.sendall(b"done")
        assert b" 200 " in friend.recv(4096)


def test_a_thread_that_cannot_start_costs_no_place(monkeypatch):
    true, left = socketserver.ThreadingMixIn.process_request, [5]

    def starting(self, *both):
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("can't start new thread")
        true(self, *both)

    monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", starting)
    with serving(at_once=1) as server:
        for _ in range(5):
            with contextlib.suppress(OSError):
                assert answer_to(server, head()) == b""
        assert b" 200 " in answer_to(server, head())
        wait_until(lambda: not server._server.places)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port():
    """A data loader's worker outlives the server; the port is free all the same."""
    with serving() as server:
        port = server.port
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
    try:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen()
    finally:
        child.kill()
        child.join()


def test_a_second_close_does_nothing():
    with serving() as server:
        server.close()
    with pytest.raises(ConnectionRefusedError):
        answer_to(server, head())
