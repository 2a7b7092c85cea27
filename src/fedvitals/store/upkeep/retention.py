# SPDX-License-Identifier: Apache-2.0
"""Deletes runs on request, and thins old runs until a store fits a budget.

Names (`symbol`) and lists of layers stay: they are small, shared by runs, and cached by writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvitals.errors import BusyError, ConfigError
from fedvitals.store.dialect import Database
from fedvitals.store.postgres import is_written
from fedvitals.store.schema import TABLES
from fedvitals.store.tapes import remove_lost_tape, remove_tape, tape_bytes
from fedvitals.store.upkeep.opening import transaction, upkeep
from fedvitals.store.upkeep.removal import note_removal

SMALLEST = 1_000_000  # bytes of a budget; a mistyped «500» instead of «500MB» must not cost every run

# What a run can lose and still be read as a whole: its scalars, events and findings stay.
_BLOCKS = ("layer_matrix", "block IN (SELECT arrival FROM layer_block WHERE run = ?)"), ("layer_block", "run = ?")
_DETAIL = (
    *_BLOCKS,
    ("sketch", "run = ?"),
    ("metric", "run = ? AND (step IS NOT NULL OR layer IS NOT NULL)"),
    ("span", "run = ? AND step IS NOT NULL"),
    ("event", "run = ? AND step IS NOT NULL AND level IN (SELECT id FROM symbol WHERE text IN ('debug', 'info'))"),
)
_EVERYTHING = (
    *_BLOCKS,
    *((t.name, "run = ?") for t in TABLES if t.name != "layer_block" and any(c.name == "run" for c in t.columns)),
    ("run", "id = ?"),
)


@dataclass(frozen=True, slots=True)
class Removed:
    """What was removed from one run."""

    run: str
    name: str
    what: str  # "detail", "run"; or "tape" of a run that is gone
    rows: int
    bytes: int
    tape_bytes: int = 0  # of its tape, removed with it


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was removed, and the store's size before and after."""

    removed: tuple[Removed, ...]
    bytes_before: int
    bytes_after: int
    open: tuple[str, ...] = ()  # runs that were skipped because they are not finished, or are being written


def stored_bytes(database: Database) -> int:
    """Return the size of the records; in a file, without the free space from earlier deletions."""
    if database.dialect.shared:
        rows = database.rows(
            "SELECT SUM(pg_total_relation_size(oid)) FROM pg_class WHERE relnamespace = 'fedvitals'::regnamespace "
            "AND relkind = 'r'"
        )
        return int(rows[0][0] or 0)
    used, free, size = (
        int(database.rows(f"PRAGMA {name}")[0][0]) for name in ("page_count", "freelist_count", "page_size")
    )
    return (used - free) * size


def delete(where: Path | str, runs: Sequence[str], *, give_back: bool = True) -> Cleared:
    """Remove these runs (by id) entirely, with their tapes. StoreError if one of them is being written.

    The tape of a run that is no longer in the store is also removed by that run's id.

    `give_back`: return the space to the disk, which blocks all other processes meanwhile; otherwise it is reused.
    """
    with upkeep(where) as database:
        before = stored_bytes(database)
        removed = []
        for run in runs:
            stored = database.rows("SELECT id, name FROM run WHERE id = (SELECT id FROM symbol WHERE text = ?)", (run,))
            for number, name in stored:
                with transaction(database):
                    if _is_written(database, run):
                        raise BusyError(
                            f"The run {run} is being written, so it was not deleted. End its training first."
                        )
                    gone = _remove(database, number, _EVERYTHING)
                    note_removal(database)
                removed.append(Removed(run, name, "run", *gone, remove_tape(where, run)))
            if not stored and tape_bytes(where, run):
                removed.append(Removed(run, "", "tape", 0, 0, remove_lost_tape(where, run)))
        if give_back:
            _give_back(database)
        return Cleared(tuple(removed), before, stored_bytes(database))


def thin(where: Path | str, keep_bytes: int) -> Cleared:
    """Make the store fit: the oldest finished runs first lose their data per step and per layer, then go entirely.

    Tapes have a separate budget; a run's tape is removed with the run.
    """
    if keep_bytes < SMALLEST:
        raise ConfigError(
            f"A store of at most {keep_bytes} bytes would keep no run: its tables alone take some 0.3 MB. "
            f"Allow {SMALLEST} or more, for example 500MB."
        )
    with upkeep(where) as database:
        before = size = stored_bytes(database)
        runs = database.rows(
            "SELECT r.id, s.text, r.name, r.finished FROM run AS r JOIN symbol AS s ON s.id = r.id "
            "ORDER BY COALESCE(r.finished, r.started), r.id"
        )
        removed: list[Removed] = []
        left_alone = [run for _, run, _, finished in runs if finished is None]
        for what, tables in (("detail", _DETAIL), ("run", _EVERYTHING)):
            for number, run, name, finished in runs:
                if size <= keep_bytes:
                    break
                if finished is None or run in left_alone:
                    continue
                with transaction(database):
                    if _is_written(database, run):
                        left_alone.append(run)
                        continue
                    rows, freed = _remove(database, number, tables)
                    note_removal(database)
                if rows:
                    size -= freed
                    tape = remove_tape(where, run) if what == "run" else 0
                    removed.append(Removed(run, name, what, rows, freed, tape))
        if removed:
            _give_back(database)
        return Cleared(tuple(removed), before, stored_bytes(database), tuple(left_alone))


def _is_written(database: Database, run: str) -> bool:
    """Whether a run is being written. In a file, we hold the only lock: a run without an end was killed."""
    return database.dialect.shared and is_written(database, run)


def _remove(database: Database, run: int, tables: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """Return how many rows and bytes were removed: counted in a file, estimated by their share in PostgreSQL."""
    before, rows, estimated = stored_bytes(database), 0, 0
    for table, condition in tables:
        mine = _weight(database, table, condition, (run,))
        if not mine[0]:
            continue
        if database.dialect.shared:
            whole = _weight(database, table, "true", ())
            ((total,),) = database.rows("SELECT pg_total_relation_size(?::regclass)", (f"fedvitals.{table}",))
            estimated += int(total * mine[1] / max(whole[1], 1))
        database.execute(f"DELETE FROM {table} WHERE {condition}", (run,))  # noqa: S608 - our own words only
        rows += mine[0]
    return rows, estimated if database.dialect.shared else before - stored_bytes(database)


def _weight(database: Database, table: str, condition: str, values: Sequence[Any]) -> tuple[int, int]:
    """Return the number of rows, and a measure of their size."""
    size = "SUM(LENGTH(numbers))" if table == "layer_matrix" else "COUNT(*)"
    ((rows, weight),) = database.rows(f"SELECT COUNT(*), {size} FROM {table} WHERE {condition}", values)  # noqa: S608
    return int(rows), int(weight or 0)


def _give_back(database: Database) -> None:
    """Return the space to the disk. Trainings that write to the same PostgreSQL wait for it in their queues."""
    if not database.dialect.shared:
        database.execute("VACUUM")
        return
    for table in {table for table, _ in _EVERYTHING}:
        database.execute(f"VACUUM FULL {table}")
