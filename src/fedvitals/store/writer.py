# SPDX-License-Identifier: Apache-2.0
"""Writes a batch of records in one transaction; the same for every database."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fedvitals.errors import RecordError
from fedvitals.measurements import Measurements, Telemetry, run_of
from fedvitals.records import LayerStats, LayerTable, Metric, Run, Sketch, Truth
from fedvitals.store import rows
from fedvitals.store.columns import Column
from fedvitals.store.deliveries import Delivered
from fedvitals.store.dialect import Database
from fedvitals.store.packing import LayerMatrices, block_of, in_blocks, layer_matrices, with_checksum
from fedvitals.store.symbols import NAMES_REMEMBERED, Symbols
from fedvitals.store.upkeep import compaction

Family = tuple[str, str, str, int, bool]  # run, family, layer table, number of layers, whether about the whole
MeasuredColumns = Callable[[Measurements, rows.Number], list[Column]]
_NOT_NOTED = (Run, Truth)
ROUNDS_REMEMBERED = 1000  # whose times are known without asking; a run of any length must fit into memory


class Writer:
    """Writes a database, and keeps a cache between batches.

    Where several processes may write at once (`dialect.shared`), each run is written by one batch at a time, names are
    added in turns, and whatever another writer may have changed is read again in each transaction.
    """

    def __init__(
        self,
        database: Database,
        changed_elsewhere: Callable[[], bool],
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._changed_elsewhere = changed_elsewhere
        self._before_commit = before_commit
        self._symbols = Symbols(database)
        self._delivered = Delivered(database, self._symbols)
        self._columns = {kind: rows.to_columns(kind, self._symbols.number) for kind in rows.TABLE_OF}
        self._forget()

    def _forget(self) -> None:
        self._symbols.forget()
        self._delivered.forget()
        self._tables: set[str] = set()
        self._nodes: dict[str, set[str | None]] = {}  # by run; None is never recorded
        self._rounds: dict[tuple[str, int], tuple[float, float]] = {}
        self._pending: dict[Family, compaction.Pending] = {}
        self._arrival: int | None = None

    def write(self, records: Sequence[Telemetry]) -> None:
        """Store the new records of the batch, all or nothing."""
        rows.check(records)
        due: set[Family] = set()
        try:
            self._transaction(map(run_of, records), partial(self._ingest, records, due))
        except (TypeError, ValueError, OverflowError) as error:  # raised while making rows, not by the database
            raise RecordError(f"A record cannot be stored ({type(error).__name__}: {error}).") from error
        for key in due:
            # Each merge is a separate transaction: a reader sees the blocks before or after it, never both.
            while key in self._pending and (taken := self._pending[key].take()):
                self._transaction({key[0]}, partial(compaction.compact, self._database, key[1], taken))

    def _transaction(self, runs: Iterable[str], work: Callable[[], None]) -> None:
        try:
            self._database.execute(self._database.dialect.begin)
            if self._changed_elsewhere():
                self._forget()
            if self._database.dialect.shared:
                for run in sorted({*runs}):  # always in the same order, so that two writers never wait for each other
                    self._database.take_turn(f"run {run}")
                self._delivered.forget()
                self._symbols.begin()
            work()
            self._before_commit()
            self._database.execute("COMMIT")
        except BaseException:
            self._forget()  # memory and tables must agree again, whatever went wrong
            self._database.rollback()
            raise

    def _ingest(self, records: Sequence[Telemetry], due: set[Family]) -> None:
        new = self._delivered.fresh(records)
        by_kind: dict[type, list[Any]] = {}
        for record in new:
            by_kind.setdefault(type(record), []).append(record)
        for run in by_kind.pop(Run, []):
            self._write_run(run)
        if by_kind.keys() & {Metric, Sketch, Measurements}:
            self._write_in_order(new, Metric, rows.metric_columns)
            self._write_in_order(new, Sketch, rows.sketch_columns)
        for kind, same in by_kind.items():
            if kind not in (LayerStats, Metric, Sketch, Measurements):  # these are written in one common order
                self._database.insert(rows.insert(kind), self._columns[kind](same))
        due |= self._write_statistics(layer_matrices(new))
        self._note_places(new)
        self._delivered.save()
        self._symbols.save()

    def _write_in_order(self, records: Sequence[Telemetry], kind: type, measured_columns: MeasuredColumns) -> None:
        """Write all metrics or sketches by arrival: of two with the same time, the later one counts."""
        for kind_of_same, same in itertools.groupby(records, type):
            if kind_of_same is kind:
                self._database.insert(rows.insert(kind), self._columns[kind]([*same]))
            elif kind_of_same is Measurements:
                for measured in same:
                    columns = measured_columns(measured, self._symbols.number)  # type: ignore[arg-type]
                    if columns:
                        self._database.insert(rows.insert(kind), columns)

    def _write_run(self, run: Run) -> None:
        """Insert or overwrite the run, unless its own source has already written something newer."""
        for table in run.tables:
            self._write_table(table)
        number, source = self._symbols.number(run.id), self._symbols.number(run.source)
        for last_source, last_sequence in self._database.rows(
            "SELECT source, sequence FROM run WHERE id = ?", (number,)
        ):
            if last_source == source and run.sequence < last_sequence:
                return
        columns = (*rows.RUN_COLUMNS, "source", "sequence")
        self._database.execute(
            f"INSERT INTO run (id, {', '.join(columns)}) VALUES ({', '.join('?' * (1 + len(columns)))}) "  # noqa: S608
            f"ON CONFLICT (id) DO UPDATE SET {', '.join(f'{column} = excluded.{column}' for column in columns)}",
            (number, *rows.run_row(run), source, int(run.sequence)),
        )

    def _write_table(self, table: LayerTable) -> None:
        if table.digest in self._tables:
            return
        self._tables.add(table.digest)
        number = self._symbols.number(table.digest)
        self._database.take_turn("names")
        if self._database.rows("SELECT id FROM layer_table WHERE id = ?", (number,)):
            return
        self._database.execute("INSERT INTO layer_table (id, rows) VALUES (?, ?)", (number, table.rows))
        self._database.many(
            "INSERT INTO layer (layer_table, position, name, shape, dtype) VALUES (?, ?, ?, ?, ?)",
            rows.layer_rows(table, self._symbols.number),
        )

    def _write_statistics(self, parts: Iterable[LayerMatrices]) -> set[Family]:
        """Write blocks for each family and round. Returns the families that may have enough old rounds to merge."""
        due = set()
        for key, same in in_blocks(parts):
            family, round_index = key[:-1], key[-1]
            pending = self._pending_of(family)  # before the block is written, or it would be counted twice
            if pending.add(*self._write_block(family, same, round_index)):
                due.add(family)
        return due

    def _write_block(self, key: Family, same: list[LayerMatrices], round_: int | None) -> tuple[int, int | None, int]:
        arrival = self._next_arrival()
        entries, numbers = block_of(same, self._symbols.number)
        blob = with_checksum(numbers.astype("<f4", copy=False))
        run, family, table, layers, _ = key
        names = [self._symbols.number(name) for name in (run, family, table)]
        first, last = compaction.rounds_of(entries)
        compaction.insert_block(self._database, (arrival, *names, layers, len(entries.at), first, last), entries)
        self._database.execute("INSERT INTO layer_matrix (block, layer, numbers) VALUES (?, -1, ?)", (arrival, blob))
        return arrival, round_, len(blob)

    def _next_arrival(self) -> int:
        if self._database.dialect.next_block:
            return int(self._database.rows(self._database.dialect.next_block)[0][0])
        if self._arrival is None:
            self._arrival = int(self._database.rows("SELECT COALESCE(MAX(arrival), 0) FROM layer_block")[0][0])
        self._arrival += 1
        return self._arrival

    def _pending_of(self, key: Family) -> compaction.Pending:
        pending = self._pending.get(key)
        if pending is None:
            names = tuple(self._symbols.known(name) for name in key[:3])
            pending = self._pending[key] = compaction.load_pending(self._database, (*names, key[3], int(key[4])))
        return pending

    def _note_places(self, records: Iterable[Telemetry]) -> None:
        """Update `run_round` and `run_node`: listing rounds and nodes must not need a walk over all records.

        Readers of these tables must not learn from them what is to be found out: truths are omitted.
        """
        times: dict[tuple[str, int | None], list[float]] = {}
        nodes: dict[str, set[str | None]] = {}
        for record in records:
            if isinstance(record, Measurements):
                run, round_index, measured = record.run, record.round, record.measured_nodes()
                if not measured:
                    continue
                nodes.setdefault(run, set()).update(measured)
            elif isinstance(record, _NOT_NOTED):
                continue
            else:
                run, round_index = record.where.run, record.where.round
                nodes.setdefault(run, set()).add(record.where.node)
            times.setdefault((run, round_index), []).append(record.at)
        number = self._symbols.number
        for run, own in nodes.items():
            known = self._nodes.setdefault(run, {None})
            added = own - known
            known |= added
            if len(known) > NAMES_REMEMBERED:  # the table has them: recorded twice, they are there once
                del self._nodes[run]
            self._database.many(
                "INSERT INTO run_node (run, node) VALUES (?, ?) ON CONFLICT (run, node) DO NOTHING",
                [(number(run), number(node)) for node in added],
            )
        for (run, round_index), at in times.items():
            if round_index is not None:
                self._note_round((run, int(round_index)), (min(math.inf, *at), max(-math.inf, *at)))

    def _note_round(self, key: tuple[str, int], span: tuple[float, float]) -> None:
        place = (self._symbols.number(key[0]), key[1])
        # Another writer may have extended it, which is why a shared database is asked each time.
        known = None if self._database.dialect.shared else self._rounds.get(key)
        if known is None:
            rows = self._database.rows("SELECT first, last FROM run_round WHERE run = ? AND round = ?", place)
            known = rows[0] if rows else (math.inf, -math.inf)
        wider = (min(known[0], span[0]), max(known[1], span[1]))
        if wider != known or not math.isfinite(wider[0]):
            self._database.execute(
                "INSERT INTO run_round (run, round, first, last) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (run, round) DO UPDATE SET first = excluded.first, last = excluded.last",
                (*place, *wider),
            )
        self._rounds[key] = wider
        if len(self._rounds) > ROUNDS_REMEMBERED:
            del self._rounds[next(iter(self._rounds))]
