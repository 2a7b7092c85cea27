# SPDX-License-Identifier: Apache-2.0
"""What stands between pages and the store: whose lock is whose, what was seen, what is remembered and when it goes."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx2
import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard import change_tracker, warming
from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.change_tracker import ChangeTracker
from fedvitals.dashboard.connections import Limits
from fedvitals.dashboard.live import Live
from fedvitals.dashboard.reader_cache import ReaderCache
from fedvitals.dashboard.routes import compare as routes_compare
from fedvitals.dashboard.routes import status as routes_status
from fedvitals.errors import StoreError
from fedvitals.records import Metric, Span, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.lock import WriterLock
from fedvitals.store.read import presence, queries
from fedvitals.store.read.layer_history import _covered
from fedvitals.store.schema import VERSION
from fedvitals.store.sqlite import maintain_sqlite
from fedvitals.store.upkeep import retention
from fedvitals.views import matrix as views_matrix
from fedvitals.views.matrix import Matrices
from fedvitals.views.memo import MOST, remembered
from fedvitals.views.round_sums import round_sums
from fedvitals.views.status import DIED, SILENT, state_of
from support.dashboard_server import TOKEN, WRITE, serve
from support.held_store import holding
from support.paths import GOLDEN
from support.runs_by_hand import course
from support.timed_run import STARTED, stored
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.thorough  # CI runs it; `scripts/test --fast` does not

HOME = "http://127.0.0.1:8321"


@pytest.fixture
def store(tmp_path):
    return stored(tmp_path / "runs.db", course("a", "one"), course("b", "two", started=STARTED + 1000, rounds=100))


@pytest.fixture
def client(store):
    with TestClient(create_app(store, token=TOKEN), base_url=HOME) as client:
        yield client


def more(path, run, sequence, name="loss", node="c0", value=1.0):
    with open_store(path) as sink:
        sink.write([Metric(Where(run, 150 + sequence, node), STARTED + 500, name, value, "later", sequence)])


def can_write(path):
    """Whether another process may become the writer."""
    code = (
        f"from pathlib import Path; from fedvitals.store.lock import WriterLock\nWriterLock(Path({str(path)!r})).hold()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_whoever_lists_runs_leaves_the_lock_of_a_deletion_alone(store):
    with maintain_sqlite(store), open_reader(store) as reader:
        assert not presence.writers(reader)("a", True)
        assert not can_write(store)
    assert can_write(store)


def test_of_two_who_hold_a_store_the_first_to_go_leaves_the_lock(tmp_path):
    one, two = WriterLock(tmp_path / "runs.db"), WriterLock(tmp_path / "runs.db")
    one.hold()
    two.hold()
    one.release()
    assert not can_write(tmp_path / "runs.db")
    two.release()
    assert can_write(tmp_path / "runs.db")
    assert not (tmp_path / "runs.db.lock").exists() or one._path.read_text() != f"{os.getpid()}\n"


def test_marks_of_a_store_that_was_old_when_the_page_opened(tmp_path):
    path = tmp_path / "old.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript((GOLDEN / "schema_v2.sql").read_text())
        database.execute("INSERT INTO symbol VALUES (1, 'r-1'), (2, 'gradient')")
        database.execute("INSERT INTO run VALUES (1, 'digits', 'lab', NULL, '{}', 0, 1.0, 2.0, '{}', '[]', 1, 1)")
        database.commit()
    with TestClient(create_app(path, token=TOKEN), base_url=HOME) as client:
        assert client.get("/api/runs").json()["runs"][0]["tags"] == []
        assert client.put("/api/runs/r-1/tags/paper", headers=WRITE).json()["tags"] == ["paper"]
        assert client.get("/api/runs").json()["runs"][0]["tags"] == ["paper"]


def test_list_and_header_agree_on_the_state(tmp_path, monkeypatch):
    empty = course("r", rounds=0)
    empty.run = replace(empty.run, finished=None)
    empty.records[0] = replace(empty.records[0], finished=None)
    path = stored(tmp_path / "runs.db", empty)
    moment = [".1"]
    monkeypatch.setattr(routes_status, "this_moment", lambda: moment[0])
    with TestClient(create_app(path, token=TOKEN), base_url=HOME) as client:
        first = client.get("/api/runs/r")
        assert first.json()["state"] == client.get("/api/runs").json()["runs"][0]["state"] == "died"
        tag = {"If-None-Match": first.headers["ETag"]}
        assert client.get("/api/runs/r", headers=tag).status_code == 304
        moment[0] = ".2"
        with holding(path):
            later = client.get("/api/runs/r", headers=tag)
            assert later.json()["state"] == "silent", "its training is there"


def test_the_state_goes_by_the_last_that_was_heard():
    assert state_of(9.0, None, None) == "finished"
    assert state_of(None, None, None, now=1e9) == "running"
    assert state_of(None, None, 0.0, now=DIED + 1) == "died"
    assert state_of(None, 5.0, 0.0, now=DIED + 1) == "running"
    assert state_of(None, None, 0.0, written=True, now=SILENT - 1) == "running"
    assert state_of(None, None, 0.0, written=True, now=SILENT + 1) == "silent"


def test_a_look_that_failed_is_made_up_for(store, monkeypatch):
    cache = ReaderCache(store)
    cache.look()
    before = cache.tracker.version("a")
    more(store, "a", 0)
    with monkeypatch.context() as patch:
        patch.setattr(change_tracker, "removals", lambda _: (_ for _ in ()).throw(StoreError("gone")))
        with pytest.raises(StoreError):
            cache.look()
    cache.look()
    assert cache.tracker.version("a") != before
    cache.close()


def test_another_reader_does_not_believe_what_the_last_one_saw(store):
    watched = ChangeTracker()
    with open_reader(store) as reader:
        watched.look(reader)
        before = watched.version("a")
    more(store, "a", 0)
    with open_reader(store) as reader:
        watched._seen = change_tracker.data_version(reader)  # two connections may count alike
        watched.look(reader)
    assert watched.version("a") != before


def test_those_who_wait_for_a_look_share_one(store, monkeypatch):
    cache = ReaderCache(store)
    looks, go, entered = [], threading.Event(), threading.Event()

    def look(_):
        looks.append(1)
        entered.set()
        go.wait(PATIENCE)

    waiting, turn = [], threading.Lock()

    class Counted:
        def __enter__(self):
            waiting.append(1)
            turn.acquire()

        def __exit__(self, *_):
            turn.release()

    cache._looking = Counted()
    monkeypatch.setattr(cache.tracker, "look", look)
    first = threading.Thread(target=cache.look)
    first.start()
    assert entered.wait(PATIENCE)
    others = [threading.Thread(target=cache.look) for _ in range(5)]
    for other in others:
        other.start()
    wait_until(lambda: len(waiting) == 6)
    cache.remembered("asked", "1")  # needs no look
    go.set()
    for thread in (first, *others):
        thread.join(PATIENCE)
    assert len(looks) == 2, "one that was under way, and one for all who came meanwhile"
    cache.close()


def test_a_deletion_from_a_page_takes_no_pause_and_nothing_is_remembered_of_it(store, client):
    kept = Matrices()
    with open_reader(store) as reader:
        assert kept.matrix(reader, "b", "scale.gsc").nodes
    size = store.stat().st_size
    assert client.delete("/api/runs/b", headers=WRITE).json()["bytes"] > 100_000
    with open_reader(store) as reader:
        assert reader.database.rows("PRAGMA user_version") == [(VERSION,)]
        assert kept._epoch != views_matrix.removals(reader.database)
        assert kept.matrix(reader, "b", "scale.gsc").nodes == ()
    assert store.stat().st_size >= size, "giving the space back is for the command line"
    retention.delete(store, ["a"])

    def given_back():  # while the dashboard reads, the file is left to the next one who writes
        with maintain_sqlite(store):
            pass
        return store.stat().st_size < size

    wait_until(given_back)


def test_what_has_come_in_a_long_pause_is_read_by_a_walk(store, monkeypatch):
    kept = Matrices()
    with open_reader(store) as reader:
        kept.matrix(reader, "b", "scale.gsc")
        monkeypatch.setattr(views_matrix, "NEWS", 3)
        monkeypatch.setattr(views_matrix, "_news", lambda *_: pytest.fail("row by row"))
        with open_store(store) as sink:
            records = [Metric(Where("b", 160, f"c{i}"), STARTED, "scale.gsc", 7.0, "later", i) for i in range(9)]
            sink.write(records)
        found = kept.matrix(reader, "b", "scale.gsc")
        assert (found.rounds[-1], len(found.nodes)) == (160, 9)


def test_what_nobody_asks_for_does_not_pile_up(store, monkeypatch):
    kept = Matrices()
    monkeypatch.setattr(views_matrix, "NEWS", 5)
    with open_reader(store) as reader:
        kept.matrix(reader, "b", "scale.gsc")
        for i in range(9):
            more(store, "b", i, "scale.gsc")
            kept.matrix(reader, "b", "time.client")
        assert sum(map(len, kept._runs["b"].waiting.values())) <= 5
        assert kept.matrix(reader, "b", "scale.gsc").rounds[-1] == 158


def test_the_newest_run_is_read_ahead_also_when_it_begins_later(store, caplog, monkeypatch):
    read, failed = [], threading.Event()
    cache = ReaderCache(store)

    def overview(_, run):
        read.append(run)
        if len(read) == 1:
            failed.set()
            raise RuntimeError("broken")
        return SimpleNamespace(learning=None, sign=None)

    monkeypatch.setattr(warming, "overview", overview)
    cache.warming.asked(None)
    assert failed.wait(PATIENCE)
    with open_store(store) as sink:
        sink.write(course("c", "three", started=STARTED + 5000).records)
    wait_until(lambda: cache.warming.asked(None) or "c" in read)
    assert read == ["b", "c"]
    cache.close()
    assert "Reading ahead failed" in caplog.text


@pytest.mark.parametrize("trouble", [RuntimeError("not ours"), StoreError("ours")])
def test_pages_are_told_of_trouble_and_of_another_store(store, tmp_path, trouble, monkeypatch):
    monkeypatch.setattr("fedvitals.dashboard.live.EVERY", 0.01)
    other = stored(tmp_path / "other.db", course("z", "another"))
    told = []

    class Fails(ReaderCache):
        times = 0

        def look(self):
            self.times += 1
            if self.times == 2:
                raise trouble
            super().look()

    async def watch():
        cache = Fails(store)
        live = Live(cache, Limits())
        async with live.watching():
            events = live.events("127.0.0.1")
            async for event in events:
                told.append(event.split(b"\n")[0 if event.startswith(b"event") else 1 :])
                kinds = [lines[0] for lines in told]
                if kinds.count(b"event: change") == 1 and other.exists() and b"event: healed" in kinds:
                    other.replace(store)
                if kinds.count(b"event: change") == 2:
                    break
            await events.aclose()
        cache.close()

    asyncio.run(asyncio.wait_for(watch(), 20))
    assert [lines[0] for lines in told][1:] == [
        b"event: change", b"event: trouble", b"event: healed", b"event: change",
    ]  # fmt: skip
    assert all(run in told[-1][1] for run in (b'"z"', b'"a"', b'"b"'))


def test_the_address_that_is_printed_answers(store):
    with serve(store, "--host", "127.0.0.2") as url:
        assert url.startswith("http://127.0.0.2:")
        assert httpx2.get(f"{url}/api/runs").status_code == 200


def test_raw_records_are_chosen_by_what_they_have(store, client):
    def asked(**params):
        return client.get("/api/runs/b/records", params={"limit": 1000, **params})

    refused = asked(kind="transfer", name="loss")
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == (
        "A transfer has no name, so none can be chosen by it. Leave «name» out."
    )
    with open_reader(store) as reader:
        for wanted in ({}, {"round": 2}, {"node": "c1"}, {"round": 2, "node": "c1"}, {"name": "scale.gsc", "round": 1}):
            where = "".join(f" AND {key} = ?" for key in wanted)
            expected = reader.database.rows(
                f"SELECT arrival FROM metrics WHERE run = 'b'{where} ORDER BY arrival", tuple(wanted.values())
            )
            found = asked(**wanted).json()
            assert [row[found["columns"].index("arrival")] for row in found["rows"]] == [row[0] for row in expected][
                :1000
            ]


def test_a_comparison_changes_with_its_own_runs_and_takes_so_many_repeats(tmp_path, monkeypatch):
    runs = [course(f"{name}-{seed}", name, seed=seed, rate=rate, started=STARTED + seed)
            for name, rate in (("low", 0.1), ("high", 0.2)) for seed in range(4)]  # fmt: skip
    path = stored(tmp_path / "runs.db", *runs, course("x", "other"))
    monkeypatch.setattr(routes_compare, "REPEATS", 2)
    with TestClient(create_app(path, token=TOKEN), base_url=HOME) as client:
        wanted = {"runs": ["low-0", "high-0"], "repeats": True}
        first = client.get("/api/compare", params=wanted)
        assert [side["runs"] for side in first.json()["sides"]] == [
            ["low-3", "low-0"], ["high-3", "high-0"],
        ]  # fmt: skip
        tag = {"If-None-Match": first.headers["ETag"]}
        more(path, "x", 0)
        assert client.get("/api/compare", params=wanted, headers=tag).status_code == 304
        more(path, "low-3", 0)
        assert client.get("/api/compare", params=wanted, headers=tag).status_code == 200


def test_rounds_in_spans_are_counted_without_being_listed():
    assert _covered([(0, 3), (2, 5), (2, 3), (9, 9)]) == 7
    assert _covered([(0, 2**60)]) == 2**60 + 1


def test_sums_of_rounds_are_the_same_from_the_database_and_from_memory(store):
    kept = Matrices()
    with open_reader(store) as reader:
        views_matrix.share(reader, kept)
        assert not kept.holds(reader, "b", "scale.gsc")
        cold = round_sums(reader, "b", "scale.gsc")
        assert not kept.holds(reader, "b", "scale.gsc"), "the whole was not needed"
        kept.matrix(reader, "b", "scale.gsc")
        assert round_sums(reader, "b", "scale.gsc") == pytest.approx(cold, rel=1e-6)
        assert (len(cold), cold[9]) == (100, pytest.approx(3 * 0.1 * 10))
    with open_store(store) as sink:  # the newer of two, and neither the server's nor NaN
        told = [(3, "c0", 5.0, 9.0), (3, "server", 100.0, 9.0), (4, "c9", float("nan"), 9.0)]
        sink.write([Metric(Where("b", r, n), STARTED + at * 1e6, "scale.gsc", v, "later", i)
                    for i, (r, n, v, at) in enumerate(told)])  # fmt: skip
    with open_reader(store) as reader:
        found = round_sums(reader, "b", "scale.gsc")
        assert (found[3], found[4]) == (pytest.approx(5.0 + 2 * 0.4), pytest.approx(3 * 0.5))


def test_what_was_worked_out_is_told_again_until_its_records_change(store):
    made = []
    with open_reader(store) as reader:
        views_matrix.share(reader, Matrices())

        def remembered_count(key, sign):
            return remembered(reader, "kind", key, sign, lambda: made.append(key) or len(made))

        assert [
            remembered_count("a", 1),
            remembered_count("a", 1),
            remembered_count("a", 2),
            remembered_count("a", 2),
        ] == [1, 1, 2, 2]
        with pytest.raises(ZeroDivisionError):
            remembered(reader, "kind", "x", 1, lambda: 1 / 0)
        assert remembered_count("x", 1) == 3, "what failed is tried again"
        for key in range(MOST):
            remembered_count(key, 1)
        before = len(made)
        remembered_count("a", 2)
        assert len(made) == before + 1, "only the last few are kept"
        retention.delete(store, ["a"], give_back=False)
        remembered_count("a", 2)
        assert len(made) == before + 2


def test_the_profile_follows_late_records(store, client):
    def seconds():
        return sum(part["seconds"] for part in client.get("/api/runs/b/profile").json()["clients"])

    before = seconds()
    with open_reader(store) as reader:
        old = next(
            one for one in queries.records(reader, "b", Span) if one.where.round == 98 and one.where.node == "c0"
        )
    with open_store(store) as sink:
        where = replace(old.where, node="c7")
        sink.write([replace(old, where=where, id="f" * 16, source="later", sequence=0)])
    assert seconds() > before


def test_answers_about_a_run_as_it_was_before_are_not_kept(store):
    cache = ReaderCache(store)
    cache.look()

    def remember(asked, run):
        version = cache.tracker.version(run)
        cache.remember(asked, version, bytes(1000), run, version)
        return version

    try:
        old = [remember(f"/rounds/{number}", "a") for number in range(5)]
        other = remember("/rounds/0 of b", "b")
        assert cache.remembered("/rounds/3", old[3])
        more(store, "a", 1)
        cache.look()
        new = remember("/rounds/5", "a")
        assert new != old[0]
        assert [cache.remembered(f"/rounds/{number}", old[0]) for number in range(5)] == [None] * 5
        assert cache.remembered("/rounds/5", new)
        assert cache.remembered("/rounds/0 of b", other), "nothing has happened to that run"
        assert cache._answered == 2000
    finally:
        cache.close()


def test_an_address_is_remembered_once_also_where_it_is_about_several_runs(store):
    cache = ReaderCache(store)
    for version in ("1", "2", "3"):
        cache.remember("/compare", version, bytes(1000))
    assert (cache.remembered("/compare", "2"), cache._answered) == (None, 1000)
    assert cache.remembered("/compare", "3")
