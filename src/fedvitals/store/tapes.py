# SPDX-License-Identifier: Apache-2.0
"""Measures and removes the tapes that lie beside a store, one folder for each run.

What is in them is the business of `replay`; this is for whoever deletes a run, and needs no torch.
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

QUIET = 60.0  # seconds without a change after which nobody writes a tape whose run the store does not have


def tapes_folder(store: Target) -> Path:
    """Return the folder in which the tapes of a store lie."""
    return spill_folder(store) / "tape"


def tape_folder(store: Target, run: str) -> Path:
    """Where the tape of a run lies, beside its store. An id that is no plain name could lie anywhere: it is refused."""
    if run in ("", ".", "..") or any(sign in run for sign in "/\\\0"):
        raise StoreError(f"The run {run!r} has no tape: its id is no name of a folder.")
    return tapes_folder(store) / run


def tape_bytes(store: Target, run: str) -> int:
    """What its files take; 0 where it has none."""
    folder = _own(store, run)
    return 0 if folder is None else _bytes(folder)


def tapes(store: Target) -> dict[str, int]:
    """The bytes of each tape beside a store, by run."""
    folder = tapes_folder(store)
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return {name: tape_bytes(store, name) for name in names if _own(store, name) is not None}


def lost_tapes(store: Target, runs: Iterable[str]) -> dict[str, int]:
    """Those whose run is not among these."""
    known = set(runs)
    return {run: size for run, size in tapes(store).items() if run not in known}


def remove_tape(store: Target, run: str) -> int:
    """How many bytes that gave back. What cannot be removed stays, and is found as a lost tape."""
    folder = _own(store, run)
    if folder is None:
        return 0
    size = _bytes(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return size - (_bytes(folder) if folder.exists() else 0)


def remove_lost_tape(store: Target, run: str) -> int:
    """The same for a tape without a run: refused while it may still be written, by a run that has just begun."""
    folder = _own(store, run)
    if folder is None:
        return 0
    newest = max((_changed(path) for path in (folder, *folder.rglob("*"))), default=0.0)
    if time.time() - newest < QUIET:
        raise BusyError(f"The tape {run} was written a moment ago, so it was not deleted. Try again in a minute.")
    return remove_tape(store, run)


def _own(store: Target, run: str) -> Path | None:
    """A folder of ours and nothing else: whatever a store says that its runs are called, we stay in here."""
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
