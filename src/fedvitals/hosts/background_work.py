# SPDX-License-Identifier: Apache-2.0
"""Work not awaited before the end of a round, on one thread and in order of submission."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class BackgroundWork:
    """Runs work on a thread that lives from the first `submit` to the next `wait`.

    Exceptions of the work are dropped.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], object]) -> None:
        """Run the work later, in the context of the caller; at once while the interpreter exits."""
        self._executor = self._executor or ThreadPoolExecutor(1, self._name)
        try:
            self._executor.submit(contextvars.copy_context().run, work)
        except RuntimeError:  # no new work is accepted any more
            work()

    def wait(self) -> None:
        """Wait until all work is done, and end the thread."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
