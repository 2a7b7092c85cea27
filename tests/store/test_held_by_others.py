# SPDX-License-Identifier: Apache-2.0
"""Another program that holds the store while a training runs delays its records, and costs none."""

import contextlib
import sqlite3
import subprocess
import sys
import time

import pytest

import fedvitals as fv
from fedvitals.store import SqliteStore, spill_folder, sqlite
from fedvitals.transport.queue import CLOSING, Queue
from fedvitals.transport.spill import readmit
from support.sinks import metric
from support.waiting import PATIENCE

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute(sys.argv[2])
connection.execute("SELECT * FROM metric").fetchone()
print("held", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def held(store, begin):
    """Another process with an open transaction."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store), begin], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield
        process.stdin.close()


def stored(store):
    with contextlib.closing(sqlite3.connect(store)) as database:
        return [value for (value,) in database.execute("SELECT value FROM metric WHERE value >= 0 ORDER BY value")]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    path = tmp_path / "runs.db"
    with SqliteStore(path) as store:
        store.write([metric(-1)])
    return path


def numbered(count):
    return [fv.Metric(metric(0).where, 0.0, "loss", float(i), "monitor", i) for i in range(count)]


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_a_store_that_is_held_all_the_time_gets_its_records_afterwards(begin, store):
    """A finished store is a plain file, whose readers keep a writer out: there is no log yet to write to."""
    with held(store, begin):
        queue = Queue(SqliteStore(store), spill=spill_folder(store), bulk=4000)
        for record in numbered(3000):
            queue.put(record)
        queue.close(timeout=1)
        assert queue.lost == {}
    queue._thread.join(PATIENCE)
    with SqliteStore(store) as again:
        readmit(spill_folder(store), again)
    assert stored(store) == list(range(3000))


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
def test_a_store_that_is_held_for_a_while_has_all_records_at_the_end(begin, store):
    queue = Queue(SqliteStore(store), spill=spill_folder(store), bulk=4000)
    queue.put_many(numbered(10))
    assert queue.flush()
    with held(store, begin):
        queue.put_many(numbered(3000)[10:])
        queue.flush(0.5)
    queue.close(timeout=PATIENCE)
    assert queue.lost == {}
    assert stored(store) == list(range(3000))


def test_closing_beside_a_store_that_is_held_takes_seconds_and_loses_nothing(tmp_path):
    """It took 20: ten for what waits, and ten more for closing."""
    path = tmp_path / "runs.db"
    monitor = fv.Monitor(path, id="r")
    with monitor.round(1):
        monitor.log(loss=1.0)
    assert monitor.flush()
    with held(path, "BEGIN IMMEDIATE"):
        with monitor.round(2):
            monitor.log(loss=2.0)
        began = time.monotonic()
        monitor.close()
        waited = time.monotonic() - began
    assert CLOSING <= waited < 10.0
    assert monitor.lost == 0
    with fv.Monitor(path, id="later") as later:
        later.log(loss=3.0)
    losses = "SELECT value FROM metric JOIN symbol ON symbol.id = name WHERE text = 'loss' ORDER BY value"
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute(losses).fetchall() == [(1.0,), (2.0,), (3.0,)]
