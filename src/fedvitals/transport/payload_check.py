# SPDX-License-Identifier: Apache-2.0
"""Checks on the records of a payload before they enter a run: whether they are plausible.

`sender_limits` counts how many of them one sender may deliver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedvitals.catalog import CATALOG, HOSTS, from_update
from fedvitals.errors import RecordError
from fedvitals.measurements import Measurements, Telemetry, run_of
from fedvitals.records import LayerStats, LayerTable, Metric, Record, Run, Span, Transfer
from fedvitals.stats import GROUP_ROWS, MOST_CLASSES
from fedvitals.time_parts import CLIENT, ROUND_SECONDS, of_the_whole
from fedvitals.transport.sender import OF_CLIENTS, quoted
from fedvitals.transport.sender_limits import LAYER_NAME_CHARACTERS, LeftOut, name_of
from fedvitals.transport.sink_writer import SOURCE

OF_WORKERS = (*OF_CLIENTS, Run, Transfer, Measurements)  # kinds that one of our own worker processes may send

# Limits of a layer table: far more than any model has, and small enough that a sum or product of sizes fits into
# 64 bits and into a float without rounding.
ROW_KINDS = ("parameter", "buffer", "module", "model", *GROUP_ROWS)
LAYERS, DIMENSIONS = 100_000, 64
DTYPE_CHARACTERS = 128  # a payload holds a repeated text once, but a store holds it with each layer
LAYER_VALUES, TABLE_VALUES = 1 << 48, 1 << 52

COUNTING = frozenset((  # units of counts and times, which are never NaN or infinite
    "samples", "steps", "values", "clients", "seconds", "rounds", "bytes", "bytes/s", "samples/s", "tokens",
    "tokens/s", "percent",
))  # fmt: skip
LARGEST_COUNT = 2.0**60
LARGEST_SCALE = 1e6  # α/r of an adapter: a much larger one from one client would make the run's adapters unmeasurable
LONGEST_SECONDS = 366.0 * 86_400  # maximum of any time that a client reports

# What probes measure once in a training. Memory and machines are sampled, and users may log the rest.
MEASURED_ONCE = (
    "adapter.", "batch.", "gradient.", "nonlinearity.", "optimizer.", "perplexity.", "scale.", "steps", "time.client",
    "time.step", "tokens", "train.", "update.", "weight.",
)  # fmt: skip

# Processes whose deliveries are remembered, of our own workers and per sender; and sequence gaps of a sender.
SOURCES, SOURCES_OF_SENDER, GAPS_OF_SENDER = 10_000, 100, 1_000


def tables_of_payload(records: Sequence[Telemetry], run: str, known: Mapping[str, LayerTable]) -> dict[str, LayerTable]:
    """Return the layer tables that a payload contains, by digest.

    Raises a RecordError unless all records are of this run, of kinds that a worker may send, and about layers that are
    known or included.
    """
    tables: dict[str, LayerTable] = {}
    for record in records:
        if run_of(record) != run:
            raise RecordError(f"A payload of run {quoted(run_of(record))} was given to run '{run}'.")
        if record.source == "" or record.source.startswith(SOURCE):
            raise RecordError(f"A payload has records of source {quoted(record.source)}, which is no worker's.")
        if not isinstance(record, OF_WORKERS):
            raise RecordError(f"A payload has a {type(record).__name__}, which a worker may not report.")
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
        described = f"{type(record).__name__} {quoted(record.name)}"
        raise RecordError(f"A payload has the {described} of the whole round, which a worker may not report.")


def _check_described(
    table: str, layers: int, brought: Mapping[str, LayerTable], known: Mapping[str, LayerTable]
) -> None:
    described_by = brought.get(table) or known.get(table)
    if described_by is None or len(described_by.layers) != layers:
        rows = f"{layers} layers of table {quoted(table)}"
        raise RecordError(f"A payload has statistics of {rows}, which no run record describes.")


def check_table(table: LayerTable) -> None:
    """Raise a RecordError unless this can be the layer table of a model: its kind, number of layers and shapes."""
    if (fault := fault_of_table(table)) is not None:
        name, why = fault
        raise RecordError(f"The layer {quoted(name)} {why}." if name else f"A layer table {why}.")


def fault_of_table(table: LayerTable) -> tuple[str, str] | None:
    """Return why this cannot be the layer table of a model, preceded by the name of the layer concerned (or "")."""
    if table.rows not in ROW_KINDS:
        return "", f"has rows of the kind {quoted(table.rows)}. Known: {', '.join(ROW_KINDS)}"
    most = MOST_CLASSES if table.rows in GROUP_ROWS else LAYERS
    if len(table.layers) > most:
        return "", f"has {len(table.layers)} layers; {most} are the limit"
    total = 0
    for layer in table.layers:
        if len(layer.shape) > DIMENSIONS:
            return layer.name, f"has {len(layer.shape)} dimensions; {DIMENSIONS} are the limit"
        if len(layer.name) > LAYER_NAME_CHARACTERS or len(layer.dtype) > DTYPE_CHARACTERS:
            return layer.name, "has a name or type of more characters than any model's"
        values = math.prod(layer.shape)
        total += values
        if min((0, *layer.shape)) < 0 or max((values, *layer.shape)) > LAYER_VALUES or total > TABLE_VALUES:
            shape = " × ".join(map(str, layer.shape))[:120]
            return layer.name, f"has the shape {shape}, which no model's layer can have"
    return None


TOLD_TWICE = "with numbers that a training measures once, told again in the same message"
IMPOSSIBLE = "with counts or times that cannot be"
MALFORMED = "that no client measures"
IMPOSSIBLE_TABLE = "with layers that no model has"
UNDESCRIBED = "of layers that no layer table describes"
BROKEN_RULES = (TOLD_TWICE, IMPOSSIBLE, MALFORMED, IMPOSSIBLE_TABLE, UNDESCRIBED)
"""Reasons for leaving out records other than a limit on their amount."""


def described_records(
    records: Sequence[Record], known: Mapping[str, LayerTable], left_out: LeftOut
) -> tuple[list[Record], dict[str, LayerTable]]:
    """Return a sender's records, and the layer tables that they contain, by digest.

    Impossible tables, and statistics of layers that no table describes, are added to `left_out` instead.
    """
    kept: list[Record] = []
    tables: dict[str, LayerTable] = {}
    for record in records:
        if isinstance(record, Run):
            for table in record.tables:
                if (fault := fault_of_table(table)) is None:
                    tables[table.digest] = table
                else:
                    left_out.add(IMPOSSIBLE_TABLE, record, fault[0] or table.rows)
        elif isinstance(record, LayerStats):
            described_by = tables.get(record.table) or known.get(record.table)
            if described_by is None or len(described_by.layers) != len(record.matrix):
                left_out.add(UNDESCRIBED, record, record.family)
                continue
        kept.append(record)
    return kept, tables


def is_possible(record: Record) -> bool:
    """Return whether a metric is possible: bytes and samples are finite and fit into 64 bits, no time is a year."""
    if isinstance(record, Metric) and record.name == "adapter.scale":
        return abs(record.value) <= LARGEST_SCALE
    measure = CATALOG.get(record.name) if isinstance(record, Metric) else None
    if not isinstance(record, Metric) or measure is None or measure.unit not in COUNTING:
        return True
    return abs(record.value) <= (LONGEST_SECONDS if measure.unit == "seconds" else LARGEST_COUNT)


def of_one_training(records: Sequence[Record], left_out: LeftOut) -> list[Record]:
    """Return the records without those that one training cannot produce, since one message is one training.

    Left out are all but the last Span of a client's training, and all but the first value of a number that is measured
    once (per layer and step). These are added to `left_out`. What users log may occur often.
    """
    trained = [i for i, record in enumerate(records) if isinstance(record, Span) and record.name == CLIENT]
    surplus = set(trained[:-1])
    known: set[tuple[str, str | None, int | None]] = set()
    for i, record in enumerate(records):
        if isinstance(record, Metric) and record.name.startswith(MEASURED_ONCE):
            key = (record.name, record.where.layer, record.where.step)
            if key in known:
                surplus.add(i)
            known.add(key)
    for i in sorted(surplus):
        left_out.add(TOLD_TWICE, records[i], name_of(records[i]))
    return [record for i, record in enumerate(records) if i not in surplus]


def is_claim(record: Record) -> bool:
    """Return whether the server measures the same of a client's update if it holds that."""
    return from_update(record) and not (isinstance(record, Metric) and record.name in HOSTS)


def check_no_claim(record: Record) -> None:
    """Raise a RecordError for a client's claim about its update or layers, which only its round's payload may make."""
    if is_claim(record) or isinstance(record, LayerStats):
        raise RecordError("A client reports its update and its layers only in the payload of its round.")


def is_empty(record: Telemetry) -> bool:
    """Return whether it is statistics of no layer at all, which hold no information and which no store could return."""
    return isinstance(record, LayerStats) and not len(record.matrix)
