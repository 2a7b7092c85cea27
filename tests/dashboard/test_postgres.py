# SPDX-License-Identifier: Apache-2.0
"""The pages over PostgreSQL: lists, comparison, tags, deletion, and a training that is there though it is silent."""

import pytest
from starlette.testclient import TestClient

from fedvitals.dashboard.app import create_app
from fedvitals.dashboard.change_tracker import ChangeTracker
from fedvitals.store import open_reader
from fedvitals.store.ddl import quoted
from fedvitals.store.postgres import PostgresStore, write_postgres
from fedvitals.store.schema import TABLE
from fedvitals.store.upkeep import retention
from fedvitals.views.matrix import Matrices
from support.dashboard_server import TOKEN, WRITE
from support.postgres_server import available, running
from support.runs_by_hand import HOSTILE, course, find
from support.timed_run import STARTED

pytestmark = [pytest.mark.postgres, pytest.mark.thorough, available]
HOME = "http://127.0.0.1:8321"


@pytest.fixture
def store():
    with running() as server:
        store = PostgresStore(server.database())
        ill = course("a-ill", "ill one", best=0.7)
        find(ill, "c1")
        for told in (ill, course("b", HOSTILE, started=STARTED + 10), course("c", "silent", finished=None)):
            store.write(told.records)
        yield store
        store.close()


def test_lists_compares_tags_and_deletes(store):
    with TestClient(create_app(store.address.url, token=TOKEN), base_url=HOME) as client:
        found = {run["id"]: run for run in client.get("/api/runs").json()["runs"]}
        assert [found[run]["health"] for run in ("a-ill", "b")] == ["ill", "healthy"]
        assert found["a-ill"]["bytes"] == 4 * 3 * 2 * 1600
        assert client.get("/api/runs", params={"sort": "worst"}).json()["runs"][0]["id"] == "a-ill"
        compared = client.get("/api/compare", params={"runs": ["a-ill", "b"]}).json()
        assert [side["name"] for side in compared["sides"]] == ["ill one", HOSTILE]
        assert client.get("/api/runs/b/contents").json()["records"] > 60
        assert client.put("/api/runs/b/tags/paper", headers=WRITE).json()["tags"] == ["paper"]
        # Its training holds the run as long as its store is open: silent for years, but there.
        assert (found["c"]["state"], found["c"]["written"]) == ("silent", True)
        refused = client.delete("/api/runs/c", headers=WRITE)
        assert refused.status_code == 409
        assert "being written" in refused.json()["error"]["message"]
        store.close()
        assert client.delete("/api/runs/b", headers=WRITE).json()["name"] == HOSTILE
        after = {run["id"]: run for run in client.get("/api/runs", params={"limit": 10}).json()["runs"]}
        assert set(after) == {"a-ill", "c"}
        assert after["c"]["state"] == "died"


def test_a_batch_that_is_seen_late_is_seen(store):
    """Numbers are given out when a row is written, and seen when its batch is: not in the same order."""
    columns = ", ".join(quoted(one.name) for one in TABLE["metric"].columns if one.name != "arrival")
    copied = f"INSERT INTO metric ({columns}) SELECT {columns} FROM metric WHERE run = ? LIMIT 1"
    watched = ChangeTracker()
    with open_reader(store.address.url, patience=5) as reader:
        watched.look(reader)
        a, b = (reader.names.number(run) for run in ("a-ill", "b"))
        with write_postgres(store.address.url) as slow, write_postgres(store.address.url) as quick:
            slow.execute("BEGIN")
            slow.execute(copied, (a,))
            quick.execute(copied, (b,))
            before = watched.version("a-ill"), watched.version("b")
            watched.look(reader)
            assert watched.version("a-ill") == before[0]
            assert watched.version("b") != before[1]
            slow.execute("COMMIT")
        watched.look(reader)
        assert watched.version("a-ill") != before[0]
        after = watched.versions()
        watched.look(reader)
        assert watched.versions() == after
        kept = Matrices()
        kept.matrix(reader, "b", "scale.gsc")
        store.close()
        retention.delete(store.address.url, ["b"], give_back=False)
        assert kept.matrix(reader, "b", "scale.gsc").nodes == ()
        watched.look(reader)
        assert watched.version("a-ill") != after
