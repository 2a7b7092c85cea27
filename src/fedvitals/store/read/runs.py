# SPDX-License-Identifier: Apache-2.0
"""Reads the store's information about the runs themselves: their names, settings, beginning and end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedvitals.catalog import ALIVE
from fedvitals.records import Run
from fedvitals.store.read.reader import Reader


@dataclass(frozen=True, slots=True)
class RunHead:
    """What a list shows for a run without reading any of its records."""

    number: int  # in the store
    id: str
    name: str
    host: str
    topology: str | None
    started: float | None
    finished: float | None


def count_runs(reader: Reader) -> int:
    """Count the runs of the store."""
    ((count,),) = reader.database.rows("SELECT COUNT(*) FROM run")
    return int(count)


def has_run(reader: Reader, run: str) -> bool:
    """Whether there is a run with exactly this id."""
    return bool(reader.database.rows("SELECT 1 FROM runs WHERE id = ?", (run,)))


def newest_run(reader: Reader) -> str | None:
    """Return the id of the run that started last, or None if the store has no run."""
    rows = reader.database.rows("SELECT id FROM runs ORDER BY started DESC LIMIT 1")
    return str(rows[0][0]) if rows else None


def runs_of_name(reader: Reader, name: str) -> list[str]:
    """Return the ids of the runs with a name, the newest first."""
    rows = reader.database.rows("SELECT id FROM runs WHERE name = ? ORDER BY started DESC, id DESC", (name,))
    return [identity for (identity,) in rows]


def run_heads(reader: Reader) -> Iterator[RunHead]:
    """Yield every run of the store, in no particular order."""
    rows = reader.database.rows(
        "SELECT r.id, s.text, r.name, r.host, r.topology, r.started, r.finished FROM run AS r "
        "JOIN symbol AS s ON s.id = r.id"
    )
    return (RunHead(*row) for row in rows)


def run_settings(reader: Reader, run: str) -> Run | None:
    """Return a run with only its configuration, host and end, or None if the store has no such run.

    Unlike `queries.get_run`, it reads neither layer tables nor versions.
    """
    rows = reader.database.rows("SELECT config, host, finished FROM run WHERE id = ?", (reader.names.number(run) or 0,))
    if not rows:
        return None
    config, host, finished = rows[0]
    settings = json.loads(config)
    return Run(run, "", host, config=settings if isinstance(settings, dict) else {}, finished=finished)


def run_name(reader: Reader, run: str) -> str:
    """Return the name that the user gave the run."""
    ((name,),) = reader.database.rows("SELECT name FROM run WHERE id = ?", (reader.names.number(run) or 0,))
    return str(name)


def end_of_run(reader: Reader, run: str) -> Any:
    """Return when the run ended, or None while it has not."""
    rows = reader.database.rows("SELECT finished FROM run WHERE id = ?", (reader.names.number(run) or 0,))
    return rows[0][0] if rows else None


@dataclass(frozen=True, slots=True)
class SpanOfRounds:
    """The number of a run's rounds, the first and the last, and the time of the last record that belongs to a round.

    Before the first round, it is the time of the last sign of life.
    """

    count: int
    first: int | None
    last: int | None
    last_record: float | None


def span_of_rounds(reader: Reader, run: str) -> SpanOfRounds:
    """Return the span of a run's rounds, without listing them."""
    number = reader.names.number(run) or 0
    ((count, first, last, at),) = reader.database.rows(
        "SELECT COUNT(*), MIN(round), MAX(round), MAX(last) FROM run_round WHERE run = ?", (number,)
    )
    if at is None:
        ((at,),) = reader.database.rows(
            "SELECT MAX(at) FROM metric WHERE run = ? AND name = ? AND round IS NULL",
            (number, reader.names.number(ALIVE) or 0),
        )
    return SpanOfRounds(count, first, last, at)


def last_records_of_open_runs(reader: Reader) -> dict[int, float | None]:
    """Return for each run without an end, by its number, the time of the last record as in `span_of_rounds`."""
    before_rounds = reader.database.rows(
        "SELECT run, MAX(at) FROM metric WHERE run IN (SELECT id FROM run WHERE finished IS NULL) AND name = ? "
        "AND round IS NULL GROUP BY run",
        (reader.names.number(ALIVE) or 0,),
    )
    in_rounds = reader.database.rows(
        "SELECT run, MAX(last) FROM run_round WHERE run IN (SELECT id FROM run WHERE finished IS NULL) GROUP BY run"
    )
    return {**dict(before_rounds), **dict(in_rounds)}


def is_newest_open_run(reader: Reader, run: str) -> tuple[bool, bool]:
    """Return whether the run has no end yet, and whether it is the newest of the runs without an end."""
    rows = reader.database.rows(
        "SELECT r.finished, COALESCE(r.started, 0) >= (SELECT MAX(COALESCE(o.started, 0)) FROM run AS o "
        "WHERE o.finished IS NULL) FROM run AS r WHERE r.id = ?",
        (reader.names.number(run) or 0,),
    )
    return (rows[0][0] is None, bool(rows[0][1])) if rows else (False, False)


def advisory_locks(reader: Reader) -> set[int]:
    """Return the numbers of the locks that trainings hold on their runs; for a store in PostgreSQL."""
    rows = reader.database.rows(
        "SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
    )
    return {number for (number,) in rows}
