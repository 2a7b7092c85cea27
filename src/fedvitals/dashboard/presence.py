# SPDX-License-Identifier: Apache-2.0
"""Whether a training is still there that may write to a run: a long round is no silence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from fedvitals.store.lock import writer_of
from fedvitals.store.postgres import presence
from fedvitals.store.read.reader import Reader


def writers(reader: Reader, target: Path | str) -> Callable[[str, bool], bool]:
    """`(run, newest) -> bool`. Of a file, only its one writer is known, who writes the newest run without an end."""
    if isinstance(target, str):
        held = {row[0] for row in reader.database.rows(
            "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
        )}  # fmt: skip
        return lambda run, _newest: presence(run) in held
    writing = _is_held(target)
    return lambda _run, newest: writing and newest


def _is_held(store: Path) -> bool:
    """By the file beside the store, which names the process that writes."""
    if sys.platform == "win32":  # where there is no such file, and asking for a process would end it
        return False
    owner = writer_of(store)
    if owner is None or owner == os.getpid():
        return False
    try:
        os.kill(owner, 0)
    except PermissionError:
        return True  # somebody else's process, but there
    except (OSError, OverflowError):
        return False
    return True


def is_written(reader: Reader, target: Path | str, run: str) -> bool:
    """Whether somebody is there who may write to that run still."""
    found = reader.database.rows(
        "SELECT r.finished, COALESCE(r.started, 0) >= (SELECT MAX(COALESCE(o.started, 0)) FROM run AS o "
        "WHERE o.finished IS NULL) FROM run AS r WHERE r.id = ?",
        (reader.names.number(run) or 0,),
    )
    return bool(found) and found[0][0] is None and writers(reader, target)(run, bool(found[0][1]))
