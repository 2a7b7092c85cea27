# SPDX-License-Identifier: Apache-2.0
"""Measures and removes the tapes that lie beside a store, one folder for each run.

Their content is the business of `replay`; this module serves the deletion of runs, and needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from fedvitals.errors import BusyError, StoreError
from fedvitals.store import Target, spill_folder

QUIET = 60.0  # seconds without a change after which the tape of an unknown run is no longer being written


def tapes_folder(store: Target) -> Path:
    """Return the folder in which the tapes of a store lie."""
    return spill_folder(store) / "tape"


def tape_folder(store: Target, run: str) -> Path:
    """Return the folder of a run's tape, beside its store. An id that is no plain name could point anywhere: it is
    refused.
    """
    if run in ("", ".", "..") or any(sign in run for sign in "/\\\0"):
        raise StoreError(f"The run {run!r} has no tape: its id is no name of a folder.")
    return tapes_folder(store) / run


def tape_bytes(store: Target, run: str) -> int:
    """Return the size of a run's tape; 0 if it has none."""
    folder = _own(store, run)
    return 0 if folder is None else _bytes(folder)


def tapes(store: Target) -> dict[str, int]:
    """Return the bytes of each tape beside a store, by run."""
    folder = tapes_folder(store)
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return {name: tape_bytes(store, name) for name in names if _own(store, name) is not None}


def lost_tapes(store: Target, runs: Iterable[str]) -> dict[str, int]:
    """Return the tapes whose run is not among these."""
    known = set(runs)
    return {run: size for run, size in tapes(store).items() if run not in known}


def remove_tape(store: Target, run: str) -> int:
    """Remove a run's tape. Returns the bytes freed. What cannot be removed stays, and is reported as a lost tape."""
    folder = _own(store, run)
    if folder is None:
        return 0
    size = _bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return size - (_bytes(folder) if folder.exists() else 0)


def remove_lost_tape(store: Target, run: str) -> int:
    """Remove a tape without a run; refused while it may still be written, by a run that has just begun."""
    folder = _own(store, run)
    if folder is None:
        return 0
    newest = max((_changed(path) for path in (folder, *folder.rglob("*"))), default=0.0)
    if time.time() - newest < QUIET:
        raise BusyError(f"The tape {run} was written a moment ago, so it was not deleted. Try again in a minute.")
    return remove_tape(store, run)


def _own(store: Target, run: str) -> Path | None:
    """Return a run's tape folder only if it is a real folder of ours: a run's name must not lead outside."""
    with contextlib.suppress(StoreError):
        folder = tape_folder(store, run)
        return folder if folder.is_dir() and not folder.is_symlink() else None
    return None


def _bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # a run that is being written replaces its files
                total += (Path(place) / name).lstat().st_size
    return total


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
