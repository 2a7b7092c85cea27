# SPDX-License-Identifier: Apache-2.0
"""A pool of forked worker processes with one thread each and states in shared memory.

States are exchanged through slots of an anonymous mapping that parent and children share. A slot holds the states of
one batch of tasks, and there are two per worker, so memory grows with the workers and not with the clients. Results are
yielded in the order of the batches. A worker that dies is replaced, and its clients count as failed.
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

from fedvitals.lab.engines.executor import EvaluationJob, Executor
from fedvitals.lab.engines.tasks import Task, Update
from fedvitals.protocols import WorkerObserver

BATCHES_PER_WORKER = 2  # batches that a worker has at a time: the next one waits in its pipe while it works on one


@dataclass(slots=True)
class _Job:
    """A batch of work and the slot of its states."""

    work: list[Task] | EvaluationJob
    slot: int
    watcher: WorkerObserver | None = None


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    jobs: deque[int] = field(default_factory=deque)  # handed out, oldest first


class WorkerPool:
    """Runs batches of tasks and evaluation jobs on workers; `clients` is the largest number of states in one batch."""

    def __init__(self, make_executor: Callable[[], Executor], size: int, clients: int, workers: int) -> None:
        self._executor, self._size, self._rows = make_executor, size, clients
        self._slots = 2 * workers
        length = max(1, self._slots * clients * size * 4)
        self._memory = mmap.mmap(-1, length)
        flat = torch.frombuffer(self._memory, dtype=torch.float32, count=self._slots * clients * size)
        self._states = flat.view(self._slots, clients, size)
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())
        self._closing = weakref.finalize(self, _stop, self._workers)

    def close(self) -> None:
        self._closing()

    def train(
        self, batches: Sequence[list[Task]], watcher: WorkerObserver, absorb: Callable[[bytes], None]
    ) -> Iterator[list[Update]]:
        for updates, payload, slot in self._work(batches, watcher):
            absorb(payload)
            for update, row in zip(updates, self._states[slot], strict=False):
                update.state = row
            yield updates

    def evaluate(self, jobs: Sequence[EvaluationJob]) -> list[tuple[Tensor, Tensor]]:
        return [outcome for outcome, _, _ in self._work(jobs, None)]

    def _work(self, batches: Sequence[Any], watcher: WorkerObserver | None) -> Iterator[tuple[Any, bytes, int]]:
        """Yield each batch's result, telemetry and slot, in order."""
        free = deque(range(self._slots))
        jobs: dict[int, _Job] = {}
        done: dict[int, tuple[Any, bytes]] = {}
        handed = 0
        try:
            for number in range(len(batches)):
                while number not in done:
                    handed = self._hand_out(batches, handed, free, jobs, watcher)
                    self._collect(jobs, done)
                handed = self._hand_out(batches, handed, free, jobs, watcher)
                slot = jobs.pop(number).slot
                yield (*done.pop(number), slot)
                free.append(slot)
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
        """Hand out as many batches as there are slots and idle workers, to the least busy worker first."""
        while handed < len(batches) and free:
            worker = min(self._workers, key=lambda w: len(w.jobs))
            if len(worker.jobs) >= BATCHES_PER_WORKER:
                break
            jobs[handed] = _Job(batches[handed], free.popleft(), watcher)
            self._send(worker, handed, jobs[handed])
            handed += 1
        return handed

    def _send(self, worker: _Worker, number: int, job: _Job) -> None:
        """Send the states through the slot and everything else through the pipe."""
        rows = self._states[job.slot]
        if isinstance(job.work, EvaluationJob):
            rows[0].copy_(job.work.state)
            message: Any = (number, job.slot, dataclasses.replace(job.work, state=_EMPTY), None)
        else:
            row, tasks = 0, []
            for task in job.work:
                rows[row].copy_(task.start)
                tasks.append(dataclasses.replace(task, start=_EMPTY))
                row += len(task.nodes)
            message = (number, job.slot, tasks, job.watcher)
        worker.jobs.append(number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: `_collect` sees to it
            worker.pipe.send(message)

    def _collect(self, jobs: dict[int, _Job], done: dict[int, tuple[Any, bytes]]) -> None:
        """Wait until a worker returns a result or dies."""
        by_handle: dict[Any, _Worker] = {w.pipe: w for w in self._workers}
        by_handle |= {w.process.sentinel: w for w in self._workers}
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
        """Replace a dead worker: its current job has failed, the jobs it had not begun are handed out again."""
        worker.process.join()
        code, lost = worker.process.exitcode, list(worker.jobs)
        self._restart(worker)
        if lost:
            job = jobs[lost[0]]
            if isinstance(job.work, EvaluationJob):
                raise ChildProcessError("A worker died while it tested a model.")
            done[lost[0]] = ([*_failed_updates(job.work, self._states[job.slot], code)], b"")
        for number in lost[1:]:
            self._send(worker, number, jobs[number])

    def _with_starts(self, job: _Job, result: Any) -> Any:
        if not isinstance(job.work, EvaluationJob):
            starts = [task.start for task in job.work for _ in task.nodes]
            for update, start in zip(result, starts, strict=True):
                update.start = start
        return result

    def _drop_unfinished(self) -> None:
        """Replace the workers that still have work, since the caller has stopped reading the results."""
        for worker in self._workers:
            if worker.jobs:
                worker.process.kill()
                worker.process.join()
                self._restart(worker)

    def _restart(self, worker: _Worker) -> None:
        fresh = self._start()
        worker.process, worker.pipe = fresh.process, fresh.pipe
        worker.jobs.clear()

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [ours, *(worker.pipe for worker in self._workers)]
        arguments = (theirs, others, self._executor, self._states)
        process = context.Process(target=_serve, args=arguments, daemon=True, name="fedvitals-lab")
        process.start()
        theirs.close()
        return _Worker(process, ours)


_EMPTY = torch.empty(0)


def _serve(
    pipe: Connection, others: Sequence[Connection], make_executor: Callable[[], Executor], states: Tensor
) -> None:
    """The main loop of a worker; it ends when the parent's end of its pipe is closed."""
    for other in others:  # inherited by the fork: as long as one of us holds them, nobody would see the end
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    executor = make_executor()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, slot, work, watcher = pipe.recv()
            pipe.send(_run_job(executor, number, states[slot], work, watcher))


def _run_job(executor: Executor, number: int, rows: Tensor, work: Any, watcher: Any) -> tuple[int, Any, bytes]:
    try:
        if isinstance(work, EvaluationJob):
            return number, executor.evaluate(dataclasses.replace(work, state=rows[0].clone())), b""
        tasks, row = [], 0
        for task in work:
            tasks.append(dataclasses.replace(task, start=rows[row].clone()))
            row += len(task.nodes)
        updates = executor.train(tasks, watcher, rows[:row])
        for update in updates:
            update.state = update.start = _EMPTY
        return number, updates, watcher.payload()
    except Exception as error:  # noqa: BLE001 - of the lab itself: a client's own became its update's error
        return number, error, b""


def _failed_updates(tasks: Sequence[Task], rows: Tensor, code: int | None) -> Iterator[Update]:
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
