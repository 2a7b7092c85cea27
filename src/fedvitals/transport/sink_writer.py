# SPDX-License-Identifier: Apache-2.0
"""Accepts each record from the training thread: numbers it, applies the privacy policy, queues it for every sink."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedvitals.measurements import AnyTelemetry, Emitted, Measurements, Telemetry, Transfers, record_count, stamped
from fedvitals.protocols import RecordWriter, Sink
from fedvitals.records import LayerStats, Metric, Record, Sketch, Transfer
from fedvitals.transport.privacy import PrivacyPolicy, released
from fedvitals.transport.queue import Queue
from fedvitals.transport.sender_limits import SENDERS
from fedvitals.transport.sink_adapter import as_sink

SOURCE = "monitor"  # one process writes a run; records of other processes keep their own source
SENDER = "sender/"  # prefix of the source of records from machines that may lie


class SenderSources:
    """Numbers each sender's records without gaps; beyond a limit, senders silent longest are forgotten.

    A forgotten sender gets another source when it comes back, so that no identity is assigned twice.
    """

    def __init__(self, most: int = SENDERS) -> None:
        self._most = most
        self._process = os.urandom(4).hex()  # differs when the run is continued
        self._forgotten = 0
        self._sources: OrderedDict[str, tuple[str, itertools.count[int]]] = OrderedDict()

    def next_identity(self, sender: str) -> tuple[str, int]:
        """Return the source and the sequence number of a sender's next record."""
        known = self._sources.pop(sender, None)
        if known is None:
            again = f"-{self._forgotten}" if self._forgotten else ""
            known = f"{sender}/{self._process}{again}", itertools.count()
        self._sources[sender] = known
        if len(self._sources) > self._most:
            self._sources.popitem(last=False)
            self._forgotten += 1
        source, sequence = known
        return source, next(sequence)


class SinkWriter:
    """Accepts records from any thread and passes them to every sink, each behind its own queue and worker thread.

    `own`: how many of the sinks, from the first, are ours: the store, the detectors.
    """

    def __init__(
        self,
        sinks: Sequence[RecordWriter],
        *,
        policy: PrivacyPolicy,
        spill: Path | None,
        strict: bool,
        source: str = SOURCE,
        own: int = 0,
    ) -> None:
        self._policy, self._source, self._own = policy, source, own
        whole = [as_sink(sink) for sink in sinks]
        self._sequence = itertools.count()
        self._senders = SenderSources()
        # A sink's own records need not come back to it, least of all while it closes and accepts nothing more.
        self._ignored: list[tuple[type, ...]] = [_with_blocks(sink.ignores) for sink in whole]
        self._queues = [
            Queue(sink, spill=spill if first else None, strict=strict) for sink, first in _with_first(whole)
        ]

    def emit(self, record: Emitted, *, clients: int | None = None, stray: bool = False) -> None:
        """Number and queue a record, as far as the privacy policy allows. Never waits, never raises.

        `held` applies, because this process writes the store and so receives the updates.
        """
        passed = released(record, self._policy, clients=clients, stray=stray, held=True)
        if passed is None:
            return
        self._put(self.stamped(passed))

    def emit_all(self, records: Sequence[Record], *, stray: bool = False) -> None:
        """Number and queue several records."""
        released_records = (released(record, self._policy, stray=stray, held=True) for record in records)
        self._put_all([self.stamped(passed) for passed in released_records if passed is not None])

    def stamped(self, telemetry: AnyTelemetry) -> AnyTelemetry:
        """Return it with an identity of this writer: a sequence number for each record that it represents."""
        count = record_count(telemetry)
        if count == 1:
            return stamped(telemetry, self._source, next(self._sequence))
        # Taken in one call into C, which neither another thread nor a signal handler that logs can interrupt.
        (last,) = deque(itertools.islice(self._sequence, count), maxlen=1)
        return stamped(telemetry, self._source, last - count + 1)

    def store(self, record: Record) -> None:
        """Queue a record for the first sink alone, the store, because the others have ended."""
        passed = released(record, self._policy, held=True)
        if passed is not None and self._queues:
            self._queues[0].put(self.stamped(passed))

    def admit(self, records: Iterable[Telemetry]) -> None:
        """Queue records of another process under their own identity, as far as the privacy policy allows.

        A sender's records are numbered here, without gaps, because a store identifies what it has by these numbers.
        """
        self._put_all([passed for record in records for passed in self._admitted(record)])

    def _admitted(self, record: Telemetry) -> Iterable[Emitted]:
        passed = released(record, self._policy, held=True)
        if isinstance(record, Measurements) and passed is not None and record_count(passed) < len(record):
            # The rest as an array would be numbered differently.
            return [left for single in record.records() for left in self._admitted(single)]
        if passed is not None and record.source.startswith(SENDER):
            passed = stamped(passed, *self._senders.next_identity(record.source))
        return () if passed is None else (passed,)

    def _put(self, record: Emitted) -> None:
        for queue, ignored in zip(self._queues, self._ignored, strict=True):
            if not isinstance(record, ignored):
                queue.put(record)

    def _put_all(self, records: Sequence[Emitted]) -> None:
        for queue, ignored in zip(self._queues, self._ignored, strict=True):
            queue.put_many(record for record in records if not isinstance(record, ignored))

    @property
    def lost(self) -> int:
        """The number of records that the sinks have lost so far."""
        return sum(count for _, count in self.lost_by_sink)

    @property
    def lost_by_sink(self) -> list[tuple[str, int]]:
        """The name of each sink and how many records it has lost so far: our own first, of these the store first."""
        return [(queue.name, sum(queue.lost.values())) for queue in self._queues]

    @property
    def own(self) -> int:
        """How many of the sinks, from the first, are ours."""
        return self._own

    @property
    def thinned(self) -> tuple[int, int]:
        """The client-rounds whose layer statistics our own sinks did not get, and those without metrics as well."""
        counts = [queue.thinned for queue in self._queues[: self._own]]
        return max((count.detail for count in counts), default=0), max((count.rest for count in counts), default=0)

    def flush(self, timeout: float = 30.0, *, own: bool = False) -> bool:
        """Wait until every sink, or each of our own, has written what was emitted. Returns whether all have."""
        deadline = time.monotonic() + timeout
        queues = self._queues[: self._own] if own else self._queues
        # A list, so that each queue is flushed even if an earlier one fails.
        done = [queue.flush(max(0.0, deadline - time.monotonic())) for queue in queues]
        return all(done)

    def close(self, timeout: float = 10.0, before_store: Callable[[], None] = lambda: None) -> None:
        """Close the sinks, the store last, so that what the others report while closing still reaches it.

        `before_store` is called when all others are closed and their losses are known.
        """
        deadline = time.monotonic() + timeout
        for queue in self._queues:
            queue.drain(max(0.0, deadline - time.monotonic()))
        with contextlib.ExitStack() as stack:  # closes in reverse order, each even if another raised
            for i, queue in enumerate(self._queues):
                stack.callback(queue.close, timeout)  # a slow sink gets its time; a failing one does not
                if i == 0:
                    stack.callback(before_store)

    @property
    def losses_of_store(self) -> dict[str, int]:
        """The number of records that the first sink has lost, by cause: «sqlite: sink failed»."""
        return {f"{queue.name}: {cause}": count for queue in self._queues[:1] for cause, count in queue.lost.items()}


def _with_first(sinks: Sequence[Sink]) -> list[tuple[Sink, bool]]:
    """Pair each sink with whether it spills: only the first, the store, which reads back its own folder."""
    return [(sink, index == 0) for index, sink in enumerate(sinks)]


def _with_blocks(ignored: tuple[type, ...]) -> tuple[type, ...]:
    """Add block types to the ignored kinds if everything they represent is ignored."""
    measured = (Measurements,) if {Metric, LayerStats, Sketch} <= {*ignored} else ()
    return *ignored, *measured, *((Transfers,) if Transfer in ignored else ())
