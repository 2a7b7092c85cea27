# SPDX-License-Identifier: Apache-2.0
"""Which runs have changed since the last look: what ETags and live updates go by.

A look costs one statement while nothing happens. When something did, every table is asked whose rows are new, which
is a walk over the new rows only: they are numbered in the order of their arrival.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from fedvitals.store.reader import Reader
from fedvitals.store.schema import TABLES

_NUMBERED = tuple(
    table.name
    for table in TABLES
    if {"arrival", "run"} <= {column.name for column in table.columns} and table.name != "truth"
)


class Pulse:
    """Versions of runs: they rise when a run gets a record, ends, is marked or vanishes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boot = os.urandom(4).hex()
        self._epoch = 0
        self._count = 0  # changes of anything
        self._versions: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._runs: dict[str, Any] = {}
        self._marks: dict[str, Any] = {}
        self._seen: Any = None

    def look(self, reader: Reader) -> None:
        """Bring the versions up to date."""
        with self._lock:
            seen = _seen(reader)
            if seen is not None and seen == self._seen:
                return
            self._seen = seen
            changed = self._changed(reader)
            if changed:
                self._count += 1
                for run in changed:
                    self._versions[run] = self._count

    def _changed(self, reader: Reader) -> set[str]:
        ask = reader.database.rows
        newest = {table: int(ask(f"SELECT COALESCE(MAX(arrival), 0) FROM {table}")[0][0]) for table in _NUMBERED}  # noqa: S608 - our own words
        runs = {row[0]: row[1:] for row in ask("SELECT id, source, sequence, finished FROM runs")}
        marks = {
            row[0]: row[1:]
            for row in ask("SELECT run, COUNT(*), MAX(at), MIN(target), MAX(target) FROM mark GROUP BY run")
        }
        if any(newest[table] < known for table, known in self._last.items()):
            self._epoch += 1  # rows were removed, so numbers are used again: nothing that is remembered can be trusted
            self._last = {}
        numbers: set[int] = {row for row in {**marks, **self._marks} if marks.get(row) != self._marks.get(row)}
        if self._last:
            for table, last in self._last.items():
                if newest[table] > last:
                    new = f"SELECT DISTINCT run FROM {table} WHERE arrival > ? AND arrival <= ?"  # noqa: S608
                    found = ask(new, (last, newest[table]))
                    numbers |= {row[0] for row in found}
        names = dict(zip(numbers, reader.names.texts(numbers), strict=True))
        changed = {run for run in {**runs, **self._runs} if runs.get(run) != self._runs.get(run)}
        self._last, self._runs, self._marks = newest, runs, marks
        return changed | {names[number] for number in numbers}

    def version(self, run: str | None) -> str:
        """What a run is at, or the whole store."""
        with self._lock:
            at = self._count if run is None else self._versions.get(run, 0)
            return f"{self._boot}.{self._epoch}.{at}"

    def versions(self) -> tuple[int, dict[str, int]]:
        """How many changes there were, and the last of each run that had one."""
        with self._lock:
            return self._count, dict(self._versions)


def _seen(reader: Reader) -> Any:
    """What stays the same as long as nobody writes; None where that cannot be asked in one word."""
    if reader.database.dialect.shared:
        return None
    return tuple(reader.database.rows(f"PRAGMA {name}")[0][0] for name in ("data_version", "schema_version"))
