# SPDX-License-Identifier: Apache-2.0
"""Runs a user's own SQL on a store, read-only."""

from __future__ import annotations

import contextlib
import decimal
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedvitals.errors import StoreError
from fedvitals.store.dialect import Database
from fedvitals.store.read.reader import Reader

# Where SQLite asks an authoriser, PostgreSQL uses a read-only transaction. What such a transaction still allows
# (settings, locks, files on the server) begins with other words than these.
_READING = re.compile(r"(?is)(\s|--[^\n]*(\n|$)|/\*.*?\*/)*(select|with|values|table|explain|show)\b")
INSTRUCTIONS = 100_000  # of SQLite's machine, between two checks for Ctrl-C: a millisecond
_REFUSALS = ("authoriz", "prohibited", "readonly", "read-only")


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows of a user's statement."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool  # whether there were more rows than the limit allowed


def query(
    reader: Reader,
    sql: str,
    limit: int | None = None,
    *,
    seconds: float | None = None,
    cell_bytes: int | None = None,
) -> Answer:
    """Run a user's statement and return its rows; StoreError if it is wrong or would change anything.

    In SQLite, `seconds` bounds how long it may run, and `cell_bytes` the size of every intermediate value. PostgreSQL
    has the patience that the reader was opened with.
    """
    database, most = reader.database, None if limit is None else limit + 1
    try:
        if database.dialect.name == "postgresql":
            columns, rows = _ask_postgres(database, sql, most)
        else:
            with _bounded(database.connection, cell_bytes):
                columns, rows = _ask_sqlite(database, sql, most, seconds)
    except database.dialect.errors as error:
        what = " ".join(database.dialect.hide(str(error)).split()).rstrip(".")
        if any(word in what for word in _REFUSALS):
            raise _refusal(sql) from error
        raise StoreError(f"The query failed: {what}. docs/schema.md lists the views and their columns.") from error
    shown = rows if limit is None else rows[:limit]
    return Answer(columns, shown, more=len(shown) < len(rows))


def _refusal(sql: str) -> StoreError:
    return StoreError(
        f"Only reading is allowed here, one SELECT at a time, and the store was not changed. Got: {sql.strip()[:200]}"
    )


Rows = tuple[tuple[str, ...], list[tuple[Any, ...]]]


def _ask_sqlite(database: Database, sql: str, limit: int | None, seconds: float | None) -> Rows:
    with _interruptible(database.connection), _timed(database.connection, seconds):
        cursor = database.connection.execute(sql)
        rows = cursor.fetchall() if limit is None else cursor.fetchmany(limit)
        described = cursor.description
        cursor.close()  # an open statement would keep the store's log from being folded in
    if described is None:  # only spaces and comments
        raise _refusal(sql)
    return tuple(column[0] for column in described), rows


@contextlib.contextmanager
def _interruptible(connection: sqlite3.Connection) -> Iterator[None]:
    """Let Ctrl-C end a statement, which SQLite would otherwise run to its end first.

    Python runs a signal's handler between two of its own instructions: here, when SQLite asks whether to continue. An
    exception raised there would be lost, so the usual handler runs after the statement has ended. PostgreSQL's driver
    cancels a statement by itself.
    """
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    connection.set_progress_handler(lambda: bool(interrupted), INSTRUCTIONS)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)
        signal.signal(signal.SIGINT, usual)
        if interrupted:
            usual(signal.SIGINT, None)


@contextlib.contextmanager
def _bounded(connection: sqlite3.Connection, cell_bytes: int | None) -> Iterator[None]:
    """Refuse values larger than this inside the block: one expression can create a text of a gigabyte."""
    if cell_bytes is None:
        yield
        return
    usual = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, cell_bytes)
    try:
        yield
    finally:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, usual)


@contextlib.contextmanager
def _timed(connection: sqlite3.Connection, seconds: float | None) -> Iterator[None]:
    """End a statement that runs longer than this, raising StoreError."""
    if seconds is None:
        yield
        return
    end = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > end, INSTRUCTIONS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if time.monotonic() > end:
            raise StoreError(
                f"The statement ran longer than {seconds:g} seconds and was ended. Ask for less: name a run, a metric "
                "and a round in WHERE."
            ) from error
        raise
    finally:
        connection.set_progress_handler(None, 0)


def _ask_postgres(database: Database, sql: str, limit: int | None) -> Rows:
    if not _READING.match(sql):
        raise _refusal(sql)
    database.execute("BEGIN TRANSACTION READ ONLY")
    rows: list[tuple[Any, ...]] = []
    try:
        cursor = database.connection.cursor()
        # Streamed, so that a table need not fit into memory, and in the protocol that takes one statement at a time.
        with contextlib.closing(cursor.stream(sql, binary=True)) as stream:
            for row in stream:
                rows.append(tuple(_plain(value) for value in row))
                if len(rows) == limit:
                    break
        return tuple(column.name for column in cursor.description or ()), rows
    finally:
        database.rollback()


def _plain(value: Any) -> Any:
    """Convert the decimals that PostgreSQL returns for sums and means of integers; users and JSON expect numbers."""
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if value is None or isinstance(value, str | int | float | bytes) else str(value)
