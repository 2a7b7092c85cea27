# SPDX-License-Identifier: Apache-2.0
"""Tells whether a training is still there that may write to a run: one that is has not died, however long it is silent.

Both kinds of stores have a lock that the system takes from a process when it ends, so that no number of a process is
trusted that another may have by now.
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
    """`(run, newest) -> bool`. Of a file, only its one writer is known, who writes the newest run without an end."""
    if reader.database.dialect is not SQLITE:
        held = advisory_locks(reader)
        return lambda run, _newest: presence(run) in held
    writing = is_held_elsewhere(Path(reader.database.target))
    return lambda _run, newest: writing and newest


def is_written(reader: Reader, run: str) -> bool:
    """Whether somebody is there who may write to that run still."""
    is_open, is_newest = is_newest_open_run(reader, run)
    return is_open and writers(reader)(run, is_newest)
