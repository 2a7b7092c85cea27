# SPDX-License-Identifier: Apache-2.0
"""A pool of forked worker processes with one thread each and states in shared memory.

States are exchanged through slots of an anonymous mapping that parent and children share (`slots.py`). A slot holds the
states of one batch of tasks, and there are two per worker, so memory grows with the workers and not with the clients.
Everything else goes through pipes, without a tensor in it: torch would open a file for each. Results are yielded in the
order of the batches. A worker that dies is replaced, and its clients count as failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import pickle
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from fedvitals.lab.engines.executor import EvaluationJob, Executor
from fedvitals.lab.engines.slots import StateLease, StateSlots
from fedvitals.lab.engines.tasks import Task, Update
from fedvitals.protocols import WorkerObserver

BATCHES_PER_WORKER = 2  # batches that a worker has at a time: the next one waits in its pipe while it works on one


@dataclass(slots=True)
class _Job:
    """A batch of work, the slot of the states that it starts from, and the first row of those that come of it."""

    work: list[Task] | EvaluationJob
    slot: int
    out: int
    lease: StateLease | None = None
    watcher: bytes = b""  # a pickled WorkerObserver


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    jobs: deque[int] = field(default_factory=deque)  # handed out, oldest first
    watcher: bytes = b""  # that it was sent last


class WorkerPool:
    """Runs batches of tasks and evaluation jobs on workers; `clients` is the largest number of states in one batch.

    With `shifted`, a slot also has rows for the tasks' shifts, after those of the states.
    """

    def __init__(
        self,
        make_executor: Callable[[], Executor],
        size: int,
        clients: int,
        workers: int,
        *,
        shifted: bool = False,
    ) -> None:
        self._executor, self._clients, self._count = make_executor, clients, 2 * workers
        self._rows = 2 * clients if shifted else clients
        self._slots = StateSlots(self._count, self._rows, size)
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())
        self._closing = weakref.finalize(self, _stop, self._workers)

    def close(self) -> None:
        self._closing()

    def train(
        self, batches: Sequence[list[Task]], watcher: WorkerObserver, absorb: Callable[[bytes], None], *, keep: bool
    ) -> Iterator[list[Update]]:
        for updates, payload in self._work(batches, watcher, keep=keep):
            absorb(payload)
            yield updates

    def evaluate(self, jobs: Sequence[EvaluationJob]) -> list[tuple[Tensor, Tensor]]:
        return [outcome for outcome, _ in self._work(jobs, None)]

    def _work(
        self, batches: Sequence[Any], watcher: WorkerObserver | None, *, keep: bool = False
    ) -> Iterator[tuple[Any, bytes]]:
        """Yield each batch's result and telemetry, in order. With `keep`, updates are leased where there is room."""
        free, pickled = deque(range(self._count)), bytes(ForkingPickler.dumps(watcher))
        jobs: dict[int, _Job] = {}
        done: dict[int, tuple[Any, bytes]] = {}
        handed = 0
        try:
            for number in range(len(batches)):
                while number not in done:
                    handed = self._hand_out(batches, handed, free, jobs, pickled, keep=keep)
                    self._collect(jobs, done)
                handed = self._hand_out(batches, handed, free, jobs, pickled, keep=keep)
                slot = jobs.pop(number).slot
                yield done.pop(number)
                free.append(slot)
        finally:
            self._drop_unfinished()

    def _hand_out(
        self,
        batches: Sequence[Any],
        handed: int,
        free: deque[int],
        jobs: dict[int, _Job],
        watcher: bytes,
        *,
        keep: bool,
    ) -> int:
        """Hand out as many batches as there are slots and idle workers, to the least busy worker first."""
        while handed < len(batches) and free:
            worker = min(self._workers, key=lambda w: len(w.jobs))
            if len(worker.jobs) >= BATCHES_PER_WORKER:
                break
            slot, work = free.popleft(), batches[handed]
            lease = self._slots.lease(sum(len(task.nodes) for task in work)) if keep else None
            jobs[handed] = _Job(work, slot, slot * self._rows if lease is None else lease.first, lease, watcher)
            self._send(worker, handed, jobs[handed])
            handed += 1
        return handed

    def _send(self, worker: _Worker, number: int, job: _Job) -> None:
        """Send the states through the slot and everything else through the pipe."""
        first = job.slot * self._rows
        rows = self._slots.rows(first, self._rows)
        if isinstance(job.work, EvaluationJob):
            rows[0].copy_(job.work.state)
            work: Any = dataclasses.replace(job.work, state=_NO_STATE)
        else:
            row, work = 0, []
            for task in job.work:
                rows[row].copy_(task.start)
                shift: Any = None
                if task.shift is not None:
                    shift = self._clients + row
                    rows[shift, : len(task.shift)] = task.shift
                work.append(dataclasses.replace(task, start=_NO_STATE, shift=shift))
                row += len(task.nodes)
        watcher = b"" if job.watcher is worker.watcher else job.watcher  # the same for all batches of a round
        worker.watcher = job.watcher
        worker.jobs.append(number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: `_collect` sees to it
            worker.pipe.send((number, first, job.out, work, watcher))

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
                    done[number] = (self._with_states(jobs[number], result), payload)
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
            rows = self._slots.rows(job.out, self._rows)
            done[lost[0]] = ([*_failed_updates(job.work, rows, code)], b"")
        for number in lost[1:]:
            self._send(worker, number, jobs[number])

    def _with_states(self, job: _Job, result: Any) -> Any:
        """Return a batch's updates with their states, of what a worker has sent; of an evaluation, what it has sent."""
        if isinstance(job.work, EvaluationJob):
            return tuple(map(torch.from_numpy, result))
        starts = [task.start for task in job.work for _ in task.nodes]
        rows = self._slots.rows(job.out, len(starts))
        updates = []
        for row, start, (node, samples, group, losses, *rest) in zip(rows, starts, result, strict=True):
            update = Update(node, row, start, samples, group, torch.from_numpy(losses), *rest)
            update.arrived = None if job.lease is None else (row, job.lease)
            updates.append(update)
        return updates

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
        worker.watcher = b""

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [ours, *(worker.pipe for worker in self._workers)]
        arguments = (theirs, others, self._executor, self._slots.states)
        process = context.Process(target=_serve, args=arguments, daemon=True, name="fedvitals-lab")
        process.start()
        theirs.close()
        return _Worker(process, ours)


_NO_STATE: Any = None  # in a message: states go through the slots


def _serve(
    pipe: Connection, others: Sequence[Connection], make_executor: Callable[[], Executor], states: Tensor
) -> None:
    """The main loop of a worker; it ends when the parent's end of its pipe is closed."""
    for other in others:  # inherited by the fork: as long as one of us holds them, nobody would see the end
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    executor, watcher = make_executor(), b""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number, first, out, work, changed = pipe.recv()
            watcher = changed or watcher
            pipe.send(_run_job(executor, number, states[first:], states[out:], work, pickle.loads(watcher)))  # noqa: S301


def _run_job(
    executor: Executor, number: int, starts: Tensor, out: Tensor, work: Any, watcher: Any
) -> tuple[int, Any, bytes]:
    try:
        if isinstance(work, EvaluationJob):
            outcome = executor.evaluate(dataclasses.replace(work, state=starts[0].clone()))
            return number, tuple(tensor.numpy() for tensor in outcome), b""
        tasks, row = [], 0
        for task in work:
            shift = None if task.shift is None else starts[task.shift, : executor.layout.weights].clone()
            tasks.append(dataclasses.replace(task, start=starts[row].clone(), shift=shift))
            row += len(task.nodes)
        updates = [_without_states(update) for update in executor.train(tasks, watcher, out[:row])]
        return number, updates, watcher.payload()
    except Exception as error:  # noqa: BLE001 - of the lab itself: a client's own became its update's error
        return number, error, b""


def _without_states(update: Update) -> tuple[Any, ...]:
    """Return an update's other fields in their order, its losses as an array."""
    u = update
    losses = u.losses.detach().cpu().numpy()
    return u.node, u.samples, u.group, losses, u.steps, u.seconds, u.sent, u.error, u.error_type, u.home


def _failed_updates(tasks: Sequence[Task], rows: Tensor, code: int | None) -> Iterator[Update]:
    killed = code == -9  # by SIGKILL, which Windows has not
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
