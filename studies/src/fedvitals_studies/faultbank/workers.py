# SPDX-License-Identifier: Apache-2.0
"""Runs tasks in several processes until a deadline: one that dies, or loses its GPU, is replaced, and the rest
continue.

`multiprocessing.Pool` waits forever for the task of a process that died, and one error on a GPU leaves its process
unable to use it again: thousands of cases in a few minutes need better.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

SPARE_SHARE, SPARE_SECONDS = 0.1, 20.0
"""Of the time that is given: before its end no more tasks are handed out, so that those at work can finish."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Replaces a result: why there is none."""

    why: str


@dataclass(slots=True)
class _Worker(Generic[T]):
    process: Any
    pipe: Connection
    task: T | None = None


def in_processes(
    work: Callable[[T], R], tasks: Sequence[T], workers: int, seconds: float | None = None
) -> Iterator[tuple[T, R | Ended]]:
    """Yield each task with its result, as they arrive. `work` is a module-level function: other processes must find it.

    With `seconds`, what is not done by then is given up and not reported. One worker: in this process.
    """
    now = time.monotonic()
    end = math.inf if seconds is None else now + seconds
    last = math.inf if seconds is None else end - min(SPARE_SECONDS, SPARE_SHARE * seconds)
    if workers <= 1:
        yield from _here(work, tasks, last)
        return
    with _one_thread_each():
        pool = [_start(work) for _ in range(min(workers, len(tasks)))]
        try:
            yield from _elsewhere(work, deque(tasks), pool, last, end)
        finally:
            for worker in pool:
                _stop(worker)


def _here(work: Callable[[T], R], tasks: Sequence[T], last: float) -> Iterator[tuple[T, R | Ended]]:
    for task in tasks:
        if time.monotonic() > last:
            return
        yield task, _done(work, task)[0]


def _elsewhere(
    work: Callable[[T], R], left: deque[T], pool: Sequence[_Worker[T]], last: float, end: float
) -> Iterator[tuple[T, R | Ended]]:
    while True:
        if time.monotonic() > last:
            left.clear()
        for worker in pool:
            if worker.task is None and left:
                worker.task = left.popleft()
                with contextlib.suppress(OSError):  # it died: reported below, through its pipe
                    worker.pipe.send(worker.task)
        busy = {worker.pipe: worker for worker in pool if worker.task is not None}
        rest = max(0.0, end - time.monotonic())
        ready = multiprocessing.connection.wait([*busy], None if math.isinf(rest) else rest) if busy else []
        if not ready:  # all is done, or the time is over
            return
        for pipe in ready:
            yield _collect(busy[pipe], work)  # type: ignore[index]


def _collect(worker: _Worker[T], work: Callable[[T], R]) -> tuple[T, R | Ended]:
    task = worker.task
    assert task is not None  # noqa: S101 - only processes with a task are listened to
    result: R | Ended
    try:
        result, fit = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(5)
        result, fit = Ended(f"The process that worked on it died (exit code {worker.process.exitcode})."), False
    if not fit:
        _stop(worker)
        fresh = _start(work)
        worker.process, worker.pipe = fresh.process, fresh.pipe
    worker.task = None
    return task, result


def _start(work: Callable[[Any], Any]) -> _Worker[Any]:
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True, name="fedvitals-bank")
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _stop(worker: _Worker[Any]) -> None:
    worker.pipe.close()
    if worker.task is not None:
        worker.process.terminate()
    worker.process.join(2)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            result, fit = _done(work, pipe.recv())
            pipe.send((result, fit))
            if not fit:
                return


def _done(work: Callable[[T], R], task: T) -> tuple[R | Ended, bool]:
    try:
        return work(task), _fit()
    except Exception:  # noqa: BLE001 - whatever happens in one task, the others continue
        return Ended(traceback.format_exc(limit=4)), _fit()


def _fit() -> bool:
    """Whether this process can still use its GPU, if it does: an error there is permanent."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Set the number of threads in the parent, since a spawned process creates its threads before it can be told."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before
