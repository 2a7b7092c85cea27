# SPDX-License-Identifier: Apache-2.0
"""Buffers a worker process's records until they are encoded and sent to the parent process."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence

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
from fedvitals.records import Event, LayerTable, Record, Run, Where
from fedvitals.transport.privacy import PrivacyPolicy, released
from fedvitals.transport.sender_limits import MESSAGE
from fedvitals.transport.wire.payload import LIMITS, encode

LOST = "worker.lost"  # the event that tells of telemetry which did not come home
ROOM = LIMITS.records // 2  # records that wait; nobody may ever take them


class PayloadBuffer:
    """Takes records as a `SinkWriter` does; `take` returns them as one payload.

    Everything in a worker is a client's, so the privacy level is applied to all of it, whichever node it names.
    """

    def __init__(self, policy: PrivacyPolicy, known: Iterable[str] = ()) -> None:
        self.source = f"worker-{os.getpid()}-{os.urandom(4).hex()}"
        self.known = set(known)  # layer tables that need not be sent
        self._policy = policy
        self._lock = threading.RLock()
        self._records: list[Telemetry] = []
        self._count = 0  # records that these are
        self._run: Run | None = None
        self._sequence = 0
        self._untold = 0
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

    def emit_all(self, records: Sequence[Record], *, stray: bool = False) -> None:
        """The same for several records at once."""
        for record in records:
            self.emit(record, stray=stray)

    def flush(self, timeout: float = 0.0, *, own: bool = False) -> bool:  # noqa: ARG002 - as a `SinkWriter`'s
        """Return True: nothing is written from here."""
        return True

    def close(self, timeout: float = 0.0) -> None:
        """Nothing is held open."""

    def take(self, most: int | None = None) -> bytes:
        """Return everything since the last call as one payload, with the layer tables not sent before; b"" for nothing.

        `most`: bytes, if less than a payload may ever have.
        """
        with self._lock:
            records, self._records, self._count = self._records, [], 0
            tables = self._new_tables()
            about = [Run(self._run.id, self._run.name, tables=tables)] if self._run is not None and tables else []
            if not (records or about or self._untold):
                return b""
            payload = self._fitting([*about, *records], most)
            self.known.update(table.digest for table in tables)
            return payload

    def _new_tables(self) -> tuple[LayerTable, ...]:
        return () if self._run is None else tuple(t for t in self._run.tables if t.digest not in self.known)

    def _fitting(self, telemetry: list[Telemetry], most: int | None) -> bytes:
        """As many as one payload may hold: single steps go first, then what is oldest; findings and errors last."""
        with contextlib.suppress(RecordError):
            return self._encoded(telemetry, most)
        records = single_records(telemetry)
        for keep in (_whole_rounds, *[_newer_half] * 20, _important, *[_latest] * 20):
            kept = keep(records)
            self._lose(len(records) - len(kept))
            records = kept
            with contextlib.suppress(RecordError):
                return self._encoded(records, most)
        return self._encoded([], None)

    def _encoded(self, records: Sequence[Telemetry], most: int | None) -> bytes:
        """With the loss so far told at the end. Sequences are spent only on what is sent."""
        sent = [*records]
        if self._untold and self._run is not None:
            rounds = [number for number in map(round_of, records) if number is not None]
            place = Where(self._run.id, rounds[-1] if rounds else None)
            text = f"{self._untold} records of a worker found no room."
            sent.append(Event(place, time.time(), "warning", LOST, text, {"records": self._untold}))
        numbers = itertools.accumulate(map(record_count, sent), initial=self._sequence)
        limits = LIMITS if most is None else MESSAGE  # where bytes are counted, the other side takes us for a sender
        payload = encode([stamped(record, self.source, i) for record, i in zip(sent, numbers, strict=False)], limits)
        if most is not None and len(payload) > most:
            raise RecordError(f"{len(payload)} bytes, where {most} may go.")
        self._sequence += sum(map(record_count, sent))
        self._untold = 0
        return payload

    def _lose(self, count: int) -> None:
        self.lost += count
        self._untold += count


def _whole_rounds(records: list[Record]) -> list[Record]:
    return [r for r in records if isinstance(r, Run) or r.where.step is None or is_important(r)]


def _newer_half(records: list[Record]) -> list[Record]:
    bulk = [i for i, record in enumerate(records) if not is_important(record)]
    gone = set(bulk[: (len(bulk) + 1) // 2])
    return [record for i, record in enumerate(records) if i not in gone]


def _important(records: list[Record]) -> list[Record]:
    return [record for record in records if is_important(record)]


def _latest(records: list[Record]) -> list[Record]:
    return records[(len(records) + 1) // 2 :]
