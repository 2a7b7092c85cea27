# SPDX-License-Identifier: Apache-2.0
"""`fedvitals doctor`: what it sees, what it mends, and what it says about both."""

import contextlib
import importlib.util
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fedvitals.errors import StoreError
from fedvitals.records import Event, Metric, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.read import queries
from fedvitals.store.upkeep.doctor import examine
from fedvitals.store.upkeep.repair import mend
from fedvitals.testing import tiny_run
from fedvitals.transport.queue import Queue
from fedvitals.transport.spill import Spill, leftover, to_json
from support.paths import TESTS
from support.store_contract import RUN, metric, stats
from support.verbs import result, run


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1), *(stats(r, "c1", r, 10 + r) for r in range(90))])
    return path


def states(path):
    return {sign.what: sign.state for sign in examine(path)}


def change(path, *statements):
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def killed(path):
    """Leaves a lock, a log and a run without an end."""
    code = (
        "import os, sys\nfrom fedvitals.store import open_store\nfrom support.store_contract import RUN, metric\n"
        "open_store(sys.argv[1]).write([RUN, metric(2, 'c2', 1.0, at=150.0, sequence=2)])\nos.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, path], cwd=TESTS, check=False).returncode == -signal.SIGKILL


def test_a_healthy_store_is_fine(tmp_path, capsys):
    tiny_run(tmp_path / "runs.db", strict=True)
    found = result(capsys, "doctor", tmp_path / "runs.db")
    assert found["trouble"] is False
    assert {sign["what"] for sign in found["environment"]} >= {"fedvitals", "torch", "kernel", "sqlite", "extras"}
    assert {sign["state"] for sign in found["store"]} == {"fine"}
    code, out, _ = run(capsys, "doctor", tmp_path / "runs.db", "--mend")
    assert code == 0
    assert "There was nothing to mend." in out


def test_without_a_store_the_installation_is_examined(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVITALS_STORE", raising=False)
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else there(name))
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "No store here" in out
    assert "llvm" in out or "torch" in out
    assert "pip install 'fedvitals[wandb" in " ".join(out.split())
    code, _, err = run(capsys, "doctor", "nowhere.db")
    assert code == 2
    assert "There is no store" in err


def test_what_a_killed_process_leaves_is_noted_and_cleared_up(path, capsys):
    killed(path)
    signs = examine(path)
    assert {(sign.what, sign.state) for sign in signs} >= {("writer", "note"), ("log", "note"), ("runs", "note")}
    assert result(capsys, "doctor", path)["trouble"] is False  # none of it harms
    done = " ".join(mend(path))
    for words in ("Removed the lock", "Folded", "Closed 1 runs that were killed"):
        assert words in done
    assert set(states(path).values()) == {"fine"}
    with open_reader(path) as reader:
        assert queries.get_run(reader, "r-1").finished == 150.0
    assert [file.name for file in path.parent.iterdir()] == ["runs.db"]
    assert mend(path) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("statements", "what", "words"),
    [
        (["DELETE FROM symbol WHERE text = 'loss'"], "names", "Gave 1 lost names a stand-in"),
        (
            ["INSERT INTO delivered SELECT run, source, first + 3, last + 4 FROM delivered WHERE last > 50"],
            "identity",
            "Set the delivered records of 1 sources in order",
        ),
        (["UPDATE layer_matrix SET numbers = x'00' WHERE block = 90"], "statistics", "Removed 1 blocks"),
        (["UPDATE layer_block SET coordinates = x'0000' WHERE arrival = 90"], "statistics", "Removed 1 blocks"),
        (["DELETE FROM layer_matrix WHERE layer = 1"], "statistics", "Removed 1 blocks"),
        (["DELETE FROM layer_block WHERE arrival = 90"], "statistics", "Removed 1 blocks"),
        (["UPDATE run SET config = '17'"], "values", "Replaced 1 texts"),  # JSON, but no object
        (["UPDATE layer SET shape = '{}' WHERE position = 1"], "values", "texts and values that could not"),
    ],
)
def test_what_is_muddled_is_found_and_set_in_order(path, capsys, statements, what, words):
    change(path, *statements)
    assert states(path)[what] == "trouble"
    code, out, _ = run(capsys, "doctor", path)
    assert code == 1
    assert "--mend" in out
    code, out, _ = run(capsys, "doctor", path, "--mend")
    assert code == 0
    assert words in out
    assert "trouble" not in states(path).values()
    with open_reader(path) as reader:
        assert len(reader.history("r-1").matrix("gradient", "l2", "conv.bias")[0]) > 0
    with open_store(path) as store:  # and it can be written on
        store.write([metric(5, "c1", 1.0, sequence=500)])


def test_spoilt_indexes_are_rebuilt(path):
    """A row is slipped in while the index claims to be about other rows."""
    name = "name LIKE 'metric_by%'"
    change(
        path, "PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET sql = sql || ' WHERE round > 5' WHERE {name}"
    )
    columns = 'run, 2, node, step, layer, "group", at, name, value, source'
    change(path, f"INSERT INTO metric SELECT 77, {columns}, 77 FROM metric LIMIT 1")
    restored = f"UPDATE sqlite_master SET sql = replace(sql, ' WHERE round > 5', '') WHERE {name}"
    change(path, "PRAGMA writable_schema = ON", restored)
    assert states(path)["file"] == "trouble"
    assert "Rebuilt the indexes" in " ".join(mend(path))
    assert states(path)["file"] == "fine"


def test_what_was_spilled_is_taken_back(path, capsys):
    spill = Spill(Path(f"{path}.d"), "store")
    spill.append(Event(Where("r-1", 3), 1.0, "error", "log", "kept", {}, "m", 700))
    assert leftover(Path(f"{path}.d")) == []  # its queue is alive
    spill.close(keep=True)
    assert {sign["what"]: sign["state"] for sign in result(capsys, "doctor", path)["store"]}["spilled"] == "note"
    found = result(capsys, "doctor", path, "--mend")
    assert "Took back what 1 files" in " ".join(found["mended"])
    with open_reader(path) as reader:
        assert [event.message for event in queries.events(reader, "r-1")] == ["kept"]
    assert leftover(Path(f"{path}.d")) == []


def test_a_store_that_is_being_written_is_examined_but_not_mended(path):
    code = (
        "import sys\nfrom fedvitals.store import open_store\nfrom support.store_contract import RUN\n"
        "store = open_store(sys.argv[1])\nstore.write([RUN])\nprint(flush=True)\nsys.stdin.read()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, path], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    writer.stdout.readline()
    assert states(path)["writer"] == "fine"
    assert f"process {writer.pid} writes it" in [sign.text for sign in examine(path)]
    with pytest.raises(StoreError, match=f"being written by process {writer.pid}"):
        mend(path)
    writer.communicate()


def test_what_is_no_store_is_not_touched(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("remember the milk")
    change(tmp_path / "other.db", "CREATE TABLE holiday (day TEXT)")
    for path, words in ((text, "could be read"), (tmp_path / "other.db", "another program")):
        before = path.read_bytes()
        assert "trouble" in states(path).values()
        with pytest.raises(StoreError, match=words):
            mend(path)
        assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", "other.db"]


def poisoned(path):
    """A store with a round that is a text, as a host may have given it: SQLite keeps anything in any column."""
    watched = tiny_run(path, strict=True, rounds=3)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for table in ("metric", "event", "span", "run_round"):
            database.execute(f"UPDATE {table} SET round = 'zero' WHERE round = 1")
        database.execute("UPDATE layer_block SET first_round = 'zero', last_round = 'zero' WHERE first_round = 1")
    return watched.run.id


@pytest.mark.thorough
def test_a_round_that_is_no_integer_is_read_around_and_mended(tmp_path, capsys):
    path = tmp_path / "runs.db"
    identity = poisoned(path)
    for verb in ("runs", "show", "findings", "check", "profile", "report"):
        rest = () if verb == "runs" else (identity, "-o", tmp_path / "report.md") if verb == "report" else (identity,)
        code, _, error = run(capsys, verb, *rest, "--store", path)
        assert code in (0, 1), error
    with open_reader(path) as reader:
        assert reader.history(identity).rounds() == [0, 2]
    code, out, _ = run(capsys, "doctor", path)
    assert code == 1
    assert "have a round or step that is no integer" in out
    code, out, _ = run(capsys, "doctor", path, "--mend")
    assert code == 0
    assert "out of rounds and steps that are no integers" in " ".join(out.split())
    assert not [sign for sign in examine(path) if sign.state == "trouble"]
    with open_reader(path) as reader:
        assert reader.history(identity).rounds() == [0, 2]
        ((kept,),) = reader.database.rows("SELECT COUNT(*) FROM metrics WHERE round IS NULL AND name = 'time.client'")
        assert kept > 0  # they belong to no round, but are there


def test_spilled_records_of_a_round_that_is_no_integer_come_back_in_no_round(tmp_path, capsys):
    """What earlier versions left beside the store when somebody counted his rounds by words."""
    path = tmp_path / "runs.db"
    identity = tiny_run(path, strict=True).run.id
    folder = tmp_path / "runs.db.d"
    folder.mkdir()
    events = [
        Event(Where(identity, "zero", 7), 1.0, "warning", "monitor.error", "closing a round", {}, "m", 1),
        Event(Where(identity, 0), 1.0, "warning", "other", "another", {}, "m", 2),
    ]
    (folder / "spill-sqlitestore-1-00.jsonl").write_text("".join(f"{to_json(event)}\n" for event in events))
    code, out, _ = run(capsys, "doctor", path, "--mend")
    assert code == 0
    assert "Took back what 1 files" in out
    assert not any(folder.glob("spill-*"))
    with open_reader(path) as reader:
        found = {event.name: event.where for event in queries.records(reader, identity, Event) if event.source == "m"}
    assert found == {"monitor.error": Where(identity, None, "7"), "other": Where(identity, 0)}


def test_a_record_that_a_store_cannot_take_costs_only_itself(tmp_path):
    path = tmp_path / "runs.db"
    store = open_store(path)
    queue = Queue(store)
    good = [metric(number, "c1", 1.0, sequence=number + 1) for number in range(9)]
    bad = Metric(Where("r-1", "zero", "c1"), 1.0, "loss", 1.0, "m", 99)
    queue.put_many([RUN, *good[:4], bad, *good[4:]])
    assert not queue.flush()
    queue.close()
    assert queue.lost == {"bad record": 1}
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == list(range(9))
