# SPDX-License-Identifier: Apache-2.0
"""Encodes records into a payload: grouped by what they share, with repeated text as numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedvitals.errors import RecordError
from fedvitals.measurements import NO_STEP, Measurements, Telemetry
from fedvitals.records import (
    Action,
    Event,
    Finding,
    LayerStats,
    Metric,
    Run,
    Sketch,
    Snapshot,
    Span,
    Transfer,
    Where,
)
from fedvitals.stats import Array, pack
from fedvitals.transport.wire.fields import ANY_SUMS, HOLDS_SUMS, WORD_CHARACTERS, plain, text
from fedvitals.transport.wire.vocabulary import NUMBER_OF

_Place = tuple[str, int | None, str | None, int | None, str | None, str | None]  # the fields of a Where


class PayloadWriter:
    """Collects parts of a payload; time, source and sequence are omitted if they follow from the previous entry."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.places: list[tuple[Any, ...]] = []
        self.entries: list[tuple[Any, ...]] = []
        self.records = self.cells = self.data_bytes = 0
        self._numbers: dict[str, int] = {}  # of the payload's own words
        self._place_of: dict[_Place, int] = {}
        self._sums: list[Array] = []
        self._others: list[Array] = []
        self._arrays: list[bytes] = []
        self._same: dict[int, int] = {}
        self._kept: list[Where] = []  # keeps them alive, so that no other object gets the same `id`
        self._last_data: Any = self  # last data encoded as `_raw`; nothing so far
        self._raw = msgspec.Raw()
        self._at: float | None = None
        self._source: str | None = None
        self._next = -1

    def add(self, records: Iterable[Telemetry]) -> None:
        """Add records in order. Most are metrics that differ from the last in name and value only, which is fast."""
        known = NUMBER_OF.get
        names: list[int] = []  # of the entry of metrics that may still be extended
        values: list[float] = []
        moves: list[int] = []
        where: Where | None = None
        at, source, sequence = 0.0, "", -1
        for record in records:
            self.records += 1
            if type(record) is not Metric:
                self._close(names, moves, values)
                names = []
                self._add_other(record)
                continue
            if names and record.sequence == sequence and record.at == at and record.source == source:
                if record.where is not where:
                    where = record.where
                    moves += len(names), self._placed(where)
            else:
                self._close(names, moves, values)
                names, moves, values = [], [], []
                where, at, source, sequence = record.where, record.at, record.source, record.sequence
                self.entries.append((0, *self._header(record, self._placed(where), at)))
            sequence += 1
            number = known(record.name)
            names.append(self.word(record.name) if number is None else number)
            values.append(record.value)
        self._close(names, moves, values)

    def _close(self, names: list[int], moves: list[int], values: list[float]) -> None:
        """Complete the entry of metrics."""
        if names:
            self.entries[-1] = (*self.entries[-1], names, moves, struct.pack(f"<{len(values)}d", *values))
            self._next += len(names) - 1

    def _add_other(self, record: Telemetry) -> None:
        known = _WRITE.get(type(record))
        if known is None:
            # A Truth is recorded by the process that writes the store, never by a worker.
            raise RecordError(f"Only records about a training can be sent, got {type(record).__name__}.")
        tag, rest = known
        if isinstance(record, Run):
            header = self._header(record, self._number((record.id, None, None, None, None, None)), self._at)
        elif isinstance(record, Measurements):
            place = self._number((record.run, record.round, None, None, None, None))
            header = self._header(record, place, record.at)
            self._next += len(record) - 1
            self.records += len(record) - 1
            self.cells += record.present.size
        else:
            header = self._header(record, self._placed(record.where), record.at)
        self.entries.append((tag, *header, *rest(self, record)))

    def finish(self) -> list[bytes]:
        """Return the nine sums of all layers, then everything else: each kind is converted once."""
        parts: list[bytes] = []
        if self._sums:
            parts.append(_little(pack(ANY_SUMS, np.concatenate(self._sums))))
        if self._others:
            with np.errstate(all="ignore"):
                parts.append(_little(np.concatenate(self._others)))
        return parts + self._arrays

    def word(self, value: str) -> int:
        number = NUMBER_OF.get(value)
        if number is None:
            number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(NUMBER_OF) + len(self.words)
            self.words.append(text(value, WORD_CHARACTERS))
        return number

    def words_of(self, texts: tuple[str, ...]) -> Sequence[int]:
        return _vocabulary_numbers(texts) or [self.word(text) for text in texts]

    def maybe(self, value: str | None) -> int | None:
        return None if value is None else self.word(value)

    def data(self, value: Any) -> msgspec.Raw:
        if value is not self._last_data:  # clients that trained as one batch share the attributes of their Spans
            self._last_data, self._raw = value, msgspec.Raw(msgspec.msgpack.encode(plain(value)))
        self.data_bytes += len(self._raw)
        return self._raw

    def matrix(self, family: str, matrix: Array) -> None:
        if HOLDS_SUMS[family]:
            self._sums.append(matrix)
        else:
            self._others.append(matrix.reshape(-1))

    def array(self, values: npt.NDArray[Any], kind: np.dtype[Any]) -> None:
        self._arrays.append(values.astype(kind, copy=False).tobytes())

    def _header(self, record: Telemetry, place: int, at: float | None) -> tuple[Any, ...]:
        source = sequence = None
        if record.source != self._source:
            self._source, source = record.source, self.word(record.source)
        if record.sequence != self._next:
            sequence = record.sequence
        self._next = record.sequence + 1
        same = at == self._at
        self._at = at
        return place, None if same else at, source, sequence

    def _placed(self, where: Where) -> int:
        """Return the number of a place; usually the same object again, which is found without a comparison."""
        number = self._same.get(id(where))
        if number is None:
            place = (where.run, where.round, where.node, where.step, where.layer, where.group)
            number = self._same[id(where)] = self._number(place)
            self._kept.append(where)
        return number

    def _number(self, place: _Place) -> int:
        number = self._place_of.setdefault(place, len(self.places))
        if number == len(self.places):
            run, round_index, node, step, layer, group = place
            texts = self.maybe(node), self.maybe(layer), self.maybe(group)
            self.places.append((self.word(run), round_index, texts[0], step, *texts[1:]))
        return number


@lru_cache(maxsize=64)
def _vocabulary_numbers(texts: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of words if all are in the vocabulary, else (); clients measure the same repeatedly."""
    numbers = [NUMBER_OF.get(text, -1) for text in texts]
    return () if -1 in numbers else tuple(numbers)


_U1, _F4, _F8, _I8, _U4 = (np.dtype(kind) for kind in ("u1", "<f4", "<f8", "<i8", "<u4"))


def _little(values: Array | npt.NDArray[np.float32]) -> bytes:
    return values.astype(_F4, copy=False).tobytes()


def _layers(w: PayloadWriter, r: LayerStats) -> tuple[Any, ...]:
    w.matrix(r.family, r.matrix)
    return w.word(r.family), w.word(r.table), len(r.matrix)


def _measurements(w: PayloadWriter, m: Measurements) -> tuple[Any, ...]:
    complete = m.metric_count == m.present.size
    w.array(np.packbits(m.present), _U1)
    w.array(m.values if complete else m.values[m.present], _F8)
    stepped = None
    if m.steps is not None:
        steps = m.steps.ravel() if complete else m.steps[m.present]
        (stepped,) = (steps != NO_STEP).nonzero()
        if len(stepped):
            w.array(stepped, _U4)
            w.array(steps[stepped], _I8)
    if m.sketches is not None:
        w.array(m.sketches, _F8)
    layers = []
    for part in m.layers:
        count, rows, columns = part.matrices.shape
        w.matrix(part.family, part.matrices.reshape(count * rows, columns))
        layers.append((w.word(part.family), w.word(part.table), part.step, part.rows, rows))
    return (
        *([*map(w.maybe, m.nodes)], [*map(w.maybe, m.groups)], w.words_of(m.names), m.metric_count),
        *(None if stepped is None else len(stepped), layers, m.sketch_rows),
        *(0 if m.sketches is None else m.sketches.shape[1], m.sketch_version),
    )


def _run(w: PayloadWriter, r: Run) -> tuple[Any, ...]:
    layers = [(w.word(t.rows), [(w.word(x.name), x.shape, w.word(x.dtype)) for x in t.layers]) for t in r.tables]
    about = (text(r.name), w.word(r.host), None if r.topology is None else text(r.topology), w.data(r.config))
    return *about, r.seed, r.started, r.finished, w.data(r.versions), layers


_Fields = Callable[[PayloadWriter, Any], tuple[Any, ...]]
_WRITE: dict[type[Telemetry], tuple[int, _Fields]] = {
    LayerStats: (1, _layers),
    Span: (
        2,
        lambda w, r: (
            *(w.word(r.name), r.seconds, w.word(r.trace), w.word(r.id), w.maybe(r.parent)),
            w.data(r.attributes),
        ),
    ),
    Transfer: (
        3,
        lambda w, r: (w.word(r.sender), w.word(r.receiver), r.bytes, r.raw_bytes, r.seconds, w.word(r.kind)),
    ),
    Event: (4, lambda w, r: (w.word(r.level), w.word(r.name), text(r.message), w.data(r.data))),
    Sketch: (5, lambda w, r: (struct.pack(f"<{len(r.values)}d", *r.values), w.word(r.digest), r.version)),
    Finding: (
        6,
        lambda w, r: (
            *(w.word(r.issue), w.word(r.severity), r.confidence, text(r.message), w.data(r.evidence)),
            [(w.word(s.node), s.score, text(s.reason)) for s in r.suspects],
        ),
    ),
    Action: (
        7,
        lambda w, r: (w.word(r.finding), w.word(r.kind), w.maybe(r.target), w.data(r.arguments), w.word(r.status)),
    ),
    Snapshot: (8, lambda w, r: (w.word(r.kind), w.word(r.digest), r.bytes)),
    Run: (9, _run),
    Measurements: (10, _measurements),
}
