# SPDX-License-Identifier: Apache-2.0
"""From a scope and numbers to records, and from there to the sinks: the one way that telemetry leaves a monitor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

from fedvitals.monitor.run_context import RunContext
from fedvitals.monitor.scopes import ClientThreads
from fedvitals.probes.results import Results
from fedvitals.records import LayerTable, Record
from fedvitals.scope import Scope
from fedvitals.stats import FAMILIES
from fedvitals.transport.payload_buffer import PayloadBuffer
from fedvitals.transport.recorder import ScopeRecorder
from fedvitals.transport.sink_writer import SinkWriter

Writer = SinkWriter | PayloadBuffer  # of a monitor, of a worker process


class Emission:
    """Turns results into records and hands them to the writer, which applies the privacy policy and numbers them.

    `open_writer` opens the run and returns its writer; None once the run has ended without a record. `record` makes
    single records of a scope.
    """

    def __init__(self, context: RunContext, threads: ClientThreads, open_writer: Callable[[], Writer | None]) -> None:
        self._context, self._threads, self._open_writer = context, threads, open_writer
        self.writer: Writer | None = None  # while none is open
        self.record = ScopeRecorder(self.emit)

    def connect(self, writer: Writer) -> None:
        """The run has been opened: records go to this writer from now on."""
        self.writer = writer

    def emit(self, record: Record, clients: int | None = None) -> None:
        """Hand over a record; the first one opens the run. `clients`: how many a sum speaks for."""
        writer = self.writer or self._open_writer()
        if writer is not None:
            writer.emit(record, clients=clients, stray=self._threads.may_be_client())

    def emit_if_open(self, record: Record) -> None:
        """Hand over a record, unless that would open the run."""
        if self.writer is not None:
            self.emit(record)

    def admit(self, records: Iterable[Record]) -> None:
        """Hand over records of a worker process with the identity that they have."""
        writer = self.writer or self._open_writer()
        if isinstance(writer, SinkWriter):
            for record in records:
                writer.admit(record)

    def results(self, scope: Scope, results: Results) -> None:
        """Hand over what was measured in a scope, as records."""
        record = self.record
        if results.clients is not None:
            record = ScopeRecorder(functools.partial(self.emit, clients=results.clients))
        record.metrics(scope, results.metrics)
        for family, matrix, step in results.matrices:
            table = self._context.table_of(results, FAMILIES[family].rows, len(matrix))
            if table is not None:
                record.layers(scope, family, matrix, table, step)
        if results.sketch is not None:
            from fedvitals.kernels.sketch_hash import VERSION  # noqa: PLC0415 - its package imports torch

            record.sketch(scope, tuple(results.sketch.tolist()), VERSION)
        for name, message, data in results.remarks:
            record.event(scope, "info", name, message, data)

    def layer_tables(self, tables: Mapping[str, LayerTable], *, own: bool = True) -> None:
        """Record layer tables the first time they are seen.

        `own`: False for tables that a sender claims. Nothing that is measured here is ever described by such a table.
        """
        by_digest = {table.digest: table for table in tables.values()}
        if self._context.knows(by_digest, own=own):
            return
        with self._context.lock:
            writer = self.writer or self._open_writer()  # first: opening adds to what is known of the run
            if self._context.add_tables(by_digest, own=own) and writer is not None:
                writer.emit(self._context.run)

    def flush(self, timeout: float, *, own: bool = False) -> bool:
        """Wait until everything is written. `own`: by the store and the detectors only, not by the user's sinks."""
        return self.writer is None or self.writer.flush(timeout, own=own)
