# SPDX-License-Identifier: Apache-2.0
"""Sinks that keep, fail, refuse or hang, and queues that end with the test: what the tests of the queue share."""

from __future__ import annotations

import contextlib
import threading

from fedvitals.errors import RecordError
from fedvitals.protocols import Sink
from fedvitals.records import Event, Metric, Where
from fedvitals.transport.queue import Queue
from support.waiting import PATIENCE


def metric(value: float, node: str = "c1") -> Metric:
    return Metric(Where("run", 1, node), 0.0, "loss", float(value))


def error(number: int, node: str = "c1") -> Event:
    return Event(Where("run", 1, node), float(number), "error", "log", f"error {number}")


class Keeping(Sink):
    """A sink that keeps what it gets, fails with `trouble` while that is set, and refuses what is `poisonous`."""

    name = "keeping"

    def __init__(self, trouble: Exception | None = None, poisonous=lambda _: False) -> None:
        self.records: list = []
        self.batches: list[int] = []
        self.attempts = 0
        self.trouble = trouble
        self.poisonous = poisonous
        self.closed_by: list[str] = []

    def write(self, records, /) -> None:
        self.attempts += 1
        if self.trouble is not None:
            raise self.trouble
        if any(self.poisonous(record) for record in records):
            raise RecordError("poison")
        self.batches.append(len(records))
        self.records.extend(records)

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


class Hanging(Keeping):
    """A sink that does not come back before the test lets it."""

    name = "hanging"

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, records, /) -> None:
        self.entered.set()
        self.go.wait(PATIENCE)
        super().write(records)


@contextlib.contextmanager
def ending_queues():
    """A function that makes queues; when the block ends, so do they and their threads."""
    queues = []

    def make(sink, **settings) -> Queue:
        queues.append(Queue(sink, **settings))
        return queues[-1]

    yield make
    for queue in queues:
        queue.strict = False
        queue.close(timeout=0.5)
        if isinstance(queue._sink, Hanging):
            queue._sink.go.set()
        if queue._thread is not None:
            queue._thread.join(PATIENCE)
            assert not queue._thread.is_alive()
