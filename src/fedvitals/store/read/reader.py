# SPDX-License-Identifier: Apache-2.0
"""Opens stores read-only, for any number of readers, also while a training writes."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from fedvitals.errors import EmptyStoreError, StoreError
from fedvitals.stats import FAMILIES, STATISTICS, derive, unpack
from fedvitals.store import checksums
from fedvitals.store.ddl import quoted
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.identity import has_foreign_log
from fedvitals.store.packing import NONE, entries_of, numbers_of
from fedvitals.store.read.history import SqlHistory
from fedvitals.store.schema import LAYER_STATISTICS, TABLES, VERSION
from fedvitals.store.sqlite import check_file, check_version
from fedvitals.store.symbols import Names

_MAY = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_NEVER = ("load_extension", "fts3_tokenizer")  # functions: one loads code from a file, the other reveals an address
_PRAGMAS = (
    "application_id", "user_version", "data_version", "schema_version",
    "database_list", "index_info", "index_list", "table_info", "table_list", "shrink_memory",
)  # fmt: skip
# The size of a connection's page cache. A walk over all rounds of a run fills it, so that with SQLite's default of
# 2,000 a server's memory grows with the run it shows; the system caches the pages anyway, and nothing is slower. For a
# run of 3,400 rounds, all pages took the same time with 100, 200 and 500, and a third longer with 50.
CACHE_KIBIBYTES = 200
# Prepared statements that a connection keeps, 5 kB each. A server's readers would each fill Python's default of 128 in
# time, some of them rarely used; answers take no longer with fewer.
STATEMENTS = 16

# Makes a store of an older version read like one of this version: in the reader's own temporary schema, not in the
# file.
_SINCE_3 = (
    "PRAGMA temp_store = MEMORY",
    "CREATE TEMP VIEW sketch AS SELECT *, 1 AS version FROM main.sketch",
)
_LOOKS_NEW: Mapping[int, tuple[str, ...]] = {
    3: _SINCE_3,
    2: (
        *_SINCE_3,
        "CREATE TEMP VIEW layer_block AS SELECT *, NULL AS whole FROM main.layer_block",
        "CREATE TEMP TABLE mark (run INTEGER, kind TEXT, target TEXT, value TEXT, at REAL)",
        "CREATE TEMP VIEW marks AS SELECT * FROM mark",
    ),
}


def _without_wrong_rounds(version: int) -> Iterator[str]:
    """Yield statements after which a reader sees records of a round that is no integer as having no round.

    They act on the reader's own temporary schema; `fedvitals doctor --mend` changes the file.
    """
    yield "PRAGMA temp_store = MEMORY"
    yield "CREATE TEMP VIEW run_round AS SELECT * FROM main.run_round WHERE TYPEOF(round) = 'integer'"
    for table in TABLES:
        columns = [column for column in table.columns if column.since <= version]
        if table.name == "run_round" or table.since > version or not {"round", "step"} & {c.name for c in columns}:
            continue
        shown = ", ".join(_integer(column.name) for column in columns)
        for name in filter(None, (table.name, table.view)):
            yield f"CREATE TEMP VIEW IF NOT EXISTS {name} AS SELECT {shown} FROM main.{name}"  # noqa: S608


def _integer(column: str) -> str:
    if column not in ("round", "step"):
        return quoted(column)
    return f"CASE WHEN TYPEOF({column}) = 'integer' THEN {column} END AS {column}"


def _has_wrong_rounds(database: Database) -> bool:
    """Whether a run has a round that is a text. SQLite sorts those after all numbers, so one look per run is enough."""
    last = "SELECT MAX(round) FROM run_round WHERE run_round.run = run.id"
    return bool(database.rows(f"SELECT 1 FROM run WHERE TYPEOF(({last})) = 'text' LIMIT 1"))  # noqa: S608


def _authorise(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading and nothing else: «mode=ro» alone would let ATTACH and VACUUM INTO write other files."""
    if action in _MAY and second not in _NEVER:
        return sqlite3.SQLITE_OK
    if (
        action == sqlite3.SQLITE_PRAGMA
        and first in _PRAGMAS
        and (second is None or not first.endswith(("id", "version")))
    ):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _layer(
    family: str, position: int, stored: int, layers: int, count: int, coordinates: bytes, details: bytes, blob: bytes
) -> str:
    """Return one layer of a block as JSON rows for the view `layer_statistics`; NaN is NULL as everywhere in SQL."""
    if position >= layers or FAMILIES[family].columns is not STATISTICS:
        return "[]"
    entries = entries_of(coordinates, details, count)
    matrix = unpack(family, numbers_of(family, blob, count)[position if stored < 0 else 0].T)
    columns: list[list[float | None]] = [
        [None if round_ == NONE else round_ for round_ in entries.rounds.tolist()],
        [node or None for node in entries.nodes.tolist()],
        [None if step == NONE else step for step in entries.steps.tolist()],
        [group or None for group in entries.groups.tolist()],
        entries.at.tolist(),
        *(derive(family, matrix, statistic).tolist() for statistic in LAYER_STATISTICS),
    ]
    text = json.dumps(list(zip(*columns, strict=True)))
    # JSON has neither NaN nor infinity, but a number too large for float64 is read as infinity.
    return text.replace("NaN", "null").replace("Infinity", "9e999")


class Reader:
    """An open store to read from; the modules of `store.read` contain the queries."""

    def __init__(self, database: Database, version: int = VERSION) -> None:
        self.database = database
        self.names = Names(database)
        self._version = version

    def is_outdated(self) -> bool:
        """Whether this reads a store as one of an older version, and it has been upgraded since."""
        return self._version != VERSION and self.database.rows("PRAGMA user_version") != [(self._version,)]

    def history(self, run: str) -> SqlHistory:
        """Return the history of a run, by its id."""
        return SqlHistory(self.database, run, self.names)

    def release_memory(self) -> None:
        """Free the pages that SQLite caches for this connection, up to 0.2 MB; the system may still cache them."""
        if self.database.dialect is SQLITE:
            self.database.execute("PRAGMA shrink_memory")

    def close(self) -> None:
        """Close the connection."""
        self.database.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_damaged(path: Path) -> None:
    """Raise StoreError if a store's pages differ from what was written."""
    try:
        if checksums.is_known_sound(path):
            return
        problems = checksums.examine(path).problems
    except OSError as error:
        raise StoreError(f"The store '{path}' cannot be opened: {error.strerror}.") from error
    if problems:
        raise StoreError(
            f"The store '{path}' is damaged: {'; '.join(problems)}. Its numbers may be wrong, so none are shown. "
            f"`fedvitals doctor {path} --mend` saves what is sound."
        )
    checksums.remember_sound(path)


def read_sqlite(path: Path) -> Reader:
    """Open the store in that file for reading."""
    if not path.exists():
        raise StoreError(
            f"There is no store '{path}'. Name one with --store or FEDVITALS_STORE, change to its folder, or make one: "
            "`fedvitals demo` does, and so does `fedvitals.Monitor(...)` in a training script."
        )
    check_file(path)
    refuse_damaged(path)
    # Next to a write-ahead log, even a reader needs a file of its own. In a folder where it can have none (an archive,
    # a read-only mount) nobody can write either, and the store can be read as it is. A log of another file that had
    # this name before must not be read into this one.
    fixed = not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists()
    fixed = fixed or has_foreign_log(path)
    address = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if fixed else ''}"
    try:
        connection = sqlite3.connect(
            address, uri=True, timeout=10, isolation_level=None, check_same_thread=False, cached_statements=STATEMENTS
        )
    except sqlite3.Error as error:
        raise StoreError(f"The store '{path}' cannot be opened: {error}.") from error
    database = Database(connection, SQLITE, str(path))
    try:
        version = check_version(database)
        if version < VERSION and version not in _LOOKS_NEW:
            what = f"has schema version {version}" if version else "is empty"
            raise (StoreError if version else EmptyStoreError)(  # noqa: TRY301 - the connection is to be closed
                f"The store '{path}' {what}; this fedvitals reads version {VERSION}. "
                "The first training that writes to it brings it up to date."
            )
        for statement in _LOOKS_NEW.get(version, ()):
            database.execute(statement)
        for statement in _without_wrong_rounds(version) if _has_wrong_rounds(database) else ():
            database.execute(statement)
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIBIBYTES}")
        connection.create_function("fedvitals_layer", 8, _layer, deterministic=True)
        connection.set_authorizer(_authorise)
    except BaseException:
        connection.close()
        raise
    return Reader(database, version)
