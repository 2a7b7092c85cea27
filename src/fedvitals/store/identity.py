# SPDX-License-Identifier: Apache-2.0
"""Detects whether a store's file is still the one that was opened, or was deleted, replaced or overwritten.

A store that is being written consists of its file and a write-ahead log beside it (`-wal`, with its index `-shm`).
SQLite applies this log to whatever file has the store's name. A log that belongs to another file must therefore be
moved aside before anything opens the file, and a process whose file was replaced must neither fold its log into the new
file nor write to it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedvitals.store.lock import note_of

SIDE_FILES = ("-wal", "-shm")
# tables that only grow during a run
TABLES = ("symbol", "metric", "event", "span", "transfer", "finding", "layer_block")
RUNS_REMEMBERED = 8
RUNS_COMPARED = 10_000
PATIENCE, PAUSE = 5.0, 0.05  # seconds in which another process may fold the log into the file

Signature = tuple[int, int, int, int]  # device, inode, bytes and change time of a file

_GATE = threading.Lock()
_MAINTAINED: dict[Path, int] = {}  # how often this process has compacted or repaired each store


class Condition(enum.Enum):
    """What has happened to the file that was opened."""

    SAME = "same"
    MOVED = "moved"  # deleted or replaced by another file: ours still exists behind the open connection
    OVERWRITTEN = "overwritten"  # the same inode with other content: ours is gone


@dataclass(frozen=True)
class Content:
    """A short description of a store's file without its log: some of its runs, and the highest number in each table."""

    runs: frozenset[tuple[int, float | None]]
    highest: tuple[int, ...]

    def continues(self, earlier: Content, *, edited: bool = False) -> bool:
        """Whether this is a later (or the same) state of the store whose content was `earlier`.

        `edited`: another program may have deleted rows, but no runs.
        """
        grown = all(now >= before for now, before in zip(self.highest, earlier.highest, strict=True))
        return (grown or edited) and earlier.runs <= self.runs

    def to_json(self, signature: Signature) -> str:
        runs = sorted(self.runs, key=lambda run: run[0])[:RUNS_REMEMBERED]
        return json.dumps({"runs": runs, "highest": self.highest, "file": signature})

    @classmethod
    def from_json(cls, text: str) -> tuple[Self, Signature] | None:
        """Return the content and the signature in a note, or None if it has neither."""
        try:
            note = json.loads(text.partition("\n")[0])
            runs = frozenset((int(number), started) for number, started in note["runs"])
            device, inode, size, changed = (int(number) for number in note["file"])
            highest = tuple(int(number) for number in note["highest"])
        except (ValueError, KeyError, TypeError):
            return None
        return (cls(runs, highest), (device, inode, size, changed)) if len(highest) == len(TABLES) else None


def signature_of(path: Path | str) -> Signature | None:
    """Return device, inode, size and change time of a file without opening it; None if there is no such file."""
    try:
        status = os.stat(path)  # noqa: PTH116 - called before each commit, and a text is faster than a Path
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _alone(path: Path) -> sqlite3.Connection:
    """Return a connection that reads the file itself, ignoring any log beside it.

    SQLite treats it as a file that never changes: without locks, and without touching its log. Opening it in any other
    way would release the locks that this process holds on it.
    """
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, isolation_level=None)


def content_of(path: Path) -> Content | None:
    """Return the content of the file itself; None if it cannot be read without its log, as while that is folded in."""
    highest = ", ".join(f"(SELECT MAX(rowid) FROM {table})" for table in TABLES)  # noqa: S608 - our own words only
    try:
        with contextlib.closing(_alone(path)) as connection:
            row = connection.execute(f"SELECT {highest}").fetchone()
            runs = connection.execute("SELECT id, started FROM run ORDER BY id LIMIT ?", (RUNS_COMPARED,)).fetchall()
    except (sqlite3.Error, sqlite3.Warning):
        return None
    return Content(frozenset(runs), tuple(number or 0 for number in row))


def is_another(path: Path, earlier: Content, *, edited: bool = False) -> bool | None:
    """Whether the file holds something other than a later state of a store; None if that cannot be determined.

    A file into which a log is being folded, or was when its writer was killed, is not consistent without that log. A
    file that is consistent by itself and does not continue the store is another one.
    """
    signature = signature_of(path)
    if signature is None or not signature[2]:
        return True
    try:
        with contextlib.closing(_alone(path)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
            content = content_of(path)
            if content is not None and content.continues(earlier, edited=edited):
                return False
            sound = connection.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)]
    except (sqlite3.Error, sqlite3.Warning) as error:
        return True if "not a database" in str(error) else None
    return True if sound and signature == signature_of(path) else None


class FileWatch:
    """Detects whether a store's file was replaced since this process last wrote to it.

    `check` costs one `stat` as long as nothing was folded into the file. After that, the content is compared.
    """

    def __init__(self, path: Path, is_sound: Callable[[], bool], is_edited: Callable[[], bool]) -> None:
        """Begin to watch a store that this process has just opened.

        `is_sound`: whether it can be read through the open connection, which knows the log. `is_edited`: whether
        another program has since written to it through SQLite.
        """
        self._path, self._is_sound, self._is_edited = path.absolute(), is_sound, is_edited
        self._name = str(self._path)
        self._signature = signature_of(self._path)
        self._content = content_of(self._path)
        self._maintained = _MAINTAINED.get(self._path, 0)
        self._logs = self._log_inodes()
        self._index_bytes = 0  # size of the log's index when last seen

    @property
    def identified(self) -> bool:
        """Whether the file itself holds anything that identifies it."""
        return self._content is not None and any(self._content.highest)

    def note(self) -> str | None:
        """Return what another process needs in order to see that the log belongs to the file."""
        if self._content is None or self._signature is None:
            return None
        return self._content.to_json(self._signature)

    def remember(self) -> bool:
        """Record what this process has just written. Returns whether the file itself has changed by it."""
        if not self.restore_index() or len(self._logs) < len(SIDE_FILES):
            self._logs = self._log_inodes() or self._logs
            self.restore_index()
        signature = signature_of(self._name)
        if signature is None or signature[:2] != (self._signature or (0, 0))[:2]:
            return False
        if signature == self._signature:
            return False
        content, before = content_of(self._path), self._content
        known = before is None or {run for run, _ in before.runs} <= {run for run, _ in (content or before).runs}
        if content is None or not known:
            return False  # `check` detects it again, and reports what it is
        self._signature, self._content = signature, content
        return True

    def restore_index(self) -> bool:
        """Restore the length of the log's index if another program has truncated it. Returns whether it is the known
        index.

        SQLite maps that file into memory, and touching what lies beyond its end kills the process (SIGBUS). SQLite
        rebuilds an index of zeros from the log.
        """
        path = f"{self._name}-shm"
        signature = signature_of(path)
        if signature is None or signature[:2] != self._logs.get("-shm"):
            return False
        if signature[2] < self._index_bytes:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)  # its beginning alone would be taken for a complete index
                os.truncate(path, self._index_bytes)
        else:
            self._index_bytes = signature[2]
        return True

    def check(self) -> Condition:
        """Return what has happened to the file."""
        self.restore_index()
        signature = signature_of(self._name)
        if signature == self._signature and signature is not None:
            return Condition.SAME
        if signature is None or self._signature is None or signature[:2] != self._signature[:2]:
            return Condition.MOVED
        before, self._maintained = self._maintained, _MAINTAINED.get(self._path, 0)
        if before != self._maintained or self._content is None:
            self._signature, self._content = signature, content_of(self._path)
            return Condition.SAME
        deadline, edited = time.monotonic() + PATIENCE, self._is_edited()
        while (another := is_another(self._path, self._content, edited=edited)) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE)
        # Our connection may still see all of a truncated file, in its log. Only maintenance makes a file shorter.
        cut = signature[2] < self._signature[2]
        if another or (another is None and (cut or not self._is_sound())):
            return Condition.OVERWRITTEN
        self._signature, self._content = signature, content_of(self._path) or self._content
        return Condition.SAME

    def move_log_aside(self) -> list[Path]:
        """Rename our log and its index, so that nothing applies them to another file. Returns the new names.

        Files of these names that are not ours are left alone.
        """
        moved = []
        for suffix, inode in self._logs.items():
            path = self._path.with_name(self._path.name + suffix)
            signature = signature_of(path)
            if signature is not None and signature[:2] == inode:
                moved.append(_aside(path))
        return moved

    def _log_inodes(self) -> dict[str, tuple[int, int]]:
        signatures = {suffix: signature_of(self._name + suffix) for suffix in SIDE_FILES}
        return {suffix: signature[:2] for suffix, signature in signatures.items() if signature is not None}


def maintained(path: Path) -> None:
    """Note that this process has compacted or repaired a store, so that its writers accept the result as their own."""
    with _GATE:
        _MAINTAINED[path.absolute()] = _MAINTAINED.get(path.absolute(), 0) + 1


def has_foreign_log(path: Path, note: str | None = None) -> bool:
    """Whether the log beside a store belongs to another file that had its name before.

    `note`: the note of the log's writer, by default the one in the lock file now. Without any note, the log is assumed
    to belong to the store, as SQLite assumes.
    """
    log = signature_of(path.with_name(path.name + "-wal"))
    if log is None or not log[2]:
        return False
    signature = signature_of(path)
    if signature is None or not signature[2]:
        return True  # SQLite would delete it
    known = Content.from_json(note or note_of(path) or "")
    if known is None or known[1] == signature:
        return False
    return bool(is_another(path, known[0]))


def set_foreign_log_aside(path: Path, note: str | None = None) -> list[Path]:
    """Rename the log of another file, and its index. Returns the new names. Only for the process that may write the
    store.
    """
    if not has_foreign_log(path, note):
        return []
    files = [path.with_name(path.name + suffix) for suffix in SIDE_FILES]
    return [_aside(file) for file in files if file.exists()]


def logs_aside(path: Path) -> list[Path]:
    """Return the logs that were renamed because they belong to a file that no longer has the store's name."""
    files = (path.parent.glob(f"{path.name}{suffix}.aside-*") for suffix in SIDE_FILES)
    return sorted(file for group in files for file in group)


def continued_in(path: Path) -> list[Path]:
    """Return the stores beside this one in which a training continued after its file was replaced."""
    files = (path.parent.glob(f"{path.name}.{word}-*") for word in ("rescued", "continued"))
    return sorted(file for group in files for file in group if file.name.rpartition("-")[2].isdecimal())


def free_name(path: Path, word: str) -> Path:
    """Return «runs.db.rescued-4711», with the number of this process, or the next free name."""
    first = path.with_name(f"{path.name}.{word}-{os.getpid()}")
    more = (first.with_name(f"{first.name}-{number}") for number in range(2, 10_000))
    return next(name for name in (first, *more) if not name.exists())


def _aside(path: Path) -> Path:
    target = free_name(path, "aside")
    path.rename(target)
    return target
