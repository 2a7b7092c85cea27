# SPDX-License-Identifier: Apache-2.0
"""Converts records to rows and back, column by column as `schema` types them; layer statistics have `packing`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

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
from fedvitals.store.ddl import quoted
from fedvitals.store.schema import TABLE
from fedvitals.store.symbols import encodable

# Which table holds which record; Run and LayerStats have ways of their own.
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


_plain = plain_json.PlainJson(nonfinite=plain_json.word, fields=plain_json.no_fields, unknown=str)


def to_json(value: Any) -> str:
    """Return a value as JSON; numbers and things that JSON lacks become texts."""
    if not value and isinstance(value, Mapping):
        return "{}"  # by far the most frequent
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_plain(value))


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _real(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)  # also out of NumPy's types, which sqlite3 does not take
    return number if number == number else None  # noqa: PLR0124 - NaN is NULL: SQLite knows no other, and it is quicker


def _text(value: Any) -> str | None:
    return None if value is None else encodable(str(value))


def _suspects(suspects: Sequence[Suspect]) -> str:
    return to_json([asdict(suspect) for suspect in suspects])


def _floats(values: Sequence[float]) -> bytes:
    with np.errstate(over="ignore"):
        return np.asarray(values, "<f4").tobytes()


Column = Sequence[Any]


def _wholes(column: Column) -> Column:
    return column if {*map(type, column)} <= {int, type(None)} else [_whole(value) for value in column]


def _reals(column: Column) -> Column:
    if {*map(type, column)} == {float}:
        return [value if value == value else None for value in column]  # noqa: PLR0124 - as in _real
    return [_real(value) for value in column]


def to_rows(kind: type, number: Callable[[str | None], int | None]) -> Callable[[Sequence[Any]], list[Row]]:
    """The function that makes rows of such records, column by column; `number` gives a name's symbol."""

    def symbols(column: Column) -> Column:
        known = {text: number(text) for text in dict.fromkeys(column)}
        return [known[text] for text in column]

    by_type: dict[str, Callable[[Column], Column]] = {
        "symbol": symbols,
        "integer": _wholes,
        "real": _reals,
        "text": lambda column: [*map(_text, column)],
        "json": lambda column: [*map(to_json, column)],
        "blob": lambda column: [*map(_floats, column)],
    }
    columns = TABLE[TABLE_OF[kind]].columns[1:]  # the database numbers the arrivals
    values = attrgetter(*(f"where.{c.name}" if c.name in _PLACE else c.name for c in columns))
    plan = [(lambda column: [*map(_suspects, column)]) if c.name == "suspects" else by_type[c.type] for c in columns]

    def rows(records: Sequence[Any]) -> list[Row]:
        columns_of_records = zip(*map(values, records), strict=True)
        return [*zip(*(convert(column) for convert, column in zip(plan, columns_of_records, strict=True)), strict=True)]

    return rows


def measured_rows(measured: Measurements, number: Callable[[str | None], int | None]) -> Iterator[Row]:
    """The rows of the table `metric` for measurements; without an object for each."""
    if not measured.metric_count:
        return iter(())
    texts = (measured.nodes, measured.groups, measured.names)
    nodes, groups, names = ([number(text) for text in column] for column in texts)
    row, column = (index.tolist() for index in np.nonzero(measured.present))
    values = measured.values[measured.present]
    steps: Iterable[int | None] = itertools.repeat(None)
    if measured.steps is not None:
        steps = [None if step == NO_STEP else step for step in measured.steps[measured.present].tolist()]
    return zip(
        itertools.repeat(number(measured.run)),
        itertools.repeat(_whole(measured.round)),
        map(nodes.__getitem__, row),
        steps,
        itertools.repeat(None),  # of no single layer
        map(groups.__getitem__, row),
        itertools.repeat(_real(measured.at)),
        map(names.__getitem__, column),
        _reals(values.tolist()),
        itertools.repeat(number(measured.source)),
        range(measured.sequence, measured.sequence + len(row)),
    )  # fmt: skip


def sketch_rows(measured: Measurements, number: Callable[[str | None], int | None]) -> Iterator[Row]:
    """The rows of the table `sketch` for measurements."""
    first = measured.sequence + len(measured) - len(measured.sketch_rows)
    for i, row in enumerate(measured.sketch_rows):
        assert measured.sketches is not None  # noqa: S101 - there are rows of it
        values, node, group = measured.sketches[i], number(measured.nodes[row]), number(measured.groups[row])
        place = (number(measured.run), _whole(measured.round), node, None, None, group, _real(measured.at))
        identity = (number(measured.source), first + i, measured.sketch_version)
        yield (*place, _floats(values), sketch_digest(values), *identity)


def insert(kind: type) -> str:
    """Return the statement that inserts a row of such records."""
    table = TABLE[TABLE_OF[kind]]
    columns = [quoted(column.name) for column in table.columns[1:]]
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608


def select(kind: type) -> str:
    """Every column of such records but their arrival, names for numbers; to be followed by conditions."""
    table = TABLE[TABLE_OF[kind]]
    return f"SELECT {', '.join(quoted(column.name) for column in table.columns[1:])} FROM {table.view}"  # noqa: S608


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def from_rows(kind: type, rows: Sequence[Row]) -> list[Any]:
    """The records that `select` found, made column by column: a third of the time that each by itself takes."""
    if not rows:
        return []
    columns = TABLE[TABLE_OF[kind]].columns[1:]
    by_name: dict[str, Column] = {c.name: v for c, v in zip(columns, zip(*rows, strict=True), strict=True)}
    where = map(Where, *(by_name.pop(name) for name in _PLACE))
    for column in columns:
        if column.name not in by_name:
            continue
        values = by_name[column.name]
        if column.type == "json":
            by_name[column.name] = [*map(json.loads, values)]
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


def _suspected(suspects: Sequence[Mapping[str, Any]]) -> tuple[Suspect, ...]:
    return tuple(Suspect(suspect["node"], _score(suspect["score"]), suspect["reason"]) for suspect in suspects)


def _score(value: float | str) -> float:
    return float(value)  # "NaN" and "Infinity", too


RUN_COLUMNS = ("name", "host", "topology", "config", "seed", "started", "finished", "versions", "tables")


def run_row(run: Run) -> Row:
    """The run in the order of RUN_COLUMNS."""
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
    """The run from its id, RUN_COLUMNS, source and sequence."""
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
    """Return a row for each layer of a table; `number` gives a name's symbol."""
    digest = number(table.digest)
    return [
        (digest, i, number(layer.name), to_json(list(layer.shape)), _text(layer.dtype))
        for i, layer in enumerate(table.layers)
    ]


def layer_table_of(rows: str, layers: Sequence[tuple[str, str, str]]) -> LayerTable:
    """The list of layers from its name, shape and dtype columns."""
    return LayerTable(rows, tuple(Layer(name, tuple(json.loads(shape)), dtype) for name, shape, dtype in layers))


def as_stored(event: Event) -> Event:
    """The event as it comes back from SQL: its data is JSON. What memory shows must not differ."""
    if not event.data:
        return event
    data = json.loads(to_json(event.data))
    return Event(event.where, event.at, event.level, event.name, event.message, data, event.source, event.sequence)


def check(records: Sequence[Any]) -> None:
    """RecordError for a batch with something else in it, before any of it is stored."""
    for thing in records:
        if not isinstance(thing, Telemetry):
            raise RecordError(f"A store takes records (see fedvitals.records), got {type(thing).__name__}.")
