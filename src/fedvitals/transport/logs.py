# SPDX-License-Identifier: Apache-2.0
"""Log lines with their position in the federation: as events in the store, and on the screen.

The user keeps using `logging`; what is written inside a round or a client is assigned to it.
"""

from __future__ import annotations

import json as json_format
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from fedvitals.errors import ConfigError, text_of, unknown
from fedvitals.records import Event, Where
from fedvitals.scope import Scope, current

MESSAGE_BYTES = 4096
TRACEBACK_BYTES = 16_384
NARRATING = ("flwr", "nvflare")  # frameworks that log their own account of rounds, which we report better
OURS = "fedvitals"  # loggers whose lines never become events, and the name of the handler that `configure` installs

# Attributes of every log record; the others came in through `extra`.
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
RESERVED = frozenset({"logger", "file", "exception", "exception_message", "traceback", "quotes"})  # our fields
TRACEBACK = "Traceback (most recent call last)"
LEVELS = (
    (logging.CRITICAL, "critical"),
    (logging.ERROR, "error"),
    (logging.WARNING, "warning"),
    (logging.INFO, "info"),
)


def level_name(number: int) -> str:
    """Return «debug», «info», «warning», «error» or «critical»; a level in between counts as the lower one."""
    return next((name for bound, name in LEVELS if number >= bound), "debug")


def bounded(text: str, limit: int = MESSAGE_BYTES) -> str:
    """Return the text within a number of bytes, valid in UTF-8: lone surrogates, which no store takes, are escaped."""
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= limit:
        return encoded.decode()
    ellipsis = "…"
    return encoded[: limit - len(ellipsis.encode())].decode("utf-8", "ignore") + ellipsis


class EventHandler(logging.Handler):
    """Passes each log record made inside a scope to `emit`, as an Event named «log».

    A thread of the user's own has no scope; `fallback` then returns the federation's current one. With `run`, scopes of
    other runs are ignored, so that two monitors in one process do not take each other's lines.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        *,
        fallback: Callable[[], Scope | None] | None = None,
        run: str | None = None,
        level: int | str = logging.NOTSET,
    ) -> None:
        super().__init__(level)
        self._hand_over = emit
        self._fallback = fallback
        self._run = run
        self._busy = threading.local()

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record as in `logging`, but without a lock: no state is shared, and log lines must not wait."""
        if not self.filter(record):
            return False
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        _speak_if_nobody_does(record, self)
        # Whatever receives the event may log too, which would recurse here forever.
        if _is_ours(record) or _narrates(record) or getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            scope = current.get() or (self._fallback() if self._fallback is not None else None)
            if scope is not None and self._run in (None, scope.run):
                self._hand_over(event_of(record, scope))
        except Exception:  # noqa: BLE001 - a log line must never stop training
            self.handleError(record)
        finally:
            self._busy.now = False


def _narrates(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING and record.name.partition(".")[0] in NARRATING


def _speak_if_nobody_does(record: logging.LogRecord, handler: EventHandler) -> None:
    """Print a warning that Python would have printed without us.

    If no handler is set up, `logging` prints warnings by its last resort. With our handler on the root logger it would
    no longer do so, which would change the user's program.
    """
    last = logging.lastResort
    if last is None or record.levelno < last.level:
        return
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(not isinstance(other, EventHandler) for other in logger.handlers):
            return
        logger = logger.parent if logger.propagate else None
    ours = [other for other in logging.getLogger().handlers if isinstance(other, EventHandler)]
    if not ours or ours[0] is handler:  # with several monitors, one prints it
        last.handle(record)


def event_of(record: logging.LogRecord, scope: Scope) -> Event:
    """Return the log record as an Event at the scope's coordinates; `privacy` decides how much of it may leave."""
    return Event(
        Where(scope.run, scope.round, scope.node, group=scope.group),
        record.created,
        level_name(record.levelno),
        "log",
        bounded(_message(record)),
        {
            **_extra(record),
            "logger": record.name,
            "file": f"{record.filename}:{record.lineno}",
            **_exception(record),
            **_quoted(record),
        },
    )


class JsonFormatter(logging.Formatter):
    """One JSON object per line: at, level, logger, file, message, run, round, node, and the fields from `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        scope = current.get()
        line: dict[str, Any] = {
            **_extra(record),
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": level_name(record.levelno),
            "logger": record.name,
            "file": f"{record.filename}:{record.lineno}",
            "message": _message(record),
            **_exception(record),
        }
        if scope is not None:
            line |= {"run": scope.run, "round": scope.round, "node": scope.node}
        return json_format.dumps(line, ensure_ascii=False)


class HumanFormatter(logging.Formatter):
    """`12:03:04 info    digits round 3 c7  train: message`, followed by the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        scope = current.get()
        place = []
        if scope is not None:
            place = [scope.run, "" if scope.round is None else f"round {scope.round}", scope.node or ""]
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = " ".join(part for part in place if part)
        line = (
            f"{clock} {level_name(record.levelno):<8} {where + '  ' if where else ''}{record.name}: {_message(record)}"
        )
        text = _exception(record).get("traceback")
        return f"{line}\n{text.rstrip()}" if text else line


def configure(
    *,
    json: bool = False,
    level: int | str = "INFO",
    stream: TextIO | None = None,
) -> logging.Handler:
    """Return the single handler on the root logger that shows lines with their position.

    For programs without logging of their own. Called again, it changes that handler instead of adding another.
    """
    name = level.upper() if isinstance(level, str) else level
    known = logging.getLevelNamesMapping()
    if isinstance(name, str) and name not in known:
        raise ConfigError(unknown("log level", str(level), known))
    root = logging.getLogger()
    installed = next((handler for handler in root.handlers if handler.get_name() == OURS), None)
    handler = installed if isinstance(installed, logging.StreamHandler) else logging.StreamHandler()
    handler.setStream(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json else HumanFormatter())
    handler.set_name(OURS)
    root.setLevel(name)
    if handler not in root.handlers:
        root.addHandler(handler)
    return handler


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name == OURS or record.name.startswith(OURS + ".")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - arguments that do not fit the text: show both rather than nothing
        return f"{text_of(record.msg)} {text_of(record.args)}"


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields that JSON can hold, as they are now, since the user may change a list later."""
    fields = {}
    for name, value in vars(record).items():
        if name in STANDARD:
            continue
        try:
            text = json_format.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if len(text) <= MESSAGE_BYTES:
            key = f"extra.{name}" if name in RESERVED else bounded(name)
            fields[key] = bounded(value) if isinstance(value, str) else json_format.loads(text)
    return fields


def _quoted(record: logging.LogRecord) -> dict[str, Any]:
    """Return `quotes` if the line itself is the text of an exception: `logger.error(error)`, or a traceback."""
    if isinstance(record.msg, BaseException):
        return {"quotes": True, "exception": type(record.msg).__name__}
    return {"quotes": True} if TRACEBACK in _message(record) else {}


def _exception(record: logging.LogRecord) -> dict[str, str]:
    kind, error, _ = record.exc_info or (None, None, None)
    if kind is None or error is None:
        return {}
    return {
        "exception": kind.__name__,
        "exception_message": bounded(text_of(error)),
        "traceback": bounded("".join(traceback.format_exception(error)), TRACEBACK_BYTES),
    }
