# SPDX-License-Identifier: Apache-2.0
"""Tells whether a training is still there that may write to a run, so that a long round is not taken for silence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from fedvitals.store.lock import writer_of
from fedvitals.store.postgres import presence
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import advisory_locks, is_newest_open_run


def writers(reader: Reader, target: Path | str) -> Callable[[str, bool], bool]:
    """`(run, newest) -> bool`. Of a file, only its one writer is known, who writes the newest run without an end."""
    if isinstance(target, str):
        held = advisory_locks(reader)
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
    is_open, is_newest = is_newest_open_run(reader, run)
    return is_open and writers(reader, target)(run, is_newest)
