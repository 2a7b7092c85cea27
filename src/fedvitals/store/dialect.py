# SPDX-License-Identifier: Apache-2.0
"""What differs between databases, and nothing else: type names, the placeholder, how a transaction begins.

All SQL of the store is plain text over DB-API. It keeps to what SQLite and PostgreSQL both understand, so that a second
database is one more `Dialect` and the way to open its connection, not a second store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvitals.errors import StoreError


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    types: Mapping[str, str]  # from the words that `schema` uses for types
    errors: tuple[type[Exception], ...]  # what the driver raises
    begin: str  # a transaction that is going to write
    placeholder: str = "?"

    def sql(self, text: str) -> str:
        """The statement as this database wants it; no SQL of ours has a question mark inside quotes."""
        return text if self.placeholder == "?" else text.replace("?", self.placeholder)


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
)


class Database:
    """A DB-API connection that speaks the store's SQL; errors come out as StoreError and name the store."""

    def __init__(self, connection: Any, dialect: Dialect, target: str) -> None:
        self.connection = connection
        self.dialect = dialect
        self.target = target

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            found: list[tuple[Any, ...]] = self.connection.execute(self.dialect.sql(sql), values).fetchall()
        except self.dialect.errors as error:
            raise self.failed("read", error) from error
        return found

    def execute(self, sql: str, values: Sequence[Any] = ()) -> None:
        try:
            self.connection.execute(self.dialect.sql(sql), values)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """The same statement for each row of values."""
        try:
            self.connection.cursor().executemany(self.dialect.sql(sql), rows)
        except self.dialect.errors as error:
            raise self.failed("written", error) from error

    def failed(self, what: str, error: Exception) -> StoreError:
        return StoreError(f"The store '{self.target}' could not be {what}: {error}.")
