# SPDX-License-Identifier: Apache-2.0
"""Tracks which runs have changed since the last check, for ETags and live updates.

A check takes one statement while nothing happens. After a change, every table is asked which runs have new rows, which
only walks over the new rows: they are numbered in the order of arrival.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from fedvitals.store.read.changes import count_newest_rows, data_version, runs_with_new_rows, store_state
from fedvitals.store.read.reader import Reader
from fedvitals.store.upkeep.removal import removals

# If several processes write at once, a row may become visible before smaller numbers of another process: at least this
# many of the last rows are checked again, and at most twice as many.
WINDOW = 10_000
StoreVersion = tuple[str, int, int]
"""Who counts, how often rows were removed, how many changes there were: equal where nothing has happened."""


class ChangeTracker:
    """Versions of runs, which increase when a run gets a record, ends, is marked or deleted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boot = os.urandom(4).hex()
        self._epoch = 0
        self._count = 0  # number of changes of any kind
        self._versions: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._runs: dict[str, Any] = {}
        self._marks: dict[int, Any] = {}
        self._removed: object = None
        self._seen: Any = None
        self._reader: Reader | None = None  # the reader that saw it
        # For each table: the first row counted, and the number of rows of each run
        self._bases: dict[str, tuple[int, dict[int, int]]] = {}

    def look(self, reader: Reader) -> bool:
        """Update the versions. Returns whether rows were removed since the last check."""
        with self._lock:
            seen = data_version(reader)
            if seen is not None and seen == self._seen and reader is self._reader:
                return False
            epoch = self._epoch
            changed = self._changed(reader)
            self._seen, self._reader = seen, reader  # after a failure, the next check has to repeat it
            if changed:
                self._count += 1
                for run in changed:
                    self._versions[run] = self._count
            return epoch != self._epoch

    def _changed(self, reader: Reader) -> set[str]:
        state = store_state(reader)
        newest, runs, marks = state.newest, state.runs, state.marks
        removed = removals(reader.database)
        if removed != self._removed or any(newest[table] < known for table, known in self._last.items()):
            self._epoch += 1  # rows were removed, so numbers are used again: nothing cached can be trusted
            self._last, self._bases = {}, {}
        numbers: set[int] = {row for row in {**marks, **self._marks} if marks.get(row) != self._marks.get(row)}
        bases = dict(self._bases)
        for table, last in newest.items():
            if reader.database.dialect.shared:
                counted, bases[table] = _recounted(reader, table, last, self._bases.get(table))
                numbers |= counted
            elif last > self._last.get(table, last):
                numbers |= runs_with_new_rows(reader, table, self._last[table], last)
        names = dict(zip(numbers, reader.names.texts(numbers), strict=True))
        changed = {run for run in {**runs, **self._runs} if runs.get(run) != self._runs.get(run)}
        self._last, self._runs, self._marks, self._removed, self._bases = newest, runs, marks, removed, bases
        return changed | {names[number] for number in numbers}

    def has_run(self, run: str) -> bool:
        """Whether the store had a run with exactly this id at the last check."""
        with self._lock:
            return run in self._runs

    def version(self, run: str | None) -> str:
        """Return the version of a run, or of the whole store (None)."""
        with self._lock:
            at = self._count if run is None else self._versions.get(run, 0)
            return f"{self._boot}.{self._epoch}.{at}"

    def versions(self) -> tuple[StoreVersion, dict[str, int]]:
        """Return the version of the store, and the last change of each run that had one."""
        with self._lock:
            return (self._boot, self._epoch, self._count), dict(self._versions)


def _recounted(
    reader: Reader, table: str, newest: int, known: tuple[int, dict[int, int]] | None
) -> tuple[set[int], tuple[int, dict[int, int]]]:
    """Return the runs that have more of the last rows than were `known`, and the state for the next check."""
    base, counts = known or (max(0, newest - WINDOW), {})
    following = newest - WINDOW if newest - base > 2 * WINDOW else base
    rows = count_newest_rows(reader, table, following, base)
    changed = {run for run, count, _ in rows if count != counts.get(run, 0)} if known else set()
    return changed, (following, {run: count for run, _, count in rows})
