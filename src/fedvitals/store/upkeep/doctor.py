# SPDX-License-Identifier: Apache-2.0
"""Reports what is wrong with a store, without changing anything; `repair` changes it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedvitals.errors import FedvitalsError, StoreError
from fedvitals.store.checksums import Report, noted_log
from fedvitals.store.checksums import examine as examine_pages
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.identity import continued_in, has_foreign_log, logs_aside
from fedvitals.store.lock import note_of, owner_of
from fedvitals.store.packing import entries_of, numbers_of
from fedvitals.store.postgres import address_of, read_postgres
from fedvitals.store.schema import TABLES, VERSION
from fedvitals.store.sqlite import check_file, check_version
from fedvitals.store.upkeep.values import missing_structure, unreadable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PLACES = ("round", "step", "first_round", "last_round")  # columns with a record's position in the run
WAL_BYTES = 256 << 20  # a log larger than this is being folded in by no process


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that was examined."""

    what: str
    state: str  # "fine", "note" or "trouble"
    text: str


def examine(where: Path | str) -> list[Sign]:
    """Return everything that can be seen of a store, in order of importance."""
    try:
        if isinstance(where, str):
            with contextlib.closing(read_postgres(where)) as reader:
                return [_version(reader.database), *_content(reader.database, written=True)]
        return _examine_file(where)
    except (FedvitalsError, sqlite3.Error, OSError) as error:
        return [Sign("store", "trouble", str(error))]


def damage_in(where: Path | str) -> str | None:
    """Return a sentence on what is wrong with a store, after a reader failed on it; None if nothing is."""
    if isinstance(where, Path) and not where.exists():
        return None
    troubles = [f"{sign.what}: {sign.text}" for sign in examine(where) if sign.state == "trouble"]
    if not troubles:
        return None
    shown = address_of(where).shown if isinstance(where, str) else where
    return f"The store '{shown}' is damaged: {'; '.join(troubles[:2])}. `fedvitals doctor --mend` repairs what it can."


def _examine_file(path: Path) -> list[Sign]:
    if not path.exists():
        return [Sign("store", "trouble", f"There is no store '{path}'.")]
    check_file(path)
    owner = writing_process(path)
    report = examine_pages(path)
    with contextlib.closing(open_read_only(path)) as connection:
        database = Database(connection, SQLITE, str(path))
        wrong = integrity(database)
        signs = [_file(path, wrong), _checksums(report, owner), _lock(path, owner), _log(path, owner)]
        signs += _exchanged(path)
        if wrong:
            return signs
        return [*signs, _version(database), *_content(database, written=owner is not None)]


def _checksums(report: Report, owner: str | None) -> Sign:
    if report.problems:
        return Sign("checksums", "trouble", "; ".join(report.problems))
    if report.sums is not None:
        return Sign("checksums", "fine", f"{len(report.sums.pages)} pages are as they were written")
    if report.state == "edited":
        words = "another program has written to the file since, and no checksums cover that"
    else:
        words = "none: written by an older fedvitals, or copied by a program that leaves them out"
    more = "" if owner is not None else "; --mend notes new ones"
    return Sign("checksums", "note", words + more)


def open_read_only(path: Path) -> sqlite3.Connection:
    """Return a connection that reads the file with its log, unless the log belongs to another file."""
    alone = "&immutable=1" if has_foreign_log(path) else ""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{alone}", uri=True, timeout=10, isolation_level=None)


def integrity(database: Database) -> list[str]:
    """Return what SQLite finds wrong with the file itself; [] if nothing."""
    try:
        problems = [str(row[0]) for row in database.rows("PRAGMA integrity_check(20)")]
    except FedvitalsError as error:
        return [str(error)]
    return [] if problems == ["ok"] else problems


def _file(path: Path, wrong: list[str]) -> Sign:
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return Sign("file", "trouble", f"{size}, damaged: {' '.join(wrong[0].split())}{more}")
    return Sign("file", "fine", f"{size}, sound")


def writing_process(path: Path) -> str | None:
    """Return the process that holds the store's lock; None if there is none."""
    lock = path.with_name(path.name + ".lock")
    if fcntl is None or not lock.exists():
        return None
    with lock.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return owner_of(file.fileno())
    return None


def _lock(path: Path, owner: str | None) -> Sign:
    if owner is not None:
        return Sign("writer", "fine", f"process {owner} writes it")
    if path.with_name(path.name + ".lock").exists() and not _was_killed(path):
        return Sign("writer", "note", "nobody; a lock file tells whose log lies beside the store, which harms nothing")
    if path.with_name(path.name + ".lock").exists():
        return Sign(
            "writer", "note", "nobody; the lock of a process that was killed lies beside it, which harms nothing"
        )
    return Sign("writer", "fine", "nobody writes it")


def _was_killed(path: Path) -> bool:
    """Whether the last writer ended without closing the store. A writer that closed it has removed its note on the log.

    Before its first record a writer has left no note, and without a log there is nothing that a reader could hold.
    """
    log = path.with_name(path.name + "-wal")
    return noted_log(note_of(path)) is not None or not log.exists() or not log.stat().st_size


def _log(path: Path, owner: str | None) -> Sign:
    log = path.with_name(path.name + "-wal")
    size = log.stat().st_size if log.exists() else 0
    if not size:
        return Sign("log", "fine", "folded into the file")
    wal_size = f"{size / 1e6:.1f} MB in {log.name}"
    if has_foreign_log(path):
        mend = "the training that writes it" if owner is not None else "--mend"
        return Sign(
            "log", "trouble", f"{wal_size} belong to another file that had this name before; {mend} moves it aside"
        )
    if owner is None:
        why = "left by a process that was killed" if _was_killed(path) else "kept for a reader that had the store open"
        return Sign("log", "note", f"{wal_size}, {why}; it belongs to the store")
    state = "note" if size > WAL_BYTES else "fine"
    return Sign(
        "log",
        state,
        wal_size + (": a reader that never ends keeps it from being folded in" if state != "fine" else ""),
    )


def _exchanged(path: Path) -> list[Sign]:
    """Return what a training left beside a store whose file was replaced while it ran."""
    signs, logs, stores = [], logs_aside(path), continued_in(path)
    if stores:
        names = ", ".join(store.name for store in stores[:3]) + (", ..." if len(stores) > 3 else "")
        words = f"replaced while a training wrote it; that went on in {names}, a store like any other"
        signs.append(Sign("replaced", "note", words))
    if logs:
        names = ", ".join(log.name for log in logs[:3]) + (", ..." if len(logs) > 3 else "")
        words = (
            f"logs of another file that had this name are kept as {names}; no store needs them, and you may delete them"
        )
        signs.append(Sign("replaced", "note", words))
    return signs


def _version_of(database: Database) -> int:
    """Return the version of the tables. A file may be older than this fedvitals; an older server was refused before."""
    return check_version(database) if database.dialect.name == "sqlite" else VERSION


def _version(database: Database) -> Sign:
    version = _version_of(database)
    if version < VERSION:
        return Sign("schema", "note", f"version {version}; the next training brings it to {VERSION}")
    return Sign("schema", "fine", f"version {version}")


def _content(database: Database, *, written: bool) -> list[Sign]:
    """Return the signs of each part; a part that cannot be examined is reported as trouble."""
    checks: dict[str, Callable[[], list[Sign]]] = {
        "tables": lambda: _structure(database),
        "values": lambda: _values(database),
        "names": lambda: [_symbols(database)],
        "numbers": lambda: _numbers(database),
        "identity": lambda: [_delivered(database)],
        "statistics": lambda: [_blobs(database)],
        "runs": lambda: _runs(database, written=written),
    }
    signs: list[Sign] = []
    for what, check in checks.items():
        try:
            signs += check()
        except Exception as error:  # noqa: BLE001 - damage can turn a row into anything
            signs.append(Sign(what, "trouble", f"cannot be examined ({type(error).__name__}: {error})"))
    return signs


def _structure(database: Database) -> list[Sign]:
    missing = missing_structure(database, _version_of(database)) if database.dialect.name == "sqlite" else []
    if not missing:
        return []
    more = f" (and {len(missing) - 3} more)" if len(missing) > 3 else ""
    return [Sign("tables", "trouble", f"missing, or not as declared: {', '.join(missing[:3])}{more}")]


def _values(database: Database) -> list[Sign]:
    if database.dialect.name != "sqlite":
        return []
    unreadable_columns = [*unreadable(database, _version_of(database))]
    if not unreadable_columns:
        return []
    places = ", ".join(f"{table.name}.{column.name}" for table, column, _ in unreadable_columns[:3])
    count = sum(len(rows) for _, _, rows in unreadable_columns)
    return [Sign("values", "trouble", f"{count} rows hold something that cannot be read, in {places}")]


def misnumbered(database: Database) -> dict[tuple[str, str], int]:
    """Count rows whose round or step is no integer, by table and column. Only SQLite accepts such a value."""
    if database.dialect.name != "sqlite":
        return {}
    version, counts = _version_of(database), dict[tuple[str, str], int]()
    for table in TABLES:
        for column in table.columns:
            if column.name in PLACES and column.type == "integer" and max(table.since, column.since) <= version:
                sql = f"SELECT COUNT(*) FROM {table.name} WHERE TYPEOF({column.name}) NOT IN ('integer', 'null')"  # noqa: S608
                ((count,),) = database.rows(sql)
                counts |= {(table.name, column.name): count} if count else {}
    return counts


def _numbers(database: Database) -> list[Sign]:
    count = sum(misnumbered(database).values())
    return [Sign("numbers", "trouble", f"{count} rows have a round or step that is no integer")] if count else []


def nameless(database: Database) -> list[int]:
    """Return the numbers used for a name that the store does not have."""
    numbers: set[int] = set()
    version = _version_of(database)
    for table in TABLES:
        for column in table.columns:
            if column.type == "symbol" and max(table.since, column.since) <= version:
                numbers |= {
                    row[0]
                    for row in database.rows(
                        f'SELECT DISTINCT t."{column.name}" FROM {table.name} AS t WHERE t."{column.name}" IS NOT NULL '  # noqa: S608
                        f'AND NOT EXISTS (SELECT 1 FROM symbol AS s WHERE s.id = t."{column.name}")'
                    )
                }
    return sorted(numbers)


def _symbols(database: Database) -> Sign:
    lost = nameless(database)
    if lost:
        return Sign("names", "trouble", f"{len(lost)} numbers stand for names that are not in the store")
    ((count,),) = database.rows("SELECT COUNT(*) FROM symbol")
    return Sign("names", "fine", f"{count}, all there")


def overlapping(database: Database) -> list[tuple[int, int]]:
    """Return the runs and sources whose intervals of delivered records are inconsistent."""
    return [
        (run, source)
        for run, source in database.rows(
            "SELECT DISTINCT a.run, a.source FROM delivered AS a LEFT JOIN delivered AS b "
            "ON b.run = a.run AND b.source = a.source AND b.first > a.first AND b.first <= a.last + 1 "
            "WHERE a.last < a.first OR b.first IS NOT NULL"
        )
    ]


def _delivered(database: Database) -> Sign:
    wrong = overlapping(database)
    if wrong:
        return Sign("identity", "trouble", f"what was delivered is muddled for {len(wrong)} sources")
    ((intervals,),) = database.rows("SELECT COUNT(*) FROM delivered")
    return Sign("identity", "fine", f"{intervals} intervals of delivered records, none overlapping")


def broken_blocks(database: Database) -> list[int]:
    """Return the blocks of layer statistics that cannot be unpacked because sizes or checksums do not match."""
    known = {arrival for (arrival,) in database.rows("SELECT arrival FROM layer_block")}
    broken = {block for (block,) in database.rows("SELECT DISTINCT block FROM layer_matrix") if block not in known}
    for arrival in known:
        ((family, layers, entries, coordinates, details),) = database.rows(
            "SELECT s.text, b.layers, b.entries, b.coordinates, b.details "
            "FROM layer_block AS b LEFT JOIN symbol AS s ON s.id = b.family WHERE b.arrival = ?",
            (arrival,),
        )
        rows = database.rows("SELECT layer, numbers FROM layer_matrix WHERE block = ?", (arrival,))
        try:
            entries_of(coordinates, details, entries)
            held = [len(numbers_of(family, numbers, entries)) for _, numbers in rows]
        except (KeyError, StoreError, TypeError, ValueError, ZeroDivisionError):
            broken.add(arrival)
            continue
        expected = [layers if layer < 0 else 1 for layer, _ in rows]
        if held != expected or sum(held) != layers:
            broken.add(arrival)
    return sorted(broken)


def _blobs(database: Database) -> Sign:
    broken = broken_blocks(database)
    if broken:
        return Sign("statistics", "trouble", f"{len(broken)} blocks of layer statistics cannot be unpacked")
    ((blocks, entries),) = database.rows("SELECT COUNT(*), COALESCE(SUM(entries), 0) FROM layer_block")
    return Sign("statistics", "fine", f"{entries} matrices in {blocks} blocks")


def unfinished(database: Database) -> list[str]:
    """Return the ids of the runs that have no end."""
    return [
        str(row[0])
        for row in database.rows(
            "SELECT s.text FROM run AS r JOIN symbol AS s ON s.id = r.id WHERE r.finished IS NULL ORDER BY s.text"
        )
    ]


def _runs(database: Database, *, written: bool) -> list[Sign]:
    ((count,),) = database.rows("SELECT COUNT(*) FROM run")
    ends = unfinished(database)
    signs = [Sign("runs", "fine", f"{count}, {len(ends)} of them open")]
    if ends and not written:
        named = ", ".join(ends[:3]) + (", ..." if len(ends) > 3 else "")
        signs.append(Sign("runs", "note", f"without an end, and nobody writes: killed ({named})"))
    ((strays,),) = database.rows(
        "SELECT COUNT(*) FROM (SELECT DISTINCT run FROM run_round) AS d WHERE run NOT IN (SELECT id FROM run)"
    )
    if strays:
        signs.append(
            Sign("runs", "note", f"{strays} runs have records but no description; `fedvitals query` shows them")
        )
    return signs
