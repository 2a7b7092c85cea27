# SPDX-License-Identifier: Apache-2.0
"""Checks on the records of a payload before they enter a run, and quotas that each sender has for itself.

A sender that brings too much costs its own telemetry; it never uses up what the other senders need.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fedvitals.catalog import CATALOG, HOSTS, from_update
from fedvitals.errors import RecordError
from fedvitals.measurements import Measurements, Telemetry, is_important, run_of
from fedvitals.protocols import Node
from fedvitals.records import LayerStats, LayerTable, Metric, Record, Run, Span, Transfer
from fedvitals.time_parts import CLIENT, ROUND_SECONDS, of_the_whole
from fedvitals.transport.sender import OF_CLIENTS, Sender
from fedvitals.transport.sink_writer import SOURCE

OF_WORKERS = (*OF_CLIENTS, Run, Transfer, Measurements)  # what a worker process of our own may send

# What one layer table may hold: far more than any model has, and little enough that a sum or a product of sizes fits
# into 64 bits and into a float without rounding.
ROW_KINDS = ("parameter", "buffer", "module", "model")
LAYERS, DIMENSIONS = 100_000, 64
NAME_CHARACTERS, DTYPE_CHARACTERS = (
    512,
    128,
)  # of a layer: a payload holds a repeated text once, a store with each layer
LAYER_VALUES, TABLE_VALUES = 1 << 48, 1 << 52

# A run is written again, with all its layer tables, whenever it gets a new one. A model has up to four tables.
TABLES = 1_000  # of the run's own models and worker processes
TABLES_OF_SENDER, LAYERS_OF_SENDER = 50, 100_000  # that no one else has brought before
TABLES_OF_ALL = 5_000  # a hundred senders would have to use up their quota

NAMES_OF_SENDER = 200  # of metrics, that no one else has brought before

COUNTING = frozenset(  # units of what is counted or timed, and is never NaN or infinite
    ("samples", "steps", "values", "clients", "seconds", "rounds", "bytes", "bytes/s", "samples/s", "percent")
)
LARGEST_COUNT = 2.0**60

SOURCES, SOURCES_OF_SENDER = 10_000, 100  # processes whose deliveries are remembered: of our own workers, of a sender
BULK_OF_PAYLOAD, IMPORTANT_OF_PAYLOAD = (
    20_000,
    500,
)  # records of a sender; a sink's queue has room for 5 and 20 times that


def tables_of_payload(records: Sequence[Telemetry], run: str, known: Mapping[str, LayerTable]) -> dict[str, LayerTable]:
    """Return the layer tables that a payload brings, by digest.

    Raises a RecordError unless all records are of this run, of kinds that a worker may send, and about layers that are
    known or come with them.
    """
    tables: dict[str, LayerTable] = {}
    for record in records:
        if run_of(record) != run:
            raise RecordError(f"A payload of run '{run_of(record)[:80]}' was given to run '{run}'.")
        if record.source == "" or record.source.startswith(SOURCE):
            raise RecordError(f"A payload has records of source '{record.source}', which is no worker's.")
        if not isinstance(record, OF_WORKERS):
            raise RecordError(f"A payload has a {type(record).__name__}, which is not a worker's to tell.")
        if isinstance(record, Run):
            for table in record.tables:
                check_table(table)
                tables[table.digest] = table
        elif isinstance(record, LayerStats):
            _check_described(record.table, len(record.matrix), tables, known)
        elif isinstance(record, Measurements):
            _check_measurements(record, tables, known)
        elif isinstance(record, Span | Metric):
            _check_of_client(record)
    return tables


def _check_measurements(
    measured: Measurements, brought: Mapping[str, LayerTable], known: Mapping[str, LayerTable]
) -> None:
    for part in measured.layers:
        _check_described(part.table, part.matrices.shape[1], brought, known)
    if None in measured.nodes or ROUND_SECONDS in measured.names:
        for row, name, _, _ in measured.metrics():
            _check_of_client(Metric(measured.place(row), measured.at, name, 0.0))


def _check_of_client(record: Span | Metric) -> None:
    if of_the_whole(record):
        described = f"{type(record).__name__} '{record.name[:80]}'"
        raise RecordError(f"A payload has the {described} of the whole round, which is not a worker's to tell.")


def _check_described(
    table: str, layers: int, brought: Mapping[str, LayerTable], known: Mapping[str, LayerTable]
) -> None:
    described_by = brought.get(table) or known.get(table)
    if described_by is None or len(described_by.layers) != layers:
        rows = f"{layers} layers of table '{table[:80]}'"
        raise RecordError(f"A payload has statistics of {rows}, which no run record tells of.")


def check_table(table: LayerTable) -> None:
    """Raise a RecordError unless this could be the layer table of a model: its kind, number of layers and shapes."""
    if table.rows not in ROW_KINDS:
        raise RecordError(f"A layer table has rows of the kind '{table.rows[:80]}'. Known: {', '.join(ROW_KINDS)}.")
    if len(table.layers) > LAYERS:
        raise RecordError(f"A layer table has {len(table.layers)} layers; {LAYERS} are the limit.")
    total = 0
    for layer in table.layers:
        if len(layer.shape) > DIMENSIONS:
            raise RecordError(
                f"The layer '{layer.name[:80]}' has {len(layer.shape)} dimensions; {DIMENSIONS} are the limit."
            )
        if len(layer.name) > NAME_CHARACTERS or len(layer.dtype) > DTYPE_CHARACTERS:
            raise RecordError(f"The layer '{layer.name[:80]}' has a name or type of more characters than any model's.")
        values = math.prod(layer.shape)
        total += values
        if min((0, *layer.shape)) < 0 or max((values, *layer.shape)) > LAYER_VALUES or total > TABLE_VALUES:
            shape = " × ".join(map(str, layer.shape))[:120]
            raise RecordError(f"The layer '{layer.name[:80]}' has the shape {shape}, which no model's layer can have.")


class TableQuota:
    """Counts the layer tables that each sender has brought to a run."""

    def __init__(self) -> None:
        self._brought: dict[Node, tuple[int, int]] = {}  # by sender: tables, and layers in them

    def charge(
        self, sender: Sender | None, tables: Mapping[str, LayerTable], known: Collection[str], own: Collection[str]
    ) -> None:
        """Count the tables of a payload that are new to the run, or raise a RecordError if they are too many.

        `known`: digests of all tables of the run; `own`: of those that no sender brought. Without a sender, the payload
        comes from a worker process of our own.
        """
        if sender is None:
            if len({*own, *tables}) > TABLES:
                raise RecordError(f"A payload brings layer tables beyond the {TABLES} that a run may have.")
            return
        new = [table for digest, table in tables.items() if digest not in known]
        if not new:
            return
        count, layers = self._brought.get(sender.node, (0, 0))
        count, layers = count + len(new), layers + sum(len(table.layers) for table in new)
        if count > TABLES_OF_SENDER or layers > LAYERS_OF_SENDER:
            raise RecordError(
                f"Telemetry of '{sender.node}' brings layer tables beyond the {TABLES_OF_SENDER} (with "
                f"{LAYERS_OF_SENDER} layers in all) that one client may have."
            )
        if len(known) + len(new) > TABLES_OF_ALL:
            raise RecordError(f"Telemetry of '{sender.node}' brings a layer table beyond the {TABLES_OF_ALL} of a run.")
        self._brought[sender.node] = count, layers


class NameQuota:
    """Counts the names of metrics that each sender has brought to a run: exporters take a few hundred of them."""

    def __init__(self) -> None:
        self._known: set[str] = set(CATALOG)
        self._brought: dict[Node, int] = {}

    def admits(self, sender: Sender, record: Record) -> bool:
        """Whether a record has a name that is known, or one of the new names that this sender may still bring."""
        if not isinstance(record, Metric) or record.name in self._known:
            return True
        count = self._brought.get(sender.node, 0)
        if count >= NAMES_OF_SENDER:
            return False
        self._known.add(record.name)
        self._brought[sender.node] = count + 1
        return True


def is_possible(record: Record) -> bool:
    """Whether a metric can be so: a number of bytes, seconds or samples is finite, and fits into 64 bits."""
    measure = CATALOG.get(record.name) if isinstance(record, Metric) else None
    if not isinstance(record, Metric) or measure is None or measure.unit not in COUNTING:
        return True
    return abs(record.value) <= LARGEST_COUNT


def within_quota(records: Sequence[Record]) -> list[Record]:
    """Return as many records as a sender's payload may put into the queues; those of single steps go first."""
    trained = [i for i, record in enumerate(records) if isinstance(record, Span) and record.name == CLIENT]
    surplus = set(trained[:-1])  # one message is one training
    records = [record for i, record in enumerate(records) if i not in surplus]
    important = [record for record in records if is_important(record)]
    bulk = [record for record in records if not is_important(record)]
    if len(important) <= IMPORTANT_OF_PAYLOAD and len(bulk) <= BULK_OF_PAYLOAD:
        return records
    bulk.sort(key=lambda record: not isinstance(record, Run) and record.where.step is not None)  # stable
    return [*bulk[:BULK_OF_PAYLOAD], *important[:IMPORTANT_OF_PAYLOAD]]


def is_claim(record: Record) -> bool:
    """Whether the server measures the same of a client's update, if it holds that."""
    return from_update(record) and not (isinstance(record, Metric) and record.name in HOSTS)


def is_empty(record: Telemetry) -> bool:
    """Whether it is statistics of no layer at all, which say nothing and which no store could give back."""
    return isinstance(record, LayerStats) and not len(record.matrix)
