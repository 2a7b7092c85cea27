# SPDX-License-Identifier: Apache-2.0
"""The questions of the command line and the dashboard, and people's own SQL."""

import math
import sqlite3

import numpy as np
import pytest

from fedvitals.errors import ConfigError, StoreError, unknown
from fedvitals.records import Event, Finding, LayerStats, Run, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.dialect import Database
from fedvitals.store.read import queries
from fedvitals.store.read.ask import query
from fedvitals.store.read.federation_layers import whole_layers
from fedvitals.store.read.layer_history import layer_history
from fedvitals.store.schema import TABLES
from fedvitals.store.upkeep import compaction
from support.store_contract import RUN, TABLE, metric, same, stats, sums


@pytest.fixture(params=["as it came", "compacted"])
def reader(request, tmp_path, monkeypatch):
    if request.param == "compacted":
        monkeypatch.setattr(compaction, "CHUNK_ROUNDS", 3)
        monkeypatch.setattr(compaction, "NEWEST_ROUNDS", 0)
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        store.write([RUN])
        number = 0
        for r in range(8):
            batch = []
            for c in ("c10", "c2", "server"):
                number += 2
                batch += [metric(r, c, r + 0.5, at=100.0 + r, sequence=number)]
                batch += [stats(r, c, number, number + 1)] if c != "server" else []
            store.write(batch)
        store.write(
            [
                metric(6, None, 0.75, at=150.0, sequence=100, name="accuracy"),
                metric(7, "c2", 0.25, at=151.0, sequence=101, name="accuracy"),
                metric(7, "c2", math.nan, at=151.0, sequence=102, name="gradient.norm"),
                metric(7, None, 3.0, at=152.0, sequence=103, name="monitor.lost"),
                Event(Where("r-1", 1, "c2"), 101.0, "warning", "dropped", "gone", {}, "m", 104),
                Event(Where("r-1", 2, "c2"), 102.0, "info", "joined", "back", {}, "m", 105),
                Event(Where("r-1", 3), 103.0, "info", "round", "on", {}, "m", 106),
                Finding(Where("r-1", 3), 103.0, "drift", "note", 0.5, "…", {}, (), "m", 107),
                LayerStats(Where("r-1", 7, None, group="edge-1"), 160.0, "weight", sums(7), TABLE.digest, "m", 108),
                Run("r-2-older", "digits", started=50.0, finished=60.0, source="m"),
                Run("r-2-other", "mnist", host="lab", started=70.0),
            ]
        )
    with open_reader(path) as reader:
        compacted = reader.database.rows("SELECT COUNT(*) FROM layer_matrix WHERE layer >= 0")[0][0]
        assert bool(compacted) == (request.param == "compacted")
        yield reader


def test_list_of_runs(reader):
    first, second, third = queries.list_runs(reader)
    assert (first.id, second.id, third.id) == ("r-1", "r-2-other", "r-2-older")
    assert (first.name, first.host, first.rounds, first.clients) == ("digits", "torch", 8, 2)
    assert (first.accuracy, first.loss) == (0.75, 7.5)
    assert first.events == {"info": 2, "warning": 1}
    assert (first.findings, first.lost) == (1, 3)
    assert (first.finished, first.seconds) == (None, 60.0)
    assert (third.seconds, third.rounds, third.accuracy, third.lost) == (10.0, 0, None, 0)
    assert second.seconds is None


def test_a_person_names_a_run_by_id_name_or_the_beginning_of_an_id(reader):
    assert queries.find_run(reader, "r-2-other") == "r-2-other"
    assert queries.find_run(reader, "digits") == "r-1"  # the newest of that name
    assert queries.find_run(reader, "r-2-ol") == "r-2-older"
    with pytest.raises(ConfigError, match="Several runs begin with 'r-2': r-2-older, r-2-other"):
        queries.find_run(reader, "r-2")
    with pytest.raises(ConfigError, match=r"Unknown run 'digts'. Known: digits, mnist. Did you mean 'digits'\?"):
        queries.find_run(reader, "digts")
    with pytest.raises(ConfigError, match="Unknown run ''"):
        queries.find_run(reader, "")


def test_the_run_itself(reader):
    assert queries.get_run(reader, "r-1") == RUN
    assert "Known: a, 'a, b', 'c d'." in unknown("run", "x", ["c d", "a", "a, b"])  # one name does not look like two
    with pytest.raises(ConfigError, match=r"Unknown run 'r-9'. Known: r-1, r-2-older, r-2-other"):
        queries.get_run(reader, "r-9")


def test_one_round(reader):
    table = queries.round_table(reader, "r-1", 7)
    assert list(table) == [None, "c2", "c10", "server"]
    assert same(table["c2"], {"loss": 7.5, "accuracy": 0.25, "gradient.norm": math.nan})
    assert table[None] == {"monitor.lost": 3.0}
    assert queries.round_table(reader, "r-1", 99) == queries.round_table(reader, "nobody", 1) == {}


def test_newest_rounds(reader):
    newest = queries.newest_rounds(reader, "r-1", 2)
    assert list(newest) == [7, 6]
    assert newest[6][None] == {"accuracy": 0.75}


def test_one_client_and_the_whole(reader):
    found = queries.node_history(reader, "r-1", "c2")
    assert list(found) == ["accuracy", "gradient.norm", "loss"]
    assert found["loss"] == (list(range(8)), [r + 0.5 for r in range(8)])
    assert queries.node_history(reader, "r-1", None) == {"accuracy": ([6], [0.75]), "monitor.lost": ([7], [3.0])}
    assert queries.node_history(reader, "r-1", "nobody") == {}


def test_one_layer_over_rounds_and_nodes(reader):
    rounds, nodes, matrix = queries.layer_matrix(reader, "r-1", "gradient", "count", "conv.bias")
    assert (rounds, nodes, matrix.tolist()) == (list(range(8)), ["c2", "c10"], [[50.0, 50.0]] * 8)
    with pytest.raises(ConfigError, match=r"Unknown layer of family 'gradient' 'conv.bas'.*Did you mean 'conv.bias'\?"):
        queries.layer_matrix(reader, "r-1", "gradient", "count", "conv.bas")
    with pytest.raises(ConfigError, match="Unknown family 'grad'"):
        queries.layer_matrix(reader, "r-1", "grad", "count", "conv.bias")
    with pytest.raises(ConfigError, match="Unknown statistic of family 'gradient' 'l3'"):
        queries.layer_matrix(reader, "r-1", "gradient", "l3", "conv.bias")


def test_all_layers_of_one_round(reader):
    found = queries.layer_round(reader, "r-1", "gradient", 1)
    assert (found.layers, found.nodes, found.matrix.shape) == (TABLE.names, ("c2", "c10"), (2, 3, 9))
    np.testing.assert_allclose(found.get("l2"), np.sqrt([sums(10)[:, 2], sums(8)[:, 2]]), rtol=1e-6)
    assert queries.layer_round(reader, "r-1", "weight", 7).nodes == (None,)
    assert queries.layer_round(reader, "r-1", "weight", 1).nodes == ()
    assert queries.layer_families(reader, "r-1") == ["gradient", "weight"]


def test_events_newest_first_to_go(reader):
    assert [event.name for event in queries.events(reader, "r-1")] == ["dropped", "joined", "round"]
    assert [event.name for event in queries.events(reader, "r-1", limit=2)] == ["joined", "round"]
    assert [event.name for event in queries.events(reader, "r-1", level="warning")] == ["dropped"]


def test_every_view_can_be_read(reader):
    for table in TABLES:
        if table.view:
            assert query(reader, f"SELECT * FROM {table.view}").columns == tuple(
                column.name for column in table.columns
            )


def test_layer_statistics_as_sql(reader):
    answer = query(reader, "SELECT * FROM layer_statistics WHERE run = 'r-1' AND layer = 'conv.bias'")
    assert answer.columns[:9] == ("run", "round", "node", "step", "group", "at", "family", "layer", "count")
    assert len(answer.rows) == 17
    found = query(reader, "SELECT round, node, l2, mean, max, nans, sparsity FROM layer_statistics "
                          "WHERE family = 'gradient' AND layer = 'conv.bias' AND round = 1 ORDER BY node")  # fmt: skip
    wanted = LayerStats(Where("r-1"), 0.0, "gradient", sums(8), TABLE.digest)
    assert found.rows[0][:2] == (1, "c10")
    values = [wanted.get(name)[1] for name in ("l2", "mean", "max", "nans", "sparsity")]
    np.testing.assert_allclose(found.rows[0][2:], values, rtol=1e-5)
    groups = query(reader, "SELECT node, \"group\", step, typeof(round) FROM layer_statistics WHERE family = 'weight'")
    assert groups.rows == [(None, "edge-1", None, "integer")] * 3


def test_layer_statistics_show_nan_as_null_and_infinity_as_it_is(tmp_path):
    matrix = sums(1)
    matrix[0] = (5, 0, 0, 0, math.inf, -math.inf, 0, 5, 0)
    with open_store(tmp_path / "runs.db") as store:
        store.write([RUN, LayerStats(Where("r-1", 1, "c1"), 1.0, "gradient", matrix, TABLE.digest, "m", 1)])
        store.write([stats(1, "c1", 1, 2, "gradient.histogram")])
    with open_reader(tmp_path / "runs.db") as reader:
        sql = "SELECT mean, min, max, nans FROM layer_statistics WHERE layer = 'conv.weight'"
        assert query(reader, sql).rows == [(None, math.inf, -math.inf, 5.0)]


def test_a_condition_on_a_name_uses_the_index(reader):
    sql = "EXPLAIN QUERY PLAN SELECT value FROM metrics WHERE run = 'r-1' AND name = 'loss' AND round = 7"
    text = " ".join(row[3] for row in query(reader, sql).rows)
    assert "(run=? AND name=? AND round=?)" in text


def test_the_answer_is_limited(reader):
    answer = query(reader, "SELECT round FROM metrics WHERE name = 'loss' ORDER BY round", limit=3)
    assert (answer.rows, answer.more) == ([(0,), (0,), (0,)], True)
    assert query(reader, "SELECT 1 WHERE 0", limit=3).more is False


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM metric",
        "INSERT INTO symbol VALUES (999, 'x')",
        "UPDATE run SET name = 'x'",
        "DROP TABLE metric",
        "CREATE TABLE x (y)",
        "CREATE TEMP TABLE x (y)",
        "PRAGMA user_version = 7",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = DELETE",
        "ATTACH 'other.db' AS other",
        "VACUUM",
        "VACUUM INTO 'copy.db'",
        "WITH x AS (SELECT 1) DELETE FROM metric",
        "BEGIN IMMEDIATE",
        "REINDEX",
        "SELECT load_extension('x')",
        " \n-- a remark\nDELETE FROM run",
    ],
)
def test_people_cannot_write(reader, sql, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(StoreError, match="Only reading is allowed"):
        query(reader, sql)
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    assert len(queries.list_runs(reader)) == 3


@pytest.mark.parametrize("sql", ["SELEKT 1", "SELECT * FROM nowhere", "SELECT 1; SELECT 2", "SELECT '\udc80'"])
def test_a_wrong_query_is_answered(reader, sql):
    with pytest.raises(StoreError, match=r"The query failed: .* docs/schema.md"):
        query(reader, sql)


def test_a_reader_sends_few_texts_of_statements_however_long_a_run_gets(tmp_path, monkeypatch):
    """A connection keeps what it has prepared by its text, so that a list of another length is another statement."""
    texts, run_statement, rounds = set(), Database._run, 70

    def noted(database, sql, values):
        texts.add(sql)
        return run_statement(database, sql, values)

    monkeypatch.setattr(Database, "_run", noted)
    with open_store(tmp_path / "runs.db") as store:
        store.write([RUN])
        for number in range(rounds):
            store.write([stats(number, client, number, number + 1) for client in ("c1", "c2")])
            with open_reader(tmp_path / "runs.db") as reader:
                assert len(whole_layers(reader, "r-1", "gradient")[0]) == number + 1
                assert len(layer_history(reader, "r-1", "gradient", "c1").rounds) == number + 1
    lists = [text for text in texts if " IN (?" in text]
    assert 2 <= len(lists) <= 2 * (rounds.bit_length() + 1), lists


def test_a_reader_holds_few_pages(reader):
    """A walk over all rounds fills what it may hold, in each of a server's readers at once."""
    reader.database.connection.set_authorizer(None)
    assert reader.database.rows("PRAGMA cache_size") == [(-200,)]


def test_rounds_without_losses_are_not_sorted_when_losses_are_counted(tmp_path):
    """A run tells each round that nothing was lost; sorting these by source takes memory that grows with the run."""
    with open_store(tmp_path / "runs.db") as store:
        none = [metric(number, None, 0.0, sequence=number + 1, name="monitor.lost") for number in range(50)]
        store.write([RUN, *none, metric(50, None, 3.0, sequence=51, name="monitor.lost")])
    with open_reader(tmp_path / "runs.db") as reader:
        counted = reader.database.rows(f"SELECT m.value {queries.LOSSES}", (reader.names.number("r-1"),))
        assert counted == [(3.0,)]
        assert queries.left_out(reader, "r-1") == (3, 0)


def test_a_reader_keeps_few_prepared_statements(tmp_path, monkeypatch):
    """Each of a server's readers fills what it may keep, the one that is seldom needed after hours."""
    kept, connect = [], sqlite3.connect

    def noted(*arguments, cached_statements=128, **options):
        kept.append(cached_statements)
        return connect(*arguments, cached_statements=cached_statements, **options)

    with open_store(tmp_path / "runs.db") as store:
        store.write([RUN])
    monkeypatch.setattr(sqlite3, "connect", noted)
    with open_reader(tmp_path / "runs.db"):
        assert kept == [16]
