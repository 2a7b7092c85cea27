# SPDX-License-Identifier: Apache-2.0
"""Turns scopes and numbers into records and passes them to the sinks. All telemetry leaves a monitor through here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fedvitals.measurements import Emitted, Measurements, Telemetry
from fedvitals.monitor.run_context import RunContext
from fedvitals.monitor.scopes import ClientThreads
from fedvitals.probes.node_columns import NodeColumns
from fedvitals.probes.results import Key, Results, measurements_of
from fedvitals.records import LayerTable, Record, group_table
from fedvitals.scope import Scope
from fedvitals.stats import FAMILIES, GROUP_ROWS
from fedvitals.transport.payload_buffer import PayloadBuffer
from fedvitals.transport.recorder import ScopeRecorder
from fedvitals.transport.sink_writer import SinkWriter

Writer = SinkWriter | PayloadBuffer  # of a monitor, or of a worker process


class Emission:
    """Turns results into records and hands them to the writer, which applies the privacy policy and numbers them.

    `open_writer` opens the run and returns its writer; None once the run has ended without a record. `record` makes
    `open_writer` opens the run and returns its writer, or None if the run ended without a record. `record` makes single
    records of a scope.
    """

    def __init__(self, context: RunContext, threads: ClientThreads, open_writer: Callable[[], Writer | None]) -> None:
        self._context, self._threads, self._open_writer = context, threads, open_writer
        self.writer: Writer | None = None  # None while the run is not open
        self.record = ScopeRecorder(self.emit)

    def connect(self, writer: Writer) -> None:
        """Send records to this writer from now on: the run has been opened."""
        self.writer = writer

    def emit(self, record: Emitted, clients: int | None = None) -> None:
        """Emit a record or measurements; the first opens the run.

        `clients`: the number of clients that a sum covers.
        """
        writer = self.writer or self._open_writer()
        if writer is not None:
            writer.emit(record, clients=clients, stray=self._threads.may_be_client())

    def emit_all(self, records: Sequence[Record]) -> None:
        """Emit several records of this process."""
        writer = self.writer or self._open_writer()
        if writer is not None:
            writer.emit_all(records, stray=self._threads.may_be_client())

    def emit_if_open(self, record: Telemetry) -> None:
        """Emit a record, unless that would open the run."""
        if self.writer is not None:
            self.emit(record)

    def admit(self, records: Iterable[Telemetry]) -> None:
        """Emit records of a worker process under the identity they already have."""
        writer = self.writer or self._open_writer()
        if isinstance(writer, SinkWriter):
            writer.admit(records)

    def results(self, scope: Scope, results: Results) -> None:
        """Emit what was measured in a scope."""
        self.results_of_nodes(scope, [((scope.node, scope.group), results)])

    def results_of_nodes(self, scope: Scope, rows: Sequence[tuple[Key, Results]]) -> None:
        """Emit what was measured for several nodes (each with its group) in a round, in their order."""
        batches: list[list[tuple[Key, Results]]] = [[]]
        for key, results in rows:
            if results.clients is None:
                batches[-1].append((key, results))
            else:  # a sum over clients, which the privacy policy checks separately
                batches += [(key, results)], []
        self._describe_groups({(family, len(matrix)) for _, own in rows for family, matrix, _ in own.matrices})
        now, table_of = time.time(), self._context.table_of
        tables = [measurements_of(scope.run, scope.round, now, batch, table_of) for batch in batches]
        # Nothing below this line fails: either everything is emitted or nothing is.
        for batch, measurements in zip(batches, tables, strict=True):
            clients = batch[0][1].clients if batch else None
            if clients is not None:
                for record in measurements.records():
                    self.emit(record, clients=clients)
            elif len(measurements):
                self.emit(measurements)
        for (node, group), results in rows:
            for name, message, data in results.remarks:
                self.record.event(replace(scope, node=node, group=group), "info", name, message, data)

    def columns(self, scope: Scope, columns: NodeColumns, without: Collection[int] = ()) -> Measurements:
        """Emit what was measured for many nodes in a round, except the rows in `without`; returns what was emitted."""
        self._describe_groups(columns.layer_counts())
        table = columns.measurements(scope.run, scope.round, time.time(), self._context.table_of, without)
        if len(table):
            self.emit(table)
        for row, (name, message, data) in columns.remarks:
            if row not in without:
                node, group = columns.keys[row]
                self.record.event(replace(scope, node=node, group=group), "info", name, message, data)
        return table

    def _describe_groups(self, counts: Collection[tuple[str, int]]) -> None:
        """Record the tables of families by class or band, given with their numbers of rows.

        The number of classes is known only from the outputs seen in training.
        """
        for family, count in counts:
            rows = FAMILIES[family].rows
            if rows in GROUP_ROWS:
                self.layer_tables({rows: group_table(rows, count)})

    def layer_tables(self, tables: Mapping[str, LayerTable], *, own: bool = True) -> None:
        """Record layer tables the first time they are seen.

        `own`: False for tables that a sender claims. Nothing measured here is ever described by such a table.
        """
        by_digest = {table.digest: table for table in tables.values()}
        if self._context.knows(by_digest, own=own):
            return
        with self._context.lock:
            writer = self.writer or self._open_writer()  # first, because opening adds to what is known about the run
            if self._context.add_tables(by_digest, own=own) and writer is not None:
                writer.emit(self._context.run)

    def flush(self, timeout: float, *, own: bool = False) -> bool:
        """Wait until everything is written. `own`: only by the store and the detectors, not by the user's sinks."""
        return self.writer is None or self.writer.flush(timeout, own=own)
