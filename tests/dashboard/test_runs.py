# SPDX-License-Identifier: Apache-2.0
"""The list of runs: what it tells of each, filters, order, tags, deletion."""

import os
import time

import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.pages.costs import traffic_page
from fedvitals.dashboard.pages.runs import POINTS, RunList, RunsAsked, facts_of, thinned
from fedvitals.dashboard.routes import runs as routes_runs
from fedvitals.lab.experiment import Experiment
from fedvitals.records import Metric, Transfer, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.marks import set_mark
from fedvitals.store.read import queries
from fedvitals.views.profile import profile_of
from fedvitals.views.run_figures import figures_of, last
from fedvitals.views.status import LAB_ROUNDS, status_of
from fedvitals.views.verdict import facts_of as verdict_facts
from fedvitals.views.verdict import verdict_of
from support.dashboard_server import TOKEN, WRITE
from support.held_store import holding
from support.runs_by_hand import HOSTILE, course, ward
from support.timed_run import STARTED, stored

HOME = "http://127.0.0.1:8321"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """For all tests that only read."""
    return ward(tmp_path_factory.mktemp("ward") / "runs.db")


@pytest.fixture(scope="module")
def client(shared):
    with TestClient(create_app(shared, token=TOKEN), base_url=HOME) as client:
        yield client


@pytest.fixture
def store(tmp_path):
    """For a test that changes it."""
    return ward(tmp_path / "runs.db")


@pytest.fixture
def writing(store):
    with TestClient(create_app(store, token=TOKEN), base_url=HOME) as client:
        yield client


def ids(client, **params):
    return [run["id"] for run in client.get("/api/runs", params=params).json()["runs"]]


def row(client, identity):
    return next(run for run in client.get("/api/runs").json()["runs"] if run["id"] == identity)


def test_running_first_then_newest(client):
    found = client.get("/api/runs").json()
    assert [run["id"] for run in found["runs"]] == ["c-now", f"e-{HOSTILE}", "d-silent", "b-healthy", "a-ill"]
    assert (found["total"], found["stored"], found["running"]) == (5, 5, 1)


def test_worst_first_in_one_click(client):
    """Critical before warning before healthy."""
    worst = ids(client, sort="worst")
    assert worst[:2] == [f"e-{HOSTILE}", "a-ill"]
    assert [row(client, run)["health"] for run in worst] == ["ill", "ill", "healthy", "healthy", "healthy"]


def test_tells_how_a_run_is(client):
    ill = row(client, "a-ill")
    assert (ill["health"], ill["state"], ill["rounds"], ill["planned"]) == ("ill", "finished", 4, 4)
    assert ill["headline"].startswith("c1 seems to have wrong labels")
    assert ill["findings"] == {"critical": 0, "warning": 1, "note": 0}
    assert ill["accuracy"] == pytest.approx(0.7)
    assert ill["bytes"] == 4 * 3 * 2 * 1600
    assert (ill["clients"], ill["seconds"]) == (3, 100)
    assert (ill["spark"]["name"], ill["spark"]["of"], len(ill["spark"]["values"])) == ("accuracy", "federation", 4)


def test_the_list_says_of_each_run_what_its_own_page_says(shared):
    with open_reader(shared) as reader:
        runs = RunList().page(reader, lambda run: run, RunsAsked()).runs
        assert len(runs) > 1
        for run in runs:
            verdict = verdict_of(reader, run.id)
            assert (run.health, run.headline, run.key) == (verdict.state, verdict.headline, verdict.key)


def test_a_run_without_end_whose_records_stopped_has_died(client):
    dead, now = row(client, "d-silent"), row(client, "c-now")
    assert (dead["state"], now["state"]) == ("died", "running")
    assert dead["last_record"] == pytest.approx(STARTED + 2000 + 3 * 4.5)


@pytest.mark.thorough
def test_a_run_whose_training_is_there_has_not_died(store):
    """The process that holds the store is taken for the one that writes its newest run without an end."""
    told = course("f-long", started=time.time() - 5000, finished=None)
    told.at = time.time() - 5000
    stored(store, told)
    with TestClient(create_app(store, token=TOKEN), base_url=HOME) as client:
        with holding(store):
            assert row(client, "f-long")["state"] == "died"  # c-now is newer
        client.delete("/api/runs/c-now", headers=WRITE)
        with holding(store) as process:
            assert row(client, "f-long")["state"] == "silent"
            assert row(client, "d-silent")["state"] == "died"
        assert process.returncode == 0
        # The number of the process in the file may be another's by now: nobody asks for it.
        store.with_name(store.name + ".lock").write_text(f"{os.getppid()}\n")
    with TestClient(create_app(store, token=TOKEN), base_url=HOME) as client:
        assert row(client, "f-long")["state"] == "died"


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"search": "ILL one"}, ["a-ill"]),
        ({"search": "a-il"}, ["a-ill"]),
        ({"search": HOSTILE}, [f"e-{HOSTILE}"]),
        ({"search": "one centralized", "sort": "name"}, ["b-healthy", "a-ill"]),
        ({"search": "nobody"}, []),
        ({"state": "running"}, ["c-now"]),
        ({"state": "died"}, ["d-silent"]),
        ({"health": "ill"}, [f"e-{HOSTILE}", "a-ill"]),
        ({"health": "ill", "state": "running"}, []),
        ({"tag": "paper"}, []),
    ],
)
def test_filters(client, asked, wanted):
    assert ids(client, **asked) == wanted


COLUMNS = ("name", "progress", "accuracy", "findings", "duration", "bytes", "clients", "host", "started", "health")


@pytest.mark.parametrize("sort", COLUMNS)
def test_every_column_sorts_both_ways(client, sort):
    up, down = ids(client, sort=sort, order="up"), ids(client, sort=sort, order="down")
    assert sorted(up) == sorted(down)
    assert len(up) == 5
    if sort in ("name", "started"):  # no two are the same
        assert up == down[::-1]


def test_sorts_by_the_largest_where_that_is_what_one_looks_for(client):
    assert ids(client, sort="bytes")[0] == "b-healthy"
    assert ids(client, sort="accuracy")[-1] == "a-ill"
    assert ids(client, sort="findings")[:2] == [f"e-{HOSTILE}", "a-ill"]


def test_pages_have_no_run_twice(client):
    pages = [ids(client, limit=2, offset=offset) for offset in (0, 2, 4, 6)]
    assert [len(page) for page in pages] == [2, 2, 1, 0]
    assert len({run for page in pages for run in page}) == 5
    assert client.get("/api/runs", params={"limit": 2}).json()["total"] == 5


@pytest.mark.parametrize("wrong", [{"limit": 201}, {"limit": 0}, {"offset": -1}, {"sort": "colour"}, {"state": "x"}])
def test_what_cannot_be_asked_is_refused_in_the_one_shape(client, wrong):
    answer = client.get("/api/runs", params=wrong)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "bad_request"


@pytest.mark.thorough
def test_nothing_new_is_not_sent_again(writing, monkeypatch):
    monkeypatch.setattr(routes_runs, "this_moment", lambda: ".1")  # else a new minute is a change, too
    tag = writing.get("/api/runs").headers["ETag"]
    assert writing.get("/api/runs", headers={"If-None-Match": tag}).status_code == 304
    writing.put("/api/runs/a-ill/tags/paper", headers=WRITE)
    assert writing.get("/api/runs", headers={"If-None-Match": tag}).status_code == 200


@pytest.mark.thorough
def test_a_run_that_goes_on_moves(store, writing):
    before = row(writing, "c-now")
    sink = open_store(store)
    records = [Metric(Where("c-now", 4, None), time.time(), "accuracy", 0.99, "later", 0),
               Metric(Where("c-now", 4, "c9"), time.time(), "traffic.sent", 7.0, "later", 1)]  # fmt: skip
    sink.write(records)
    sink.close()
    after = row(writing, "c-now")
    assert (before["rounds"], after["rounds"]) == (4, 5)
    assert (after["accuracy"], after["clients"]) == (0.99, 4)
    assert after["spark"]["values"][-1] == 0.99


def test_list_header_report_and_comparison_agree_on_a_run(tmp_path):
    """One number for the bytes, one for how good it is: of clients alone the median, of messages all but telemetry."""
    told = course("r", rounds=4)
    told.records = [one for one in told.records if getattr(one, "name", "") not in ("accuracy", "loss")]
    values = {"c0": 0.1, "c1": 0.5, "c2": 0.6, "edge-0": 0.9}
    for j, name in enumerate(("accuracy", "loss")):
        newest = [Metric(Where("r", 3, n), 9.0, name, values[n], "t", 10 * j + i) for i, n in enumerate(values)]
        told.records += newest
    messages = [("c0", "server", 700, "telemetry"), ("c0", "c1", 40, "model"), ("edge-0", "server", -5, "update")]
    for i, (sender, receiver, size, kind) in enumerate(messages):
        told.records.append(Transfer(Where("r", 3), 9.0, sender, receiver, size, 50, 0.1, kind, "t", 90 + i))
    path = stored(tmp_path / "runs.db", told)
    with open_reader(path) as reader:
        listed, header, figures = facts_of(reader, "r"), status_of(reader, "r"), figures_of(reader, "r")
        profile, (summary,), verdict = profile_of(reader, "r"), queries.list_runs(reader), verdict_facts(reader, "r")
        page = traffic_page(reader, "r")
    moved = sum(max(0, one.bytes) for one in told.records if isinstance(one, Transfer) and one.kind != "telemetry")
    assert {listed.bytes, header.bytes, figures.traffic.bytes, profile.traffic.bytes, page.total} == {moved}
    assert {header.telemetry_bytes, figures.traffic.telemetry_bytes, page.telemetry} == {700}
    assert {listed.accuracy, header.accuracy, summary.accuracy, verdict.accuracy, last(figures.accuracy)} == {0.5}
    assert {listed.loss, header.loss, summary.loss, verdict.loss, last(figures.loss)} == {0.5}
    assert [one.best for one in page.reached] == [one.best for one in profile.reached] == pytest.approx([0.5] * 3)


def test_a_muted_finding_no_longer_makes_a_run_ill(store, writing):
    set_mark(store, "a-ill", "muted", row(writing, "a-ill")["key"], "known")
    now = row(writing, "a-ill")
    assert now["health"] == "healthy"
    assert now["findings"] == {"critical": 0, "warning": 0, "note": 0}


@pytest.mark.thorough
def test_tags_are_given_found_and_taken(writing):
    assert writing.put("/api/runs/a-ill/tags/for the paper", headers=WRITE).json() == {
        "id": "a-ill",
        "tags": ["for the paper"],
    }
    writing.put("/api/runs/a-ill/tags/a%2Fb", headers=WRITE)
    assert row(writing, "a-ill")["tags"] == ["a/b", "for the paper"]
    assert writing.get("/api/runs").json()["tags"] == ["a/b", "for the paper"]
    assert ids(writing, tag="a/b") == ids(writing, search="paper") == ["a-ill"]
    assert writing.delete("/api/runs/a-ill/tags/a%2Fb", headers=WRITE).json()["tags"] == ["for the paper"]
    assert writing.delete("/api/runs/a-ill/tags/never", headers=WRITE).status_code == 200


@pytest.mark.thorough
def test_tags_have_bounds(writing):
    put = lambda run, tag: writing.put(f"/api/runs/{run}/tags/{tag}", headers=WRITE).status_code  # noqa: E731
    assert put("a-ill", "x" * 41) == 422
    assert put("a-ill", "%20") == 422
    assert put("a-ill", "a%00b") == 422
    assert put("nobody", "x") == 404
    assert put("a-il", "x") == 404  # the beginning of an id is not enough to change something
    assert [put("a-ill", f"t{i}") for i in range(21)] == [200] * 20 + [409]
    assert put("a-ill", "t0") == 200


def test_writes_need_to_come_from_our_own_page(client):
    assert client.put("/api/runs/a-ill/tags/x").status_code == 403
    assert client.delete("/api/runs/a-ill").status_code == 403
    assert len(ids(client)) == 5


def test_tells_what_goes_before_it_goes(client):
    told = client.get("/api/runs/a-ill/contents").json()
    assert (told["name"], told["rounds"]) == ("ill one", 4)
    assert told["records"] > 60
    assert told["bytes"] > 1000


@pytest.mark.thorough
def test_deletes_for_good(writing):
    gone = writing.delete("/api/runs/a-ill", headers=WRITE)
    assert gone.status_code == 200
    assert gone.json()["name"] == "ill one"
    assert "a-ill" not in ids(writing)
    assert writing.get("/api/runs").json()["total"] == 4
    assert writing.delete("/api/runs/a-ill", headers=WRITE).status_code == 404
    assert writing.delete("/api/runs/good one", headers=WRITE).status_code == 404  # a name is not enough


@pytest.mark.thorough
def test_a_store_that_is_being_written_loses_no_run(store, writing):
    """The training of another process holds the store: refused with the reason, and nothing is gone."""
    with holding(store) as writer:
        refused = writing.delete("/api/runs/a-ill", headers=WRITE)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "conflict"
        assert f"being written by process {writer.pid}" in refused.json()["error"]["message"]
    assert "a-ill" in ids(writing)


@pytest.mark.thorough
def test_no_store_and_an_empty_one(tmp_path):
    with TestClient(create_app(tmp_path / "none.db", token=TOKEN), base_url=HOME) as client:
        assert client.get("/api/runs").status_code == 503
    path = stored(tmp_path / "runs.db", course("r"))
    with TestClient(create_app(path, token=TOKEN), base_url=HOME) as client:
        client.delete("/api/runs/r", headers=WRITE)
        assert client.get("/api/runs").json() == {"total": 0, "stored": 0, "running": 0, "tags": [], "runs": []}


def test_a_sparkline_keeps_the_spike():
    rounds = list(range(10_000))
    values = [0.5] * 10_000
    values[7_777], values[-1] = -3.0, 0.25
    kept, told = thinned(rounds, values)
    assert len(kept) <= POINTS
    assert (min(told), told[-1], kept[-1]) == (-3.0, 0.25, 9_999)
    assert list(kept) == sorted(kept)
    assert thinned([1, 2], [float("nan"), 1.0]) == ((1, 2), (None, 1.0))


def test_without_a_global_accuracy_the_median_client_speaks(tmp_path):
    told = course("r", rounds=0)
    for number in range(200):
        for i, value in enumerate((0.1, 0.5, 0.6)):
            told.add(Metric(Where("r", number, f"c{i}"), STARTED + number, "loss", value))
    path = stored(tmp_path / "runs.db", told)
    with open_reader(path) as reader:
        spark = facts_of(reader, "r").spark
    assert (spark.name, spark.of, len(spark.values)) == ("loss", "median client", POINTS)
    assert set(spark.values) == {0.5}
    assert (spark.rounds[0], spark.rounds[-1]) == (0, 199)


def test_how_many_rounds_a_lab_has_planned(tmp_path):
    """The lab leaves out of the description what is as by default."""
    assert Experiment().rounds == LAB_ROUNDS
    texts = {
        "told": 'name = "x"\nrounds = 15\n\n[local]\nrounds = 3\n',
        "default": 'name = "x"\n\n[local]\nrounds = 3\n',
    }
    told = [course(name, name, config={"rounds": None, "experiment": text}) for name, text in texts.items()]
    path = stored(tmp_path / "runs.db", *told)
    with open_reader(path) as reader:
        assert [facts_of(reader, name).planned for name in texts] == [15, 10]


def test_names_that_are_not_numbers_of_anything_stay_text(client):
    found = row(client, f"e-{HOSTILE}")
    assert (found["name"], found["host"], found["topology"]) == (HOSTILE,) * 3
    assert HOSTILE in found["headline"]
