# SPDX-License-Identifier: Apache-2.0
"""A store in one SQLite file: how it is opened, by whom, and what is refused."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fedvitals.errors import StoreError
from fedvitals.records import Record
from fedvitals.store import ddl
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.lock import WriterLock
from fedvitals.store.schema import VERSION
from fedvitals.store.writer import Writer

logger = logging.getLogger("fedvitals.store")

APPLICATION = 0x66656476  # «fedv» in the file's header, so that no other program's database is taken for ours
PAGE = 8192  # bytes; blobs of some ten kilobytes are the bulk of a store


_looked_at: set[tuple[int, int]] = set()  # device and number of files that were seen to be SQLite's, or empty


def check_file(path: Path) -> None:
    """Refuse what is no SQLite file, without opening it in a way that could change it.

    Once for each file: closing it would drop every lock that SQLite holds on it for this process (so POSIX wants it),
    and the next writer to leave would take the log away from under our readers.
    """
    if path.is_dir():
        raise StoreError(f"The store '{path}' is a folder. Name a file, for example '{path / 'runs.db'}'.")
    try:
        found = path.stat()
        if (found.st_dev, found.st_ino) in _looked_at:
            return
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise StoreError(f"The store '{path}' cannot be opened: {error.strerror}.") from error
    if start and start != b"SQLite format 3\x00":
        raise StoreError(f"'{path}' is not a store: it is no SQLite database. Nothing was changed. Name another file.")
    _looked_at.add((found.st_dev, found.st_ino))


def check_version(database: Database) -> int:
    """The version of the schema in an open database, 0 when it is empty; StoreError when it cannot be ours."""
    (version,), (application,) = (database.rows(f"PRAGMA {name}")[0] for name in ("user_version", "application_id"))
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
    database.execute(SQLITE.begin)  # two that open an empty file at once take turns
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
        connection = sqlite3.connect(path.absolute(), timeout=10, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise StoreError(f"The store '{path}' cannot be opened: {error}.") from error
    database = Database(connection, SQLITE, str(path))
    try:
        check_version(database)  # before anything is written
        for setting in (
            f"page_size = {PAGE}",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "secure_delete = OFF",  # some builds overwrite what is deleted, which would double the cost of compaction
            "wal_autocheckpoint = 2000",
        ):
            database.execute(f"PRAGMA {setting}")
        _upgrade(database)
    except BaseException:
        connection.close()
        raise
    return database


def _fold(database: Database) -> None:
    """Back to a plain file without side files, fit for any tool and any read-only disk.

    While someone reads, that is refused at once: then the next writer does it.
    """
    database.execute("PRAGMA busy_timeout = 0")
    database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    with contextlib.suppress(StoreError):
        database.execute("PRAGMA journal_mode = DELETE")


@contextlib.contextmanager
def maintain_sqlite(path: Path) -> Iterator[Database]:
    """The store for those who mend or clear up: nobody else writes it meanwhile."""
    if not path.exists():
        raise StoreError(f"There is no store '{path}'. Name one with --store or FEDVITALS_STORE.")
    lock = WriterLock(path)
    try:
        lock.hold()
    except OSError as error:
        raise StoreError(f"The store '{path}' cannot be written: {error}.") from error
    try:
        database = _connect(path)
        try:
            yield database
            _fold(database)
        finally:
            database.connection.close()
    finally:
        lock.release()


class SqliteStore:
    """A sink that keeps records in a SQLite file; nothing is opened before the first write.

    Each batch is one transaction: when `write` returns, the batch survives the end of the process.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._turn = threading.Lock()
        self._file_lock = WriterLock(self.path)
        self._database: Database | None = None
        self._writer: Writer | None = None
        self._process = 0
        self._data_version = -1
        self._identity: os.stat_result | None = None

    def write(self, records: Sequence[Record], /) -> None:
        if not records:
            return
        with self._turn:
            self._open().write(records)

    def flush(self) -> None:
        """Nothing: what was written is stored. It is here because sinks with a buffer have it."""

    def _open(self) -> Writer:
        if self._writer is not None and self._process == os.getpid():
            self._hold()
            return self._rescue(self._database) if self._vanished() and self._database else self._writer
        if self._writer is not None:
            raise StoreError(
                f"The store '{self.path}' was opened by process {self._process}; its child {os.getpid()} cannot write "
                "it. Send the records to the parent instead."
            )
        self._hold()
        try:
            return self._begin()
        except BaseException:
            self._file_lock.release()
            raise

    def _hold(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file_lock.hold()
        except OSError as error:
            what = "written" if self.path.exists() else "created"
            raise StoreError(
                f"The store '{self.path}' cannot be {what}: {error}. Name a file in a folder that can be written."
            ) from error

    def _begin(self) -> Writer:
        self._database = _connect(self.path)
        self._identity = self.path.stat()
        self._process = os.getpid()
        self._writer = Writer(self._database, self._changed_elsewhere)
        return self._writer

    def _vanished(self) -> bool:
        """Whether the file that is open is no longer the one of that name."""
        try:
            return self._identity is None or not os.path.samestat(self.path.stat(), self._identity)
        except FileNotFoundError:
            return True

    def _rescue(self, database: Database) -> Writer:
        """Write the store out again: deleted under us, it lives as long as our connection, and not a moment longer."""
        copy = self.path.with_name(f"{self.path.name}.rescued-{os.getpid()}")
        try:
            copy.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(copy)) as target:
                database.connection.backup(target)
        except (sqlite3.Error, OSError) as error:
            with contextlib.suppress(OSError):
                copy.unlink(missing_ok=True)
            raise StoreError(
                f"The store '{self.path}' was deleted while it was written, and cannot be made again: {error}. "
                "What it holds is lost if this process ends before that succeeds."
            ) from error
        database.connection.close()  # removes its log by name, so the new file may have that name only from here on
        self._database = self._writer = None
        if not self.path.exists():
            copy.rename(self.path)
            copy = self.path
        logger.warning(
            "The store '%s' was deleted or replaced while it was written. What it held is in '%s'.", self.path, copy
        )
        return self._begin()

    def _changed_elsewhere(self) -> bool:
        """Whether another connection has written since the last time that this was asked."""
        if self._database is None:
            return False
        (now,) = self._database.rows("PRAGMA data_version")[0]
        before, self._data_version = self._data_version, now
        return bool(now != before)

    def close(self) -> None:
        """Put everything into the one file, and let others write. A later write opens it again."""
        with self._turn:
            if self._database is None or self._process != os.getpid():
                return
            try:
                if self._vanished():
                    self._rescue(self._database)
                _fold(self._database)
            finally:
                if self._database is not None:
                    self._database.connection.close()
                self._database = self._writer = None
                self._file_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
