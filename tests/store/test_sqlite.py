# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
import sqlite3

import pytest

from fedvitals.errors import StoreError
from fedvitals.protocols import History, Sink
from fedvitals.records import Metric, Where
from fedvitals.store import open_reader, open_store, symbols, writer
from fedvitals.store.columns import Constant, insertions
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.read import queries
from fedvitals.store.read.nodes import nodes_by_number
from fedvitals.store.sqlite import SqliteStore
from support.store_contract import StoreContract


class TestSqlite(StoreContract):
    def make(self, folder):
        return SqliteStore(folder / "runs.db")

    def make_second(self, store):
        return SqliteStore(store.path.with_name("second.db"))

    def reopen(self, store):
        store.close()
        return SqliteStore(store.path)

    def history(self, store, run="r-1"):
        return _Asked(store.path, run)

    def read(self, store, kind, run="r-1"):
        with open_reader(store.path) as reader:
            return queries.records(reader, run, kind)

    def run(self, store, run="r-1"):
        with open_reader(store.path) as reader:
            return queries.get_run(reader, run)


class _Asked:
    """A history that opens the store for each question, as the dashboard does."""

    def __init__(self, path, run):
        self._path, self._run = path, run

    def __getattr__(self, name):
        def ask(*args, **kwargs):
            with open_reader(self._path) as reader:
                return getattr(reader.history(self._run), name)(*args, **kwargs)

        return ask


def test_it_is_what_it_says(tmp_path):
    with open_store(tmp_path / "runs.db") as store:
        assert isinstance(store, Sink)
        store.write(())
        assert not store.path.exists()
        from support.store_contract import RUN

        store.write([RUN])
        with open_reader(store.path) as reader:
            assert isinstance(reader.history("r-1"), History)


@pytest.mark.parametrize("limit", [SQLITE.numbered, 40, 5])
@pytest.mark.parametrize("count", [1, 3, 25, 61, 600])
def test_rows_of_columns_are_those_that_are_inserted_one_by_one(count, limit):
    """Columns that vary, count up, are the same in each row, or are always NULL; NaN is NULL as everywhere."""
    columns = ([*range(count)], [math.nan if i % 7 else i / 3 for i in range(count)], Constant("x"), Constant(None))
    stored = []
    for numbered in (0, limit):
        connection = sqlite3.connect(":memory:", isolation_level=None)
        database = Database(connection, dataclasses.replace(SQLITE, numbered=numbered), "memory")
        database.execute("CREATE TABLE t (arrival INTEGER PRIMARY KEY, a INTEGER, b REAL, c TEXT, d REAL, e INTEGER)")
        database.insert("INSERT INTO t (a, b, c, d, e)", [*columns, range(5, 5 + count)])
        stored.append(database.rows("SELECT * FROM t ORDER BY arrival"))
    assert stored[0] == stored[1]
    assert [(a, e) for _, a, _, _, _, e in stored[0]] == [(i, i + 5) for i in range(count)]


def test_no_statement_binds_more_values_than_allowed():
    columns = [[*range(700)], Constant(1), [*range(700)], range(700)]
    statements = [*insertions("INSERT INTO t (a, b, c, d)", columns, 100)]
    assert max(len(values) for _, values in statements) <= 100
    assert len({statement for statement, _ in statements}) <= 3


def test_a_column_that_is_refused_costs_the_whole_transaction():
    database = Database(sqlite3.connect(":memory:", isolation_level=None), SQLITE, "memory")
    database.execute("CREATE TABLE t (a INTEGER NOT NULL)")
    database.execute("BEGIN")
    with pytest.raises(StoreError):
        database.insert("INSERT INTO t (a)", [[i if i != 30 else None for i in range(50)]])
    database.rollback()
    assert database.rows("SELECT * FROM t") == []


def test_a_row_that_is_refused_costs_the_whole_transaction():
    database = Database(sqlite3.connect(":memory:", isolation_level=None), SQLITE, "memory")
    database.execute("CREATE TABLE t (a INTEGER NOT NULL)")
    database.execute("BEGIN")
    with pytest.raises(StoreError):
        database.many("INSERT INTO t (a) VALUES (?)", [(i if i != 30 else None,) for i in range(50)])
    database.rollback()
    assert database.rows("SELECT * FROM t") == []


def test_a_writer_remembers_a_bounded_number_of_names(tmp_path, monkeypatch):
    """Senders may bear ever new names; all are stored, and none costs memory for good."""
    monkeypatch.setattr(symbols, "NAMES_REMEMBERED", 50)
    monkeypatch.setattr(writer, "NAMES_REMEMBERED", 50)
    nodes, names = [f"c{i}" for i in range(200)], [f"metric{i}" for i in range(200)]
    with SqliteStore(tmp_path / "runs.db") as store:
        for turn in range(2):  # the second time, all are known to the file only
            for i, (node, name) in enumerate(zip(nodes, names, strict=True)):
                store.write([Metric(Where("r", turn, node), 0.0, name, float(i), "s", 200 * turn + i)])
                assert len(store._writer._symbols._numbers) <= 60
                assert len(store._writer._nodes.get("r", ())) <= 51
    with open_reader(tmp_path / "runs.db") as reader:
        counted = reader.database.rows("SELECT COUNT(*), COUNT(DISTINCT name), COUNT(DISTINCT node) FROM metric")
        assert counted == [(400, 200, 200)]
        assert {*nodes_by_number(reader, "r").values()} == {*nodes}
        assert {*queries.metric_names(reader, "r")} == {*names}
        texts = [text for (text,) in reader.database.rows("SELECT text FROM symbol")]
        assert len(texts) == len({*texts})
