# SPDX-License-Identifier: Apache-2.0
"""What the dashboard's server promises: fresh answers, cheap when nothing changed, one shape for errors, any store."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.change_tracker import ChangeTracker
from fedvitals.dashboard.routes import status as routes_status
from fedvitals.records import Metric, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.upkeep.retention import delete
from support.dashboard_server import serve, serving
from support.timed_run import begin, stored
from support.waiting import PATIENCE

HOME = "http://127.0.0.1:8321"
ONE, TWO = "20260101-000000-one", "20260102-000000-two"


def timed_run(identity: str, name: str, started: float = 1.7e9):
    told = begin(identity, name, started=started)
    for number in range(4):
        told.round({"c0": (0.1, 1.0, 0.2), "c1": (0.1, 2.0, 0.2)}, accuracy=0.5 + number / 10)
    return told


def _more(path: Path, run: str, value: float, sequence: int, name: str = "accuracy", round_: int = 9) -> None:
    store = open_store(path)
    store.write([Metric(Where(run, round_), 1.7e9 + 99, name, value, "later", sequence)])
    store.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return stored(tmp_path / "runs.db", timed_run(ONE, "one"), timed_run(TWO, "two", 1.71e9))


@pytest.fixture
def asking(store: Path) -> Iterator[TestClient]:
    with TestClient(create_app(store), base_url=HOME) as client:
        yield client


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The same, for all tests that change nothing."""
    path = stored(tmp_path_factory.mktemp("read") / "runs.db", timed_run(ONE, "one"), timed_run(TWO, "two", 1.71e9))
    with TestClient(create_app(path), base_url=HOME) as client:
        yield client


def test_a_run_is_found_by_id_name_or_beginning(reading: TestClient) -> None:
    assert {reading.get(f"/api/runs/{text}").json()["id"] for text in (ONE, "one", "20260101")} == {ONE}


@pytest.mark.thorough
def test_what_has_not_changed_is_not_sent_again_and_only_the_run_that_changed_is(
    asking: TestClient, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes_status, "this_moment", lambda: ".1")  # else a new minute is a change, too
    tags = {run: asking.get(f"/api/runs/{run}").headers["ETag"] for run in (ONE, TWO)}
    for run, tag in tags.items():
        same = asking.get(f"/api/runs/{run}", headers={"If-None-Match": tag})
        assert (same.status_code, same.content) == (304, b"")
    _more(store, TWO, 0.97, 0)
    assert asking.get(f"/api/runs/{ONE}", headers={"If-None-Match": tags[ONE]}).status_code == 304
    fresh = asking.get(f"/api/runs/{TWO}", headers={"If-None-Match": f'"x", {tags[TWO]}'})
    assert fresh.json()["accuracy"] == 0.97


@pytest.mark.thorough
def test_a_deleted_run_is_gone_and_its_numbers_are_not_taken_for_anothers(asking: TestClient, store: Path) -> None:
    before = asking.get(f"/api/runs/{ONE}").headers["ETag"]
    asking.get(f"/api/runs/{TWO}")
    delete(store, [TWO])
    assert asking.get(f"/api/runs/{TWO}").status_code == 404
    _more(store, ONE, 0.11, 0)
    fresh = asking.get(f"/api/runs/{ONE}", headers={"If-None-Match": before})
    assert fresh.json()["accuracy"] == 0.11


@pytest.mark.thorough
def test_a_store_that_took_anothers_place_is_read_anew(asking: TestClient, store: Path, tmp_path: Path) -> None:
    assert asking.get(f"/api/runs/{ONE}").status_code == 200
    other = stored(tmp_path / "other.db", timed_run("20270101-000000-new", "new"))
    other.replace(store)
    assert asking.get("/api/runs/new").json()["id"] == "20270101-000000-new"
    assert asking.get(f"/api/runs/{ONE}").status_code == 404


def test_a_store_that_comes_later_is_seen_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "later.db"
    with TestClient(create_app(path), base_url=HOME) as asking:
        answer = asking.get("/api/runs")
        assert answer.status_code == 503
        assert "later.db" in answer.json()["error"]["message"]
        stored(path, timed_run(ONE, "one"))
        assert asking.get("/api/runs/one").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/api/runs/none", 404, "not_found"),
        ("/api/nothing", 404, "not_found"),
        (f"/api/runs/{ONE}/records?limit=0", 422, "bad_request"),
        (f"/api/runs/{ONE}/records?kind=truth", 422, "bad_request"),
        (f"/api/runs/{ONE}/records?round={2**70}", 422, "bad_request"),
    ],
)
def test_every_error_has_one_shape(reading: TestClient, path: str, status: int, code: str) -> None:
    answer = reading.get(path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["message"].endswith((".", "?"))


def test_an_error_of_ours_is_told_without_its_insides(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr("fedvitals.dashboard.routes.status.status_of", broken)
    with TestClient(create_app(store), base_url=HOME, raise_server_exceptions=False) as asking:
        answer = asking.get("/api/runs/one")
    assert answer.status_code == 500
    assert "RuntimeError" in answer.json()["error"]["message"]
    assert "secret" not in answer.text


def test_raw_records_come_a_page_at_a_time_and_all_of_them(asking: TestClient, store: Path) -> None:
    seen, after = [], 0
    while after is not None:
        page = asking.get(f"/api/runs/{ONE}/records", params={"after": after, "limit": 7}).json()
        place = page["columns"].index("arrival")
        seen += [row[place] for row in page["rows"]]
        after = page["next"]
    with open_reader(store) as reader:
        wanted = [
            row[0] for row in reader.database.rows("SELECT arrival FROM metrics WHERE run = ? ORDER BY arrival", (ONE,))
        ]
    assert seen == wanted
    one = asking.get(f"/api/runs/{ONE}/records", params={"kind": "span", "node": "c1", "round": 2}).json()
    assert len(one["rows"]) == 1


def test_a_look_sees_each_change_once(store: Path) -> None:
    tracker = ChangeTracker()
    with open_reader(store) as reader:
        tracker.look(reader)
        before, _ = tracker.versions()
        tracker.look(reader)
        assert tracker.versions()[0] == before
        _more(store, ONE, 1.0, 0)
        tracker.look(reader)
        (*same, count), versions = tracker.versions()
        assert (*same, count - 1) == before
        assert [run for run, at in versions.items() if at == count] == [ONE]


def _events(url: str, wanted: int, events: list, ready: threading.Event) -> None:
    with httpx2.stream("GET", f"{url}/api/live", timeout=PATIENCE) as stream:
        kind = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((kind, json.loads(line.removeprefix("data: "))))
                ready.set()
                if len(events) >= wanted:
                    return


@pytest.mark.thorough
def test_an_open_page_is_told_which_run_has_changed(store: Path) -> None:
    with serve(store) as url:
        found, ready = [], threading.Event()
        listening = threading.Thread(target=_events, args=(url, 3, found, ready))
        listening.start()
        assert ready.wait(PATIENCE)
        for sequence in range(240):  # its first look has nothing to compare with: it may miss some
            _more(store, TWO, 1.0, sequence)
            listening.join(0.5)
            if not listening.is_alive():
                break
    changes = [data for kind, data in found if kind == "change"]
    assert found[0][0] == "hello"
    assert changes
    assert TWO in changes[-1]["runs"]


@pytest.mark.thorough
def test_ctrl_c_ends_it_even_while_a_page_listens(store: Path) -> None:
    with serving(store) as (url, process):
        found, ready = [], threading.Event()
        listening = threading.Thread(target=lambda: _quietly(url, found, ready))
        listening.start()
        assert ready.wait(PATIENCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) in (0, 130)
        listening.join(PATIENCE)
    assert not listening.is_alive()


def _quietly(url: str, events: list, ready: threading.Event) -> None:
    with contextlib.suppress(httpx2.HTTPError):
        _events(url, 1000, events, ready)
