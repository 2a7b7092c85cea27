# SPDX-License-Identifier: Apache-2.0
"""Buffers a worker process's records until they are encoded and sent to the parent process.

A payload above its maximum size is thinned, like a queue (`transport.thinning`): details are left out, one kind after
the other, until it fits. The kinds are the families of layer statistics, with those of whole rounds separate from those
of single steps; sketches; and numbers measured at several steps. The kind with the most values goes first, and a layer
table goes with the last statistics that it describes. The event `worker.thinned` says what was left out; that does not
count as a loss.

If it still does not fit, records are lost and reported by `worker.lost`: repeatedly the older half of metrics, spans
and remarks; findings, warnings and errors last.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedvitals.errors import RecordError
from fedvitals.measurements import (
    Emitted,
    Telemetry,
    Transfers,
    is_important,
    record_count,
    round_of,
    single_records,
    stamped,
)
from fedvitals.records import Event, LayerStats, LayerTable, Metric, Record, Run, Sketch, Span, Where
from fedvitals.stats import FAMILIES
from fedvitals.transport.privacy import PrivacyPolicy, released
from fedvitals.transport.sender_limits import MESSAGE
from fedvitals.transport.wire.payload import LIMITS, encode

LOST = "worker.lost"  # the event that reports telemetry lost in a worker
THINNED = "worker.thinned"  # the event that reports details left out of a payload, in the order above
SKETCHES, STEPS = "sketches", "single steps"  # its names for these; layer statistics are named by their family
KINDS = (*(f"{family}{of}" for family in FAMILIES for of in ("", f" of {STEPS}")), SKETCHES, STEPS)
ROOM = LIMITS.records // 2  # limit on waiting records, since they may never be taken


class PayloadBuffer:
    """Accepts records like a `SinkWriter`; `take` returns them as one payload.

    Everything in a worker belongs to a client, so the privacy level applies to all of it, whichever node it names.
    """

    def __init__(self, policy: PrivacyPolicy, known: Iterable[str] = ()) -> None:
        self.source = f"worker-{os.getpid()}-{os.urandom(4).hex()}"
        self.known = set(known)  # layer tables that need not be sent again
        self._policy = self._chosen_policy = policy
        self._lock = threading.RLock()
        self._records: list[Telemetry] = []
        self._count = 0  # the number of records these represent
        self._run: Run | None = None
        self._sequence = 0
        self._untold = 0
        self._thinned: dict[str, list[Record]] = {}  # left out of the payload being made, by kind
        self.lost = 0

    def emit(self, record: Emitted, *, clients: int | None = None, stray: bool = False) -> None:  # noqa: ARG002
        """Buffer a record, as far as the privacy level allows. Never raises."""
        passed = released(record, self._policy, clients=clients, stray=True)
        count = 0 if passed is None else record_count(passed)
        with self._lock:
            if isinstance(passed, Run):
                self._run = passed
            elif passed is not None and (self._count < ROOM or is_important(passed)):
                self._records += passed.records() if isinstance(passed, Transfers) else (passed,)
                self._count += count
            elif passed is not None:
                self._lose(count)

    def restrict(self, level: int) -> None:
        """Apply at most this privacy level to what is emitted until the next `take`."""
        self._policy = replace(self._policy, level=min(self._policy.level, level))

    def emit_all(self, records: Sequence[Record], *, stray: bool = False) -> None:
        """Buffer several records."""
        for record in records:
            self.emit(record, stray=stray)

    def flush(self, timeout: float = 0.0, *, own: bool = False) -> bool:  # noqa: ARG002 - as a `SinkWriter`'s
        """Return True: nothing is written from here."""
        return True

    def close(self, timeout: float = 0.0) -> None:
        """Do nothing: no resource is held open."""

    def take(self, most: int | None = None) -> bytes:
        """Return everything since the last call as one payload, with the layer tables not sent before; b"" if empty.

        `most`: maximum bytes, if less than the general limit of a payload.
        """
        with self._lock:
            records, self._records, self._count = self._records, [], 0
            self._policy = self._chosen_policy
            tables = self._new_tables()
            about = [Run(self._run.id, self._run.name, tables=tables)] if self._run is not None and tables else []
            if not (records or about or self._untold):
                return b""
            self._thinned = {}
            return self._fitting([*about, *records], most)

    def _new_tables(self) -> tuple[LayerTable, ...]:
        return () if self._run is None else tuple(t for t in self._run.tables if t.digest not in self.known)

    def _fitting(self, telemetry: list[Telemetry], most: int | None) -> bytes:
        """Return the records that fit into one payload, encoded; the order of leaving out is stated at the top."""
        with contextlib.suppress(RecordError):
            return self._encoded(telemetry, most)
        records = single_records(telemetry)
        whole, gone = records, set[int]()
        for kind, places in _details(whole):
            gone |= places
            self._thinned[kind] = [whole[i] for i in sorted(places)]
            records = _with_used_tables([record for i, record in enumerate(whole) if i not in gone])
            with contextlib.suppress(RecordError):
                return self._encoded(records, most)
        for keep in (*[_newer_half] * 20, _important, *[_latest] * 20):
            kept = keep(records)
            self._lose(len(records) - len(kept))
            records = kept
            with contextlib.suppress(RecordError):
                return self._encoded(records, most)
        return self._encoded([], None)

    def _encoded(self, records: Sequence[Telemetry], most: int | None) -> bytes:
        """Return the encoded records, with a report of what was left out.

        Sequence numbers are only used for sent records.
        """
        sent = [*records]
        if self._run is not None and (self._untold or self._thinned):
            rounds = [number for number in map(round_of, records) if number is not None]
            place = Where(self._run.id, rounds[-1] if rounds else None)
            if self._thinned:
                sent.append(_thinning_event(place, self._thinned))
            if self._untold:
                text = f"{self._untold} records of a worker found no room."
                sent.append(Event(place, time.time(), "warning", LOST, text, {"records": self._untold}))
        numbers = itertools.accumulate(map(record_count, sent), initial=self._sequence)
        limits = LIMITS if most is None else MESSAGE  # with a byte limit, the receiver treats us as a sender
        payload = encode([stamped(record, self.source, i) for record, i in zip(sent, numbers, strict=False)], limits)
        if most is not None and len(payload) > most:
            raise RecordError(f"{len(payload)} bytes, where {most} may go.")
        self._sequence += sum(map(record_count, sent))
        self._untold = 0
        self.known.update(table.digest for record in sent if isinstance(record, Run) for table in record.tables)
        return payload

    def _lose(self, count: int) -> None:
        self.lost += count
        self._untold += count


def _details(records: Sequence[Record]) -> list[tuple[str, set[int]]]:
    """Return the kinds of details among these records with their positions, in the order in which they are left out."""
    often = Counter(_series(record) for record in records)
    places: dict[str, set[int]] = {}
    values: Counter[str] = Counter()
    for i, record in enumerate(records):
        series = _series(record)
        if isinstance(record, LayerStats):
            kind, size = record.family if series is None else f"{record.family} of {STEPS}", record.matrix.size
        elif isinstance(record, Sketch):
            kind, size = SKETCHES, len(record.values)
        elif series is not None and often[series] > 1:  # else a single number of its round, with its step
            kind, size = STEPS, 1
        else:
            continue
        places.setdefault(kind, set()).add(i)
        values[kind] += size
    return [(kind, places[kind]) for kind in sorted(places, key=lambda kind: (-values[kind], kind))]


def _series(record: Record) -> tuple[str, str | None, str | None] | None:
    """Return the series over a training's steps that a record belongs to, if any."""
    if isinstance(record, Run) or is_important(record) or record.where.step is None:
        return None
    name = record.name if isinstance(record, Metric | Span | Event) else ""
    return name, record.where.node, record.where.layer


def _with_used_tables(records: list[Record]) -> list[Record]:
    """Return the records without the layer tables that none of their statistics refers to."""
    used = {record.table for record in records if isinstance(record, LayerStats)}
    kept: list[Record] = []
    for record in records:
        if isinstance(record, Run):
            tables = tuple(table for table in record.tables if table.digest in used)
            kept += [replace(record, tables=tables)] if tables else []
        else:
            kept.append(record)
    return kept


def _thinning_event(place: Where, left_out: Mapping[str, Sequence[Record]]) -> Event:
    """Return the event that says how many details of which kinds were left out, and of how many client-rounds."""
    records = [record for own in left_out.values() for record in own if not isinstance(record, Run)]
    client_rounds = len({(record.where.round, record.where.node) for record in records})
    data = {"records": len(records), "client_rounds": client_rounds, "left_out": [*left_out]}
    return Event(place, time.time(), "info", THINNED, thinning_words(len(records), [*left_out]), data)


def thinning_words(records: int, kinds: Sequence[str]) -> str:
    """Return the sentence that says how many records of which kinds were left out of a message."""
    named = f": {', '.join(kinds)}" if kinds else ""
    return f"{records:,} layer statistics or numbers of steps were left out, having no room in the message{named}."


def _newer_half(records: list[Record]) -> list[Record]:
    bulk = [i for i, record in enumerate(records) if not is_important(record)]
    gone = set(bulk[: (len(bulk) + 1) // 2])
    return [record for i, record in enumerate(records) if i not in gone]


def _important(records: list[Record]) -> list[Record]:
    return [record for record in records if is_important(record)]


def _latest(records: list[Record]) -> list[Record]:
    return records[(len(records) + 1) // 2 :]
