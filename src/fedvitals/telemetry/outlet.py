# SPDX-License-Identifier: Apache-2.0
"""The way out of the training thread: each record is stamped, held against the privacy level, and queued per sink."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from fedvitals.catalog import level_of
from fedvitals.protocols import Sink
from fedvitals.records import Record, Run, stamped
from fedvitals.telemetry.queue import Queue

SERVER_NODES = (None, "server")
SOURCE = "monitor"  # one process writes a run; what comes from others keeps their own source


class Outlet:
    """Takes records from any thread and hands them to every sink, each behind a queue and a worker of its own."""

    def __init__(self, sinks: Sequence[Sink], *, privacy: int, spill: Path | None, strict: bool) -> None:
        self._privacy = privacy
        self._sequence = itertools.count()
        self._queues = [
            Queue(sink, spill=spill if first else None, strict=strict) for sink, first in _with_first(sinks)
        ]

    def emit(self, record: Record) -> None:
        """Never waits, never raises. What the privacy level forbids goes no further than this line."""
        if self._privacy < 3 and not isinstance(record, Run):
            about_client = record.where.node not in SERVER_NODES
            if about_client and level_of(record) > self._privacy:
                return
        record = stamped(record, SOURCE, next(self._sequence))
        for queue in self._queues:
            queue.put(record)

    @property
    def lost(self) -> int:
        return sum(sum(queue.lost.values()) for queue in self._queues)

    def flush(self, timeout: float = 30.0) -> bool:
        """Whether everything emitted before has been written by every sink."""
        deadline = time.monotonic() + timeout
        # A list, so that each queue is flushed even when an earlier one could not be.
        done = [queue.flush(max(0.0, deadline - time.monotonic())) for queue in self._queues]
        return all(done)

    def close(self, timeout: float = 10.0) -> None:
        for queue in self._queues:
            queue.close(timeout)


def _with_first(sinks: Sequence[Sink]) -> list[tuple[Sink, bool]]:
    """Only the first sink, the store, spills: what it could not take comes back into it from its own folder."""
    return [(sink, index == 0) for index, sink in enumerate(sinks)]
