# SPDX-License-Identifier: Apache-2.0
"""Every way to die: a clear word about it, what was acknowledged is there, and the training goes on bit for bit."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedvitals.errors import StoreError
from fedvitals.store import open_reader, open_store, spill_folder
from fedvitals.store.read import queries
from fedvitals.store.schema import VERSION
from fedvitals.store.upkeep.doctor import examine
from fedvitals.store.upkeep.repair import mend
from fedvitals.testing import tiny_run
from fedvitals.transport.spill import leftover
from support.paths import TESTS
from support.small_training import ROUNDS, check, mounted, suffer
from support.store_contract import RUN, metric, stats

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes

EVERY = list(range(ROUNDS))


def sound(path):
    return not [sign for sign in examine(path) if sign.state == "trouble"]


def fill(ballast):
    """Take all the room that is left."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_full_disk(tmp_path, monkeypatch, caplog):
    """Records wait in the queue until there is room again; then all of them are written."""
    with mounted(tmp_path / "small", "-o", "size=12m"):
        path, ballast = tmp_path / "small" / "runs.db", tmp_path / "small" / "ballast"

        def happens(number):
            if number == 1:
                fill(ballast)
            if number == 4:
                ballast.unlink()

        acknowledged, monitor = suffer(path, happens, monkeypatch)
        assert "disk is full" in caplog.text
        assert "works again" in caplog.text
        assert {0, 1} <= set(acknowledged)
        assert monitor.lost == 0
        check(path, monitor.run.id, EVERY)
        assert sound(path)


def test_a_disk_that_stays_full(tmp_path, monkeypatch, caplog):
    with mounted(tmp_path / "small", "-o", "size=1m"):
        path = tmp_path / "small" / "runs.db"
        with open_store(path) as store:
            store.write([RUN])
        (tmp_path / "small" / "ballast").write_bytes(bytes(600_000))
        acknowledged, monitor = suffer(path, lambda _: None, monkeypatch)
        assert monitor.lost > 0
        assert "disk is full" in caplog.text
        assert f"fedvitals lost {monitor.lost} records" in caplog.text
        with open_reader(path) as reader:
            assert queries.get_run(reader, "r-1") == RUN
        assert acknowledged == [] or check(path, monitor.run.id, acknowledged) is None


def test_a_read_only_folder(tmp_path, monkeypatch, caplog):
    """Said once; when it can be written, what has waited is written."""
    with mounted(tmp_path / "archive", "-o", "ro") as remount:
        path = tmp_path / "archive" / "runs.db"
        acknowledged, monitor = suffer(path, lambda number: remount("rw") if number == 3 else None, monkeypatch)
        assert "cannot be created: [Errno 30] Read-only file system" in caplog.text
        assert not {0, 1, 2, 3} & set(acknowledged)
        check(path, monitor.run.id, EVERY)


def test_a_read_only_file(tmp_path, monkeypatch, caplog):
    path = tmp_path / "runs.db"
    tiny_run(path, strict=True)
    before = path.read_bytes()
    with mounted(tmp_path / "other"):
        subprocess.run(["mount", "--bind", path, path], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
            _, monitor = suffer(path, lambda _: None, monkeypatch)
            assert monitor.lost == 0
            assert leftover(spill_folder(path))  # it waits for a store that can be written
            assert "readonly database" in caplog.text
            with open_reader(path) as reader:
                assert queries.find_run(reader, "tiny")
        finally:
            subprocess.run(["umount", path], check=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["header", "first page", "middle"])
def test_a_corrupt_file(tmp_path, monkeypatch, caplog, damage):
    """The training goes on, the file is named, and what can still be read is saved into another one."""
    path = tmp_path / "runs.db"
    tiny_run(path, strict=True, rounds=8)
    with open_reader(path) as reader:
        whole = reader.database.rows("SELECT COUNT(*) FROM metric")[0][0]
    start, length = {"header": (0, 100), "first page": (0, 8192), "middle": (8192 * 44, 8192 * 8)}[damage]
    with path.open("r+b") as file:
        file.seek(start)
        file.write(os.urandom(length))
    before = path.read_bytes()
    _, monitor = suffer(path, lambda _: None, monkeypatch)
    if damage != "middle":
        assert "it is no SQLite database. Nothing was changed" in caplog.text
        assert monitor.lost == 0
        assert leftover(spill_folder(path))
        assert path.read_bytes() == before
    assert not sound(path)
    before = path.read_bytes()
    (said,) = mend(path)
    assert "runs.salvaged.db" in said
    assert sound(tmp_path / "runs.salvaged.db")
    with open_reader(tmp_path / "runs.salvaged.db") as reader:
        run = queries.find_run(reader, "tiny")
        assert len(reader.history(run).rounds()) == 8
        metrics = reader.database.rows("SELECT COUNT(*) FROM metric")[0][0]
    assert metrics == whole if damage != "middle" else metrics > 0
    assert path.read_bytes() == before


def test_a_torn_log(tmp_path):
    """A log whose last page is torn costs the batch that it ends, nothing before; delivered again, all is there.

    Readers refuse the store until somebody has been told of the loss.
    """
    path = tmp_path / "runs.db"
    code = (
        "import os, sys\nfrom fedvitals.store import open_store\nfrom support.killed_writer import batch\n"
        "store = open_store(sys.argv[1])\n"
        "for number in range(8): store.write(batch(number))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, path], cwd=TESTS, check=False)
    log = Path(f"{path}-wal")
    os.truncate(log, log.stat().st_size - 5000)
    from support.killed_writer import batch

    with pytest.raises(StoreError, match="its log is cut off"):
        open_reader(path)
    assert any("what was lost" in sentence for sentence in mend(path))
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == list(range(7))
    with open_store(path) as store:
        for number in range(8):
            store.write(batch(number))
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == list(range(8))
    assert sound(path)


def test_a_newer_schema(tmp_path, monkeypatch, caplog):
    """The file is left alone, and the run's own description waits beside it for a fedvitals that knows better."""
    path = tmp_path / "runs.db"
    tiny_run(path, strict=True)
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    before = path.read_bytes()
    _, monitor = suffer(path, lambda _: None, monkeypatch)
    assert "has schema version 99" in caplog.text
    assert "Upgrade fedvitals" in caplog.text
    assert path.read_bytes() == before
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version = {VERSION}")
    database.close()
    tiny_run(path, strict=True, rounds=1)
    with open_reader(path) as reader:
        assert queries.find_run(reader, "ill") == monitor.run.id


def test_two_writers(tmp_path, monkeypatch, caplog):
    """The second waits, training all the while, and writes when the first has ended."""
    path = tmp_path / "runs.db"
    code = (
        "import sys\nfrom fedvitals.store import open_store\nfrom support.store_contract import RUN, metric\n"
        "store = open_store(sys.argv[1])\nstore.write([RUN, metric(1, 'c1', 1.0, sequence=1)])\n"
        "print('written', flush=True)\nsys.stdin.read()\nstore.close()\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, path], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout.readline() == b"written\n"

    def happens(number):
        if number == 3:
            first.communicate()

    acknowledged, monitor = suffer(path, happens, monkeypatch)
    assert f"is being written by process {first.pid}" in caplog.text
    assert not {0, 1, 2, 3} & set(acknowledged)
    assert monitor.lost == 0
    check(path, monitor.run.id, EVERY)
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == [1]


def test_a_clock_set_back(tmp_path, monkeypatch):
    """Times that go backwards cost nothing; lengths are never negative."""
    path, real, back = tmp_path / "runs.db", time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() - back[0])

    def happens(number):
        back[0] = 86_400.0 * (number >= 2)

    acknowledged, monitor = suffer(path, happens, monkeypatch)
    assert acknowledged == EVERY
    check(path, monitor.run.id, EVERY)
    with open_reader(path) as reader:
        (summary,) = queries.list_runs(reader)
        assert summary.seconds == 0
        assert summary.rounds == ROUNDS
        times = [row[0] for row in reader.database.rows("SELECT at FROM metrics ORDER BY arrival")]
    assert max(times) - min(times) > 80_000


@pytest.mark.parametrize("what", ["file", "folder", "replaced"])
def test_the_file_deleted_while_it_is_written(tmp_path, monkeypatch, caplog, what):
    """A deleted file lives on behind the open connection: it is written out again, with all that it held."""
    path = tmp_path / "runs" / "runs.db"

    def happens(number):
        if number == 2 and what == "folder":
            shutil.rmtree(path.parent)
        elif number == 2:
            path.unlink()
            if what == "replaced":
                with sqlite3.connect(path):
                    pass
                path.touch()

    acknowledged, monitor = suffer(path, happens, monkeypatch)
    assert "was deleted or replaced while it was written" in caplog.text
    assert acknowledged == EVERY
    assert monitor.lost == 0
    if what == "replaced":
        assert path.read_bytes() == b""  # somebody else's, from here on
        assert monitor.file == path.with_name(f"runs.db.rescued-{os.getpid()}")
    else:
        assert monitor.file == path
        assert sorted(file.name for file in path.parent.iterdir()) == ["runs.db"]
    check(monitor.file, monitor.run.id, EVERY)
    assert sound(monitor.file)


def test_a_store_deleted_between_two_batches_keeps_both(tmp_path):
    path = tmp_path / "runs.db"
    with open_store(path) as store:
        store.write([RUN, stats(0, "c1", 1, 1)])
        path.unlink()
        store.write([metric(1, "c1", 1.0, sequence=2)])
        path.unlink()
    with open_reader(path) as reader:
        assert reader.history("r-1").rounds() == [0, 1]
        assert queries.get_run(reader, "r-1") == RUN
