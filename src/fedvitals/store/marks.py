# SPDX-License-Identifier: Apache-2.0
"""Reads and writes what people note about a run: tags, and findings acknowledged or muted.

A mark is one row of a separate table and adds no names, so nothing that a training has cached becomes wrong.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedvitals.errors import BusyError, ConfigError, StoreError, unknown
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.identity import has_foreign_log
from fedvitals.store.lock import is_held_here
from fedvitals.store.postgres import write_postgres
from fedvitals.store.read.reader import Reader
from fedvitals.store.schema import VERSION
from fedvitals.store.sqlite import check_file, check_version, maintain_sqlite
from fedvitals.store.symbols import encodable
from fedvitals.store.upkeep.opening import transaction

KINDS = ("tag", "acknowledged", "muted")
LONGEST = 2000  # characters of a target or value
PATIENCE = 3.0  # seconds to wait for a batch of a training; it would wait as long for us, which takes milliseconds


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark that a person set on a run."""

    run: str
    kind: str  # one of KINDS
    target: str  # the tag, or the key of a case
    value: str = ""  # for example the reason for muting it
    at: float = 0.0


def marks(reader: Reader, run: str | None = None) -> list[Mark]:
    """Return all marks of a run, or of every run, in the order in which they were set."""
    condition, values = ("", ()) if run is None else (" WHERE run = ?", (run,))
    rows = reader.database.rows(
        f"SELECT run, kind, target, value, at FROM marks{condition} ORDER BY at, run, kind, target",  # noqa: S608
        values,
    )
    return [Mark(*row) for row in rows]


def set_mark(where: Path | str, run: str, kind: str, target: str, value: str = "") -> Mark:
    """Set a mark, or overwrite it. Raises ConfigError if there is no such run or kind."""
    target, value = _checked(kind, target, value)
    mark = Mark(run, kind, target, value, time.time())
    with _writing(where) as database, transaction(database):
        database.execute(
            "INSERT INTO mark (run, kind, target, value, at) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (run, kind, target) DO UPDATE SET value = excluded.value, at = excluded.at",
            (_number(database, run), kind, target, value, mark.at),
        )
    return mark


def clear_mark(where: Path | str, run: str, kind: str, target: str) -> bool:
    """Remove a mark. Returns whether there was one."""
    target, _ = _checked(kind, target, "")
    with _writing(where) as database, transaction(database):
        place = (_number(database, run), kind, target)
        rows = database.rows("SELECT 1 FROM mark WHERE run = ? AND kind = ? AND target = ?", place)
        database.execute("DELETE FROM mark WHERE run = ? AND kind = ? AND target = ?", place)
    return bool(rows)


def _checked(kind: str, target: str, value: str) -> tuple[str, str]:
    if kind not in KINDS:
        raise ConfigError(unknown("kind of mark", kind, KINDS))
    if not target.strip():
        raise ConfigError(f"A mark of kind '{kind}' needs a text.")
    if max(len(target), len(value)) > LONGEST:
        raise ConfigError(f"A mark has at most {LONGEST} characters, got {max(len(target), len(value))}.")
    return encodable(target), encodable(value)


def _number(database: Database, run: str) -> int:
    rows = database.rows(
        "SELECT r.id FROM run AS r JOIN symbol AS s ON s.id = r.id WHERE s.text = ?", (encodable(run),)
    )
    if not rows:
        raise ConfigError(unknown("run", run, [row[0] for row in database.rows("SELECT id FROM runs")]))
    return int(rows[0][0])


@contextlib.contextmanager
def _writing(where: Path | str) -> Iterator[Database]:
    """Return a connection that may write a row while another process writes the store."""
    if isinstance(where, str):
        with write_postgres(where) as database:
            yield database
        return
    if not where.exists():
        raise StoreError(f"There is no store '{where}'. Name one with --store or FEDVITALS_STORE.")
    check_file(where)
    if has_foreign_log(where):
        raise StoreError(
            f"Beside the store '{where}' lies the log of another file that had this name before. Nothing was changed. "
            f"`fedvitals doctor {where} --mend` moves it aside."
        )
    if not is_held_here(where):
        with contextlib.ExitStack() as stack:
            try:
                database = stack.enter_context(maintain_sqlite(where))
            except BusyError:  # a training is writing it
                pass
            else:
                yield database
                return
    connection = sqlite3.connect(where.absolute(), timeout=PATIENCE, isolation_level=None)
    try:
        database = Database(connection, SQLITE, str(where))
        if check_version(database) < VERSION:
            with maintain_sqlite(where):  # upgrades it, or reports which process is writing it
                pass
        database.execute("PRAGMA wal_autocheckpoint = 0")  # the training folds the log in, and knows the checksums
        yield database
    finally:
        connection.close()
