# SPDX-License-Identifier: Apache-2.0
"""The queue between the training thread and one sink: the former only appends, and a worker thread writes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedvitals.errors import FedvitalsError, RecordError, StoreLostError, text_of
from fedvitals.measurements import Emitted, Measurements, Telemetry, Transfers, is_important, record_count, round_of
from fedvitals.protocols import RecordWriter
from fedvitals.records import LayerStats, Metric, Record, Sketch, Span, Transfer
from fedvitals.transport.sink_adapter import as_sink, form_for
from fedvitals.transport.spill import BULK, BULK_BYTES, BulkLine, Spill, bulk_lines, bulk_parts
from fedvitals.transport.thinning import ThinnedClientRounds, levels, room_of, thinned

logger = logging.getLogger("fedvitals.telemetry")

BATCH = 2000  # records in one call of the sink, or slightly more, because measurements are not split
POLL_SECONDS = 0.5  # waking more often would contend with training for the interpreter, and commit more often
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds between attempts at a failing sink, doubling
SPILLED_FROM = 8  # bulk goes to disk while the sink fails, from 1 in this many parts of the memory limit
PATIENCE = 5  # consecutive failures after which a flush stops waiting, so that no round's end stalls
CLOSING = 3.0  # seconds after which closing stops waiting for a failing sink: what it has not taken is spilled
CAUSES_REPORTED = 100  # limits the user's log if a sink's messages all differ

LEFT_OUT = "layer statistics of some client-rounds are left out"
# Avoids the slower test in `is_important` for nearly all records.
ALWAYS_BULK = frozenset({Metric, LayerStats, Span, Transfer, Sketch, Measurements, Transfers})


class Queue:
    """Accepts records without delay and passes them to a sink in batches, in order, from a thread of its own.

    `bulk` and `important` limit what may wait, in small records; arrays count by their bytes (`room_of`: 200 MB). `put`
    neither waits nor raises. A queue that fills up thins what it accepts (`transport.thinning`); a full one loses the
    oldest bulk, and counts it. One exception: an important record that finds more than `important` others waiting is
    written to the folder `spill` by its own thread, about 20 µs. While the sink fails, the worker moves waiting bulk
    into a second file there, up to 1 GiB; what the sink has not taken at the end stays there for the next process.
    With `strict`, `flush` and `close` raise what is otherwise counted. The worker calls a sink's `close` method.
    """

    def __init__(
        self,
        sink: RecordWriter,
        *,
        spill: Path | None = None,
        bulk: int = 100_000,
        important: int = 10_000,
        strict: bool = False,
    ) -> None:
        self._sink = as_sink(sink)
        self.name = str(self._sink.name or type(sink).__name__).lower()
        self.strict = strict
        self._bulk_limit, self._important_limit = bulk, important
        self._spill = Spill(Path(spill), self.name) if spill is not None else None
        self._bulk_spill = Spill(Path(spill), f"{BULK}-{self.name}") if spill is not None else None
        self._empty()
        reference = weakref.ref(self)

        def after_fork() -> None:
            queue = reference()
            if queue is not None:
                queue._detach()  # noqa: SLF001 - our own method, through a weak reference

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=after_fork)

    def _empty(self) -> None:
        # Re-entrant, since a signal handler or a finaliser may log, and so call `put`, during a `put`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._bulk: deque[Emitted] = deque()
        self._important: deque[Record] = deque()
        self._bulk_room = 0  # taken by the waiting bulk, see `room_of`
        self._bulk_records = 0  # the number of records it represents
        self._bulk_lines: deque[BulkLine] = deque()  # in the bulk file, without their content
        self._moving: list[Emitted] = []  # bulk being moved to the file
        # How many records of each class have left the queue: bulk, important.
        self._heads = [0, 0]
        # The heads before the batch that the worker holds, and that batch: None if it holds none.
        self._held_from: list[int] | None = None
        self._held: list[Emitted] = []
        self._lost: dict[str, int] = {}
        self.thinned = ThinnedClientRounds()
        self._error: BaseException | None = None  # cause of a loss, raised by a strict flush
        self._outage: BaseException | None = None  # the current error of the sink
        self._failures = 0  # consecutive failures of the sink
        self._attempts_failed = 0  # failures of the sink in total
        self._reported: set[str] = set()
        self._announce_recovery = False
        # Logged by the worker, never under the lock: a log handler may hold a lock of its own and call `put`.
        self._news: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._refused = ""  # why nothing is accepted any more
        self._flushing = 0
        self._hurry = self._stopping = False

    @property
    def lost(self) -> Mapping[str, int]:
        """The number of records lost so far, by cause."""
        with self._lock:
            return dict(self._lost)

    @property
    def pending(self) -> int:
        """The number of records waiting for the sink, including those in the spill file."""
        with self._lock:
            return self._ready + sum(map(record_count, self._held))

    @property
    def _ready(self) -> int:
        spilled_bulk = sum(map(record_count, self._moving)) + sum(line.records for line in self._bulk_lines)
        return self._bulk_records + len(self._important) + self._spilled + spilled_bulk

    def put(self, record: Emitted) -> None:
        """Accept a record or measurements, without waiting or raising."""
        with self._lock:
            if self._refused:
                self._lose(self._refused, count=record_count(record))
            elif type(record) not in ALWAYS_BULK and is_important(record):
                self._put_important(record)
            else:
                self._put_bulk(record)
            if self._thread is None:
                self._start()

    def put_many(self, records: Iterable[Emitted]) -> None:
        """Accept records one after the other."""
        with self._lock:
            for record in records:
                self.put(record)

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Return whether everything put before this call has been written, waiting while that is still possible.

        False on timeout, if the sink keeps failing, and after the first lost record (see `lost`).
        """
        written = self._wait(None if timeout is None else time.monotonic() + timeout)
        self._raise_if_strict()
        return written and not self._lost

    def drain(self, timeout: float) -> bool:
        """Flush before `close`: returns whether all was written, and waits only briefly for a failing sink."""
        return self._wait(time.monotonic() + timeout, closing=True)

    def close(self, timeout: float = 10.0) -> None:
        """Flush, end the thread and close the sink. What it has not taken waits in files, or is counted as lost."""
        with self._lock:
            if self._refused:
                return
            self._refused = "closed"
        deadline = time.monotonic() + timeout
        self._wait(deadline, closing=True)
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            self._close_sink()
        else:
            # Even after the timeout, an idle worker gets the moment it needs to end.
            thread.join(max(0.2, deadline - time.monotonic()))
        self._abandon()
        self._say()
        self._raise_if_strict()

    # --- the caller's side, under the lock -------------------------------------------------------------------------

    @property
    def _spilled(self) -> int:
        return self._spill.waiting if self._spill is not None else 0

    def _put_bulk(self, record: Emitted) -> None:
        if 2 * self._bulk_room >= self._bulk_limit and LayerStats not in self._sink.ignores:
            kept = self._thin(record)
            if kept is None:
                return
            record = kept
        count, waiting = record_count(record), self._bulk_records
        room = room_of(record)  # before the sums below: a signal handler may log, and so put, during this call
        while self._bulk and self._bulk_room + room > self._bulk_limit:
            self._lose("queue full", count=record_count(self._pop_bulk()))
            self._heads[0] += 1
        self._bulk.append(record)
        self._bulk_records += count
        self._bulk_room += room
        if waiting < BATCH <= self._bulk_records:
            self._changed.notify_all()

    def _thin(self, record: Emitted) -> Emitted | None:
        """Return what a queue that is at least half full accepts of a record; None: nothing."""
        detail, rest = levels(self._bulk_room / self._bulk_limit)
        if not self._sink.takes_measurements:
            rest = 0
        kept, nodes = thinned(record, detail, rest)
        if nodes:
            if not self.thinned.detail:
                self._news.append(f"Sink '{self.name}' is slower than the training: {LEFT_OUT}, so that none is lost.")
            self.thinned.add(round_of(record), nodes, rest)
        return kept

    def _pop_bulk(self) -> Emitted:
        record = self._bulk.popleft()
        count = record_count(record)
        room = room_of(record)
        self._bulk_records -= count
        self._bulk_room -= room
        return record

    def _put_important(self, record: Record) -> None:
        # While older records wait in the file, newer ones must queue behind them.
        if not self._spilled and len(self._important) < self._important_limit:
            self._important.append(record)
            if len(self._important) == BATCH:
                self._changed.notify_all()
        elif self._spill is None:
            self._lose("queue full")
        else:
            self._spill_over(self._spill, record)

    def _spill_over(self, spill: Spill, record: Record) -> None:
        try:
            spill.append(record)
            spill.waiting += 1
        except Exception as error:  # noqa: BLE001 - a full disk, a foreign object in the data: training goes on
            self._lose("spill failed", error)

    def _lose(self, cause: str, error: BaseException | None = None, count: int = 1) -> None:
        self._lost[cause] = self._lost.get(cause, 0) + count
        if error is not None:
            self._report(error, cause)
        if self.strict and self._error is None:
            hint = "Write to it less often, or find out why its sink is slow; `lost` counts them."
            self._error = error or FedvitalsError(f"The queue of sink '{self.name}' lost records ({cause}). {hint}")

    def _report(self, error: BaseException, consequence: str) -> None:
        cause = f"{type(error).__name__}: {text_of(error)}"
        if cause in self._reported or len(self._reported) >= CAUSES_REPORTED:
            return
        self._reported.add(cause)
        self._announce_recovery = True
        self._news.append(f"Sink '{self.name}': {consequence} ({cause}). Logged once; `lost` counts.")

    def _say(self) -> None:
        while self._news:
            # The user's log handler may fail, and another thread may have been faster.
            with contextlib.suppress(Exception):
                logger.warning("%s", self._news.popleft())

    def _raise_if_strict(self) -> None:
        with self._lock:
            error, self._error, self._outage = self._error or self._outage, None, None
        if self.strict and error is not None:
            raise error

    def _start(self) -> None:
        if self._refused:
            return
        thread = threading.Thread(target=self._work, name=f"fedvitals-{self.name}", daemon=True)
        # If no thread can be started, records wait; the next put tries again.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def _wait(self, deadline: float | None, *, closing: bool = False) -> bool:
        began = time.monotonic()
        with self._lock:
            on_disk = len(self._moving) + sum(line.elements for line in self._bulk_lines)
            target = [self._heads[0] + on_disk + len(self._bulk), self._heads[1] + len(self._important) + self._spilled]
            failed_before, patience = self._attempts_failed, 1 if self.strict else PATIENCE
            self._flushing += 1
            self._hurry = True
            self._changed.notify_all()
            try:
                while not self._reached(target):
                    remaining = None if deadline is None else deadline - time.monotonic()
                    failing = self._failures > 0 and self._attempts_failed > failed_before
                    if closing and failing:
                        remaining = min(remaining or 0.0, began + CLOSING - time.monotonic())
                    hopeless = (failing and self._failures >= patience) or self._thread is None or self._stopping
                    if hopeless or (remaining is not None and remaining <= 0):
                        return False
                    self._changed.wait(remaining)
                return True
            finally:
                self._flushing -= 1

    def _reached(self, target: list[int]) -> bool:
        bulk, important = self._heads if self._held_from is None else self._held_from
        return bulk >= target[0] and important >= target[1]

    def _abandon(self) -> None:
        """Move what is left to the spill files at the end; it is lost if there is no room."""
        with self._lock:
            left = [*self._held, *self._important, *self._moving, *self._bulk]
            self._held, self._moving, self._held_from = [], [], None
            self._important.clear()
            self._bulk.clear()
            self._bulk_records = self._bulk_room = 0
            bulk = [record for record in left if not is_important(record)]
            lost = sum(map(record_count, left))
            if self._spill is not None and self._bulk_spill is not None:
                for record in left:
                    if is_important(record):
                        self._spill_over(self._spill, record)
                        lost -= 1
                for part in bulk_parts(bulk, BATCH):
                    lost -= sum(map(record_count, part[: self._spill_bulk(self._bulk_spill, part)]))
                self._spill.close(keep=self._spilled > 0)
                self._bulk_spill.close(keep=bool(self._bulk_lines))
                if self._ready:
                    self._news.append(
                        f"Sink '{self.name}' has not taken {self._ready} records. They wait in '{self._spill.folder}': "
                        "the next training with this store brings them in, and so does `fedvitals doctor --mend`."
                    )
            if lost:
                self._lose("sink failed", self._outage, lost)

    def _detach(self) -> None:
        """Detach in a forked child: nothing inherited may be written here, nor may the parent's sink."""
        self._empty()
        self._refused = "forked"
        if self._spill is not None and self._bulk_spill is not None:
            self._spill.detach()
            self._spill.waiting = 0
            self._bulk_spill.detach()

    # --- the worker's side -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._take():
            self._deliver()
            self._say()
        self._close_sink()

    def _take(self) -> bool:
        """Wait for records and hold the next batch of them; False if there is none."""
        with self._lock:
            while not self._stopping:
                ready = self._ready
                if ready == 0 or (ready < BATCH and not self._flushing):
                    self._changed.wait(POLL_SECONDS)
                    ready = self._ready
                if ready and not self._stopping:
                    break
            else:
                return False
            before = list(self._heads)
            # Important first: the Run must be in the store before its measurements.
            spilled = 0 if self._important else min(self._spilled, BATCH)
            important = [self._important.popleft() for _ in range(min(len(self._important), BATCH))]
            room = BATCH - len(important) - spilled
            bulk: list[Emitted] = []
            line = self._bulk_lines.popleft() if self._bulk_lines and room > 0 else None
            while self._bulk and room > 0 and line is None:
                bulk.append(self._pop_bulk())
                room -= record_count(bulk[-1])
            self._heads[0] += len(bulk) if line is None else line.elements
            self._heads[1] += len(important) + spilled
            self._held, self._held_from = [*important, *bulk], before
            if self._spill is not None:
                self._spill.waiting -= spilled
        if line is not None and self._bulk_spill is not None:
            self._read_back(self._bulk_spill, 1, line.records)
        if spilled and self._spill is not None:
            self._read_back(self._spill, spilled, spilled)
        return True

    def _read_back(self, spill: Spill, lines: int, count: int) -> None:
        """Put the records of spilled lines in front of the batch; without the lock, as no put may wait for a disk."""
        records: list[Telemetry] = []
        error: BaseException | None = None
        try:
            records = spill.read(lines)
        except Exception as problem:  # noqa: BLE001 - whatever the disk says, the rest is to be written
            error = problem
        missing = count - sum(map(record_count, records))
        with self._lock:
            self._held = [*records, *self._held]
            if missing > 0:
                self._lose("spill failed", error, missing)

    def _move_bulk_to_disk(self, spill: Spill) -> None:
        """Move bulk to disk while the sink fails, to free memory. Runs on the worker, without the lock."""
        while True:
            with self._lock:
                if self._stopping or SPILLED_FROM * self._bulk_room < self._bulk_limit or spill.size > BULK_BYTES:
                    return
                part, count = list[Emitted](), 0
                while self._bulk and count < BATCH:
                    part.append(self._pop_bulk())
                    count += record_count(part[-1])
                self._moving = [*part]
            self._spill_bulk(spill, part)
            with self._lock:
                left, self._moving = self._moving, []
                for record in reversed(left):  # the disk is full
                    self._bulk.appendleft(record)
                    self._bulk_records += record_count(record)
                    self._bulk_room += room_of(record)
                if left:
                    return

    def _spill_bulk(self, spill: Spill, part: Sequence[Emitted]) -> int:
        """Append bulk to its file. Returns how much was written: less if the file or the disk is full."""
        elements = 0
        try:
            for line in bulk_lines(part) if spill.size <= BULK_BYTES else ():
                spill.append_line(line.content)
                elements += line.elements
                with self._lock:
                    self._bulk_lines.append(replace(line, content=b""))
                    del self._moving[: line.elements]
        except OSError as error:
            with self._lock:
                self._report(error, "spill failed")
        return elements

    def _deliver(self) -> None:
        """Write the held batch; retry while the sink fails, and leave out single records that it rejects."""
        parts = [form_for(self._sink, self._held)]
        delay = FIRST_DELAY
        while parts:
            part = parts[0]
            with self._lock:
                self._hurry = False
                if self._stopping:
                    return
            try:
                self._sink.write(part)  # type: ignore[arg-type]  # no measurements, unless it takes them
            except RecordError as error:
                if isinstance(part[0], Measurements | Transfers) and len(part) == 1:
                    parts[:1] = [[*part[0].records()]]  # so that one rejected number does not lose others
                elif len(part) == 1:
                    with self._lock:
                        self._lose("bad record", error)
                    parts.pop(0)
                else:
                    parts[:1] = [part[: len(part) // 2], part[len(part) // 2 :]]
                continue
            except StoreLostError as error:
                with self._lock:
                    self._lose("store overwritten", error, error.lost)
                continue  # it continues in a new file
            except BaseException as error:  # noqa: BLE001 - nothing that a sink does may end the worker
                self._failed(error, delay)
                delay = min(delay * 2, LONGEST_DELAY)
                continue
            parts.pop(0)
            delay = FIRST_DELAY
            self._succeeded()
        self._acknowledge()

    def _failed(self, error: BaseException, delay: float) -> None:
        with self._lock:
            self._failures, self._attempts_failed, self._outage = self._failures + 1, self._attempts_failed + 1, error
            self._report(error, "cannot be written to, will be tried again")
            self._changed.notify_all()
        self._say()
        if self._bulk_spill is not None:
            self._move_bulk_to_disk(self._bulk_spill)
        with self._lock:
            self._changed.wait_for(lambda: self._hurry or self._stopping, delay)

    def _succeeded(self) -> None:
        with self._lock:
            self._outage, attempts, self._failures = None, self._failures, 0
            if attempts and self._announce_recovery:
                self._announce_recovery = False
                self._news.append(f"Sink '{self.name}' works again after {attempts} failed attempts.")

    def _acknowledge(self) -> None:
        with self._lock:
            self._held, self._held_from = [], None
            for spill, waiting in ((self._spill, self._spilled), (self._bulk_spill, len(self._bulk_lines))):
                if spill is not None and not waiting and not self._stopping:
                    with contextlib.suppress(OSError):
                        spill.clear()
            self._changed.notify_all()

    def _close_sink(self) -> None:
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - the run is over; say it and go
            with self._lock:
                if isinstance(error, StoreLostError):
                    return self._lose("store overwritten", error, error.lost)
                self._report(error, "failed to close")
                self._error = self._error or error
