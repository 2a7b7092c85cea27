# SPDX-License-Identifier: Apache-2.0
"""Repairs a store and reports what was done. Nothing is deleted that could still be read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from fedvitals.errors import FedvitalsError, StoreError
from fedvitals.store import ddl
from fedvitals.store.checksums import Report
from fedvitals.store.checksums import examine as examine_pages
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.identity import has_foreign_log
from fedvitals.store.lock import WriterLock
from fedvitals.store.schema import VERSION
from fedvitals.store.sqlite import check_file, check_version
from fedvitals.store.upkeep import doctor
from fedvitals.store.upkeep.opening import transaction, upkeep
from fedvitals.store.upkeep.salvage import salvage
from fedvitals.store.upkeep.values import missing_structure, replace_unreadable


def mend(where: Path | str) -> list[str]:
    """Repair what can be repaired; StoreError if another process writes the file. Returns sentences on the repairs."""
    if isinstance(where, str):
        with upkeep(where) as database:
            return _content(database)
    return _mend_file(where)


def _mend_file(path: Path) -> list[str]:
    if not path.exists():
        raise StoreError(f"There is no store '{path}'.")
    wrong, report = _damage(path)
    if report.damaged_pages or (wrong and not all("index" in line for line in wrong)):
        return [_salvage(path, report.damaged_pages)]
    done = [f"This cannot be brought back: {problem}; what was lost is lost." for problem in report.problems]
    if report.problems or report.sums is None:
        done.append("Noted the checksums of all pages as they are now.")
    if path.with_name(path.name + ".lock").exists() and doctor.writing_process(path) is None:
        done.append("Removed the lock of a process that was killed.")
    log = path.with_name(path.name + "-wal")
    if has_foreign_log(path):
        done.append(f"Moved {log.name} aside: it belongs to another file that had this name before.")
    elif log.exists() and log.stat().st_size:
        done.append(f"Folded {log.stat().st_size / 1e6:.1f} MB of {log.name} into the store.")
    if _is_incomplete(path):
        return [*done, _salvage(path, [])]
    with upkeep(path) as database:
        if wrong:
            database.execute("REINDEX")
        if not doctor.integrity(database):
            done += ["Rebuilt the indexes; the rows themselves were sound."] if wrong else []
            return [*done, *_content(database)]
    return [*done, _salvage(path, [])]


def _damage(path: Path) -> tuple[list[str], Report]:
    """Return what is wrong with the file, found without opening it in a way that could change it."""
    try:
        check_file(path)
        report = examine_pages(path)
        with contextlib.closing(doctor.open_read_only(path)) as connection:
            return doctor.integrity(Database(connection, SQLITE, str(path))), report
    except (FedvitalsError, sqlite3.Error, OSError) as error:
        return [str(error)], Report()


def _is_incomplete(path: Path) -> bool:
    """Whether the file lacks tables or columns that its version has."""
    with contextlib.closing(doctor.open_read_only(path)) as connection:
        database = Database(connection, SQLITE, str(path))
        return any(not name.startswith("view") for name in missing_structure(database, check_version(database)))


def _salvage(path: Path, damaged_pages: Sequence[int]) -> str:
    lock = WriterLock(path)
    lock.hold()
    try:
        return salvage(path, damaged_pages)
    finally:
        lock.release()


def _content(database: Database) -> list[str]:
    steps = (_tables, _values, _numbers, _blocks, _names, _delivered, _ends)
    with transaction(database):
        return [sentence for step in steps if (sentence := step(database))]


def _tables(database: Database) -> str:
    """Create the views again: they hold no data."""
    if database.dialect.shared or not missing_structure(database, VERSION):
        return ""
    for name, sql in ddl.views(SQLITE).items():
        database.execute(f"DROP VIEW IF EXISTS {name}")
        database.execute(sql)
    return "Made the views anew."


def _values(database: Database) -> str:
    return "" if database.dialect.shared else replace_unreadable(database, VERSION)


def _numbers(database: Database) -> str:
    """Remove the round from records whose round is no integer; the records stay."""
    wrong = doctor.misnumbered(database)
    for table, column in wrong:
        condition = f"WHERE TYPEOF({column}) NOT IN ('integer', 'null')"
        if table == "run_round":  # a list of the existing rounds
            database.execute(f"DELETE FROM {table} {condition}")  # noqa: S608 - our own words only
        else:
            database.execute(f"UPDATE {table} SET {column} = NULL {condition}")  # noqa: S608
    return f"Took {sum(wrong.values())} rows out of rounds and steps that are no integers." if wrong else ""


def _names(database: Database) -> str:
    lost = doctor.nameless(database)
    database.many("INSERT INTO symbol (id, text) VALUES (?, ?)", [(n, f"(name {n} is lost)") for n in lost])
    return f"Gave {len(lost)} lost names a stand-in." if lost else ""


def _delivered(database: Database) -> str:
    wrong = doctor.overlapping(database)
    for key in wrong:
        whole: list[list[int]] = []
        for first, last in sorted(database.rows("SELECT first, last FROM delivered WHERE run = ? AND source = ?", key)):
            if whole and first <= whole[-1][1] + 1:
                whole[-1][1] = max(last, whole[-1][1])
            elif first <= last:
                whole.append([first, last])
        database.execute("DELETE FROM delivered WHERE run = ? AND source = ?", key)
        database.many(
            "INSERT INTO delivered (run, source, first, last) VALUES (?, ?, ?, ?)",
            [(*key, *pair) for pair in whole],
        )
    return f"Set the delivered records of {len(wrong)} sources in order." if wrong else ""


def _blocks(database: Database) -> str:
    broken = doctor.broken_blocks(database)
    for block in broken:
        database.execute("DELETE FROM layer_matrix WHERE block = ?", (block,))
        database.execute("DELETE FROM layer_block WHERE arrival = ?", (block,))
    return f"Removed {len(broken)} blocks of layer statistics that could not be unpacked." if broken else ""


def _ends(database: Database) -> str:
    if database.dialect.shared:
        return ""  # it may be being written
    ends = doctor.unfinished(database)
    database.execute(
        "UPDATE run SET finished = COALESCE((SELECT MAX(last) FROM run_round WHERE run_round.run = run.id), started) "
        "WHERE finished IS NULL"
    )
    return f"Closed {len(ends)} runs that were killed, at the time of their last record." if ends else ""
