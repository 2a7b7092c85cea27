# SPDX-License-Identifier: Apache-2.0
"""Converts records to rows and back, column by column as typed in `schema`; `packing` handles layer statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from fedvitals import plain_json
from fedvitals.errors import RecordError
from fedvitals.measurements import NO_STEP, Measurements, Telemetry, sketch_digest
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerTable,
    Metric,
    Run,
    Sketch,
    Snapshot,
    Span,
    Suspect,
    Transfer,
    Truth,
    Where,
)
from fedvitals.store.columns import Column, Constant
from fedvitals.store.ddl import quoted
from fedvitals.store.schema import TABLE
from fedvitals.store.symbols import encodable

# The table of each record type; Run and LayerStats are handled separately.
TABLE_OF: Mapping[type, str] = {
    Metric: "metric",
    Event: "event",
    Span: "span",
    Transfer: "transfer",
    Sketch: "sketch",
    Finding: "finding",
    Action: "action",
    Snapshot: "snapshot",
    Truth: "truth",
}

_PLACE = ("run", "round", "node", "step", "layer", "group")
Row = tuple[Any, ...]


_encoded = json.JSONEncoder(allow_nan=False).encode
_plain = plain_json.PlainJson(nonfinite=plain_json.word, fields=plain_json.no_fields, unknown=str)


def to_json(value: Any) -> str:
    """Return a value as JSON; numbers and objects that JSON lacks become texts."""
    if not value and isinstance(value, Mapping):
        return "{}"  # by far the most frequent case
    try:
        return _encoded(value)
    except (TypeError, ValueError):
        return json.dumps(_plain(value))


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _real(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)  # converts NumPy's types, which sqlite3 does not accept
    return number if number == number else None  # noqa: PLR0124 - NaN is NULL, as everywhere in SQLite; fastest test


def _text(value: Any) -> str | None:
    return None if value is None else encodable(str(value))


def _suspects(suspects: Sequence[Suspect]) -> str:
    return to_json([asdict(suspect) for suspect in suspects])


def _floats(values: Sequence[float]) -> bytes:
    with np.errstate(over="ignore"):
        return np.asarray(values, "<f4").tobytes()


Values = Sequence[Any]  # of one column
Number = Callable[[str | None], int | None]  # returns a name's symbol


def _wholes(column: Values) -> Column:
    if column.count(column[0]) == len(column):
        return Constant(_whole(column[0]))
    return column if {*map(type, column)} <= {int, type(None)} else [_whole(value) for value in column]


def _reals(column: Values) -> Values:
    if {*map(type, column)} == {float}:
        return [value if value == value else None for value in column]  # noqa: PLR0124 - as in _real
    return [_real(value) for value in column]


def _symbols(texts: Values, number: Number) -> Column:
    known = {text: number(text) for text in dict.fromkeys(texts)}
    return Constant(known[texts[0]]) if len(known) == 1 else [known[text] for text in texts]


def to_columns(kind: type, number: Number) -> Callable[[Sequence[Any]], list[Column]]:
    """Return the function that makes the table's columns from such records; it needs at least one record."""
    by_type: dict[str, Callable[[Values], Column]] = {
        "symbol": lambda column: _symbols(column, number),
        "integer": _wholes,
        "real": _reals,
        "text": lambda column: [*map(_text, column)],
        "json": lambda column: [*map(to_json, column)],
        "blob": lambda column: [*map(_floats, column)],
    }
    columns = TABLE[TABLE_OF[kind]].columns[1:]  # the database numbers the arrivals
    values = attrgetter(*(f"where.{c.name}" if c.name in _PLACE else c.name for c in columns))
    plan = [(lambda column: [*map(_suspects, column)]) if c.name == "suspects" else by_type[c.type] for c in columns]

    def columns_of(records: Sequence[Any]) -> list[Column]:
        columns_of_records = zip(*map(values, records), strict=True)
        return [convert(column) for convert, column in zip(plan, columns_of_records, strict=True)]

    return columns_of


def metric_columns(measured: Measurements, number: Number) -> list[Column]:
    """Return the columns of the table `metric` for measurements, without an object for each; [] if they have no
    metrics.
    """
    if not measured.metric_count:
        return []
    row, column = (index.tolist() for index in np.nonzero(measured.present))
    names = [number(name) for name in measured.names]
    values = measured.values[measured.present]
    steps: Column = Constant(None)
    if measured.steps is not None:
        steps = [None if step == NO_STEP else step for step in measured.steps[measured.present].tolist()]
    return [
        *_place_columns(measured, row, number, steps),
        [names[i] for i in column],
        _reals(values.tolist()) if np.isnan(values).any() else values.tolist(),
        Constant(number(measured.source)),
        range(measured.sequence, measured.sequence + len(row)),
    ]


def sketch_columns(measured: Measurements, number: Number) -> list[Column]:
    """Return the columns of the table `sketch` for measurements; [] if they have no sketches."""
    count = len(measured.sketch_rows)
    if not count or measured.sketches is None:
        return []
    first = measured.sequence + len(measured) - count
    with np.errstate(over="ignore"):
        numbers = measured.sketches.astype("<f4")
    return [
        *_place_columns(measured, measured.sketch_rows, number, Constant(None)),
        [row.tobytes() for row in numbers],
        [*map(sketch_digest, measured.sketches)],
        Constant(number(measured.source)),
        range(first, first + count),
        Constant(measured.sketch_version),
    ]


def _place_columns(measured: Measurements, rows: Sequence[int], number: Number, steps: Column) -> list[Column]:
    """Return the columns of `_PLACE` and the time, for the nodes in some rows of measurements."""
    nodes, groups = [number(node) for node in measured.nodes], _symbols(measured.groups, number)
    return [
        Constant(number(measured.run)),
        Constant(_whole(measured.round)),
        [nodes[i] for i in rows],
        steps,
        Constant(None),  # not about a single layer
        groups if isinstance(groups, Constant) else [groups[i] for i in rows],
        Constant(_real(measured.at)),
    ]


def insert(kind: type) -> str:
    """Return the statement that inserts rows of such records, up to VALUES."""
    table = TABLE[TABLE_OF[kind]]
    return f"INSERT INTO {table.name} ({', '.join(quoted(column.name) for column in table.columns[1:])})"


def select(kind: type) -> str:
    """Return the statement that selects all columns of such records except their arrival, with names for numbers;
    conditions can be appended.
    """
    table = TABLE[TABLE_OF[kind]]
    return f"SELECT {', '.join(quoted(column.name) for column in table.columns[1:])} FROM {table.view}"  # noqa: S608


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def from_rows(kind: type, rows: Sequence[Row]) -> list[Any]:
    """Return the records that `select` found, built column by column in a third of the time of building each alone."""
    if not rows:
        return []
    columns = TABLE[TABLE_OF[kind]].columns[1:]
    by_name: dict[str, Values] = {c.name: v for c, v in zip(columns, zip(*rows, strict=True), strict=True)}
    where = map(Where, *(by_name.pop(name) for name in _PLACE))
    for column in columns:
        if column.name not in by_name:
            continue
        values = by_name[column.name]
        if column.type == "json":
            by_name[column.name] = [*map(_from_json, values)]
        elif column.type == "blob":
            by_name[column.name] = [tuple(np.frombuffer(value, "<f4").tolist()) for value in values]
        elif column.type == "real" and not (kind is Transfer and column.name == "seconds"):
            by_name[column.name] = [*map(_number, values)] if None in values else values
    if kind is Finding:
        by_name["suspects"] = [*map(_suspected, by_name["suspects"])]
    if kind is Truth:
        by_name["nodes"] = [*map(tuple, by_name["nodes"])]
    names = [field.name for field in fields(kind)][1:]  # the first is where
    return [*map(kind, where, *(by_name[name] for name in names))]


_FAST_JSON = msgspec.json.Decoder()


def _from_json(text: str) -> Any:
    try:
        return _FAST_JSON.decode(text)  # in a sixth of the time
    except msgspec.DecodeError:
        return json.loads(text)  # what strict JSON has no words for: NaN, infinity, half of a surrogate pair


def _suspected(suspects: Sequence[Mapping[str, Any]]) -> tuple[Suspect, ...]:
    return tuple(Suspect(suspect["node"], _score(suspect["score"]), suspect["reason"]) for suspect in suspects)


def _score(value: float | str) -> float:
    return float(value)  # also "NaN" and "Infinity"


RUN_COLUMNS = ("name", "host", "topology", "config", "seed", "started", "finished", "versions", "tables")


def run_row(run: Run) -> Row:
    """Return the run's values in the order of RUN_COLUMNS."""
    digests = [table.digest for table in run.tables]
    return (
        _text(run.name),
        _text(run.host),
        _text(run.topology),
        to_json(run.config),
        _whole(run.seed),
        _real(run.started),
        _real(run.finished),
        to_json(run.versions),
        to_json(digests),
    )


def run_of_row(row: Row, tables: Mapping[str, LayerTable]) -> Run:
    """Return the run from its id, RUN_COLUMNS, source and sequence."""
    identity, name, host, topology, config, seed, started, finished, versions, digests, source, sequence = row
    return Run(
        identity,
        name,
        host,
        topology,
        json.loads(config),
        seed,
        _number(started),
        finished,
        json.loads(versions),
        tuple(tables[digest] for digest in json.loads(digests)),
        source,
        sequence,
    )


def layer_rows(table: LayerTable, number: Callable[[str | None], int | None]) -> list[Row]:
    """Return a row for each layer of a table; `number` returns a name's symbol."""
    digest = number(table.digest)
    return [
        (digest, i, number(layer.name), to_json(list(layer.shape)), _text(layer.dtype))
        for i, layer in enumerate(table.layers)
    ]


def layer_table_of(rows: str, layers: Sequence[tuple[str, str, str]]) -> LayerTable:
    """Return the list of layers from its name, shape and dtype columns."""
    return LayerTable(rows, tuple(Layer(name, tuple(json.loads(shape)), dtype) for name, shape, dtype in layers))


def as_stored(event: Event) -> Event:
    """Return the event as it would be read from SQL: its data is JSON. The memory store must not show anything
    different.
    """
    if not event.data:
        return event
    data = json.loads(to_json(event.data))
    return Event(event.where, event.at, event.level, event.name, event.message, data, event.source, event.sequence)


def check(records: Sequence[Any]) -> None:
    """Raise RecordError for a batch that contains anything but records, before any of it is stored."""
    for kind in {*map(type, records)}:
        if not issubclass(kind, Telemetry):
            raise RecordError(f"A store takes records (see fedvitals.records), got {kind.__name__}.")
