# SPDX-License-Identifier: Apache-2.0
"""How many SQL statements a page costs: a handful a page, and no more for more clients and rounds."""

import sqlite3
import threading

import pytest
from starlette.testclient import TestClient

import fedvitals as fv
from fedvitals.dashboard.app import create_app
from fedvitals.store import open_reader
from fedvitals.store.read.runs import newest_run
from support import overview_run, small_training

MOST = 30  # statements of a cold overview


@pytest.fixture
def statements(monkeypatch):
    """Every statement that SQLite runs from now on, on all connections, but for the thread that reads ahead."""
    seen = []

    def note(sql):
        if threading.current_thread().name != "dashboard-warming":
            seen.append(sql)

    def connect(*arguments, **options):
        connection = real(*arguments, **options)
        connection.set_trace_callback(note)
        return connection

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    return seen


def trained(path, monkeypatch, *, clients, rounds):
    """The store of a real training with all probes."""
    monkeypatch.setattr(small_training, "CLIENTS", clients)
    monkeypatch.setattr(small_training, "ROUNDS", rounds)
    monitor = fv.Monitor(path, "counted", probes="deep")
    small_training.train(monitor)
    monitor.close()
    return path


def run_of(path):
    with open_reader(path) as reader:
        return newest_run(reader)


def asked(path, statements, *parts):
    """How many statements a dashboard that has just started sends for these parts of a run, and the answers."""
    address = f"/api/runs/{run_of(path)}"
    app = create_app(path)
    client = TestClient(app, base_url="http://127.0.0.1:8000")
    statements.clear()
    answers = [client.get(address + part) for part in parts]
    count = len(statements)
    app.state.reader_cache.close()
    assert [answer.status_code for answer in answers] == [200] * len(parts), answers
    return count, [answer.json() for answer in answers]


def test_a_cold_overview_takes_at_most_30_statements(tmp_path, statements, monkeypatch):
    """From the start of the process: opening two connections and the first look for changes are counted, too."""
    path = trained(tmp_path / "runs.db", monkeypatch, clients=3, rounds=2)
    count, (overview,) = asked(path, statements, "/overview")
    assert overview["clients"] == 3
    assert overview["last_round"] == 1
    assert len(overview["signs"]) > 30  # there is much to be asked for
    assert 10 < count <= MOST, "\n".join(statements)


def test_a_cold_overview_with_findings_takes_no_more(tmp_path, statements):
    """Then attendance, samples and actions are asked for as well."""
    path = overview_run.written(
        tmp_path / "runs.db", clients=3, rounds=2, findings=[overview_run.finding("c1", since=0, number=1)]
    )
    count, (overview,) = asked(path, statements, "/overview")
    assert overview["total_cases"] == 1
    assert count <= MOST, "\n".join(statements)


def test_more_clients_and_rounds_take_hardly_more_statements(tmp_path, statements):
    small = overview_run.written(tmp_path / "small.db", clients=3, rounds=2)
    large = overview_run.written(
        tmp_path / "large.db",
        clients=20,
        rounds=10,
        findings=[overview_run.finding(f"c{i}", number=n) for n in range(5, 10) for i in range(3, 15)],
        more=[overview_run.failed("c1", 2)],
    )
    few, _ = asked(small, statements, "/overview")
    many, (overview,) = asked(large, statements, "/overview")
    assert overview["total_cases"] == 12
    assert many <= few + 5, "\n".join(statements)


def test_all_that_the_overview_page_asks_for(tmp_path, statements, monkeypatch):
    """The requests of static/views/overview.js and its bands, and those of every page."""
    path = trained(tmp_path / "runs.db", monkeypatch, clients=3, rounds=2)
    parts = (
        "",
        "/overview",
        "/series?names=accuracy&names=loss&points=1000",
        "/band?sign=gradient.norm&points=1000",
        "/layer-grid?family=gradient&statistic=l2&columns=600",
        "/band?sign=scale.gsc&points=1000",
        "/series?names=scale.gsc&points=1000",
        "/grid?sign=gradient.norm&sort=worst&rows=300&columns=600",
        "/phases?points=600",
    )
    count, _ = asked(path, statements, *parts)
    assert count <= 110, "\n".join(statements)  # 359 before symbols were remembered and questions put together


def test_a_name_is_asked_for_once(tmp_path, statements):
    """A symbol never changes: no request asks for one that an earlier request has learnt."""
    path = overview_run.written(tmp_path / "runs.db", clients=3, rounds=2)
    client_of = TestClient(app := create_app(path), base_url="http://127.0.0.1:8000")
    address = f"/api/runs/{run_of(path)}"
    for part in ("/overview", "/band?sign=loss", "/clients", "/costs"):
        client_of.get(address + part)
    statements.clear()
    for part in ("/band?sign=update.norm", "/grid?sign=loss", "/series?names=loss&nodes=c1", "/client/signs?node=c2"):
        assert client_of.get(address + part).status_code == 200
    known = [f"'{name}'" for name in ("loss", "update.norm", "c1", "c2", run_of(path))]
    by_name = [sql for sql in statements if sql.startswith("SELECT id FROM symbol WHERE text =")]
    app.state.reader_cache.close()
    assert not [sql for sql in by_name if any(name in sql for name in known)]
