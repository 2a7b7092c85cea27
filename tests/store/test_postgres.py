# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL does what every store must do, on a server that the tests start; and what only a shared one can."""

import math
import re
import subprocess
import sys
import threading
import time
import traceback

import pytest

import fedvitals as fv
from fedvitals.errors import FedvitalsError, MissingExtraError, StoreError
from fedvitals.records import LayerStats, Metric, Where
from fedvitals.store import open_reader, open_store, spill_folder
from fedvitals.store.postgres import PostgresStore
from fedvitals.store.read import queries
from fedvitals.store.read.ask import query
from fedvitals.store.upkeep import compaction, retention
from fedvitals.store.upkeep.doctor import examine
from fedvitals.testing import tiny_run
from fedvitals.transport import queue as queue_module
from fedvitals.transport.spill import leftover
from support.conditions import holds_for_each
from support.paths import TESTS
from support.postgres_server import available, running
from support.sinks import ending_queues
from support.small_training import ROUNDS, check, suffer
from support.store_contract import RUN, TABLE, StoreContract, metric, stats, sums
from support.verbs import result
from support.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.thorough, available]


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


class TestPostgres(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.server = server

    def make(self, folder):
        return PostgresStore(self.server.database())

    def make_second(self, store):
        return PostgresStore(self.server.database())

    def reopen(self, store):
        store.close()
        return PostgresStore(store.address.url)

    def history(self, store, run="r-1"):
        return _Asked(store.address.url, run)

    def read(self, store, kind, run="r-1"):
        with open_reader(store.address.url) as reader:
            return queries.records(reader, run, kind)

    def run(self, store, run="r-1"):
        with open_reader(store.address.url) as reader:
            return queries.get_run(reader, run)


class _Asked:
    """A history that opens the store for each question, as the dashboard does."""

    def __init__(self, url, run):
        self._url, self._run = url, run

    def __getattr__(self, name):
        def ask(*args, **kwargs):
            with open_reader(self._url) as reader:
                return getattr(reader.history(self._run), name)(*args, **kwargs)

        return ask


SECRET = "s3cr3t/w0rd"

TRAINER = """
import sys
from dataclasses import replace
from fedvitals.store import open_store
from support.store_contract import RUN, metric, stats
url, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
def mine(record):
    return replace(record, where=replace(record.where, run=name))
store = open_store(url)
for r in range(rounds):
    run = replace(RUN, id=name, sequence=0)
    # Names that both add in the same moment, in different orders.
    nodes = [f"c{r}", f"d{r}"][:: 1 if name < "r-b" else -1]
    batch = [mine(metric(r, node, 1.0, sequence=1 + 4 * r + i)) for i, node in enumerate(nodes)]
    batch += [mine(stats(r, node, r, 3 + 4 * r + i)) for i, node in enumerate(nodes)]
    store.write([run, *batch])
store.close()
"""


def trainer(url, name, rounds):
    return subprocess.Popen([sys.executable, "-c", TRAINER, url, name, str(rounds)], cwd=TESTS)


def test_two_trainers_and_a_reader_at_once(server):
    url, rounds = server.database(), 120
    trainers = [trainer(url, name, rounds) for name in ("r-a", "r-b")]
    seen = {"r-a": 0, "r-b": 0}
    while any(process.poll() is None for process in trainers):
        try:
            with open_reader(url) as reader:
                for run, before in seen.items():
                    _, _, matrix = reader.history(run).matrix("gradient", "count", "conv.bias")
                    assert len(matrix) >= before
                    seen[run] = len(matrix)
        except StoreError as error:
            if "is empty" not in str(error):  # neither has made the tables yet
                raise
    assert [process.wait() for process in trainers] == [0, 0]
    assert max(seen.values()) > 0
    with open_reader(url) as reader:
        for run in seen:
            history = reader.history(run)
            assert history.rounds() == list(range(rounds))
            assert len(history.nodes()) == 2 * rounds
            for kind in (Metric, LayerStats):
                assert len(queries.records(reader, run, kind)) == 2 * rounds
        texts = [row[0] for row in reader.database.rows("SELECT text FROM symbol")]
        assert len(texts) == len(set(texts))
        assert reader.database.rows("SELECT COUNT(*) FROM layer_matrix WHERE layer >= 0")[0][0] > 0  # compacted
        assert not [sign for sign in examine(url) if sign.state == "trouble"]


def test_two_writers_of_one_run_store_each_record_once(server):
    """Nobody should, but a spilled record may come home while its run is still being written."""
    url = server.database()
    with PostgresStore(url) as first, PostgresStore(url) as second:
        for r in range(40):
            batch = [RUN, metric(r, "c1", 1.0, sequence=2 * r + 1), stats(r, "c1", r, 2 * r + 2)]
            (first, second)[r % 2].write(batch)
            (second, first)[r % 2].write(batch)
    with open_reader(url) as reader:
        assert len(queries.records(reader, "r-1", Metric)) == len(queries.records(reader, "r-1", LayerStats)) == 40


def test_a_server_that_goes_away_and_comes_back(monkeypatch, caplog):
    """What was acknowledged is there, what waited comes after, nothing twice; the training thread never waits."""
    monkeypatch.setattr(queue_module, "FIRST_DELAY", 0.02)
    with running() as server, ending_queues() as make:
        url = server.database()
        writers = set()

        class Noting(PostgresStore):
            def write(self, records, /):
                writers.add(threading.current_thread())
                super().write(records)

        queue = make(Noting(url))
        queue.put(RUN)
        acknowledged = -1
        for r in range(400):
            for i in range(5):
                queue.put(metric(r, f"c{i}", 1.0, sequence=1 + 5 * r + i))
            if r in (100, 200):
                server.stop("immediate")
            if r in (150, 250):
                wait_until(lambda: caplog.text, what="a failed attempt to write")
                server.start()
            if r < 100 and r % 10 == 0 and queue.flush(PATIENCE):
                acknowledged = r
            time.sleep(0.001)
        assert acknowledged >= 90
        with open_reader(url) as reader:
            assert set(range(acknowledged + 1)) <= set(reader.history("r-1").rounds())
        deadline = time.monotonic() + PATIENCE
        while not queue.flush(5) and time.monotonic() < deadline:
            pass
        assert queue.lost == {}
        with open_reader(url) as reader:
            found = [record.sequence for record in queries.records(reader, "r-1", Metric)]
        assert sorted(found) == list(range(1, 2001))
        assert writers == {queue._thread}  # a put never speaks to the server
        assert "works again" in caplog.text
        queue.close()


def test_a_training_beside_a_server_that_dies_is_the_same_to_the_last_bit(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with running() as server:
        url = server.database()

        def happens(number):
            if number == 1:
                server.stop("immediate")
            if number == 3:
                server.start()

        acknowledged, monitor = suffer(url, happens, monkeypatch)
        assert {0, 1} <= set(acknowledged)
        assert monitor.lost == 0
        check(url, monitor.run.id, range(ROUNDS))

        server.stop("immediate")  # now for good: everything waits in files, and is taken back later
        _, second = suffer(url, lambda _: None, monkeypatch, name="alone")
        assert second.lost == 0
        assert leftover(spill_folder(url))
        server.start()
        tiny_run(url, strict=True, rounds=1)
        with open_reader(url) as reader:
            assert queries.find_run(reader, "alone") == second.run.id
        assert not leftover(spill_folder(url))


def test_a_connection_that_was_cut_is_made_again_without_a_word(server):
    url = server.database()
    import psycopg

    with PostgresStore(url) as store:
        store.write([RUN])
        with psycopg.connect(server.url(), autocommit=True) as connection:
            name = url.rpartition("/")[2]
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        store.write([metric(1, "c1", 1.0, sequence=1)])
    with open_reader(url) as reader:
        assert reader.history("r-1").rounds() == [1]


def test_the_password_is_never_said(server, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    host = f"127.0.0.1:{server.port}"
    for url in (
        f"postgresql://nobody:s3cr3t%2Fw0rd@{host}/postgres",
        f"postgresql://nobody:{SECRET}@{host}/postgres",
        f"postgresql://nobody:s3cr3t%zzw0rd@{host}/postgres",
        f"postgres://{host}/postgres?user=nobody&password=s3cr3t%2Fw0rd",
        f"postgresql://nobody:s3cr3t%2Fw0rd@{host}/postgres?bogus=1",
    ):
        for use in (open_reader, lambda url: open_store(url).write([RUN])):
            with pytest.raises(FedvitalsError) as caught:
                use(url)
            told = "".join(traceback.format_exception(caught.value)) + repr(open_store(url))
            assert "s3cr3t" not in re.sub(r'use\(url\).*|f?"postgres.*|for url in.*', "", told)
            assert "***" in str(caught.value)
        monitor = fv.Monitor(url, "secret")
        with monitor.round(0):
            monitor.log(x=1.0)
        monitor.flush(PATIENCE)
        monitor.close()
        assert not [name for name in map(str, tmp_path.rglob("*")) if "s3cr3t" in name]
    assert "cannot be written to" in caplog.text
    assert "s3cr3t" not in caplog.text
    assert "w0rd" not in caplog.text


def test_without_the_driver_the_install_line_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for use in (open_reader, lambda url: open_store(url).write([RUN])):
        with pytest.raises(MissingExtraError, match=re.escape("pip install 'fedvitals[postgres]'")):
            use("postgresql://host/db")


@pytest.fixture(scope="module")
def tiny(server):
    """A store with one finished run."""
    url = server.database()
    tiny_run(url, strict=True, probes="deep", rounds=4)
    return url


def test_the_command_line_reads_it(tiny, capsys):
    (run,) = result(capsys, "runs", "--store", tiny)
    assert (run["name"], run["rounds"], run["clients"]) == ("tiny", 4, 4)
    assert result(capsys, "show", "tiny", "--store", tiny)["clients"]
    sql = "SELECT COUNT(*) AS n FROM metrics WHERE name LIKE 'gradient.norm%'"
    answer = result(capsys, "query", sql, "--store", tiny)
    assert answer["rows"][0]["n"] > 0
    assert result(capsys, "doctor", tiny)["trouble"] is False


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM metric",
        "DROP TABLE metric",
        "CREATE TEMP TABLE x (y INT)",
        "WITH x AS (DELETE FROM metric RETURNING 1) SELECT * FROM x",
        "SET default_transaction_read_only = off",
        "COMMIT",
        "COPY metric TO '/tmp/x'",
        "SELECT setval(pg_get_serial_sequence('layer_block', 'arrival'), 1)",
        "SELECT * FROM run FOR UPDATE",
        "EXPLAIN ANALYZE DELETE FROM metric",
        "DO $$ BEGIN DELETE FROM fedvitals.metric; END $$",
    ],
)
def test_people_cannot_write(tiny, sql):
    with open_reader(tiny) as reader:
        before = reader.database.rows("SELECT COUNT(*) FROM metric")
        with pytest.raises(StoreError, match="Only reading is allowed"):
            query(reader, sql)
        assert reader.database.rows("SELECT COUNT(*) FROM metric") == before


@pytest.mark.parametrize("sql", ["SELECT nonsense", "SELECT 1; DELETE FROM metric", "SELECT 1; COMMIT; DROP TABLE run"])
def test_a_wrong_query_is_answered(tiny, sql):
    with open_reader(tiny) as reader:
        with pytest.raises(StoreError, match=r"The query failed: .* docs/schema.md"):
            query(reader, sql)
        assert query(reader, "SELECT 7 AS n").rows == [(7,)]
        assert query(reader, "SELECT i FROM generate_series(1, 100000) AS s(i)", limit=2).rows == [(1,), (2,)]


def test_layer_statistics_are_the_same_as_in_sqlite(server, tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "CHUNK_ROUNDS", 5)
    records = [stats(r, f"c{c}", 7 * r + c, 4 * r + c + 1, step=3 if c else None) for r in range(30) for c in range(3)]
    matrix = sums(1)
    matrix[2] = (10, 0, 0, 0, math.inf, -math.inf, 0, 10, 0)
    records += [
        LayerStats(Where("r-1", None, "c1", group="edge-1"), -2.5, "weight", matrix, TABLE.digest, "m", 998),
        stats(1, None, 5, 999, "gradient.histogram"),
    ]
    found = []
    for target in (server.database(), tmp_path / "runs.db"):
        with open_store(target) as store:
            store.write([RUN])
            for i in range(0, len(records), 3):
                store.write(records[i : i + 3])
        with open_reader(target) as reader:
            answer = query(reader, "SELECT * FROM layer_statistics")
        key = [answer.columns.index(name) for name in ("family", "layer", "round", "node", "step")]
        found.append((answer.columns, sorted(answer.rows, key=lambda row: [str(row[i]) for i in key])))
    (columns, ours), (wanted_columns, wanted) = found
    assert columns == wanted_columns
    assert len(ours) == len(wanted) == 93 * 3 - 6
    for row, twin in zip(ours, wanted, strict=True):
        for a, b in zip(row, twin, strict=True):
            assert a == b or math.isclose(a, b, rel_tol=1e-12)


def test_a_store_of_another_program_or_version_is_left_alone(server):
    import psycopg

    url = server.database()
    with PostgresStore(url) as store:
        store.write([RUN])
    for comment, words in (("fedvitals store, schema version 99", "Upgrade fedvitals"), ("mine", "another program")):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"COMMENT ON SCHEMA fedvitals IS '{comment}'")
        for use in (open_reader, lambda url: open_store(url).write([RUN])):
            with pytest.raises(StoreError, match=words):
                use(url)


def test_a_run_is_deleted_and_thinned_but_not_while_it_is_written(server, monkeypatch):
    monkeypatch.setattr(retention, "SMALLEST", 0)
    url = server.database()
    tiny_run(url, strict=True, probes="deep", run="old")
    with PostgresStore(url) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
        with open_reader(url) as reader:
            old = queries.find_run(reader, "old")
        with pytest.raises(StoreError, match="r-1 is being written"):
            retention.delete(url, ["r-1"])
        cleared = retention.thin(url, 1000)
        assert [(gone.run, gone.what) for gone in cleared.removed] == [(old, "detail"), (old, "run")]
        assert holds_for_each(gone.bytes > 0 for gone in cleared.removed)
        assert cleared.bytes_after < cleared.bytes_before
        assert cleared.open == ("r-1",)
        store.write([metric(2, "c1", 1.0, sequence=2)])
    retention.delete(url, ["r-1"])
    with open_reader(url) as reader:
        assert reader.history("r-1").rounds() == []
