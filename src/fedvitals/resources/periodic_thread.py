# SPDX-License-Identifier: Apache-2.0
"""A daemon thread that repeats some work until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

LONGEST_WAIT = 2.0  # seconds that `stop` waits for work in progress


class PeriodicThread:
    """Runs `work` on its own thread, from `start` to `stop`. Calling either again has no effect.

    `work` gets an iterator that yields every `period` seconds, and ends when the thread is stopped.
    """

    def __init__(self, name: str, period: float, work: Callable[[Iterator[None]], None]) -> None:
        self._name, self._period, self._work = name, period, work
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it was started or stopped before."""
        if self._thread is None and not self._stop.is_set():
            thread = threading.Thread(target=self._work, args=(self._ticks(),), name=self._name, daemon=True)
            thread.start()  # raises at the system's limit of threads
            self._thread = thread

    def stop(self) -> None:
        """Stop the thread and wait for it, unless this is called on it."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LONGEST_WAIT)

    def _ticks(self) -> Iterator[None]:
        while not self._stop.wait(self._period):
            yield
