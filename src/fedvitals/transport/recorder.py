# SPDX-License-Identifier: Apache-2.0
"""Makes records of a scope and numbers, and passes them to `emit`."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedvitals.errors import text_of
from fedvitals.records import Event, Metric, Record, Span, Truth, Where, node_name
from fedvitals.scope import Scope
from fedvitals.transport.timing import new_span_id

TRACEBACK_CHARACTERS = 8000


def where(scope: Scope, step: int | None = None) -> Where:
    """Return the coordinates of a scope."""
    return Where(scope.run, scope.round, scope.node, step, None, scope.group)


class ScopeRecorder:
    """Emits records about scopes."""

    def __init__(self, emit: Callable[[Record], None]) -> None:
        self.emit = emit

    def metric(self, scope: Scope, name: str, value: float, step: int | None = None) -> None:
        """Emit one number."""
        self.emit(Metric(where(scope, step), time.time(), name, value))

    def metrics(self, scope: Scope, metrics: Iterable[tuple[str, float, int | None]]) -> None:
        """Emit many numbers (name, value, step) with one time, and with one place for all those without a step."""
        now, here = time.time(), where(scope)
        for name, value, step in metrics:
            self.emit(Metric(here if step is None else where(scope, step), now, name, value))

    def span(self, scope: Scope, name: str, at: float, seconds: float, attributes: Mapping[str, Any]) -> Span:
        """Emit the Span of a scope. Returns a copy of it, because emitting assigns an identity."""
        own = scope.span or new_span_id()
        fields = (where(scope), at, name, seconds, scope.trace, own, scope.parent, attributes)
        self.emit(Span(*fields))
        return Span(*fields)

    def event(self, scope: Scope, level: str, name: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Emit an event."""
        self.emit(Event(where(scope), time.time(), level, name, message, data or {}))

    def truth(self, run: str, fault: Mapping[str, Any]) -> None:
        """Emit a planted fault: `kind`, `nodes`, `since`, `until`, and further fields of the host."""
        fields = {"nodes": (), "since": 0, "until": None, **fault}
        kind, nodes, since, until = (fields.pop(name) for name in ("kind", "nodes", "since", "until"))
        nodes = nodes if isinstance(nodes, Iterable) and not isinstance(nodes, str) else (nodes,)
        self.emit(Truth(Where(run), time.time(), kind, tuple(map(node_name, nodes)), since, until, fields))

    def exception(self, scope: Scope, name: str, error: BaseException) -> None:
        """Emit an exception as an event."""
        kind = type(error).__name__
        trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
        data: dict[str, Any] = {"exception": kind, "traceback": trace}
        if isinstance(error, OSError) and isinstance(error.errno, int):
            data["errno"] = error.errno  # more specific than the exception's class, without anyone's words
        self.event(scope, "error", name, f"{kind}: {text_of(error)}"[:1000], data)
