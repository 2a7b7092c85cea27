# SPDX-License-Identifier: Apache-2.0
"""A store's file that is exchanged: the run goes on in a file of its own, and the foreign file stays as it is."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from fedvitals.errors import StoreError, StoreLostError
from fedvitals.records import Event, Metric, Where
from fedvitals.store import open_reader, open_store
from fedvitals.store.identity import logs_aside
from fedvitals.store.marks import set_mark
from fedvitals.store.read import queries
from fedvitals.store.upkeep.doctor import examine
from fedvitals.store.upkeep.repair import mend
from support.foreign_store import OTHER, batch, make_other, runs_and_rounds
from support.paths import TESTS
from support.small_training import ROUNDS, check, suffer
from support.store_contract import RUN


def start_other(path, *options):
    """Another process that writes a store of this name with a log of its own; it ends when its input is closed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.foreign_store", path, *options],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"written\n"
    return process


def killed_writer(path):
    """What a process leaves that is killed while it writes: a file, its log, its lock."""
    code = (
        "import os, sys\nfrom fedvitals.store import open_store\nfrom support.foreign_store import batch\n"
        "from support.store_contract import RUN\nstore = open_store(sys.argv[1])\nstore.write([RUN])\n"
        "for number in range(5): store.write(batch(number))\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, path], cwd=TESTS, check=False)
    assert path.with_name(f"{path.name}-wal").stat().st_size > 0


def is_sound(path):
    with closing(sqlite3.connect(path)) as database:
        return database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def events(path, run):
    with open_reader(path) as reader:
        return [event.name for event in queries.records(reader, run, Event)]


@pytest.mark.thorough
def test_a_store_replaced_between_two_batches(tmp_path):
    path = tmp_path / "runs.db"
    foreign = make_other(tmp_path / "other.db")
    with open_store(path) as store:
        store.write([RUN, *batch(0)])
        (tmp_path / "other.db").replace(path)
        store.write(batch(1))
        assert store.path == tmp_path / f"runs.db.rescued-{os.getpid()}"
    assert path.read_bytes() == foreign
    assert runs_and_rounds(store.path) == {"r-1": [0, 1]}
    assert events(store.path, "r-1") == ["store.replaced"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["runs.db", store.path.name]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["other store", "backup", "empty", "text"])
def test_a_store_overwritten_between_two_batches(tmp_path, how):
    """The same inode with another content: what the file held is gone, and counted."""
    path = tmp_path / "runs.db"
    make_other(tmp_path / "other.db")
    with open_store(path) as store:
        store.write([RUN, *batch(0)])
    if how == "backup":
        shutil.copyfile(path, tmp_path / "other.db")
    elif how != "other store":
        (tmp_path / "other.db").write_bytes(b"" if how == "empty" else b"notes of somebody\n" * 999)
    foreign = (tmp_path / "other.db").read_bytes()
    store.write(batch(1))
    store.close()
    store.write(batch(2))
    shutil.copyfile(tmp_path / "other.db", path)
    with pytest.raises(StoreLostError, match="was overwritten by another program") as caught:
        store.write(batch(3))
    assert caught.value.lost == 61
    store.write(batch(3))
    store.close()
    assert store.path == tmp_path / f"runs.db.continued-{os.getpid()}"
    assert path.read_bytes() == foreign
    assert runs_and_rounds(store.path) == {"r-1": [3]}
    with open_reader(store.path) as reader:
        assert queries.get_run(reader, "r-1") == replace(RUN, tables=queries.get_run(reader, "r-1").tables)
        (event,) = queries.records(reader, "r-1", Event)
        assert event.data == {"records": 61}
    assert [log.name for log in logs_aside(path)] == [f"runs.db-{name}.aside-{os.getpid()}" for name in ("shm", "wal")]


def test_a_store_overwritten_before_it_is_closed(tmp_path):
    path = tmp_path / "runs.db"
    foreign = make_other(tmp_path / "other.db")
    store = open_store(path)
    store.write([RUN, *batch(0)])
    shutil.copyfile(tmp_path / "other.db", path)
    with pytest.raises(StoreLostError, match="21 records that it held are lost"):
        store.close()
    assert path.read_bytes() == foreign
    assert not path.with_name("runs.db.lock").exists()
    with open_reader(store.path) as reader:
        assert queries.summary_of(reader, "r-1").lost == 21


@pytest.mark.thorough
def test_other_processes_can_write_the_file_that_replaced_ours(tmp_path):
    """Nothing of the exchanged store stays in their way: no lock, no log."""
    path = tmp_path / "runs.db"
    make_other(tmp_path / "other.db")
    with open_store(path) as store:
        store.write([RUN, *batch(0)])
        shutil.copyfile(tmp_path / "other.db", path)
        with pytest.raises(StoreLostError):
            store.write(batch(1))
        start_other(path).communicate()
        store.write(batch(1))
    assert runs_and_rounds(path) == {OTHER.id: list(range(51))}
    assert is_sound(path)


@pytest.mark.thorough
def test_deleted_and_made_again_by_another_process(tmp_path):
    """Both write on, each its own file; the log of the other one is never touched."""
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        store.write([RUN, *batch(0)])
        for file in tmp_path.iterdir():
            file.unlink()
        other = start_other(path)
        store.write(batch(1))
        assert path.with_name("runs.db-wal").stat().st_size > 0
        other.communicate()
        store.write(batch(2))
    assert runs_and_rounds(path) == {OTHER.id: list(range(51))}
    assert runs_and_rounds(store.path) == {"r-1": [0, 1, 2]}
    assert is_sound(path)
    assert is_sound(store.path)


def test_two_writers_of_one_process_whose_file_was_deleted_meet_again(tmp_path):
    path = tmp_path / "runs.db"
    with open_store(path) as first, open_store(path) as second:
        first.write([RUN, *batch(0)])
        second.write([OTHER, Metric(Where(OTHER.id, 0), 0.0, "loss", 0.5, "o", 1)])
        path.unlink()
        first.write(batch(1))
        second.write([Metric(Where(OTHER.id, 1), 1.0, "loss", 0.5, "o", 2)])
        assert first.path == second.path == path
    assert runs_and_rounds(path) == {"r-1": [0, 1], OTHER.id: [0, 1]}


@pytest.mark.parametrize("change", ["fold", "row", "deleted rows", "mode"])
def test_what_others_may_do_to_a_store_is_no_exchange(tmp_path, change):
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        store.write([RUN, *batch(0)])
        store.write(batch(1))
        code = (
            "import os, sqlite3, sys\nd = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
            + {
                "fold": "d.execute('PRAGMA wal_checkpoint(TRUNCATE)')",
                "row": "d.execute('INSERT INTO mark (run, kind, target, value, at) SELECT id, ?, ?, ?, 0 FROM run', "
                "('tag', 'good', ''))\nd.execute('PRAGMA wal_checkpoint(TRUNCATE)')",
                "deleted rows": "d.execute('DELETE FROM metric WHERE round = 1')\n"
                "d.execute('PRAGMA wal_checkpoint(TRUNCATE)')",
                "mode": "os.chmod(sys.argv[1], 0o600)",
            }[change]
        )
        subprocess.run([sys.executable, "-c", code, path], check=True)
        store.write(batch(2))
        assert store.path == path
    assert runs_and_rounds(path) == {"r-1": [0, 1, 2]}
    assert is_sound(path)


@pytest.mark.thorough
def test_a_log_that_a_killed_process_left_is_not_applied_to_another_file(tmp_path):
    path = tmp_path / "runs.db"
    killed_writer(path)
    make_other(tmp_path / "other.db")
    shutil.copyfile(tmp_path / "other.db", path)
    assert runs_and_rounds(path) == {OTHER.id: list(range(50))}  # a reader leaves the log out
    with pytest.raises(StoreError, match="lies the log of another file"):
        set_mark(path, OTHER.id, "tag", "good")
    signs = {sign.what: sign for sign in examine(path)}
    assert signs["log"].state == "trouble"
    assert signs["file"].state == "fine"
    assert "Moved runs.db-wal aside: it belongs to another file that had this name before." in mend(path)
    assert runs_and_rounds(path) == {OTHER.id: list(range(50))}
    assert is_sound(path)
    assert [sign.state for sign in examine(path) if sign.what in ("log", "replaced")] == ["fine", "note"]


@pytest.mark.thorough
def test_a_writer_moves_the_log_of_another_file_aside(tmp_path, caplog):
    path = tmp_path / "runs.db"
    killed_writer(path)
    make_other(tmp_path / "other.db")
    (tmp_path / "other.db").replace(path)
    with open_store(path) as store:
        store.write([RUN, *batch(9)])
    assert "lay the log of another store" in caplog.text
    assert runs_and_rounds(path) == {"r-1": [9], OTHER.id: list(range(50))}
    assert is_sound(path)
    assert len(logs_aside(path)) == 2


@pytest.mark.thorough
def test_a_log_that_a_reader_kept_is_not_applied_to_a_restored_backup(tmp_path):
    """While somebody reads, the log stays beside a store that is closed; so does the note that says whose it is."""
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        store.write([RUN, *batch(0)])
    shutil.copyfile(path, tmp_path / "backup.db")
    store.write(batch(1))
    store.close()
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        store.write(batch(2))
        assert reader.execute("SELECT COUNT(*) FROM run").fetchall() == [(1,)]
        store.close()
        assert path.with_name("runs.db-wal").stat().st_size > 0
    shutil.copyfile(tmp_path / "backup.db", path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom support.foreign_store import runs_and_rounds\n"
        "print(runs_and_rounds(Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], cwd=TESTS, capture_output=True, text=True, check=True)
    assert done.stdout == "{'r-1': [0]}\n"
    with open_store(path) as store:
        store.write(batch(3))
    assert runs_and_rounds(path) == {"r-1": [0, 3]}
    assert is_sound(path)


@pytest.mark.thorough
def test_a_log_without_its_file_is_kept(tmp_path):
    path = tmp_path / "runs.db"
    killed_writer(path)
    path.unlink()
    with open_store(path) as store:
        store.write([RUN, *batch(9)])
    assert runs_and_rounds(path) == {"r-1": [9]}
    assert any(log.stat().st_size > 0 for log in logs_aside(path))


def test_a_folder_copied_from_a_killed_process_keeps_its_log(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    killed_writer(folder / "runs.db")
    shutil.copytree(folder, tmp_path / "there")
    assert runs_and_rounds(tmp_path / "there" / "runs.db") == {"r-1": list(range(5))}
    with open_store(tmp_path / "there" / "runs.db") as store:
        store.write(batch(5))
    assert runs_and_rounds(tmp_path / "there" / "runs.db") == {"r-1": list(range(6))}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["replace", "copy", "made again"])
def test_a_training_whose_store_is_exchanged(tmp_path, monkeypatch, caplog, how):
    """The same bits; everything is acknowledged, or counted as lost; somebody else's run is all there."""
    path, started = tmp_path / "runs.db", []
    foreign = make_other(tmp_path / "other.db")

    def happens(number):
        if number != 2:
            return
        if how == "replace":
            (tmp_path / "other.db").replace(path)
        elif how == "copy":
            shutil.copyfile(tmp_path / "other.db", path)
        else:
            started.append(start_other(path, "--clear"))

    acknowledged, monitor = suffer(path, happens, monkeypatch)
    for process in started:
        process.communicate()
    if how != "made again":
        assert path.read_bytes() == foreign
    assert runs_and_rounds(path) == {OTHER.id: list(range(51 if how == "made again" else 50))}
    assert is_sound(path)
    assert monitor.file != path
    assert str(monitor.file) in caplog.text
    if how == "copy":
        assert acknowledged == [0, 1, 2]
        assert monitor.lost > 0
        check(monitor.file, monitor.run.id, [3, 4, 5])
        assert not monitor.flush()
    else:
        assert acknowledged == list(range(ROUNDS))
        assert monitor.lost == 0
        check(monitor.file, monitor.run.id, range(ROUNDS))
    with open_reader(monitor.file) as reader:
        assert queries.summary_of(reader, monitor.run.id).lost == monitor.lost
    assert "store.replaced" in events(monitor.file, monitor.run.id)
