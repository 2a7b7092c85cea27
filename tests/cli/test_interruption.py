# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a query that would never end by itself, in both kinds of stores."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedvitals.store import open_reader
from fedvitals.store.postgres import PostgresStore
from fedvitals.store.read.ask import query
from support.postgres_server import available, running
from support.timed_run import begin, stored
from support.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")]
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "runs.db", begin("r1", "tiny"))


@contextlib.contextmanager
def asking(store: str | Path, sql: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "fedvitals", "query", sql, "--store", str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def busy_seconds(process: subprocess.Popen[str]) -> float:
    """Seconds that the process has computed: starting takes about one, so two say that the query runs."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Press Ctrl-C; the exit code and what was said."""
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE)
    return process.returncode, *said


@pytest.mark.skipif(not Path("/proc").exists(), reason="whether the query runs is seen in /proc")
def test_an_endless_query_of_a_file_is_interrupted(store: Path) -> None:
    with asking(store, ENDLESS) as process:
        wait_until(lambda: busy_seconds(process) > 2, what="the query to begin")
        assert interrupt(process) == (130, "", "\nInterrupted.\n")
    with open_reader(store) as reader:
        assert query(reader, "SELECT COUNT(*) FROM runs").rows == [(1,)]


@pytest.mark.postgres
@pytest.mark.thorough
@available
def test_an_endless_query_of_a_server_is_cancelled_there(store: Path) -> None:
    active = "SELECT COUNT(*) FROM pg_stat_activity WHERE query LIKE 'WITH RECURSIVE%' AND state = 'active'"
    with running() as server:
        sink = PostgresStore(server.database())
        sink.write(begin("r1", "tiny").records)
        sink.close()
        with open_reader(sink.address.url) as reader, asking(sink.address.url, ENDLESS) as process:
            wait_until(lambda: query(reader, active).rows == [(1,)], what="the query to begin")
            assert interrupt(process) == (130, "", "\nInterrupted.\n")
            wait_until(lambda: query(reader, active).rows == [(0,)], what="the server to end it")


def test_what_a_signal_does_otherwise_is_as_before(store: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with open_reader(store) as reader:
        query(reader, "SELECT 1")
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_interrupted_also_while_a_function_of_ours_runs(store: Path) -> None:
    """What is raised in a function that SQLite calls is lost; so nothing is raised before SQLite has come back."""
    with open_reader(store) as reader:
        calls = []

        def press() -> int:
            if not calls:
                os.kill(os.getpid(), signal.SIGINT)
            calls.append(1)
            return 1

        reader.database.connection.set_authorizer(None)
        reader.database.connection.create_function("press", 0, press)
        with pytest.raises(KeyboardInterrupt):
            query(reader, f"{ENDLESS} WHERE press()")
        assert calls
