# SPDX-License-Identifier: Apache-2.0
"""Measurements: what many clients measured in a round, as arrays, the form in which numbers travel in fedvitals."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from fedvitals.records import (
    Action,
    Event,
    Finding,
    LayerStats,
    Metric,
    Record,
    Run,
    Sketch,
    Snapshot,
    Transfer,
    Truth,
    Where,
)
from fedvitals.stats import Array

NO_STEP = -1


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredLayers:
    """Matrices of one family, [rows, layers, columns]; `rows` are indices into the nodes of their `Measurements`."""

    family: str
    table: str  # digest of the LayerTable
    step: int | None
    rows: tuple[int, ...]
    matrices: Array


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """What one or many nodes measured in a round, as arrays: the form in which numbers travel inside fedvitals.

    It represents the records that `records()` returns, numbered from `sequence`: first the metrics node by node, then
    the matrices, then the sketches. `values` is [nodes, names], valid where `present`: NaN is a value, absent is not. A
    name may have several columns, for several steps. `steps` has the shape of `values`; None if no value has one.
    """

    run: str
    round: int | None
    at: float
    nodes: tuple[str | None, ...]
    groups: tuple[str | None, ...]
    names: tuple[str, ...]
    values: Array
    present: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64] | None = None
    layers: tuple[MeasuredLayers, ...] = ()
    sketch_rows: tuple[int, ...] = ()
    sketches: Array | None = None  # [sketch_rows, numbers]
    sketch_version: int = 1
    source: str = ""
    sequence: int = 0
    metric_count: int = field(init=False)  # the number of metrics
    _count: int = field(init=False)

    def __post_init__(self) -> None:
        metrics = int(np.count_nonzero(self.present))
        count = metrics + len(self.sketch_rows)
        for part in self.layers:
            count += len(part.rows)
        object.__setattr__(self, "metric_count", metrics)
        object.__setattr__(self, "_count", count)

    def __len__(self) -> int:
        """The number of records represented."""
        return self._count

    def place(self, row: int, step: int | None = None) -> Where:
        """Return the coordinates of a node."""
        return Where(self.run, self.round, self.nodes[row], step, None, self.groups[row])

    def measured_nodes(self) -> list[str | None]:
        """Return the nodes that have measurements."""
        return [self.nodes[row] for row in self._rows()]

    def places(self) -> list[Where]:
        """Return the coordinates of the nodes that have measurements."""
        return [self.place(row) for row in self._rows()]

    def _rows(self) -> list[int]:
        """Return the rows of the nodes that have measurements, in order."""
        rows = {*self.sketch_rows}.union(*(part.rows for part in self.layers))
        if self.metric_count and len(rows) < len(self.nodes):
            rows.update(np.flatnonzero(self.present.any(axis=1)).tolist())
        return sorted(rows)

    def metrics(self) -> Iterator[tuple[int, str, float, int | None]]:
        """Yield every metric: row of its node, name, value, step; node by node."""
        values, steps, names = self.values.tolist(), None if self.steps is None else self.steps.tolist(), self.names
        for row, column in zip(*(index.tolist() for index in np.nonzero(self.present)), strict=True):
            step = NO_STEP if steps is None else steps[row][column]
            yield row, names[column], values[row][column], None if step == NO_STEP else step

    def columns(
        self, wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, list[int], list[float], Sequence[int | None]]]:
        """Yield the metrics of the wanted names, column by column: name, rows of nodes, values, steps."""
        for column, name in enumerate(self.names):
            if wanted(name):
                rows = np.flatnonzero(self.present[:, column])
                steps: Sequence[int | None] = [None] * len(rows)
                if self.steps is not None:
                    steps = [None if step == NO_STEP else step for step in self.steps[rows, column].tolist()]
                yield name, rows.tolist(), self.values[rows, column].tolist(), steps

    def without_absent(self) -> Measurements:
        """Return the same records without nodes, names or values that none of them uses."""
        kept, columns = self._rows(), np.flatnonzero(self.present.any(axis=0)).tolist()
        position = {row: i for i, row in enumerate(kept)}
        cells = np.ix_(kept, columns)
        return replace(
            self,
            nodes=tuple(self.nodes[row] for row in kept),
            groups=tuple(self.groups[row] for row in kept),
            names=tuple(self.names[column] for column in columns),
            values=np.where(self.present, self.values, 0.0)[cells],
            present=self.present[cells],
            steps=None if self.steps is None else np.where(self.present, self.steps, NO_STEP)[cells],
            layers=tuple(replace(part, rows=tuple(position[row] for row in part.rows)) for part in self.layers),
            sketch_rows=tuple(position[row] for row in self.sketch_rows),
        )

    def numbered_layers(self) -> Iterator[tuple[int, MeasuredLayers]]:
        """Yield the matrices of each family with the sequence number of their first record."""
        sequence = self.sequence + self.metric_count
        for part in self.layers:
            yield sequence, part
            sequence += len(part.rows)

    def numbered_sketches(self) -> Iterator[Sketch]:
        """Yield the sketches, as records."""
        sequence = self.sequence + len(self) - len(self.sketch_rows)
        for i, row in enumerate(self.sketch_rows):
            assert self.sketches is not None  # noqa: S101 - there are rows of it
            values = tuple(self.sketches[i].tolist())
            digest, version = sketch_digest(self.sketches[i]), self.sketch_version
            yield Sketch(self.place(row), self.at, values, digest, version, self.source, sequence + i)

    def records(self) -> Iterator[Record]:
        """Yield the same as single records."""
        wholes = [self.place(row) for row in range(len(self.nodes))]
        for sequence, (row, name, value, step) in enumerate(self.metrics(), self.sequence):
            where = wholes[row] if step is None else self.place(row, step)
            yield Metric(where, self.at, name, value, self.source, sequence)
        for sequence, part in self.numbered_layers():
            for i, row in enumerate(part.rows):
                where = wholes[row] if part.step is None else self.place(row, part.step)
                identity = (self.source, sequence + i)
                yield LayerStats(where, self.at, part.family, part.matrices[i], part.table, *identity)
        yield from self.numbered_sketches()


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Many messages of a round as columns.

    It represents the records that `records()` returns, numbered from `sequence`; `nodes` are those that the messages
    concern.
    """

    run: str
    round: int | None
    nodes: Sequence[str]
    groups: Sequence[str | None]
    at: Sequence[float]
    senders: Sequence[str]
    receivers: Sequence[str]
    sizes: Sequence[int]  # bytes
    raw_sizes: Sequence[int]  # bytes before compression
    seconds: Sequence[float | None]
    kinds: Sequence[str]
    source: str = ""
    sequence: int = 0

    def __len__(self) -> int:
        """The number of records represented."""
        return len(self.nodes)

    def records(self) -> list[Record]:
        """Return the same as single records."""
        run, number, source = self.run, self.round, self.source
        places = zip(self.nodes, self.groups, self.at, range(self.sequence, self.sequence + len(self)), strict=True)
        messages = zip(self.senders, self.receivers, self.sizes, self.raw_sizes, self.seconds, self.kinds, strict=True)
        return [
            Transfer(Where(run, number, node, None, None, group), at, sender, to, size, raw, seconds, kind, source, i)
            for (node, group, at, i), (sender, to, size, raw, seconds, kind) in zip(places, messages, strict=True)
        ]

    def of_rows(self, rows: Sequence[int]) -> Transfers:
        """Return the messages in these rows."""
        names = ("nodes", "groups", "at", "senders", "receivers", "sizes", "raw_sizes", "seconds", "kinds")
        columns: dict[str, Any] = {name: [getattr(self, name)[row] for row in rows] for name in names}
        return replace(self, **columns)


def sketch_digest(values: Array) -> str:
    """Return the digest of a sketch.

    The same update gives bitwise equal sums, so equal digests mean equal updates.
    """
    return hashlib.blake2b(np.ascontiguousarray(values, "<f8").tobytes(), digest_size=8).hexdigest()


Telemetry = Record | Measurements
"""What sinks receive. Those that do not declare that they accept measurements get records."""
Emitted = Telemetry | Transfers
"""Whatever travels from a monitor to its queues."""


def single_records(batch: Iterable[Emitted]) -> list[Record]:
    """Return everything as single records, in order."""
    records: list[Record] = []
    for telemetry in batch:
        if isinstance(telemetry, Measurements | Transfers):
            records += telemetry.records()
        else:
            records.append(telemetry)
    return records


def record_count(telemetry: Emitted) -> int:
    """Return the number of records it represents."""
    return len(telemetry) if isinstance(telemetry, Measurements | Transfers) else 1


AnyTelemetry = TypeVar("AnyTelemetry", bound=Emitted)


def stamped(telemetry: AnyTelemetry, source: str, sequence: int) -> AnyTelemetry:
    """Return the record or measurements with an identity, which the writer assigns once, before anyone else sees them.

    Set in place although records are immutable: a copy of each record would double the cost of emitting.
    """
    object.__setattr__(telemetry, "source", source)
    object.__setattr__(telemetry, "sequence", sequence)
    return telemetry


def run_of(telemetry: Telemetry) -> str:
    """Return the id of the run that a record or measurements belong to."""
    if isinstance(telemetry, Measurements):
        return telemetry.run
    return telemetry.id if isinstance(telemetry, Run) else telemetry.where.run


def round_of(telemetry: Emitted) -> int | None:
    """Return the round that a record or measurements belong to; None if there is none."""
    if isinstance(telemetry, Measurements | Transfers):
        return telemetry.round
    return None if isinstance(telemetry, Run) else telemetry.where.round


def is_important(record: Emitted) -> TypeGuard[Record]:
    """Return whether a full queue must keep it: findings, actions, snapshots, truths, runs, events from «warning»."""
    if isinstance(record, Event):
        return record.level in ("warning", "error", "critical")
    return isinstance(record, Run | Finding | Action | Snapshot | Truth)


def places_of(telemetry: Telemetry) -> list[Where]:
    """Return the coordinates of everything it describes, without steps; empty for a Run."""
    if isinstance(telemetry, Measurements):
        return telemetry.places()
    return [] if isinstance(telemetry, Run) else [telemetry.where]
