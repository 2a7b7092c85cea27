# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: while nobody asks for anything, what the pages of a run will want next is read into memory.

A metric of a thousand clients over five hundred rounds takes a third of a second to read the first time. The pages of
the clients show several; whoever has looked at the run for a moment does not wait for them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from fedvitals.errors import FedvitalsError
from fedvitals.store import queries
from fedvitals.views.tally import traffic_total

if TYPE_CHECKING:
    from fedvitals.dashboard.shelf import Shelf

logger = logging.getLogger("fedvitals.dashboard")

# Those that the most pages want come first.
WANTED = (
    "loss", "update.norm", "update.cosine_mean", "steps", "time.client", "time.client_virtual", "traffic.sent",
    "traffic.received", "gradient.nonfinite", "weight.nonfinite", "gradient.norm", "scale.gsc", "local.loss",
    "local.accuracy", "accuracy", "weight.drift", "memory.resident",
)  # fmt: skip
NEWEST = ""  # stands for the newest run
QUIET = 0.25  # seconds without a request after which we may work


class Warming:
    """One thread that reads ahead, a metric at a time, and stands back as soon as somebody asks for something."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._runs: deque[str] = deque(maxlen=8)
        self._wanted = threading.Event()
        self._asked = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def asked(self, run: str | None) -> None:
        """A request has come, or has been answered. Who asks for the list of runs is likely to open the newest."""
        self._asked = time.monotonic()
        self.want(NEWEST if run is None else run)

    def want(self, run: str = NEWEST) -> None:
        """Read ahead for that run, without a word the newest."""
        if run in self._runs or self._closed:
            return
        with self._lock:
            self._runs.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dashboard-warming", daemon=True)
                self._thread.start()
        self._wanted.set()

    def _work(self) -> None:
        done: set[str] = set()
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            for run in [run for run in self._runs if run not in done]:
                done.add(run)
                with contextlib.suppress(FedvitalsError):  # who asks for it will be told
                    self._read(run)

    def _read(self, run: str) -> None:
        with self._shelf.reader() as reader:
            if run == NEWEST:
                found = reader.database.rows("SELECT id FROM runs ORDER BY started DESC LIMIT 1")
                run = str(found[0][0]) if found else ""
            traffic_total(reader, run)
            told = set(queries.metric_names(reader, run))
        for name in WANTED:
            if name not in told:
                continue
            while time.monotonic() - self._asked < QUIET and not self._closed:
                time.sleep(QUIET / 5)
            if self._closed:
                return
            with self._shelf.reader() as reader:
                self._shelf.matrices.matrix(reader, run, name)

    def close(self) -> None:
        """Waits for the metric that is being read."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
