# SPDX-License-Identifier: Apache-2.0
"""Stores records in one SQLite file, and refuses files that are no store or were replaced."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

from fedvitals.errors import StoreError, StoreLostError
from fedvitals.measurements import Telemetry, record_count
from fedvitals.protocols import Sink
from fedvitals.records import Event, Metric, Run, Where
from fedvitals.store import ddl
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.identity import (
    SIDE_FILES,
    Condition,
    FileWatch,
    free_name,
    maintained,
    set_foreign_log_aside,
    signature_of,
)
from fedvitals.store.lock import WriterLock
from fedvitals.store.schema import VERSION
from fedvitals.store.seal import Seal
from fedvitals.store.writer import Writer

logger = logging.getLogger("fedvitals.store")

APPLICATION = 0x66656476  # «fedv» in the file's header, to recognise databases of other programs
BUSY_SECONDS = 2.0  # for which a statement waits for another program; the queue before the store then retries
PAGE = 8192  # bytes; most of a store consists of blobs of some ten kilobytes


_put_back: set[tuple[int, int]] = set()  # device and inode of files that this process created again in their place
_looked_at: set[tuple[int, int]] = set()  # device and inode of files that were found to be SQLite's, or empty


def check_file(path: Path) -> None:
    """Refuse a file that is not SQLite's, without opening it in a way that could change it.

    Done once for each file: closing it would release every lock that SQLite holds on it for this process (as POSIX
    requires), and the next writer to leave would remove the log that our readers use.
    """
    if path.is_dir():
        raise StoreError(f"The store '{path}' is a folder. Name a file, for example '{path / 'runs.db'}'.")
    try:
        status = path.stat()
        if (status.st_dev, status.st_ino) in _looked_at:
            return
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise StoreError(f"The store '{path}' is a device, a pipe or a socket. Name a file.")
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise StoreError(f"The store '{path}' cannot be opened: {error.strerror}.") from error
    if start and start != b"SQLite format 3\x00":
        raise StoreError(f"'{path}' is not a store: it is no SQLite database. Nothing was changed. Name another file.")
    _looked_at.add((status.st_dev, status.st_ino))


def check_version(database: Database) -> int:
    """Return the version of the schema in an open database, 0 if it is empty; StoreError if it cannot be ours."""
    (version,), (application,) = (database.rows(f"PRAGMA {name}")[0] for name in ("user_version", "application_id"))
    if application == APPLICATION and 0 < version <= VERSION:  # then it also has tables
        return int(version)
    (tables,) = database.rows("SELECT COUNT(*) FROM sqlite_master")[0]
    if tables and application != APPLICATION:
        raise StoreError(
            f"'{database.target}' is not a store: it is a SQLite database of another program. Nothing was changed. "
            "Name another file."
        )
    if version > VERSION:
        raise StoreError(
            f"The store '{database.target}' has schema version {version}; this fedvitals knows versions up to "
            f"{VERSION}. Nothing was changed. Upgrade fedvitals, or name another file."
        )
    return int(version) if tables else 0


def _upgrade(database: Database) -> None:
    database.execute(SQLITE.begin)  # two processes that open an empty file at once take turns
    version = check_version(database)
    try:
        if version < VERSION:
            for statement in ddl.upgrade(version, SQLITE):
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {APPLICATION}")
            database.execute(f"PRAGMA user_version = {VERSION}")
    finally:
        database.execute("COMMIT")


def _connect(path: Path) -> Database:
    if path.exists():
        check_file(path)
    try:
        connection = sqlite3.connect(
            path.absolute(), timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise StoreError(f"The store '{path}' cannot be opened: {error}.") from error
    database = Database(connection, SQLITE, str(path))
    try:
        check_version(database)  # before anything is written
        for setting in (
            f"page_size = {PAGE}",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "secure_delete = OFF",  # some builds overwrite deleted content, which would double the cost of compaction
            "wal_autocheckpoint = 0",  # the log is folded in once the checksums of its pages are recorded: see `Seal`
            "cache_size = -8000",  # KiB: compaction finds in memory what it merges
        ):
            database.execute(f"PRAGMA {setting}")
        _upgrade(database)
    except BaseException:
        connection.close()
        raise
    return database


def _fold(database: Database) -> None:
    """Turn the store into a plain file without side files, usable by any tool and on any read-only disk.

    While a reader is open, this is refused at once; the next writer then does it.
    """
    database.execute("PRAGMA busy_timeout = 0")
    database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    with contextlib.suppress(StoreError):
        database.execute("PRAGMA journal_mode = DELETE")


@contextlib.contextmanager
def maintain_sqlite(path: Path) -> Iterator[Database]:
    """Yield the store for repair or compaction, while no other process writes it."""
    if not path.exists():
        raise StoreError(f"There is no store '{path}'. Name one with --store or FEDVITALS_STORE.")
    lock = WriterLock(path)
    try:
        lock.hold()
    except OSError as error:
        raise StoreError(f"The store '{path}' cannot be written: {error}.") from error
    try:
        _settle_log(path, lock)
        seal = Seal(path, lock.note_before)
        database = _connect(path)
        try:
            lock.note("")
            seal.begin()
            yield database
            seal.before_fold()
            _fold(database)
        finally:
            database.connection.close()
            maintained(path)
        seal.finish()
    finally:
        lock.release()


class SqliteStore(Sink):
    """A sink that keeps records in a SQLite file; nothing is opened before the first write.

    Each batch is one transaction: when `write` returns, the batch survives the end of the process.

    A file that is deleted while it is written is created again. If another file takes its place, the store continues in
    a new file beside it (see `path`), and the other file is left alone.
    """

    takes_measurements = True

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._wanted = self.path
        self._turn = threading.Lock()
        self._file_lock = WriterLock(self.path)
        self._database: Database | None = None
        self._writer: Writer | None = None
        self._process = 0
        self._data_version = -1
        self._watch: FileWatch | None = None
        self._seal: Seal | None = None
        self._note = ""  # in the lock file: identifies the log that lies beside the store
        self._aside: list[Path] = []  # logs of a file that is to be created again
        self._stored = 0  # number of records in the file that is open
        self._runs: dict[str, Run] = {}  # as last described

    def write(self, records: Sequence[Telemetry], /) -> None:
        """Store a batch. Raises StoreLostError, once, when the file and its content were overwritten."""
        if not records:
            return
        with self._turn:
            try:
                self._open().write(records)
            except StoreLostError:
                raise
            except StoreError:
                if self._database is None or self._condition() is Condition.SAME:
                    raise
                self._open().write(records)  # into the file that replaces the one that was overwritten
            self._stored += sum(map(record_count, records))
            self._runs |= {record.id: record for record in records if isinstance(record, Run)}
            self._remember()

    def flush(self) -> None:
        """Do nothing: what was written is stored. Sinks with a buffer need this method."""

    def _open(self) -> Writer:
        if self._writer is not None and self._process != os.getpid():
            raise StoreError(
                f"The store '{self.path}' was opened by process {self._process}; its child {os.getpid()} cannot write "
                "it. Send the records to the parent instead."
            )
        if self._writer is not None and self._database is not None:
            condition = self._condition()
            if condition is Condition.MOVED:
                return self._rescue(self._database)
            if condition is Condition.OVERWRITTEN:
                self._start_anew(self._database)
            self._hold()
            return self._writer
        self._hold()
        try:
            return self._begin()
        except BaseException:
            self._file_lock.release()
            raise

    def _hold(self) -> None:
        try:
            try:
                self._file_lock.hold()
            except FileNotFoundError:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file_lock.hold()
        except OSError as error:
            what = "written" if self.path.exists() else "created"
            raise StoreError(
                f"The store '{self.path}' cannot be {what}: {error}. Name a file in a folder that can be written."
            ) from error

    def _begin(self) -> Writer:
        _settle_log(self.path, self._file_lock)
        # otherwise it is our own note
        self._seal = Seal(self.path, self._file_lock.note_before if self._process == 0 else None)
        self._database = _connect(self.path)
        self._seal.begin()
        self._fold_in()
        self._process = os.getpid()
        self._watch = FileWatch(self.path, partial(_is_sound, self._database), self._is_edited)
        self._writer = Writer(self._database, self._changed_elsewhere, self._refuse_exchanged)
        self._leave_note()
        return self._writer

    # -- the open file, and the file that has its name ---------------------------------------------------------------

    def _condition(self) -> Condition:
        return Condition.SAME if self._watch is None else self._watch.check()

    def _refuse_exchanged(self) -> None:
        """Refuse a replaced file; called before each commit, which may fold the log into the file."""
        if self._condition() is not Condition.SAME:
            raise StoreError(f"The store '{self.path}' was exchanged while it was written.")

    def _fold_in(self) -> None:
        if self._database is not None and self._seal is not None:
            self._seal.before_fold()
            self._database.rows("PRAGMA wal_checkpoint(PASSIVE)")

    def _remember(self) -> None:
        if self._watch is None or self._seal is None:
            return
        log = self._seal.committed()
        if log is None and self._database is not None:  # nothing to keep: SQLite folds in its log by itself
            self._database.execute("PRAGMA wal_autocheckpoint = 4000")
        if not self._watch.identified or self._seal.wants_fold:
            self._fold_in()  # a file without a run could not be distinguished from another
        if self._watch.remember():
            self._leave_note()
        if log is not None:
            self._file_lock.add(log)

    def _leave_note(self) -> None:
        """Write into the lock file whose log lies beside the store."""
        self._note = (None if self._watch is None else self._watch.note()) or ""
        self._file_lock.note(self._note)

    def _rescue(self, database: Database) -> Writer:
        """Write the store out again: its file is no longer in its place, and exists only as long as our connection
        does.
        """
        if (signature_of(self.path) or ())[:2] in _put_back:  # another writer in this process has just done so
            database.connection.close()
            self._database = self._writer = None
            self._hold()
            return self._begin()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._drop_seal()
        copy = free_name(self._wanted, "rescued")
        self._aside += [] if self._watch is None else self._watch.move_log_aside()
        try:
            with contextlib.closing(sqlite3.connect(copy)) as target:
                database.connection.backup(target)
        except (sqlite3.Error, OSError) as error:
            with contextlib.suppress(OSError):
                copy.unlink(missing_ok=True)
            raise StoreError(
                f"The store '{self.path}' was deleted while it was written, and cannot be made again: {error}. "
                "What it holds is lost if this process ends before that succeeds."
            ) from error
        database.connection.close()  # SQLite sees that the file is not in its place, and removes nothing by name
        for log in self._aside:
            log.unlink(missing_ok=True)  # the copy contains what it held
        self._aside = []
        before, place = self.path, _put_in_place(copy, self.path)
        message = f"The store '{before}' was deleted or replaced while it was written. What it held is in '{place}'."
        if place == before:
            _put_back.add((signature_of(place) or (0, 0))[:2])
            logger.warning("%s", message)
            self._database = self._writer = None
            self._hold()
            return self._begin()
        message += " The run goes on there; the file that took its place is left alone."
        logger.warning("%s", message)
        return self._go_on_in(place, message)

    def _start_anew(self, database: Database) -> None:
        """Leave our file alone after another program has overwritten it, and continue in a new one. Raises
        StoreLostError.
        """
        self._drop_seal()
        logs = [] if self._watch is None else self._watch.move_log_aside()
        _never_close(database.connection, self.path)
        place, lost, self._stored = free_name(self._wanted, "continued"), self._stored, 0
        aside = f" Its log is kept as '{logs[0]}'." if logs else ""
        message = (
            f"The store '{self.path}' was overwritten by another program while it was written: {lost} records that it "
            f"held are lost. The run goes on in '{place}'; the overwritten file is left alone.{aside}"
        )
        self._go_on_in(place, message, {"records": lost})
        raise StoreLostError(message, lost)

    def _drop_seal(self) -> None:
        """Drop the checksums: the file with our name is no longer the one that they describe."""
        if self._seal is not None:
            self._seal.drop()

    def _go_on_in(self, place: Path, message: str, data: Mapping[str, int] = MappingProxyType({})) -> Writer:
        """Open another file, and report the change in each run."""
        self._file_lock.release()
        self.path, self._file_lock = place, WriterLock(place)
        self._database = self._writer = self._watch = None
        self._hold()
        writer, source = self._begin(), f"store-{os.urandom(4).hex()}"
        name, level, now = "store.replaced", "warning", time.time()
        events = [Event(Where(run), now, level, name, message, data, source, 0) for run in self._runs]
        if events:
            writer.write([*self._runs.values(), *events])
            self._remember()
        return writer

    def _tell_lost(self, lost: int) -> None:
        """Record the loss in the new file when the run is over: until then, the monitor reports it with all other
        losses.
        """
        if self._writer is not None and self._runs:
            now, source = time.time(), f"store-{os.urandom(4).hex()}"
            self._writer.write([Metric(Where(run), now, "monitor.lost", lost, source, 0) for run in self._runs])

    def _changed_elsewhere(self) -> bool:
        """Whether another connection has written since the previous call."""
        if self._database is None:
            return False
        (now,) = self._database.rows("PRAGMA data_version")[0]
        before, self._data_version = self._data_version, now
        if now != before >= 0 and self._seal is not None:
            self._seal.changed_elsewhere()
        return bool(now != before)

    def _is_edited(self) -> bool:
        """Whether another connection has written since our last transaction; `_changed_elsewhere` will still see it."""
        if self._database is None or self._data_version < 0:
            return False
        return bool(self._database.rows("PRAGMA data_version")[0][0] != self._data_version)

    def close(self) -> None:
        """Put everything into the one file, and let other processes write. A later write opens it again."""
        with self._turn:
            if self._database is None or self._process != os.getpid():
                return
            lost: StoreLostError | None = None
            try:
                try:
                    self._open()
                except StoreLostError as error:
                    lost = error
                    self._tell_lost(error.lost)
                self._finish()
            finally:
                if self._database is not None:
                    self._database.connection.close()
                if self._seal is not None:
                    self._seal.finish()
                self._database = self._writer = self._watch = self._seal = None
                self._file_lock.release()
            if lost is not None:
                raise lost

    def _finish(self) -> None:
        if self._database is None or self._watch is None or self._seal is None:
            return
        self._seal.before_fold()
        self._file_lock.note(self._note)  # from here on, the log may be gone
        _fold(self._database)
        if self._watch.remember():
            self._leave_note()  # for the log, if a reader keeps it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_sound(database: Database) -> bool:
    try:
        return database.rows("PRAGMA quick_check(1)") == [("ok",)]
    except StoreError:
        return False


def _settle_log(path: Path, lock: WriterLock) -> None:
    """Rename a log that belongs to another file of this name, before SQLite would apply it to this one."""
    try:
        moved = set_foreign_log_aside(path, lock.note_before)
    except OSError as error:
        raise StoreError(
            f"Beside the store '{path}' lies the log of another file, which cannot be moved aside: {error}. "
            f"Move '{path.name}-wal' and '{path.name}-shm' away."
        ) from error
    if moved:
        logger.warning(
            "Beside '%s' lay the log of another store that had this name before. It was not applied, and is kept "
            "as '%s'.",
            path,
            moved[0],
        )


def _put_in_place(copy: Path, path: Path) -> Path:
    """Give a file its intended name, unless something else has that name. Returns where the file is now."""
    if any(path.with_name(path.name + suffix).exists() for suffix in SIDE_FILES):
        return copy
    try:
        os.link(copy, path)  # unlike renaming, it never overwrites a file that has just appeared
    except FileExistsError:
        return copy
    except OSError:  # a file system without links
        if path.exists():
            return copy
        copy.rename(path)
        return path
    copy.unlink()
    return path


def _never_close(connection: sqlite3.Connection, path: Path) -> None:
    """Abandon a connection whose file was overwritten: closing it would fold its log into the foreign content.

    It stays open until the process ends, without its locks: closing any handle of the file releases them for the whole
    process, which is why nothing else here ever opens a store's file itself.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY))
