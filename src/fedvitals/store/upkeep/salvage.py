# SPDX-License-Identifier: Apache-2.0
"""Copies the readable rows of a damaged file into a new file beside it, and leaves the damaged one as it is."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedvitals.errors import StoreError
from fedvitals.records import Run
from fedvitals.store.ddl import quoted
from fedvitals.store.schema import TABLES, VERSION, Table
from fedvitals.store.sqlite import PAGE, SqliteStore, maintain_sqlite
from fedvitals.store.upkeep import doctor

ATTEMPTS = 2000  # ranges of one table's rows that may fail before giving up
HEADER = 100  # bytes of a SQLite file before its first page


def salvage(path: Path, damaged_pages: Sequence[int] = ()) -> str:
    """Copy what can be read. Returns a sentence on how much that was. StoreError if nothing could be read.

    `damaged_pages`: pages whose checksums are wrong. Nothing on them is copied.
    """
    target = _free_name(path)
    with SqliteStore(target) as store:
        store.write([Run("salvage", "salvage")])  # creates the tables
    try:
        with (
            tempfile.TemporaryDirectory(dir=path.parent) as folder,
            contextlib.closing(_open(path, Path(folder), damaged_pages)) as old,
        ):
            counts = _copy(old, target)
    except (sqlite3.Error, OSError) as error:
        target.unlink(missing_ok=True)
        raise StoreError(f"Nothing of the store '{path}' could be read: {error}. It was left as it is.") from error
    if not sum(counts.values()):
        target.unlink(missing_ok=True)
        raise StoreError(f"Nothing of the store '{path}' could be read. It was left as it is.")
    saved = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
    return (
        f"Saved what could be read into '{target}' ({saved}). '{path}' was left as it is; when you need it no longer, "
        "put the new file in its place."
    )


def _free_name(path: Path) -> Path:
    names = [path.with_name(f"{path.stem}.salvaged{path.suffix}")]
    names += [path.with_name(f"{path.stem}.salvaged-{i}{path.suffix}") for i in range(2, 1000)]
    return next(name for name in names if not name.exists())


def _open(path: Path, folder: Path, damaged_pages: Sequence[int]) -> sqlite3.Connection:
    """Return a copy of the damaged file, with its log and, if its list of tables is broken, one that fits."""
    copy = folder / "damaged.db"
    shutil.copyfile(path, copy)
    version = _version(copy)
    with copy.open("r+b") as file:
        for page in damaged_pages:
            if page > 1:  # page 1 has the list of tables
                file.seek((page - 1) * PAGE)
                file.write(bytes(PAGE))
    log = path.with_name(path.name + "-wal")
    if log.exists():
        shutil.copyfile(log, copy.with_name(copy.name + "-wal"))
    if not _readable(copy, version):
        with SqliteStore(folder / "sound.db") as sound:
            sound.write([Run("salvage", "salvage")])
        _lend(copy, folder / "sound.db", [])
        if not _readable(copy, version):
            # Stores have their tables at the same places, unless they were vacuumed: those of a new version come last.
            _lend(copy, folder / "sound.db", _pages_of_schema((folder / "sound.db").read_bytes()))
    connection = sqlite3.connect(copy, isolation_level=None)
    # Text that the damage has turned into invalid bytes must not prevent reading the rest of the row.
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def _lend(copy: Path, sound: Path, pages: list[int]) -> None:
    """Give a damaged file the header and these pages of an undamaged one."""
    lender = sound.read_bytes()
    with copy.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(lender[(page - 1) * PAGE : page * PAGE])
        file.seek(0)
        # The number of pages is counted again, and no free pages are known.
        file.write(lender[:28] + bytes(12) + lender[40:HEADER])


def _pages_of_schema(lender: bytes) -> list[int]:
    """Return the first page and, if it is a list of others (an interior B-tree page), those."""
    pages = [1]
    if lender[HEADER] == 5:
        cells = int.from_bytes(lender[HEADER + 3 : HEADER + 5], "big")
        pages.append(int.from_bytes(lender[HEADER + 8 : HEADER + 12], "big"))
        for i in range(cells):
            place = int.from_bytes(lender[HEADER + 12 + 2 * i : HEADER + 14 + 2 * i], "big")
            pages.append(int.from_bytes(lender[place : place + 4], "big"))
    return pages


def _version(path: Path) -> int:
    """Return the version of the schema in the header; the lowest if that number is impossible."""
    with path.open("rb") as file:
        version = int.from_bytes(file.read(HEADER)[60:64], "big")
    return version if 1 <= version <= VERSION else 1


def _readable(path: Path, version: int) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            return tables >= {table.name for table in TABLES if table.since <= version}
    except sqlite3.Error:
        return False


def _copy(old: sqlite3.Connection, target: Path) -> dict[str, int]:
    counts = {}
    with maintain_sqlite(target) as database:
        new = database.connection
        new.execute("BEGIN IMMEDIATE")
        for table in TABLES:
            new.execute(f"DELETE FROM {table.name}")  # noqa: S608 - our own words only
        for table in TABLES:
            columns = ", ".join(quoted(column.name) for column in table.columns)
            holes = ", ".join("?" * len(table.columns))
            insert = f"INSERT OR IGNORE INTO {table.name} ({columns}) VALUES ({holes})"  # noqa: S608
            counts[table.name] = 0
            for row in _rows(old, table, columns):
                if not _fits(row, table):
                    continue
                with contextlib.suppress(sqlite3.Error):  # a row that the damage has made invalid
                    counts[table.name] += new.execute(insert, row).rowcount
        new.execute("COMMIT")
        for block in doctor.broken_blocks(database):
            new.execute("DELETE FROM layer_matrix WHERE block = ?", (block,))
            new.execute("DELETE FROM layer_block WHERE arrival = ?", (block,))
        lost = doctor.nameless(database)
        new.executemany("INSERT INTO symbol (id, text) VALUES (?, ?)", [(n, f"(name {n} is lost)") for n in lost])
    return counts


def _fits(row: tuple[Any, ...], table: Table) -> bool:
    """Whether this can be a row of the table. In a borrowed list of tables, one the file never had points anywhere."""
    json = (value for value, column in zip(row, table.columns, strict=True) if column.type == "json")
    return all(isinstance(value, str) for value in json)


def _rows(old: sqlite3.Connection, table: Table, columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table by ranges of their number, halving each range that cannot be read as a whole."""
    sql = f"SELECT rowid, {columns} FROM {table.name} WHERE rowid BETWEEN ? AND ? ORDER BY rowid"  # noqa: S608
    ranges, failed = [(0, _last(old, table.name))], 0
    while ranges and failed < ATTEMPTS:
        low, high = ranges.pop()
        try:
            for row in old.execute(sql, (low, high)):
                low = row[0] + 1
                yield row[1:]
        except sqlite3.Error:
            failed += 1
            if low < high:
                middle = (low + high) // 2
                ranges += [(middle + 1, high), (low, middle)]


def _last(old: sqlite3.Connection, table: str) -> int:
    try:
        return int(old.execute(f"SELECT MAX(rowid) FROM {table}").fetchone()[0] or 0)  # noqa: S608
    except sqlite3.Error:
        return 1 << 32
