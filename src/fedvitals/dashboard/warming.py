# SPDX-License-Identifier: Apache-2.0
"""Reads ahead what the pages of a run will need: what its overview shows and, while there are no requests, the rest.

A metric of a thousand clients over five hundred rounds takes a quarter of a second to read the first time. What the
overview shows is read as soon as the server starts, or somebody asks about the run; requests for the same wait for it
and compute nothing twice. The pages of the clients show more; a user who has looked at the run for a moment does not
wait for them.

The same thread returns memory that answers have freed, otherwise the server would hold the most that it ever needed.
Some of what answers leave are cycles of objects (a request and its task refer to each other), and the collector would
only look for them after tens of thousands: see `server.serve`.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from fedvitals.dashboard.pages.time_costs import changes, time_costs
from fedvitals.errors import FedvitalsError
from fedvitals.resources.memory import give_back_free_memory
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import newest_run
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.overview import overview
from fedvitals.views.round_sums import round_sums
from fedvitals.views.traffic_counts import traffic_total

if TYPE_CHECKING:
    from fedvitals.dashboard.reader_cache import ReaderCache

logger = logging.getLogger("fedvitals.dashboard")

OF_CLIENTS = ("loss", "traffic.sent", "traffic.received", "update.norm", "steps")  # what the table of clients needs
WANTED = (
    *OF_CLIENTS, "update.cosine_mean", "time.client", "time.client_virtual", "gradient.nonfinite", "weight.nonfinite",
    "gradient.norm", "scale.gsc", "local.loss", "local.accuracy", "accuracy", "weight.drift", "memory.resident",
)  # fmt: skip
NAME = "dashboard-warming"  # of the threads
NEWEST = ""  # represents the newest run
REMEMBERED = 64  # runs that are not read ahead again
QUIET = 0.25  # seconds without a request after which reading ahead may start
# Seconds after which free memory is returned again, even while there are requests. With 10, a server held 97 MB instead
# of 77 for a run of 3,260 rounds, since what answers leave grows with the run.
GIVE_BACK = 2.0
ALL_OBJECTS = 5  # every this many times, older objects are examined, too


class Warming:
    """A thread that reads ahead, one metric at a time, and pauses as soon as there is a request."""

    def __init__(self, cache: ReaderCache) -> None:
        self._cache = cache
        self._runs: deque[str] = deque(maxlen=8)
        self._wanted = threading.Event()
        self._asked = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._done: dict[str, None] = {}  # in the order in which they were begun
        self._given_back, self._times = time.monotonic(), 0

    def asked(self, run: str | None) -> None:
        """Note a request, or its answer; a user who requests the list of runs is likely to open the newest."""
        self._asked = time.monotonic()
        self.want(NEWEST if run is None else run)

    def want(self, run: str = NEWEST) -> None:
        """Read ahead for that run, by default the newest."""
        with self._lock:
            if self._closed or run in self._runs or run in self._done:
                return
            self._runs.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
                self._thread.start()
        self._wanted.set()

    def _work(self) -> None:
        while not self._closed:
            self._wanted.wait(GIVE_BACK)
            self._wanted.clear()
            self._give_back()
            while not self._closed and (run := self._next()) is not None:
                self._try(self._read, run)

    def _try(self, work: Callable[[str], None], run: str) -> None:
        try:
            work(run)
        except FedvitalsError:
            pass  # reported to whoever requests it
        except Exception:
            logger.exception("Reading ahead failed; pages are not concerned.")

    def _give_back(self) -> None:
        """Return memory now and then after requests: takes some milliseconds, and 30 if all objects are examined."""
        if self._asked > self._given_back <= time.monotonic() - GIVE_BACK:
            self._times += 1
            gc.collect(1 if self._times % ALL_OBJECTS else 2)
            give_back_free_memory()
            self._given_back = time.monotonic()

    def _next(self) -> str | None:
        with self._lock:
            run = self._runs.popleft() if self._runs else None
            if run not in (None, NEWEST):  # the newest run changes
                self._note(run)
            return run

    def _note(self, run: str) -> None:
        self._done[run] = None
        if len(self._done) > REMEMBERED:
            del self._done[next(iter(self._done))]

    def _read(self, run: str) -> None:
        self._cache.look()  # the first look at a store forgets what was read before it
        with self._cache.reader() as reader:
            if run == NEWEST:
                run = newest_run(reader) or NEWEST
                with self._lock:
                    if run in self._done or run == NEWEST:
                        return
                    self._note(run)
        # At once with what follows: the database counts without Python's lock.
        counting = threading.Thread(target=self._try, args=(self._count_bytes, run), name=NAME, daemon=True)
        counting.start()
        with self._cache.reader() as reader:
            shown = overview(reader, run)
            for name in (shown.learning, shown.sign):
                if name is not None:
                    _prepare(reader, run, name)
            measured = set(queries.metric_names(reader, run))
        counting.join()
        metrics = [functools.partial(_prepare, name=name) for name in WANTED if name in measured]
        table = len(measured.intersection(OF_CLIENTS))
        works: list[Callable[..., object]] = [*metrics[:table], self._roster, *metrics[table:], time_costs, changes]
        for work in works:
            self._quietly(functools.partial(work, run=run))

    def _roster(self, reader: Reader, run: str) -> None:
        self._cache.rosters.roster(reader, run, self._cache.tracker.version(run))

    def _count_bytes(self, run: str) -> None:
        with self._cache.reader() as reader:
            traffic_total(reader, run)
            for way in ("sent", "received"):
                round_sums(reader, run, f"traffic.{way}")

    def _quietly(self, work: Callable[[Reader], object]) -> None:
        """Do the work once there has been no request for a moment."""
        while time.monotonic() - self._asked < QUIET and not self._closed:
            self._give_back()
            time.sleep(QUIET / 5)
        if not self._closed:
            with self._cache.reader() as reader:
                work(reader)

    def close(self) -> None:
        """Stop, after the metric that is being read."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


def _prepare(reader: Reader, run: str, name: str) -> None:
    """Prepare a metric, and what is computed from it once and cached with it."""
    matrix = metric_matrix(reader, run, name)
    matrix.band()
    matrix.worst_first()
