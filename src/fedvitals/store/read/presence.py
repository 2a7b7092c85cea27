# SPDX-License-Identifier: Apache-2.0
"""Detects whether a training that may write to a run is still alive, however long it has been silent.

Both kinds of stores have a lock that the system releases when a process ends, so that no process number needs to be
trusted, which another process may have by now.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedvitals.store.dialect import SQLITE
from fedvitals.store.lock import is_held_elsewhere
from fedvitals.store.postgres import presence
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import advisory_locks, is_newest_open_run


def writers(reader: Reader) -> Callable[[str, bool], bool]:
    """Return `(run, newest) -> bool`. A file has only one known writer, which writes the newest run without an end."""
    if reader.database.dialect is not SQLITE:
        held = advisory_locks(reader)
        return lambda run, _newest: presence(run) in held
    writing = is_held_elsewhere(Path(reader.database.target))
    return lambda _run, newest: writing and newest


def is_written(reader: Reader, run: str) -> bool:
    """Whether a process that may write to that run is still alive."""
    is_open, is_newest = is_newest_open_run(reader, run)
    return is_open and writers(reader)(run, is_newest)
