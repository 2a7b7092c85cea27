# SPDX-License-Identifier: Apache-2.0
"""One process writes a store. Readers need no lock, and a second writer in the same process takes its turn."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedvitals.errors import StoreError

if sys.platform != "win32":
    import fcntl


class WriterLock:
    """The file beside a store, locked by the process that writes and naming it.

    POSIX record locks, not flock: a forked child does not inherit them, so it cannot keep a store from being written
    after its parent is gone. They belong to the process, hence `hold` before every batch: another store object of this
    process may have closed the file in between, and with it dropped the lock.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._path = store.with_name(store.name + ".lock")
        self._file: int | None = None

    def hold(self) -> None:
        """Take the lock, or keep it. StoreError when another process has it."""
        if sys.platform == "win32":
            return
        while True:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
                self._close()
                raise StoreError(
                    f"The store '{self._store}' is being written by process {owner}, and one process writes a store "
                    "at a time. Wait for it, end it, or give this training a store of its own. Reading is always free."
                ) from error
            if self._is_current():
                break
            self._close()  # its last owner removed the file between our opening and our locking it
        mine = f"{os.getpid()}\n".encode()
        if os.pread(self._file, 32, 0) != mine:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, mine, 0)

    def _is_current(self) -> bool:
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def release(self) -> None:
        if self._file is not None:
            if self._is_current():
                self._path.unlink(missing_ok=True)
            self._close()
