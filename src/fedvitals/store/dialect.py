# SPDX-License-Identifier: Apache-2.0
"""Describes the differences between SQLite and PostgreSQL: type names, placeholders, how a transaction begins.

All SQL of the store is plain text over DB-API. It keeps to what both SQLite and PostgreSQL understand, so that another
database only needs a `Dialect` and a way to open a connection, not a second store.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fedvitals.errors import StoreError
from fedvitals.store.columns import Column, insertions, rows_of

_LARGEST = repr(sys.float_info.max)
_NUMBERS = msgspec.json.Decoder(list[float | None])


def _infinite(number: float | None) -> float | None:
    if number is None or abs(number) < sys.float_info.max:
        return number
    return math.copysign(math.inf, number)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The properties in which one database differs from the others."""

    name: str
    types: Mapping[str, str]  # from the type names that `schema` uses
    errors: tuple[type[Exception], ...]  # the exceptions that the driver raises
    begin: str  # begins a transaction that is going to write
    placeholder: str = "?"
    unique: str = "CREATE UNIQUE INDEX {name} ON {table} ({column})"
    options: Mapping[str, Any] = field(default_factory=dict)  # for the driver's `execute`
    # For databases that several processes may write at once: the statement that waits for a lock (identified by a
    # number derived from its name), and how the next block of layer statistics is numbered. Empty where the database
    # has one writer.
    lock: str = ""
    next_block: str = ""
    # how many values a statement with numbered placeholders accepts; 0 where rows are sent one by one
    numbered: int = 0
    gather: str = "json_group_array({})"  # aggregates the values of a group into one; see `gathered`
    hide: Callable[[str], str] = str  # removes secrets from the text of an error

    @property
    def shared(self) -> bool:
        """Whether several processes may write at once."""
        return bool(self.lock)

    def gathered(self, value: Any) -> list[float | None]:
        """Return the numbers that `gather` has combined: a hundred times fewer objects than one row each."""
        if not isinstance(value, str):
            return list(value)
        try:
            return _NUMBERS.decode(value)
        except msgspec.DecodeError:  # JSON has no infinity; which of the two texts appears depends on the version
            value = value.replace("9e999", _LARGEST).replace("Inf", _LARGEST)
            return [_infinite(number) for number in _NUMBERS.decode(value)]

    def sql(self, text: str) -> str:
        """Return the statement in this database's syntax; our SQL has no question mark inside quotes."""
        return text if self.placeholder == "?" else text.replace("%", "%%").replace("?", self.placeholder)


def lock_number(name: str) -> int:
    """Return the 64-bit number of a lock, derived from its name: the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"fedvitals {name}".encode("utf-8", "replace"), digest_size=8).digest(),
                          "big", signed=True)  # fmt: skip


SQLITE = Dialect(
    name="sqlite",
    types={
        "key": "INTEGER PRIMARY KEY",
        "symbol": "INTEGER",
        "integer": "INTEGER",
        "real": "REAL",
        "text": "TEXT",
        "json": "TEXT",
        "blob": "BLOB",
    },
    # An integer beyond 64 bits, a lone surrogate in a requested name, a second statement in one text.
    errors=(sqlite3.Error, OverflowError, UnicodeEncodeError, sqlite3.Warning),
    begin="BEGIN IMMEDIATE",  # a deferred transaction could not wait for its turn once it has read
    numbered=999,  # the limit of old versions of SQLite
)


class Database:
    """A DB-API connection that uses the store's SQL. Driver errors are raised as StoreError, which names the store."""

    def __init__(self, connection: Any, dialect: Dialect, target: str) -> None:
        self.connection = connection
        self.dialect = dialect
        self.target = target

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement and return all its rows."""
        try:
            rows: list[tuple[Any, ...]] = self._run(sql, values).fetchall()
        except self.dialect.errors as error:
            raise self.failed("read", error) from error
        return rows

    def each_row(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Run a statement and yield its rows one by one, for callers that keep less than the rows take as objects."""
        try:
            yield from self._run(sql, values)
        except self.dialect.errors as error:
            raise self.failed("read", error) from error

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        """Run a statement that returns nothing."""
        try:
            self._run(sql, values)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def _run(self, sql: str, values: Sequence[Any]) -> Any:
        return self.connection.execute(self.dialect.sql(sql), values, **self.dialect.options)

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run the same statement for each row of values."""
        rows = [*rows]  # before the driver begins: making a row may use this same connection to look up a name's number
        if not rows:
            return
        try:
            self.connection.cursor().executemany(self.dialect.sql(sql), rows)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def insert(self, into: str, columns: Sequence[Column]) -> None:
        """Insert rows given as columns; `into` is the statement up to VALUES."""
        if not self.dialect.numbered:
            self.many(f"{into} VALUES ({', '.join('?' * len(columns))})", rows_of(columns))
            return
        try:
            for statement, values in insertions(into, columns, self.dialect.numbered):
                self.connection.execute(statement, values)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def take_turn(self, name: str) -> None:
        """Wait for the named lock, which is then held until the end of the transaction."""
        if self.dialect.lock:
            self.execute(self.dialect.lock, (lock_number(name),))

    def rollback(self) -> None:
        """Undo the transaction if there is still one; an error of the rollback itself is ignored."""
        with contextlib.suppress(*self.dialect.errors):
            self.connection.execute("ROLLBACK")

    def failed(self, what: str, error: Exception) -> StoreError:
        """Return the StoreError to raise for a driver's error; `what` is the operation that failed: «read» or
        «written».
        """
        message = self.dialect.hide(str(error)).rstrip(".")
        mend = f" `fedvitals doctor {self.target} --mend` saves what can still be read."
        if "not a database" in message:  # SQLite refuses such a file before it changes anything
            return StoreError(f"'{self.target}' is no store: it is no SQLite database. Nothing was changed.{mend}")
        hint = mend if "malformed" in message else ""
        return StoreError(f"The store '{self.target}' could not be {what}: {message}.{hint}")
