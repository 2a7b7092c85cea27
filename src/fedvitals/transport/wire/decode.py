# SPDX-License-Identifier: Apache-2.0
"""Records out of a payload whose fields have been checked: what they refer to must be there, and no more."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from fedvitals.errors import RecordError
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
from fedvitals.transport.wire.fields import ANY_SUMS, HOLDS_SUMS, Entry, Head, Limits, Place, check_plain, check_size
from fedvitals.transport.wire.vocabulary import WORDS

_DATA = msgspec.msgpack.Decoder(dict[str, Any])


class PayloadReader:
    """From a checked head and the bytes behind it to records."""

    def __init__(self, head: Head, matrices: memoryview, limits: Limits) -> None:
        self._entries, self._limits = head.entries, limits
        self.words = (*WORDS, *head.words)
        self._places = [self._where(place) for place in head.places]
        self._sums, self._others = self._cut(matrices)
        self._sum_row = self._other = 0
        self._data_bytes = 0

    def read(self) -> list[Record]:
        """Return all records, in order."""
        records: list[Record] = []
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
                check_size("records", len(records) + len(entry.names), self._limits.records)
                places = self._moved(entry) if entry.moves else itertools.repeat(place, len(entry.names))
                records += _metrics(entry, self.words, places, at, source, sequence)
                sequence += len(entry.names)
            else:
                check_size("records", len(records) + 1, self._limits.records)
                records.append(_READ[type(entry)](self, entry, (place, at), (source, sequence)))
                sequence += 1
            if sequence > 2**63:
                raise RecordError(f"A sequence of {sequence} in a payload: no source counts that far.")
        return records

    def _moved(self, entry: fields.Metrics) -> list[Where]:
        """The place of each metric: from the first on that of the entry, from each move on another."""
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
        value = _DATA.decode(raw)
        check_plain(value)
        return value

    def matrix(self, family: str, rows: int) -> Array:
        if HOLDS_SUMS[family]:
            self._sum_row += rows
            return self._sums[self._sum_row - rows : self._sum_row]
        columns = len(FAMILIES[family].columns)
        self._other += rows * columns
        return self._others[self._other - rows * columns : self._other].reshape(rows, columns)

    def _where(self, place: Place) -> Where:
        maybe = self.maybe
        where = Where(
            self.words[place.run], place.round, maybe(place.node), place.step, maybe(place.layer), maybe(place.group)
        )
        if not where.run:
            raise RecordError("A record in a payload belongs to no run.")
        return where

    def _cut(self, matrices: memoryview) -> tuple[Array, Array]:
        """The nine sums of all layers, and all other numbers; their bytes must be as many as the entries say."""
        sums = others = 0
        for entry in self._entries:
            if type(entry) is fields.Layers:
                family = self.words[entry.family]
                if family not in FAMILIES:
                    raise RecordError(f"Unknown family '{family[:80]}' in a payload. Known: {', '.join(FAMILIES)}.")
                if HOLDS_SUMS[family]:
                    sums += entry.rows
                else:
                    others += entry.rows * len(FAMILIES[family].columns)
        if not len(matrices) and not sums and not others:
            return _NO_SUMS, _NOTHING
        width = len(STATISTICS)
        if 4 * (sums * width + others) != len(matrices):
            raise RecordError(f"Matrices of {4 * (sums * width + others)} bytes announced, got {len(matrices)}.")
        numbers = np.frombuffer(matrices, "<f4")
        with np.errstate(all="ignore"):
            unpacked = unpack(ANY_SUMS, numbers[: sums * width].reshape(sums, width))
            return unpacked, numbers[sums * width :].astype(np.float64)


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
    """Made slot by slot: the constructor of a frozen class takes twice as long, and metrics are most of a payload."""
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
    """Slot by slot, too; its shape is right, since `matrix` cut it out."""
    family = r.word(e.family)
    record = _NEW_LAYERS(LayerStats)
    values = (*at, family, r.matrix(family, e.rows), r.word(e.table), *identity)
    for put, value in zip(_PUT_LAYERS, values, strict=True):
        put(record, value)
    return record


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


_READ: dict[type[Entry], Callable[[PayloadReader, Any, _At, _Identity], Record]] = {
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
}
