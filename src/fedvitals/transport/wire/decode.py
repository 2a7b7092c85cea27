# SPDX-License-Identifier: Apache-2.0
"""Decodes records from a payload whose fields have been checked: whatever they refer to must be there, and no more."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from fedvitals.errors import RecordError
from fedvitals.measurements import NO_STEP, MeasuredLayers, Measurements, Telemetry, record_count
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Record,
    Run,
    Sketch,
    Snapshot,
    Span,
    Suspect,
    Transfer,
    Where,
)
from fedvitals.stats import FAMILIES, STATISTICS, Array, unpack
from fedvitals.transport.wire import fields
from fedvitals.transport.wire.fields import (
    ANY_SUMS,
    HOLDS_SUMS,
    WIDTH,
    Entry,
    Head,
    Limits,
    Place,
    check_plain,
    check_size,
)

_DATA = msgspec.msgpack.Decoder(dict[str, Any])


class PayloadReader:
    """Turns a checked head and the bytes behind it into records."""

    def __init__(self, head: Head, matrices: memoryview, limits: Limits, words: Sequence[str]) -> None:
        self._entries, self._limits = head.entries, limits
        check_size("places", len(head.places), limits.records)
        self.words = (*words, *head.words)
        self._places = [self._where(place) for place in head.places]
        self._sums, self._others, self._arrays = self._cut(matrices)
        self._sum_row = self._other = 0
        self._data_bytes = self._cells = 0
        self._last_data: tuple[bytes, dict[str, Any]] | None = None

    def read(self) -> list[Telemetry]:
        """Return everything, in order."""
        check_size("records", sum(map(_announced_records, self._entries)), self._limits.records)
        records: list[Telemetry] = []
        at: float | None = None
        source: str | None = None
        sequence: int | None = None
        for entry in self._entries:
            at = entry.at if entry.at is not None else at
            source = self.words[entry.source] if entry.source is not None else source
            sequence = entry.sequence if entry.sequence is not None else sequence
            if source is None or sequence is None or (at is None and type(entry) is not fields.Runs):
                raise RecordError("The first entry of a payload lacks its time, source or sequence.")
            place = self._places[entry.place]
            if type(entry) is fields.Metrics:
                places = self._moved(entry) if entry.moves else itertools.repeat(place, len(entry.names))
                records += _metrics(entry, self.words, places, at, source, sequence)
                sequence += len(entry.names)
            else:
                telemetry = _READ[type(entry)](self, entry, (place, at), (source, sequence))
                records.append(telemetry)
                sequence += record_count(telemetry)
            if sequence > 2**63:
                raise RecordError(f"A sequence of {sequence} in a payload: no source counts that far.")
        self.end()
        return records

    def _moved(self, entry: fields.Metrics) -> list[Where]:
        """Return the place of each metric: that of the entry, changing at each of its moves."""
        starts, places = [0, *entry.moves[::2], len(entry.names)], [entry.place, *entry.moves[1::2]]
        if len(starts) != len(places) + 1 or any(b <= a for a, b in itertools.pairwise(starts)):
            raise RecordError(f"The places of {len(entry.names)} metrics in a payload change in an impossible way.")
        where_of_each: list[Where] = []
        for place, (start, end) in zip(places, itertools.pairwise(starts), strict=True):
            where_of_each += [self._places[place]] * (end - start)
        return where_of_each

    def word(self, number: int) -> str:
        return self.words[number]

    def maybe(self, number: int | None) -> str | None:
        return None if number is None else self.words[number]

    def data(self, raw: msgspec.Raw) -> dict[str, Any]:
        self._data_bytes += len(raw)
        check_size("bytes of free-form data", self._data_bytes, self._limits.data)
        if self._last_data is None or bytes(raw) != self._last_data[0]:  # as for clients that trained as one batch
            value = _DATA.decode(raw)
            check_plain(value)
            self._last_data = bytes(raw), value
        return self._last_data[1]

    def matrices(self, family: str, *shape: int) -> Array:
        """Return the next numbers of this family, [*shape, its columns]."""
        rows, columns = math.prod(shape), WIDTH[family]
        if HOLDS_SUMS[family]:
            self._sum_row += rows
            return self._sums[self._sum_row - rows : self._sum_row].reshape(*shape, columns)
        self._other += rows * columns
        return self._others[self._other - rows * columns : self._other].reshape(*shape, columns)

    def array(self, kind: np.dtype[Any], count: int) -> Any:
        """Return the next numbers of the arrays behind the matrices, read-only."""
        return np.frombuffer(self.bytes_of_array(count * kind.itemsize), kind)

    def bytes_of_array(self, size: int) -> memoryview:
        """Return this many of the next bytes of the arrays."""
        if size > len(self._arrays):
            raise RecordError(f"Arrays of a payload are cut off: {len(self._arrays)} of {size} bytes are left.")
        part, self._arrays = self._arrays[:size], self._arrays[size:]
        return part

    def count_cells(self, cells: int) -> None:
        """Add the cells of a table, each bit of which announces eight bytes or more; raise if there are too many."""
        self._cells += cells
        check_size("cells in tables of measurements", self._cells, self._limits.cells)

    def end(self) -> None:
        """Raise unless the head announced everything behind it."""
        if len(self._arrays):
            raise RecordError(f"A payload has {len(self._arrays)} bytes more than are announced.")

    def _where(self, place: Place) -> Where:
        maybe = self.maybe
        where = Where(
            self.words[place.run], place.round, maybe(place.node), place.step, maybe(place.layer), maybe(place.group)
        )
        if not where.run:
            raise RecordError("A record in a payload belongs to no run.")
        return where

    def _announced(self) -> Iterator[tuple[str, int]]:
        """Yield the matrices that the entries announce: family, and rows."""
        for entry in self._entries:
            if type(entry) is fields.Layers:
                yield self.words[entry.family], entry.rows
            elif type(entry) is fields.MeasurementsEntry:
                for part in entry.layers:
                    yield self.words[part.family], part.layers * len(part.rows)

    def _cut(self, matrices: memoryview) -> tuple[Array, Array, memoryview]:
        """Return the nine sums of all layers, all other numbers, and the rest, sized by the entries."""
        sums = others = 0
        for family, rows in self._announced():
            if family not in FAMILIES:
                raise RecordError(f"Unknown family '{family[:80]}' in a payload. Known: {', '.join(FAMILIES)}.")
            if HOLDS_SUMS[family]:
                sums += rows
            else:
                others += rows * WIDTH[family]
        if not sums and not others:
            return _NO_SUMS, _NOTHING, matrices
        width = WIDTH[ANY_SUMS]
        size = 4 * (sums * width + others)
        if size > len(matrices):
            raise RecordError(f"Matrices of {size} bytes announced, got {len(matrices)}.")
        numbers = np.frombuffer(matrices[:size], _F4)
        with np.errstate(all="ignore"):
            unpacked = unpack(ANY_SUMS, numbers[: sums * width].reshape(sums, width))
            return unpacked, numbers[sums * width :].astype(np.float64), matrices[size:]


def _announced_records(entry: Entry) -> int:
    """Return how many records an entry represents, before any of them is created."""
    if type(entry) is fields.Metrics:
        return len(entry.names)
    if type(entry) is fields.MeasurementsEntry:
        return entry.values + len(entry.sketch_rows) + sum(len(part.rows) for part in entry.layers)
    return 1


_F4, _F8, _I8, _U4 = (np.dtype(kind) for kind in ("<f4", "<f8", "<i8", "<u4"))
_NO_SUMS, _NOTHING = np.zeros((0, len(STATISTICS))), np.zeros(0)
_NEW_METRIC = Metric.__new__
_NEW_LAYERS = LayerStats.__new__
_PUT = tuple(getattr(Metric, field.name).__set__ for field in dataclasses.fields(Metric))
_PUT_LAYERS = tuple(getattr(LayerStats, field.name).__set__ for field in dataclasses.fields(LayerStats))


def _metrics(
    entry: fields.Metrics,
    words: Sequence[str],
    places: Iterable[Where],
    at: float | None,
    source: str,
    sequence: int,
) -> list[Record]:
    """Create metrics slot by slot: a frozen class's constructor takes twice as long, and they are most of a payload."""
    values = struct.unpack(f"<{len(entry.names)}d", entry.values)
    put_where, put_at, put_name, put_value, put_source, put_sequence = _PUT
    metrics: list[Record] = []
    for number, value, place in zip(entry.names, values, places, strict=True):
        metric = _NEW_METRIC(Metric)
        put_where(metric, place)
        put_at(metric, at)
        put_name(metric, words[number])
        put_value(metric, value)
        put_source(metric, source)
        put_sequence(metric, sequence)
        sequence += 1
        metrics.append(metric)
    return metrics


_At = tuple[Where, Any]
_Identity = tuple[str, int]


def _layer_stats(r: PayloadReader, e: fields.Layers, at: _At, identity: _Identity) -> Record:
    """Created slot by slot too; its shape is correct because `matrix` produced it."""
    family = r.word(e.family)
    record = _NEW_LAYERS(LayerStats)
    values = (*at, family, r.matrices(family, e.rows), r.word(e.table), *identity)
    for put, value in zip(_PUT_LAYERS, values, strict=True):
        put(record, value)
    return record


def _measurements(r: PayloadReader, e: fields.MeasurementsEntry, at: _At, identity: _Identity) -> Telemetry:
    rows, columns = len(e.nodes), len(e.names)
    r.count_cells(rows * columns)
    if len(e.groups) != rows:
        raise RecordError(f"Measurements of {rows} nodes in a payload name {len(e.groups)} groups.")
    cells = rows * columns
    bits = r.bytes_of_array(-(-cells // 8))
    if (int.from_bytes(bits) >> -cells % 8).bit_count() != e.values:
        raise RecordError(f"Measurements in a payload announce {e.values} values, and mark a different number of them.")
    steps = None if e.steps is None else np.full((rows, columns), NO_STEP, np.int64)
    if e.values == cells:
        present, values = np.ones((rows, columns), np.bool_), r.array(_F8, cells).reshape(rows, columns).copy()
    else:
        present = np.unpackbits(np.frombuffer(bits, np.uint8), count=cells).view(np.bool_).reshape(rows, columns)
        values = np.zeros((rows, columns))
        values[present] = r.array(_F8, e.values)
    if e.steps and steps is not None:
        own = steps.reshape(-1) if e.values == cells else np.full(e.values, NO_STEP, np.int64)
        places = r.array(_U4, e.steps).astype(np.intp)
        own[places] = r.array(_I8, e.steps)
        if e.values != cells:
            steps[present] = own
    sketches = None
    if e.sketch_rows:
        shape = (len(e.sketch_rows), e.sketch_numbers)
        sketches = r.array(_F8, shape[0] * shape[1]).reshape(shape)
    layers = tuple(_measured_layers(r, part, rows) for part in e.layers)
    if max(e.sketch_rows, default=-1) >= rows or at[0].node is not None:
        raise RecordError("Measurements in a payload are of a node that it does not name.")
    return Measurements(
        *(at[0].run, at[0].round, at[1], tuple(map(r.maybe, e.nodes)), tuple(map(r.maybe, e.groups))),
        *(tuple(map(r.words.__getitem__, e.names)), values, present, steps, layers),
        *(tuple(e.sketch_rows), sketches, e.sketch_version, *identity),
    )


def _measured_layers(r: PayloadReader, part: fields.MeasuredLayersEntry, rows: int) -> MeasuredLayers:
    if part.rows and max(part.rows) >= rows:
        raise RecordError("Statistics of layers in a payload are of a node that it does not name.")
    if not part.layers:
        raise RecordError("Statistics of layers in a payload are of no layer at all.")
    family = r.words[part.family]
    matrices = r.matrices(family, len(part.rows), part.layers)
    return MeasuredLayers(family, r.words[part.table], part.step, tuple(part.rows), matrices)


def _finding(r: PayloadReader, e: fields.Findings, at: _At, identity: _Identity) -> Record:
    suspects = tuple(Suspect(r.word(node), score, reason) for node, score, reason in e.suspects)
    issue, severity = r.word(e.issue), r.word(e.severity)
    return Finding(*at, issue, severity, e.confidence, e.message, r.data(e.evidence), suspects, *identity)


def _run_record(r: PayloadReader, e: fields.Runs, at: _At, identity: _Identity) -> Record:
    tables = tuple(
        LayerTable(r.word(rows), tuple(Layer(r.word(name), tuple(shape), r.word(kind)) for name, shape, kind in layers))
        for rows, layers in e.tables
    )
    versions = {name: str(version) for name, version in r.data(e.versions).items()}
    about = (e.name, r.word(e.host), e.topology, r.data(e.config), e.seed)
    return Run(at[0].run, *about, e.started, e.finished, versions, tables, *identity)


_READ: dict[type[Entry], Callable[[PayloadReader, Any, _At, _Identity], Telemetry]] = {
    fields.Layers: _layer_stats,
    fields.Spans: lambda r, e, at, identity: Span(
        *at,
        r.word(e.name),
        e.seconds,
        r.word(e.trace),
        r.word(e.id),
        r.maybe(e.parent),
        r.data(e.attributes),
        *identity,
    ),
    fields.Transfers: lambda r, e, at, identity: Transfer(
        *at, r.word(e.sender), r.word(e.receiver), e.bytes, e.raw_bytes, e.seconds, r.word(e.kind), *identity
    ),
    fields.Events: lambda r, e, at, identity: Event(
        *at, r.word(e.level), r.word(e.name), e.message, r.data(e.data), *identity
    ),
    fields.Sketches: lambda r, e, at, identity: Sketch(
        *at, struct.unpack(f"<{len(e.values) // 8}d", e.values), r.word(e.digest), e.version, *identity
    ),
    fields.Findings: _finding,
    fields.Actions: lambda r, e, at, identity: Action(
        *at, r.word(e.finding), r.word(e.kind), r.maybe(e.target), r.data(e.arguments), r.word(e.status), *identity
    ),
    fields.Snapshots: lambda r, e, at, identity: Snapshot(*at, r.word(e.kind), r.word(e.digest), e.bytes, *identity),
    fields.Runs: _run_record,
    fields.MeasurementsEntry: _measurements,
}
