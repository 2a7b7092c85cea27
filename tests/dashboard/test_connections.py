# SPDX-License-Identifier: Apache-2.0
"""Clients that hold the real server: by half a request, by silence, by not reading, by many connections or streams."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.connections import Limits, Places, server_of
from fedvitals.dashboard.server import bind
from support.timed_run import begin, stored
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough

HOST = b"Host: 127.0.0.1\r\n"
GET = b"GET /api/store HTTP/1.1\r\n" + HOST
LIVE = b"GET /api/live HTTP/1.1\r\n" + HOST + b"\r\n"
FOREVER = 3600.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    told = begin("20260101-000000-tiny", "tiny")
    told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5)
    return stored(tmp_path_factory.mktemp("held") / "runs.db", told)


def patient(**changed: float) -> Limits:
    """Limits of which only those named can be what ends a connection."""
    seconds = dict.fromkeys(("head_seconds", "body_seconds", "send_seconds", "idle_seconds"), FOREVER)
    return Limits(**{**seconds, **changed})  # type: ignore[arg-type]


class Site:
    """A server that runs, and connections to it."""

    def __init__(self, server: uvicorn.Server, port: int, stack: contextlib.ExitStack) -> None:
        self._server, self._port, self._stack = server, port, stack

    def connect(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = socket.socket()
        self._stack.callback(connection.close)
        connection.settimeout(PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((source, 0))
        connection.connect(("127.0.0.1", self._port))
        connection.sendall(sent)
        return connection

    def answers(self, source: str = "127.0.0.1") -> bytes:
        """The status line of a request that should be answered."""
        return self.connect(GET + b"Connection: close\r\n\r\n", source).makefile("rb").readline()

    def wait_for_connections(self, count: int) -> None:
        wait_until(lambda: len(self._server.server_state.connections) == count, what="connections to be closed")


@contextlib.contextmanager
def running(store: Path, limits: Limits) -> Iterator[Site]:
    server = server_of(create_app(store, limits=limits), limits)
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with contextlib.ExitStack() as stack:
        try:
            wait_until(lambda: server.started, what="the server to start")
            yield Site(server, listener.getsockname()[1], stack)
        finally:
            stack.close()
            server.should_exit = True
            thread.join(PATIENCE)


def is_closed(connection: socket.socket) -> bool:
    """Wait for the other side to close the connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def drip(connection: socket.socket) -> None:
    """Send a byte now and then until the other side has had enough."""
    connection.settimeout(0.02)
    until = time.monotonic() + PATIENCE
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < until:
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(65536):
                    return
    assert time.monotonic() < until, "it was never closed"


def test_headers_that_drip_in_are_cut_off(store: Path) -> None:
    with running(store, patient(head_seconds=0.3)) as site:
        drip(site.connect(GET + b"X: "))
        assert b"200" in site.answers()


def test_a_connection_that_asks_nothing_is_closed(store: Path) -> None:
    with running(store, patient(head_seconds=0.3)) as site:
        assert is_closed(site.connect())
        assert is_closed(site.connect(GET + b"\r\nGET /half HTTP/1.1\r\n")), "after an answer, too"


def test_an_idle_connection_is_closed(store: Path) -> None:
    with running(store, patient(idle_seconds=0.3)) as site:
        assert is_closed(site.connect(GET + b"\r\n"))


def test_a_body_that_drips_in_is_cut_off(store: Path) -> None:
    with running(store, patient(body_seconds=0.3)) as site:
        head = b"POST /api/login HTTP/1.1\r\n" + HOST + b"X-Fedvitals: 1\r\nContent-Length: 60000\r\n\r\n"
        drip(site.connect(head))


def test_one_that_does_not_read_its_answers_is_cut_off(store: Path) -> None:
    with running(store, patient(send_seconds=0.3)) as site:
        reader = site.connect()
        site.wait_for_connections(1)
        ask = (b"GET /static/style.css HTTP/1.1\r\n" + HOST + b"\r\n") * 100
        reader.settimeout(0.5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(100):
                reader.sendall(ask)
        site.wait_for_connections(0)


def test_endless_headers_are_refused(store: Path) -> None:
    with running(store, patient()) as site:
        connection = site.connect(GET)
        with contextlib.suppress(ConnectionError):
            for number in itertools.count():
                connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 4000))
                assert number < 10_000, "they are read without an end"
        assert b"200" in site.answers()


def test_who_opens_many_connections_keeps_nobody_out(store: Path) -> None:
    with running(store, patient(connections_of_address=4, connections=6)) as site:
        waiting = [site.connect(GET) for _ in range(20)]
        assert b"200" in site.answers()
        assert all(map(is_closed, waiting[:16])), "the oldest make room"
        others = [site.connect(GET, f"127.0.1.{number}") for number in range(20)]
        assert b"200" in site.answers("127.0.0.9"), "nor by many addresses of this machine"
        assert is_closed(others[0])


def test_who_opens_many_streams_keeps_nobody_out(store: Path) -> None:
    with running(store, patient(connections_of_address=4, streams_of_address=2)) as site:
        streams = []
        for _ in range(6):
            streams.append(site.connect(LIVE))
            list(iter_lines(streams[-1], b"event: hello"))
        for oldest in streams[:4]:
            list(iter_lines(oldest, b"0\r\n"))  # the last chunk
        assert b"200" in site.answers()
        assert b"200" in site.answers("127.0.0.9")


def test_where_all_are_being_answered_a_newcomer_is_told_so(store: Path) -> None:
    with running(store, patient(connections_of_address=2)) as site:
        for _ in range(2):
            list(iter_lines(site.connect(LIVE), b"event: hello"))
        assert b"503" in site.answers()
        assert b"200" in site.answers("127.0.0.9")


def test_a_websocket_is_not_opened(store: Path) -> None:
    upgrade = (
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    )
    with running(store, patient()) as site:
        connection = site.connect(b"GET /api/live2 HTTP/1.1\r\n" + HOST + upgrade)
        assert b"404" in connection.makefile("rb").readline()


def test_the_address_that_has_most_makes_room() -> None:
    ended: list[str] = []

    def leave(holder: str) -> bool:
        ended.append(holder)
        return holder != "busy"

    places = Places[str](4, 3, leave)
    assert all([places.enter("a", "busy"), places.enter("a", "a1"), places.enter("a", "a2"), places.enter("b", "b1")])
    assert places.enter("c", "c1")
    assert ended == ["busy", "a1"]
    places.exit("c", "c1")
    places.exit("c", "c1")
    assert len(places) == 3


def iter_lines(connection: socket.socket, last: bytes) -> Iterator[bytes]:
    """Lines of an answer up to one that begins like this."""
    for line in connection.makefile("rb"):
        yield line
        if line.startswith(last):
            return
