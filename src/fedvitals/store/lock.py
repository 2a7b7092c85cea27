# SPDX-License-Identifier: Apache-2.0
"""Lets one process at a time write a store. Readers need no lock; the writers of one process take turns."""

from __future__ import annotations

import os
import stat
import struct
import sys
import threading
from pathlib import Path

from fedvitals.errors import BusyError, StoreError
from fedvitals.store.positions import read_at, write_at

try:
    import fcntl
except ImportError:  # Windows: only SQLite's own locks keep other processes from writing
    fcntl = None  # type: ignore[assignment]

NOTE_BYTES = 1 << 16
# The C structure `flock`, whose field order differs: type, whence, start, length, process; on macOS type and whence
# come last.
_FLOCK, _FLOCK_TYPE = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)

# A record lock is released when its process closes the file, from whichever thread and through whichever descriptor.
# What this process holds is therefore recorded here; nothing in it opens such a file to read it, or closes one that
# another of its writers still holds.
_GATE = threading.Lock()
_HELD: dict[Path, int] = {}  # how many writers of this process hold the file
_LEFT: dict[Path, list[int]] = {}  # files to be closed when their last holder is gone


def _forget() -> None:
    """Reset the state in a forked child, which inherits none of its parent's locks."""
    global _GATE  # noqa: PLW0603 - another thread may have held it while the process forked
    _GATE = threading.Lock()
    _HELD.clear()
    _LEFT.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def owner_of(file: int) -> str:
    """Return the process named in an open lock file."""
    return read_at(file, 32, 0).decode(errors="replace").partition("\n")[0].strip() or "unknown"


def _path(store: Path) -> Path:
    return store.absolute().with_name(store.name + ".lock")


def _is_lock_file(file: int) -> bool:
    """Whether an open file can be the lock of a store: a regular file that is empty or begins with a process number."""
    return stat.S_ISREG(os.fstat(file).st_mode) and (owner_of(file) == "unknown" or owner_of(file).isdecimal())


def _read(path: Path) -> str:
    """Return the content of a lock file. Raises OSError for a pipe, which could block the reader."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"'{path}' is not a regular file")
        return os.read(file, NOTE_BYTES).decode(errors="replace")
    finally:
        os.close(file)


def writer_of(store: Path) -> int | None:
    """Return the process that writes a store or was the last to write it, from the lock file; None if there is none."""
    path = _path(store)
    with _GATE:
        if path in _HELD:
            return os.getpid()
        try:
            return int(_read(path).partition("\n")[0])
        except (OSError, ValueError):
            return None


def is_held_here(store: Path) -> bool:
    """Whether this process writes the store."""
    with _GATE:
        return _path(store) in _HELD


def is_held_elsewhere(store: Path) -> bool:
    """Whether another process of this machine holds the lock of a store. The system frees it when the process ends."""
    if fcntl is None:
        return False
    path = _path(store)
    with _GATE:
        if path in _HELD:  # closing the file would release our own lock
            return False
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            write = fcntl.F_WRLCK
            whole_file = struct.pack(_FLOCK, *((0, 0, 0, write, 0) if _FLOCK_TYPE else (write, 0, 0, 0, 0)))
            answer = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, whole_file))
        except OSError:  # a file system without locks
            return False
        finally:
            os.close(file)
    return bool(answer[_FLOCK_TYPE] != fcntl.F_UNLCK)


def note_of(store: Path) -> str | None:
    """Return the note of a store's last writer; None if that is this process, or it left no note."""
    path = _path(store)
    with _GATE:
        if path in _HELD:
            return None
        try:
            return _read(path).partition("\n")[2] or None
        except (OSError, ValueError):
            return None


class WriterLock:
    """The file beside a store that its writing process locks and whose content names that process.

    POSIX record locks, not flock: a forked child does not inherit them, so it cannot block the store after its parent
    is gone. Call `hold` before every batch: the file may have been removed in between.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = _path(store)
        self._file: int | None = None
        self._end = 0  # of the note
        self.note_before: str | None = None  # the last owner's note, if it left the file behind

    def hold(self) -> None:
        """Take the lock, or keep it. Raises StoreError if another process has it."""
        if fcntl is None:
            return
        with _GATE:
            self._hold()

    def _hold(self) -> None:
        opened = False
        while True:
            if self._file is None:
                opened = True
                self._file = self._open()
                _HELD[self._path] = _HELD.get(self._path, 0) + 1
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = owner_of(self._file)
                self._close()
                raise BusyError(
                    f"The store '{self._store}' is being written by process {owner}, and one process writes a store "
                    "at a time. Wait for it, end it, or give this training a store of its own. Reading is always free."
                ) from error
            if self._is_current():
                break
            self._close()  # its last owner removed the file between our opening and our locking it
        if opened:
            self.note_before = read_at(self._file, NOTE_BYTES, 0).decode(errors="replace").partition("\n")[2] or None
        if owner_of(self._file) != str(os.getpid()):
            self._say(self.note_before or "")

    def _open(self) -> int:
        """Open or create the lock file. Raises StoreError if something else has its name, which is then left alone."""
        status = self._path.lstat() if os.path.lexists(self._path) else None
        if status is None or stat.S_ISREG(status.st_mode):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o644)
            if _is_lock_file(file):
                return file
            os.close(file)
        raise StoreError(
            f"'{self._path}' is not the lock file of the store '{self._store}': it is a link, a pipe or somebody's own "
            "file. Nothing was changed. Move it away, or name another store."
        )

    def note(self, text: str) -> None:
        """Write one line into the file, for others to read and for the next owner if this process is killed."""
        with _GATE:
            if self._file is not None:
                self._say(text + "\n")

    def add(self, line: str) -> None:
        """Write a line after the note, replacing the previously added line, which has the same length."""
        if self._file is not None:
            write_at(self._file, f"{line}\n".encode(), self._end)

    def _say(self, text: str) -> None:
        if self._file is not None:
            content = f"{os.getpid()}\n{text}".encode()
            write_at(self._file, content, 0)
            os.ftruncate(self._file, len(content))
            self._end = len(content)

    def _has_log(self) -> bool:
        """Whether the store's log stays behind, as it does while a reader is open: the note says whose log it is."""
        try:
            return self._store.absolute().with_name(f"{self._store.name}-wal").stat().st_size > 0
        except OSError:
            return False

    def _is_current(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._file is None:
            return
        _LEFT.setdefault(self._path, []).append(self._file)
        self._file = None
        _HELD[self._path] = _HELD.get(self._path, 1) - 1
        if _HELD[self._path] <= 0:
            del _HELD[self._path]
            for file in _LEFT.pop(self._path):
                os.close(file)

    def release(self) -> None:
        """Let other processes write the store."""
        with _GATE:
            if self._file is None:
                return
            if _HELD.get(self._path, 1) <= 1 and self._is_current() and not self._has_log():
                self._path.unlink(missing_ok=True)
            self._close()
