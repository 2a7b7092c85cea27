# SPDX-License-Identifier: Apache-2.0
"""Limits how many connections and live streams a server holds open, per address and in total, and how long.

uvicorn by itself waits forever for the rest of a request, and for a client that does not read its answer.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

Holder = TypeVar("Holder")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the server's capacity clients may hold."""

    head_seconds: float = 10.0  # from the connection, or the last answer, until a request's headers are complete
    body_seconds: float = 30.0  # for the rest of a request
    send_seconds: float = 120.0  # for a client to read a pending answer
    idle_seconds: float = 5.0  # between two requests
    connections: int = 512
    connections_of_address: int = 128
    streams: int = 200  # pages that listen for changes
    streams_of_address: int = 32


class Places(Generic[Holder]):
    """Places for at most `total` holders, and `of_address` per address.

    When all are taken, a newcomer gets the place of the oldest holder that `leave` can end: of its own address if that
    has too many, else of the address with the most. An address that opens many keeps nobody else out.
    """

    def __init__(self, total: int, of_address: int, leave: Callable[[Holder], bool]) -> None:
        self._total, self._of_address, self._leave = total, of_address, leave
        self._holders: dict[str, dict[Holder, None]] = {}  # by address, oldest first

    def __len__(self) -> int:
        return sum(map(len, self._holders.values()))

    def enter(self, address: str, holder: Holder) -> bool:
        """Take a place. Returns False if there is none."""
        if len(self._holders.get(address, ())) >= self._of_address:
            free = self._end_oldest(address)
        elif len(self) >= self._total:
            crowded = sorted(self._holders, key=lambda known: len(self._holders[known]), reverse=True)
            free = any(map(self._end_oldest, crowded))
        else:
            free = True
        if free:
            self._holders.setdefault(address, {})[holder] = None
        return free

    def exit(self, address: str, holder: Holder) -> None:
        """Give a place back; has no effect if the holder has none."""
        holders = self._holders.get(address, {})
        holders.pop(holder, None)
        if not holders:
            self._holders.pop(address, None)

    def _end_oldest(self, address: str) -> bool:
        for holder in self._holders[address]:
            if self._leave(holder):
                self.exit(address, holder)
                return True
        return False


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP connection with deadlines, and with a place among the others.

    A deadline restarts when the connection's state changes, not with each byte that drips in.
    """

    def __init__(self, limits: Limits, places: Places[BoundedProtocol], *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits, self._places = limits, places
        self._waiting_for: str | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._places.enter(self._address, self):
            self._watch()
        else:
            transport.write(_REFUSAL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.exit(self._address, self)
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def leave(self) -> bool:
        """End the connection unless a request is being answered. Returns whether it ended."""
        if self._state() == "answer":
            return False
        self.transport.abort()
        return True

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _state(self) -> str:
        """Return what the connection is waiting for."""
        if self.flow.write_paused:
            return "send"
        if self.cycle is None or self.cycle.response_complete:
            return "head"
        return "body" if self.cycle.more_body else "answer"

    def _watch(self) -> None:
        state = self._state()
        if state == self._waiting_for:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        limits = self._limits
        seconds = {"head": limits.head_seconds, "body": limits.body_seconds, "send": limits.send_seconds}.get(state)
        self._waiting_for = state
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing, since any client could fill the terminal with this warning."""


def bounded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Return the factory of uvicorn's connections: all share the same places."""
    places = Places[BoundedProtocol](
        limits.connections, limits.connections_of_address, lambda connection: connection.leave()
    )
    return cast("type[asyncio.Protocol]", functools.partial(BoundedProtocol, limits, places))


def server_of(app: Any, limits: Limits) -> uvicorn.Server:
    """Return a server of an ASGI app in which no client can exceed the limits on connections and their duration."""
    config = uvicorn.Config(
        app, http=bounded_protocol(limits), ws="none", timeout_keep_alive=math.ceil(limits.idle_seconds),
        proxy_headers=False,  # any process on this machine could claim any other address in them
        log_level="error", access_log=False, server_header=False, timeout_graceful_shutdown=1, lifespan="on",
    )  # fmt: skip
    return uvicorn.Server(config)


_WORDS = b"Too many connections are open. Close some pages, or wait."
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_WORDS), _WORDS)
)
