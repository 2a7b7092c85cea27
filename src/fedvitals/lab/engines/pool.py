# SPDX-License-Identifier: Apache-2.0
"""Worker processes: forked, one thread each, states in shared memory. One that dies is replaced; its clients failed.

States travel through trays: stretches of an anonymous mapping that parent and children share. A tray holds the states
of one batch of tasks, and there are two per worker, so memory grows with the workers and not with the clients: pages
that nobody touches are never there. Results come out in the order of the batches, whoever finishes first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import multiprocessing
import multiprocessing.connection
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from fedvitals.lab.engines.executor import Desk, Examination
from fedvitals.lab.engines.work import Task, Update
from fedvitals.protocols import WorkerObserver

AHEAD = 2  # batches that a worker has at a time: the next one waits in its pipe while it works on one


@dataclass(slots=True)
class _Job:
    """A batch of work and where its states lie."""

    work: list[Task] | Examination
    tray: int
    watcher: WorkerObserver | None = None


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    jobs: deque[int] = field(default_factory=deque)  # handed out, oldest first


class Pool:
    """`clients`: the most states that one batch may have."""

    def __init__(self, desk: Callable[[], Desk], size: int, clients: int, workers: int) -> None:
        self._desk, self._size, self._rows = desk, size, clients
        self._trays = 2 * workers
        length = max(1, self._trays * clients * size * 4)
        self._memory = mmap.mmap(-1, length)
        flat = torch.frombuffer(self._memory, dtype=torch.float32, count=self._trays * clients * size)
        self._states = flat.view(self._trays, clients, size)
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())
        self.deaths = 0
        self._closing = weakref.finalize(self, _stop, self._workers)

    def close(self) -> None:
        self._closing()

    def train(
        self, batches: Sequence[list[Task]], watcher: WorkerObserver, absorb: Callable[[bytes], None]
    ) -> Iterator[list[Update]]:
        for updates, payload, tray in self._work(batches, watcher):
            absorb(payload)
            for update, row in zip(updates, self._states[tray], strict=False):
                update.state = row
            yield updates

    def examine(self, jobs: Sequence[Examination]) -> list[tuple[Tensor, Tensor]]:
        return [found for found, _, _ in self._work(jobs, None)]

    def _work(self, batches: Sequence[Any], watcher: WorkerObserver | None) -> Iterator[tuple[Any, bytes, int]]:
        """Each batch's result, telemetry and tray, in order."""
        free = deque(range(self._trays))
        jobs: dict[int, _Job] = {}
        done: dict[int, tuple[Any, bytes]] = {}
        handed = 0
        try:
            for number in range(len(batches)):
                while number not in done:
                    handed = self._hand_out(batches, handed, free, jobs, watcher)
                    self._collect(jobs, done)
                handed = self._hand_out(batches, handed, free, jobs, watcher)
                tray = jobs.pop(number).tray
                yield (*done.pop(number), tray)
                free.append(tray)
        finally:
            self._drop_unfinished()

    def _hand_out(
        self,
        batches: Sequence[Any],
        handed: int,
        free: deque[int],
        jobs: dict[int, _Job],
        watcher: WorkerObserver | None,
    ) -> int:
        """As much as there are trays and idle workers for, to the least busy first."""
        while handed < len(batches) and free:
            worker = min(self._workers, key=lambda w: len(w.jobs))
            if len(worker.jobs) >= AHEAD:
                break
            jobs[handed] = _Job(batches[handed], free.popleft(), watcher)
            self._send(worker, handed, jobs[handed])
            handed += 1
        return handed

    def _send(self, worker: _Worker, number: int, job: _Job) -> None:
        """The states go through the tray, everything else through the pipe."""
        rows = self._states[job.tray]
        if isinstance(job.work, Examination):
            rows[0].copy_(job.work.state)
            message: Any = (number, job.tray, dataclasses.replace(job.work, state=_EMPTY), None)
        else:
            row, tasks = 0, []
            for task in job.work:
                rows[row].copy_(task.start)
                tasks.append(dataclasses.replace(task, start=_EMPTY))
                row += len(task.nodes)
            message = (number, job.tray, tasks, job.watcher)
        worker.jobs.append(number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: `_collect` sees to it
            worker.pipe.send(message)

    def _collect(self, jobs: dict[int, _Job], done: dict[int, tuple[Any, bytes]]) -> None:
        """Wait for a result or a death."""
        by_handle: dict[Any, _Worker] = {w.pipe: w for w in self._workers} | {
            w.process.sentinel: w for w in self._workers
        }
        ready = multiprocessing.connection.wait([*by_handle])
        for worker in {id(by_handle[handle]): by_handle[handle] for handle in ready}.values():
            try:
                while worker.pipe.poll():
                    number, result, payload = worker.pipe.recv()
                    if isinstance(result, BaseException):
                        raise result
                    worker.jobs.popleft()
                    done[number] = (self._with_starts(jobs[number], result), payload)
            except (EOFError, ConnectionResetError):
                self._replace(worker, jobs, done)

    def _replace(self, worker: _Worker, jobs: dict[int, _Job], done: dict[int, tuple[Any, bytes]]) -> None:
        """A worker died: what it was at has failed, what it had not begun is handed out again."""
        worker.process.join()
        code = worker.process.exitcode
        self.deaths += 1
        lost = list(worker.jobs)
        fresh = self._start()
        worker.process, worker.pipe = fresh.process, fresh.pipe
        worker.jobs.clear()
        if lost:
            job = jobs[lost[0]]
            if isinstance(job.work, Examination):
                raise ChildProcessError("A worker died while it tested a model.")
            done[lost[0]] = ([*_failed(job.work, self._states[job.tray], code)], b"")
        for number in lost[1:]:
            self._send(worker, number, jobs[number])

    def _with_starts(self, job: _Job, result: Any) -> Any:
        if not isinstance(job.work, Examination):
            starts = [task.start for task in job.work for _ in task.nodes]
            for update, start in zip(result, starts, strict=True):
                update.start = start
        return result

    def _drop_unfinished(self) -> None:
        """Whoever stopped listening does not want the rest: replace the workers that still have work."""
        for worker in self._workers:
            if worker.jobs:
                worker.process.kill()
                worker.process.join()
                fresh = self._start()
                worker.process, worker.pipe = fresh.process, fresh.pipe
                worker.jobs.clear()

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [ours, *(worker.pipe for worker in self._workers)]
        arguments = (theirs, others, self._desk, self._states)
        process = context.Process(target=_serve, args=arguments, daemon=True, name="fedvitals-lab")
        process.start()
        theirs.close()
        return _Worker(process, ours)


_EMPTY = torch.empty(0)


def _serve(pipe: Connection, others: Sequence[Connection], make: Callable[[], Desk], states: Tensor) -> None:
    """A worker's life: it ends when the parent's end of its pipe is closed, however the parent ended."""
    for other in others:  # inherited by the fork: as long as one of us holds them, nobody would see the end
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    desk = make()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, tray, work, watcher = pipe.recv()
            pipe.send(_done(desk, number, states[tray], work, watcher))


def _done(desk: Desk, number: int, rows: Tensor, work: Any, watcher: Any) -> tuple[int, Any, bytes]:
    try:
        if isinstance(work, Examination):
            return number, desk.examine(dataclasses.replace(work, state=rows[0].clone())), b""
        tasks, row = [], 0
        for task in work:
            tasks.append(dataclasses.replace(task, start=rows[row].clone()))
            row += len(task.nodes)
        updates = desk.train(tasks, watcher, rows[:row])
        for update in updates:
            update.state = update.start = _EMPTY
        return number, updates, watcher.payload()
    except Exception as error:  # noqa: BLE001 - of the lab itself: a client's own became its update's error
        return number, error, b""


def _failed(tasks: Sequence[Task], rows: Tensor, code: int | None) -> Iterator[Update]:
    killed = code == -signal.SIGKILL
    how = "was killed (signal 9), as the kernel does when memory runs out," if killed else f"died (exit code {code})"
    error, kind = f"The worker process {how} while it trained this client.", "WorkerKilled" if killed else "WorkerDied"
    row = 0
    for task in tasks:
        for node in task.nodes:
            rows[row].copy_(task.start)
            yield Update(node, rows[row], task.start, 0, task.group, error=error, error_type=kind)
            row += 1


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.process.join(timeout=2)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
