# SPDX-License-Identifier: Apache-2.0
"""What the readers between pages and the store hold: pages, descriptors, garbage."""

import contextlib
import gc
import itertools
import platform
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from fedvitals.dashboard import warming
from fedvitals.dashboard.reader_cache import READERS, ReaderCache
from fedvitals.records import Metric, Where
from fedvitals.store import open_store
from support.dashboard_server import serving
from support.runs_by_hand import course
from support.timed_run import STARTED, stored
from support.waiting import wait_until

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

HOME = "http://127.0.0.1:8321"


@pytest.fixture
def store(tmp_path):
    return stored(tmp_path / "runs.db", course("a", "one"), course("b", "two", started=STARTED + 1000, rounds=100))


def heaps_of_threads(process):
    """How many heaps the C library has made for single threads: 64 MiB each, of which the rest is reserved."""
    lines = [line.split() for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), line[1]) for line in lines]
    return sum(
        start % (64 << 20) == 0 and access == "rw-p" and following == (end, start + (64 << 20), "---p")
        for (start, end, access), following in itertools.pairwise(spans)
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heaps of glibc")
def test_the_threads_that_answer_share_one_heap(store):
    with serving(store) as (url, process), ThreadPoolExecutor(8) as pages:
        paths = [f"{url}/api/runs/b/{part}" for part in ("overview", "clients", "profile", "map", "findings")] * 8
        assert {answer.status_code for answer in pages.map(httpx2.get, paths)} == {200}
        assert heaps_of_threads(process.pid) == 0


def test_readers_that_wait_hold_no_pages(tmp_path):
    with open_store(tmp_path / "runs.db") as store:
        store.write([Metric(Where("r", 0), 0.0, "loss", 1.0, "s", 0)])
    cache, statements = ReaderCache(tmp_path / "runs.db"), []
    with contextlib.ExitStack() as stack:
        for _ in range(READERS):
            reader = stack.enter_context(cache.reader())
            reader.database.connection.set_trace_callback(statements.append)
    assert statements == ["PRAGMA shrink_memory"] * READERS
    assert len(cache._readers) == READERS
    cache.close()


def descriptors_of(file):
    """How often this process has a file open, where the system tells."""
    return sum(path.resolve() == file for path in Path("/proc/self/fd").glob("*"))


def test_many_requests_at_once_take_turns_and_leave_no_more_descriptors(tmp_path):
    """SQLite cannot close a file while another connection of the process has it locked: it keeps the descriptor."""
    with open_store(tmp_path / "runs.db") as store:
        store.write([Metric(Where("r", 0), 0.0, "loss", 1.0, "s", 0)])
    before = descriptors_of(tmp_path / "runs.db")
    cache, lent, most = ReaderCache(tmp_path / "runs.db"), set(), []
    cache.look()

    def ask(_):
        with cache.reader() as reader:
            lent.add(reader)
            most.append(len(lent))
            reader.database.rows("SELECT COUNT(*) FROM metric")
            time.sleep(0.01)
            lent.remove(reader)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(ask, range(200)))
    assert max(most) <= READERS
    assert descriptors_of(tmp_path / "runs.db") - before <= READERS + 1  # and the one that looks for changes
    cache.close()


def test_garbage_of_answers_goes_also_while_many_ask(tmp_path, monkeypatch):
    monkeypatch.setattr(warming, "GIVE_BACK", 0.0)

    class Ring:
        def __init__(self):
            self.itself = self

    with open_store(tmp_path / "runs.db") as store:
        store.write([Metric(Where("r", 0), 0.0, "loss", 1.0, "s", 0)])
    cache, gone = ReaderCache(tmp_path / "runs.db"), threading.Event()
    gc.disable()
    try:
        weakref.finalize(Ring(), gone.set)
        cache.warming.asked("r")
        wait_until(lambda: cache.warming.asked("r") or gone.is_set())  # it never gets quiet
    finally:
        gc.enable()
        cache.close()
