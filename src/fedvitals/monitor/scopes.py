# SPDX-License-Identifier: Apache-2.0
"""Where the training stands: the open round, the scope of the calling code, and the threads of open clients."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextvars import Token
from dataclasses import replace
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.monitor.run_context import RunContext
from fedvitals.protocols import Node
from fedvitals.records import AnyName, Record, client_name, node_name
from fedvitals.scope import Scope, current
from fedvitals.time_parts import edge_span
from fedvitals.transport.privacy import SERVER, WORDS
from fedvitals.transport.timing import new_span_id

logger = logging.getLogger(__name__)

MOST_BYTES = 2**63 - 1  # of a message: the largest integer that a store can hold


class ClientThreads:
    """Tracks the threads on which clients were opened, to decide whose code may have produced a record."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._by_span: dict[str | None, int] = {}

    def enter(self, scope: Scope) -> None:
        """Note that a client was opened on the calling thread."""
        self._by_span[scope.span] = threading.get_ident()

    def idents(self) -> tuple[int, ...]:
        """The identifiers of the threads on which clients are open."""
        return tuple(self._by_span.values())

    def leave(self, scope: Scope) -> None:
        """Forget a client that has closed; does nothing for other scopes."""
        self._by_span.pop(scope.span, None)

    def may_be_client(self) -> bool:
        """Whether a client's code may be running on a thread whose scope does not say so.

        A thread that a client started has no scope. Where a host closes clients in another order than it opened them,
        the thread's scope may be the round's again while a client still trains.
        """
        if not self._by_span or self._context.policy.level >= WORDS:
            return False
        scope = current.get()
        if scope is None or scope.run != self._context.run.id:
            return True
        return scope.node in SERVER and threading.get_ident() in self.idents()


class Scopes:
    """Opens and closes scopes of rounds, edges and clients. `round` is the scope of the open round.

    `emit` takes the records made inside a scope. `open_run` begins the run unless it has begun; it is called before a
    scope opens, because log lines inside belong to the run.
    """

    def __init__(
        self, context: RunContext, threads: ClientThreads, emit: Callable[[Record], None], open_run: Callable[[], None]
    ) -> None:
        self._context, self._threads, self._emit, self.open_run = context, threads, emit, open_run
        self.round: Scope | None = None
        self.last_round: int | None = None
        self._renamed: dict[Node, Node] = {}

    def client(self, name: AnyName) -> Node:
        """Return the name under which a client is recorded (`client_name`), and say so once if it is another."""
        text, node = node_name(name), client_name(name)
        if node != text:
            if not self._renamed:
                logger.warning(
                    "A client is named '%s', as fedvitals names groups and the server: it is recorded as '%s'. So are "
                    "other clients with such names.",
                    text,
                    node,
                )
            self._renamed[text] = node
        return node

    def node(self, name: AnyName) -> Node:
        """Return the name under which a node is recorded that may be a client, a group or the server."""
        text = node_name(name)
        return text if text in SERVER else self._renamed.get(text, text)

    def by_client(self, values: Mapping[Any, Any]) -> dict[Node, Any]:
        """Return what is given by client, by the names under which they are recorded."""
        return {self.client(name): value for name, value in values.items()}

    def message(
        self, sender: AnyName, receiver: AnyName, size: int, raw: int | None, seconds: float | None, kind: str
    ) -> tuple[Node, Node, int, int, float | None, str]:
        """Return a message as it is recorded: names as text, sizes as integers. ConfigError for an invalid size."""
        sizes = int(size), int(size if raw is None else raw)
        if max(map(abs, sizes)) > MOST_BYTES:
            raise ConfigError(
                f"A message of {size} bytes ({raw} before compression) is larger than a store can record."
            )
        return self.node(sender), self.node(receiver), *sizes, seconds, kind

    def here(self) -> Scope:
        """Return the caller's scope; on a thread without one, the scope of the round that is open or was open last."""
        scope = current.get()
        if scope is not None and scope.run == self._context.run.id:
            return scope
        return self.round or self.of_run(trace=self._context.trace)

    def of_run(self, node: Node | None = None, trace: str = "") -> Scope:
        """Return a scope in the last round, outside every open client and edge."""
        return Scope(self._context.run.id, self._emit, self.last_round, node=node, trace=trace)

    def enter(
        self,
        node: Node | None,
        *,
        group: str | None = None,
        client: bool = False,
        inside: Scope | None = None,
        watch: Callable[..., Any] | None = None,
    ) -> tuple[Scope, Token[Scope | None]]:
        """Open a scope inside `inside`, or inside the caller's. Returns it with the token that `leave` needs.

        `watch` is called with the model of a client that is opened without one.
        """
        self.open_run()
        around = inside or self.here()
        own, parent = new_span_id(), around.span
        if group is not None and around.node is None and parent is not None:  # a group's Span is known to all by name
            if client:
                parent = edge_span(around.span, group)
            else:
                own = edge_span(around.span, group)
        scope = replace(around, node=node, group=group or around.group, span=own, parent=parent, watch=watch)
        if client:
            self._threads.enter(scope)
        return scope, current.set(scope)

    def enter_round(self, round_index: int) -> tuple[Scope, Token[Scope | None]]:
        """Open a round. Returns its scope with the token that `leave` needs."""
        self.open_run()
        parent = self.here()
        self.round = replace(parent, round=round_index, node=None, span=new_span_id(), parent=parent.span)
        self.last_round = round_index
        return self.round, current.set(self.round)

    def client_threads(self) -> tuple[int, ...]:
        """The identifiers of the threads on which clients are open."""
        return self._threads.idents()

    def leave_round(self) -> None:
        """Mark that no round is open any more; code still inside its scope stays there until `leave`."""
        self.round = None

    def forget_last_round(self) -> None:
        """Assign records to no round from now on, until a round opens."""
        self.last_round = None

    def leave(self, scope: Scope, token: Token[Scope | None]) -> None:
        """Close a scope that `enter` or `enter_round` opened."""
        self._threads.leave(scope)
        # A host may close a scope on another thread than it was opened on, which has a context of its own.
        with contextlib.suppress(ValueError):
            current.reset(token)
