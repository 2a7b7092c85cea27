# SPDX-License-Identifier: Apache-2.0
"""Describes where SQLite and PostgreSQL differ: type names, placeholders, how a transaction begins.

All SQL of the store is plain text over DB-API. It keeps to what SQLite and PostgreSQL both understand, so that a second
database is one more `Dialect` and the way to open its connection, not a second store.
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
    """The differences of one database from the others."""

    name: str
    types: Mapping[str, str]  # from the words that `schema` uses for types
    errors: tuple[type[Exception], ...]  # what the driver raises
    begin: str  # a transaction that is going to write
    placeholder: str = "?"
    unique: str = "CREATE UNIQUE INDEX {name} ON {table} ({column})"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the driver's `execute`
    # Where several processes may write at once: how one waits for its turn at something (a number stands for its
    # name), and how the next block of layer statistics is numbered. Empty where the database has one writer.
    lock: str = ""
    next_block: str = ""
    numbered: int = 0  # values that a statement with numbered placeholders takes; 0 where rows are sent one by one
    gather: str = "json_group_array({})"  # how the values of a group become one; see `gathered`
    hide: Callable[[str], str] = str  # takes out of an error's words what nobody may read

    @property
    def shared(self) -> bool:
        """Whether several processes may write at once."""
        return bool(self.lock)

    def gathered(self, value: Any) -> list[float | None]:
        """The numbers that `gather` has put together: of many rows a hundred times fewer objects to make."""
        if not isinstance(value, str):
            return list(value)
        if "Inf" in value or "9e999" in value:  # JSON has no infinity; which of the two it is depends on the version
            value = value.replace("9e999", _LARGEST).replace("Inf", _LARGEST)
            return [_infinite(number) for number in _NUMBERS.decode(value)]
        return _NUMBERS.decode(value)

    def sql(self, text: str) -> str:
        """The statement as this database wants it; no SQL of ours has a question mark inside quotes."""
        return text if self.placeholder == "?" else text.replace("%", "%%").replace("?", self.placeholder)


def lock_number(name: str) -> int:
    """The number that stands for a lock's name: 64 bits, the same in every process."""
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
    # An integer beyond 64 bits, a lone surrogate in a name that is asked for, a second statement in one text.
    errors=(sqlite3.Error, OverflowError, UnicodeEncodeError, sqlite3.Warning),
    begin="BEGIN IMMEDIATE",  # a deferred one could not wait for its turn once it has read
    numbered=999,  # what an old SQLite takes
)


class Database:
    """A DB-API connection that speaks the store's SQL; errors come out as StoreError and name the store."""

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
        """Run a statement and yield its rows one by one, for those who keep less than the rows take as objects."""
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
        """The same statement for each row of values."""
        rows = [*rows]  # before the driver begins: making a row may ask this very connection for the number of a name
        if not rows:
            return
        try:
            self.connection.cursor().executemany(self.dialect.sql(sql), rows)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def insert(self, into: str, columns: Sequence[Column]) -> None:
        """Insert rows that come as columns; `into` is the statement up to its values."""
        if not self.dialect.numbered:
            self.many(f"{into} VALUES ({', '.join('?' * len(columns))})", rows_of(columns))
            return
        try:
            for statement, values in insertions(into, columns, self.dialect.numbered):
                self.connection.execute(statement, values)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def take_turn(self, name: str) -> None:
        """Wait until no other process holds what is named; until the end of the transaction it is ours."""
        if self.dialect.lock:
            self.execute(self.dialect.lock, (lock_number(name),))

    def rollback(self) -> None:
        """Undo what the transaction did, if there is one left to undo; what went wrong before is the news, not this."""
        with contextlib.suppress(*self.dialect.errors):
            self.connection.execute("ROLLBACK")

    def failed(self, what: str, error: Exception) -> StoreError:
        """Return the error to raise for a driver's error; `what` could not be done: «read» or «written»."""
        message = self.dialect.hide(str(error)).rstrip(".")
        mend = f" `fedvitals doctor {self.target} --mend` saves what can still be read."
        if "not a database" in message:  # SQLite refuses such a file before it changes anything
            return StoreError(f"'{self.target}' is no store: it is no SQLite database. Nothing was changed.{mend}")
        hint = mend if "malformed" in message else ""
        return StoreError(f"The store '{self.target}' could not be {what}: {message}.{hint}")
