# SPDX-License-Identifier: Apache-2.0
"""The file itself: who may write it, what is refused, which schema it has, and who reads it meanwhile."""

import os
import re
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from documentation.pages import schema_page
from fedvitals.errors import ConfigError, StoreError
from fedvitals.records import Layer, LayerStats, LayerTable, Metric, Run, Where
from fedvitals.store import ddl, open_reader, open_store, schema
from fedvitals.store.dialect import SQLITE, Dialect
from fedvitals.store.read import queries
from fedvitals.store.sqlite import SqliteStore, maintain_sqlite
from fedvitals.store.upkeep import compaction
from fedvitals.store.upkeep.doctor import broken_blocks
from fedvitals.store.upkeep.repair import mend
from support.conditions import holds_for_each
from support.paths import GOLDEN, ROOT
from support.store_contract import RUN, metric, stats

GOLDEN = {version: GOLDEN / f"schema_v{version}.sql" for version in (1, 2, 3, 4, 5)}
V4 = GOLDEN[4].parent / "store_v4.sql"
NEXT = schema.VERSION + 1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


def dump(path):
    database = sqlite3.connect(path)
    found = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid").fetchall()
    (version,), (application,) = (
        database.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id")
    )
    database.close()
    pragmas = [f"PRAGMA user_version = {version}", f"PRAGMA application_id = {application}"]
    return ";\n\n".join([*pragmas, *(sql for (sql,) in found)]) + ";\n"


def test_nothing_is_made_before_the_first_write_and_then_folders_too(tmp_path):
    store = open_store(tmp_path / "a" / "b" / "runs.db")
    assert list(tmp_path.iterdir()) == []
    store.write([RUN])
    store.close()
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == ["runs.db"]


def test_a_closed_store_opens_again_on_the_next_write(path):
    store = open_store(path)
    store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
    store.close()
    store.close()
    store.write([metric(1, "c1", 1.0, sequence=1), metric(2, "c1", 2.0, sequence=2)])
    store.close()
    with open_reader(path) as reader:
        assert reader.history("r-1").series("loss", "c1") == ([1, 2], [1.0, 2.0])


def test_the_schema_of_each_version_is_what_it_was(path, tmp_path, monkeypatch):
    """Stores in the field have exactly this: a change needs a new version and a migration, not another golden file."""
    with open_store(path) as store:
        store.write([RUN])
    assert dump(path) == GOLDEN[schema.VERSION].read_text(), "a new version needs a golden file of its own"
    for version in range(1, schema.VERSION):
        old = tmp_path / f"{version}.db"
        with monkeypatch.context() as patch:
            patch.setattr(
                ddl, "TABLES", tuple(of_version(table, version) for table in schema.TABLES if table.since <= version)
            )
            patch.setattr(ddl, "VERSION", version)
            patch.setattr("fedvitals.store.sqlite.VERSION", version)
            with maintain_sqlite(make_empty(old)):
                pass
        assert dump(old) == GOLDEN[version].read_text()


def of_version(table, version):
    return replace(table, columns=tuple(column for column in table.columns if column.since <= version))


def make_empty(path):
    path.touch()
    return path


@pytest.mark.parametrize("version", GOLDEN)
def test_a_store_of_any_version_is_written_and_then_read(path, version):
    database = sqlite3.connect(path)
    database.executescript(GOLDEN[version].read_text())
    database.close()
    with open_store(path) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
    with open_reader(path) as reader:
        assert reader.history("r-1").latest("loss", 1) == {"c1": 1.0}
    assert sorted(dump(path).split(";\n\n")) == sorted(GOLDEN[schema.VERSION].read_text().split(";\n\n"))


def test_blocks_without_checksums_are_read_and_merged_with_new_ones(path):
    """What a fedvitals of schema version 4 wrote: two clients, 80 rounds, the older ones merged."""
    database = sqlite3.connect(path)
    database.executescript(V4.read_text())
    before = database.execute("SELECT numbers FROM layer_matrix").fetchall()
    database.close()
    (table,) = (LayerTable("parameter", (Layer("a", (2, 2), "float32"), Layer("b", (3,), "float32"))),)
    matrix = np.array([[5.0, 1.0, 2.0, 3.0, -1.0, 1.0, 0.0, 0.0, 0.0]] * 2)
    with open_store(path) as store:
        for number in range(80, 160):
            place = Where("r-1", number, "c0")
            store.write([LayerStats(place, 100.0 + number, "gradient", matrix, table.digest, "monitor", 1000 + number)])
    with open_reader(path) as reader:
        rounds, nodes, values = reader.history("r-1").matrix("gradient", "l2", "a")
    assert (rounds, nodes) == ([*range(160)], ["c0", "c1"])
    np.testing.assert_allclose(values[:2], [[0.86101492, 2.71957914], [1.80722027, 1.19458294]], rtol=1e-6)
    np.testing.assert_allclose(values[80:, 0], 2**0.5, rtol=1e-6)
    after = sqlite3.connect(path).execute("SELECT numbers FROM layer_matrix").fetchall()
    assert {len(blob) % 36 for (blob,) in before} == {0}
    assert {len(blob) % 36 for (blob,) in after} == {0, 4}


@pytest.mark.parametrize("column", ["numbers", "coordinates", "details"])
def test_a_changed_byte_of_a_block_is_recognised_named_and_mended(path, column):
    matrix = np.array([[5.0, 1.0, 2.0, 3.0, -1.0, 1.0, 0.0, 0.0, 0.0]])
    table = LayerTable("parameter", (Layer("a", (5,), "float32"),))
    run = Run("r-1", "r", tables=(table,), source="s", sequence=0)
    with open_store(path) as store:
        store.write([run])
        for number in (1, 2):
            place = Where("r-1", number, "c0")
            store.write([LayerStats(place, 1.0, "gradient", matrix, table.digest, "s", number)])
    owner = "layer_matrix" if column == "numbers" else "layer_block"
    first = "block" if column == "numbers" else "arrival"
    database = sqlite3.connect(path)
    ((blob,),) = database.execute(f"SELECT {column} FROM {owner} WHERE {first} = 1")
    database.execute(f"UPDATE {owner} SET {column} = ? WHERE {first} = 1", (bytes([blob[0] ^ 1]) + blob[1:],))
    database.commit()
    database.close()
    with open_reader(path) as reader, pytest.raises(StoreError, match=r"damaged.*doctor"):
        reader.history("r-1").across("gradient", ["l2"], 1)
    with maintain_sqlite(path) as opened:
        assert broken_blocks(opened) == [1]
    assert "Removed 1 blocks of layer statistics that could not be unpacked." in mend(path)
    with maintain_sqlite(path) as opened:
        assert broken_blocks(opened) == []
    with open_reader(path) as reader:
        assert reader.history("r-1").matrix("gradient", "l2", "a")[0] == [2]


def test_a_new_version_adds_its_columns_and_tables_to_an_old_store(path, monkeypatch):
    with open_store(path) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
    table = schema.TABLE["run_node"]
    wider = schema.Table(
        table.name, table.meaning, (*table.columns, schema.Column("role", "text", "", True, NEXT)), table.key
    )
    new = schema.Table("note", "", (schema.Column("text", "text", ""),), view="notes", since=NEXT)
    tables = (*(wider if t is table else t for t in schema.TABLES), new)
    monkeypatch.setattr(ddl, "TABLES", tables)
    monkeypatch.setattr(ddl, "VERSION", NEXT)
    monkeypatch.setattr("fedvitals.store.sqlite.VERSION", NEXT)
    monkeypatch.setattr("fedvitals.store.read.reader.VERSION", NEXT)
    monkeypatch.setattr(ddl, "MIGRATIONS", {NEXT: ("UPDATE run_node SET role = 'client'",)})
    with pytest.raises(StoreError, match=f"has schema version {schema.VERSION}; this fedvitals reads version {NEXT}"):
        open_reader(path)
    with open_store(path) as store:
        store.write([metric(2, "c1", 2.0, sequence=2)])
    with open_reader(path) as reader:
        assert reader.database.rows("SELECT role FROM run_node") == [("client",)]
        assert reader.database.rows("SELECT * FROM notes") == []
        assert reader.history("r-1").rounds() == [1, 2]


def test_a_newer_store_is_refused_and_left_alone(path):
    with open_store(path) as store:
        store.write([RUN])
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    before = path.read_bytes()
    for use in (open_reader, lambda path: open_store(path).write([RUN])):
        with pytest.raises(StoreError, match=r"schema version 99.*Upgrade fedvitals"):
            use(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"name,age\nx,1\n", b"\x00" * 5000, b"SQLite"])
def test_what_is_no_database_is_refused_and_left_alone(path, content):
    path.write_bytes(content)
    for use in (open_reader, lambda path: open_store(path).write([RUN])):
        with pytest.raises(StoreError, match="no SQLite database"):
            use(path)
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]


def test_a_damaged_database_is_refused(path):
    path.write_bytes(b"SQLite format 3\x00" + b"x" * 5000)
    with pytest.raises(StoreError, match="it is no SQLite database"):
        open_reader(path)
    with pytest.raises(StoreError, match="it is no SQLite database"):
        open_store(path).write([RUN])


def test_a_database_of_another_program_is_refused_and_left_alone(path):
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE holiday (day TEXT)")
    database.commit()
    database.close()
    before = path.read_bytes()
    for use in (open_reader, lambda path: open_store(path).write([RUN])):
        with pytest.raises(StoreError, match="another program"):
            use(path)
    assert path.read_bytes() == before


def test_a_folder_a_missing_and_an_empty_file_are_named(path):
    with pytest.raises(StoreError, match=r"is a folder\. Name a file"):
        open_store(path.parent).write([RUN])
    with pytest.raises(StoreError, match="is a folder"):
        open_reader(path.parent)
    with pytest.raises(StoreError, match=r"There is no store .*runs.db.*--store.*fedvitals demo"):
        open_reader(path)
    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        open_reader(path)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_store(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be created"):
        open_store(tmp_path / "file" / "runs.db").write([RUN])


def test_the_environment_wins_over_a_relative_path_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("runs.db").path == Path("runs.db")
    assert open_store().path == Path("runs.db")
    monkeypatch.setenv("FEDVITALS_STORE", str(tmp_path / "set.db"))
    assert open_store("runs.db").path == open_store().path == tmp_path / "set.db"
    assert open_store("/somewhere/runs.db").path == Path("/somewhere/runs.db")
    monkeypatch.setenv("FEDVITALS_STORE", "postgresql://host/db")
    assert open_store("runs.db").address.url == "postgresql://host/db"


def test_what_is_neither_file_nor_postgresql_is_refused():
    for target in ("http://host", ":memory:", ""):
        with pytest.raises(ConfigError, match="A store is a file or postgresql://"):
            open_reader(target)
    with pytest.raises(ConfigError) as refused:
        open_reader("mysql://ann:secret@host/runs")
    assert "secret" not in str(refused.value)


@pytest.mark.thorough
def test_a_second_process_may_read_but_not_write(path):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.store_contract import RUN; from fedvitals.store import open_reader, open_store\n"
        f"with open_reader({str(path)!r}) as reader: print(reader.history('r-1').rounds())\n"
        f"open_store({str(path)!r}).write([RUN])\n"
    )
    with open_store(path) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
        assert second.stdout == "[1]\n"
        assert f"is being written by process {os.getpid()}" in second.stderr
        store.write([metric(2, "c1", 1.0, sequence=2)])
    third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (third.stdout, third.stderr) == ("[1, 2]\n", "")


def test_two_stores_of_one_process_take_turns(path):
    """A notebook cell that is run again makes a second monitor before the first is closed."""
    first, second = SqliteStore(path), SqliteStore(path)
    for i in range(6):
        (first, second)[i % 2].write([RUN, metric(i, f"c{i}", 1.0, sequence=i + 1), stats(i, f"c{i}", i, 100 + i)])
    first.write([metric(5, "c5", 1.0, sequence=6)])  # delivered to the other before
    first.close()
    second.write([metric(6, "c6", 1.0, sequence=7)])
    second.close()
    with open_reader(path) as reader:
        assert reader.history("r-1").nodes() == [f"c{i}" for i in range(7)]
        assert len(queries.records(reader, "r-1", Metric)) == 7
    assert [file.name for file in path.parent.iterdir() if "lock" in file.name] == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_cannot_write_and_does_no_harm(path):
    store = open_store(path)
    store.write([RUN])
    child = os.fork()
    if child == 0:
        try:
            store.close()
            store.write([metric(1, "child", 1.0, sequence=1)])
        except StoreError as error:
            os._exit(0 if "its child" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    store.write([metric(1, "c1", 1.0, sequence=1)])
    store.close()
    with open_reader(path) as reader:
        assert reader.history("r-1").nodes() == ["c1"]


def test_a_batch_that_fails_leaves_nothing_and_the_next_one_works(path):
    with open_store(path) as store:
        store.write([RUN])
        with pytest.raises(StoreError, match="could not be written"):
            store.write([metric(1, "new", 1.0, sequence=1), metric(2**70, "c1", 1.0, sequence=2)])
        store.write([metric(1, "new", 2.0, sequence=1)])
    with open_reader(path) as reader:
        assert reader.history("r-1").latest("loss", 1) == {"new": 2.0}


def test_a_lone_surrogate_is_replaced_not_fatal(path):
    with open_store(path) as store:
        store.write([RUN, metric(1, "c\udc80", 1.0, sequence=1)])
        store.write([metric(2, "c\udc80", 1.0, sequence=2)])
    with open_reader(path) as reader:
        assert reader.history("r-1").nodes() == ["c?"]


def test_numpy_numbers_are_numbers(path):
    np = pytest.importorskip("numpy")
    with open_store(path) as store:
        store.write([metric(np.int64(1), "c1", np.float32(0.5), sequence=np.int64(1))])
    with open_reader(path) as reader:
        assert reader.history("r-1").series("loss", "c1") == ([1], [0.5])


def test_many_read_while_one_writes(path, monkeypatch):
    monkeypatch.setattr(compaction, "CHUNK_ROUNDS", 3)
    done = threading.Event()
    store = open_store(path)
    store.write([RUN])

    def watch(_):
        """What is read never shrinks, and every round is whole: batches are seen entirely or not at all."""
        seen = 0
        while not done.is_set():
            with open_reader(path) as reader:
                for _ in range(3):
                    rounds, _, matrix = reader.history("r-1").matrix("gradient", "count", "conv.bias")
                    assert rounds == list(range(len(rounds)))
                    assert (matrix == 50).all()
                    assert len(rounds) >= seen
                    seen = len(rounds)
        return seen

    with ThreadPoolExecutor(4) as pool:
        watchers = [pool.submit(watch, i) for i in range(4)]
        for r in range(80):
            store.write([stats(r, f"c{c}", c, 4 * r + c + 1) for c in range(4)])
        done.set()
        assert holds_for_each(watcher.result() > 0 for watcher in watchers)
    store.close()
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == list(range(80))
        assert reader.database.rows("SELECT COUNT(*) FROM layer_matrix WHERE layer >= 0")[0][0] > 30  # compacted


def test_a_store_in_a_folder_that_cannot_be_written_is_read_as_it_lies(path, monkeypatch):
    with open_store(path) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root, who may write anywhere
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == [1]
        assert [file.name for file in path.parent.iterdir()] == ["runs.db"]


@pytest.mark.parametrize("name", ["a b.db", "50%.db", "what?.db", "#1.db", "ü.db", "file:x.db"])
def test_a_path_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with open_store(name) as store:
        store.write([RUN])
    with open_reader(name) as reader:
        assert queries.find_run(reader, "digits") == "r-1"
    assert name in [file.name for file in tmp_path.iterdir()]


def test_the_schema_is_documented_and_the_page_is_up_to_date():
    assert (ROOT / "docs" / "schema.md").read_text() == schema_page()
    for table in schema.TABLES:
        assert table.meaning
        assert all(column.meaning for column in table.columns), table.name


def test_nothing_of_sqlite_slips_into_what_postgresql_is_given():
    """Nor the other way round; test_store_postgres runs it."""
    types = {"key": "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY", "symbol": "INTEGER", "integer": "BIGINT",
             "real": "DOUBLE PRECISION", "text": "TEXT", "json": "TEXT", "blob": "BYTEA"}  # fmt: skip
    postgresql = Dialect("postgresql", types, (), "BEGIN", "%s")
    text = ";\n".join(ddl.upgrade(0, postgresql))
    assert not re.search(r"REAL|BLOB|AUTOINCREMENT|WITHOUT ROWID|json_each|fedvitals_|PRAGMA", text)
    assert postgresql.sql("SELECT ? + ? LIKE 'a%'") == "SELECT %s + %s LIKE 'a%%'"
    assert SQLITE.sql("SELECT ? + ?") == "SELECT ? + ?"


WRITES = """
import sys
from fedvitals.records import Metric, Where
from fedvitals.store import open_store
store = open_store(sys.argv[1])
store.write([Metric(Where("r", int(sys.argv[2])), 1.0, "loss", 1.0, "child", int(sys.argv[2]))])
print("written", flush=True)
sys.stdin.readline()
store.close()
"""


@pytest.mark.thorough
def test_looking_at_a_store_takes_no_lock_away_from_its_readers(path):
    """POSIX drops a process's locks on a file when it closes that file anywhere: then a writer removes the log."""

    def writing(number):
        command = [sys.executable, "-c", WRITES, str(path), str(number)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "written\n"
        return child

    first = writing(0)
    with open_reader(path) as reader:
        assert reader.history("r").rounds() == [0]
        open_reader(path).close()  # looks at the file, too
        first.communicate("\n")  # ends, and would fold the log into the store
        second = writing(1)
        assert reader.history("r").rounds() == [0, 1]
        second.communicate("\n")
