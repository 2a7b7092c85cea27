# SPDX-License-Identifier: Apache-2.0
"""How long a block of the user's own code takes, as a Span of the current scope.

`@timed`, `@timed("load", shard=3)` and `with timed("load"):` all measure; nested blocks become nested spans.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import time
from collections.abc import Callable
from contextvars import Token
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, cast, overload

from fedvitals.errors import ConfigError, text_of
from fedvitals.records import Event, Record, Span, Where
from fedvitals.scope import Scope, current
from fedvitals.time_parts import NESTED
from fedvitals.transport.logs import bounded
from fedvitals.transport.privacy import WRITTEN_BY_TIMED

logger = logging.getLogger("fedvitals.telemetry")

Function = TypeVar("Function", bound=Callable[..., Any])

# A random stream of our own: `random` belongs to the user's training, and asking the system each time would let other
# threads run. A child process must not continue its parent's.
_ids = random.Random(os.urandom(32))  # noqa: S311 - names, not secrets
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _ids.seed(os.urandom(32)))


def new_trace() -> str:
    """Return a trace id of W3C trace context: 32 hexadecimal digits."""
    return f"{_ids.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    """Return a span id of W3C trace context: 16 hexadecimal digits."""
    return f"{_ids.getrandbits(64) or 1:016x}"


@overload
def timed(name: Function) -> Function: ...


@overload
def timed(name: str | None = None, **attributes: Any) -> Timed: ...


def timed(name: str | Callable[..., Any] | None = None, **attributes: Any) -> Any:
    """Measure how long a block or function takes, as a span of the round: a context manager and decorator.

    A block that raises is noted in its span and as an Event «exception»; the exception propagates unchanged. Outside
    any scope the time is only logged, at DEBUG.

    Args:
        name: The name of the span; by default that of the decorated function.
        attributes: Plain values that are kept with the span.

    Returns:
        The context manager, or the decorated function.
    """
    if callable(name):
        return Timed(None, attributes)(name)
    return Timed(name, attributes)


class Timed:
    """What `timed` returns: a block to enter, or a decorator for functions and coroutine functions."""

    def __init__(self, name: str | None, attributes: dict[str, Any]) -> None:
        self.name = name or "block"
        if self.name in NESTED:  # reserved names, which describe rounds
            self.name = f"own.{self.name}"
        self.attributes = {f"own.{key}" if key in WRITTEN_BY_TIMED else key: attributes[key] for key in attributes}
        self._named = name is not None
        # One entry per `with` that is open, so that one object may be entered again inside itself.
        self._open: list[_Block] = []

    def __call__(self, function: Function) -> Function:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"timed cannot measure the generator {function.__qualname__}: between two values other code runs. "
                "Put `with timed(...)` around the loop that uses it, or around the work between two yields."
            )
        name = self.name if self._named else getattr(function, "__qualname__", type(function).__name__)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def measured_coroutine(*args: Any, **kwargs: Any) -> Any:
                with Timed(name, self.attributes):
                    return await function(*args, **kwargs)

            return cast("Function", measured_coroutine)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with Timed(name, self.attributes):
                return function(*args, **kwargs)

        return cast("Function", measured)

    def __enter__(self) -> Self:
        self._open.append(_Block(self.name, self.attributes))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.pop().end(error)


class _Block:
    """One measurement in progress."""

    def __init__(self, name: str, attributes: dict[str, Any]) -> None:
        self.name = name
        self.attributes = attributes
        self.outer = current.get()
        self.id = ""
        self.trace = ""
        self.token: Token[Scope | None] | None = None
        if self.outer is not None:
            self.id = new_span_id()
            self.trace = self.outer.trace or new_trace()
            self.token = current.set(replace(self.outer, trace=self.trace, span=self.id, parent=self.outer.span))
        self.at = time.time()
        self.began = time.perf_counter()

    def end(self, error: BaseException | None) -> None:
        seconds = time.perf_counter() - self.began
        scope = self.outer
        if scope is None or self.token is None:
            logger.debug("%s took %.6f s; recorded nowhere, since no scope is open.", self.name, seconds)
            return
        try:
            current.reset(self.token)
        except ValueError:  # an async generator may be closed in another context, without our scope
            logger.debug("%s ended in another context than it began in.", self.name)
        where = Where(scope.run, scope.round, scope.node, group=scope.group)
        attributes = dict(self.attributes)
        if error is not None:
            attributes |= {"error": type(error).__name__, "message": bounded(text_of(error))}
        _emit(scope, Span(where, self.at, self.name, seconds, self.trace, self.id, scope.span, attributes))
        # Cancellation, generator exit and Ctrl-C end a block early, but nothing has failed.
        if isinstance(error, Exception):
            message = bounded(f"{self.name}: {type(error).__name__}: {bounded(text_of(error))}")
            data = {"error": type(error).__name__, "block": self.name, "trace": self.trace, "span": self.id}
            _emit(scope, Event(where, self.at + seconds, "error", "exception", message, data))


def _emit(scope: Scope, record: Record) -> None:
    try:
        scope.emit(record)
    except Exception as problem:  # noqa: BLE001 - the user's own exception, if any, must get through
        # Without a traceback, which would also show the user's exception, whose text must not be passed on.
        logger.warning("A %s could not be handed over: %s.", type(record).__name__, type(problem).__name__)
