# SPDX-License-Identifier: Apache-2.0
"""Reads what has changed in a store since an earlier point in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedvitals.store.read.reader import Reader
from fedvitals.store.schema import TABLES

NUMBERED = tuple(
    table.name
    for table in TABLES
    if {"arrival", "run"} <= {column.name for column in table.columns} and table.name != "truth"
)
"""Tables whose rows belong to a run and are numbered in the order of their arrival."""


def data_version(reader: Reader) -> object:
    """Return a value that stays the same as long as nobody else writes; None if the database has no such value.

    Values of two readers cannot be compared.
    """
    return None if reader.database.dialect.shared else reader.database.rows("PRAGMA data_version")[0][0]


@dataclass(frozen=True, slots=True)
class StoreState:
    """How far a store has been written."""

    newest: dict[str, int]  # by table, the arrival of the newest row
    runs: dict[str, tuple[Any, ...]]  # by id, what changes when a run's description is written again
    marks: dict[int, tuple[Any, ...]]  # by the run's number, what changes when a mark is set or removed


def store_state(reader: Reader) -> StoreState:
    """Return how far the store has been written."""
    ask = reader.database.rows
    newest = " UNION ALL ".join(f"SELECT '{table}', COALESCE(MAX(arrival), 0) FROM {table}" for table in NUMBERED)  # noqa: S608 - our own words
    runs = ask("SELECT s.text, r.source, r.sequence, r.finished, r.id FROM run AS r JOIN symbol AS s ON s.id = r.id")
    marks = ask("SELECT run, COUNT(*), MAX(at), MIN(target), MAX(target) FROM mark GROUP BY run")
    reader.names.learn((number, run) for run, *_, number in runs)
    return StoreState(
        {table: int(arrival) for table, arrival in ask(newest)},
        {row[0]: row[1:4] for row in runs},
        {row[0]: row[1:] for row in marks},
    )


def runs_with_new_rows(reader: Reader, table: str, after: int, last: int) -> set[int]:
    """Return the numbers of the runs with rows whose arrival is above `after` and at most `last`."""
    sql = f"SELECT DISTINCT run FROM {table} WHERE arrival > ? AND arrival <= ?"  # noqa: S608 - our own words
    return {run for (run,) in reader.database.rows(sql, (after, last))}


def count_newest_rows(reader: Reader, table: str, after: int, base: int) -> list[tuple[int, int, int]]:
    """Return for each run its number, its number of rows with arrivals above `base`, and of those above `after`."""
    return reader.database.rows(
        f"SELECT run, COUNT(*), COUNT(CASE WHEN arrival > ? THEN 1 END) FROM {table} WHERE arrival > ? GROUP BY run",  # noqa: S608 - our own words
        (after, base),
    )
