# SPDX-License-Identifier: Apache-2.0
"""The checksums of a store's pages: what they notice, and what they must not mistake for damage."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys

import pytest

from fedvitals.errors import StoreError
from fedvitals.records import Metric, Run, Where
from fedvitals.store import checksums, open_reader, open_store, seal
from fedvitals.store.marks import set_mark
from fedvitals.store.upkeep.doctor import examine
from fedvitals.store.upkeep.repair import mend
from support.paths import TESTS

PAGE = 8192


def batch(number, count=50):
    values = ((r, 1 / (1 + r + number)) for r in range(count))
    return [Metric(Where("r-1", r, "c1"), 1.0 + r, "loss", v, f"s{number}", r) for r, v in values]


@pytest.fixture
def path(tmp_path):
    place = tmp_path / "runs.db"
    with open_store(place) as store:
        store.write([Run("r-1", "r-1", started=1.0)])
        for number in range(20):
            store.write(batch(number))
    return place


def values(path):
    checksums._SOUND.clear()
    with open_reader(path) as reader:
        return reader.database.rows("SELECT arrival, value FROM metric ORDER BY arrival")


def signs(path):
    return {sign.what: sign for sign in examine(path)}


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


def leaf_of(path, table):
    """The place of the last byte of a row in a table."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as database:
        ((number,),) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,))
    content = path.read_bytes()
    while content[(number - 1) * PAGE] == 5:
        start = (number - 1) * PAGE
        cell = int.from_bytes(content[start + 12 : start + 14], "big")
        number = int.from_bytes(content[start + cell : start + cell + 4], "big")
    return number * PAGE - 3


def test_a_flipped_bit_of_a_number_is_refused_and_its_row_is_left_out_by_mending(path):
    before = values(path)
    flip(path, leaf_of(path, "metric"))
    with pytest.raises(StoreError, match=r"1 of its .* pages is not as written"):
        values(path)
    assert signs(path)["checksums"].state == "trouble"
    (sentence,) = mend(path)
    assert "Saved what could be read" in sentence
    saved = values(path.with_name("runs.salvaged.db"))
    assert set(saved) < set(before)
    assert len(saved) > len(before) / 2


def test_pages_have_the_same_checksums_in_any_pieces_and_without_a_call_that_reads_into_a_buffer(path, monkeypatch):
    file, count = checksums.open_file(path), path.stat().st_size // PAGE
    whole = checksums.checksums_of(file, PAGE, count + 1)  # one more than there are
    assert (whole[:count] != checksums.UNKNOWN).any(axis=1).all()
    assert (whole[count] == checksums.UNKNOWN).all()
    monkeypatch.setattr(checksums, "AT_ONCE", 3)
    assert (checksums.checksums_of(file, PAGE, count + 1) == whole).all()
    monkeypatch.delattr(os, "preadv", raising=False)
    assert (checksums.checksums_of(file, PAGE, count + 1) == whole).all()


def test_checksums_follow_a_log_that_is_folded_in_many_times(path, monkeypatch):
    monkeypatch.setattr(seal, "FOLD_FRAMES", 20)
    with open_store(path) as store:
        for number in range(20, 60):
            store.write(batch(number))
    report = checksums.examine(path)
    assert (report.state, report.problems) == ("sealed", [])
    assert not checksums.beside(path).exists()


def test_a_copy_takes_its_checksums_along(path, tmp_path):
    copy = tmp_path / "copy.db"
    shutil.copyfile(path, copy)
    assert checksums.examine(copy).state == "sealed"
    flip(copy, leaf_of(copy, "run"))
    with pytest.raises(StoreError, match="damaged"):
        values(copy)


def test_a_change_by_another_program_is_no_damage(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM metric WHERE arrival > 500")
        database.execute("CREATE TABLE notes AS SELECT * FROM metric")
        database.commit()
    assert len(values(path)) == 500
    assert signs(path)["checksums"].state == "note"
    with open_store(path) as store:
        store.write(batch(99))
    assert signs(path)["checksums"].state == "fine"


def test_a_mark_keeps_the_checksums(path):
    set_mark(path, "r-1", "tag", "baseline")
    assert signs(path)["checksums"].state == "fine"


def killed(path):
    code = (
        "import os, sys\nfrom fedvitals.records import Metric, Where\nfrom fedvitals.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "for i in range(9): store.write([Metric(Where('r-1', i, 'c2'), 90.0 + i, 'loss', i / 7, 'late', i)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, path], check=False)


def test_a_log_that_another_program_folded_in_is_no_damage(path):
    before = len(values(path))
    killed(path)
    with contextlib.closing(sqlite3.connect(path)) as database:  # which folds the log in when it closes
        database.execute("SELECT COUNT(*) FROM metric").fetchone()
    assert len(values(path)) == before + 9
    assert signs(path)["checksums"].state == "note"


def test_a_log_that_is_gone_is_missed(path):
    killed(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink()
    with pytest.raises(StoreError, match="its log is missing"):
        values(path)
    assert any("its log is missing" in sentence for sentence in mend(path))
    assert signs(path)["checksums"].state == "fine"
    assert values(path)


def test_damage_stays_damage_when_the_store_is_written_again(path, caplog):
    flip(path, leaf_of(path, "run"))
    with open_store(path) as store:
        store.write([Run("r-1", "again", started=2.0, source="s", sequence=5)])
    assert "is damaged" in caplog.text
    with pytest.raises(StoreError, match="not as written"):
        values(path)


def test_a_log_that_a_reader_kept_is_not_called_the_log_of_a_killed_process(path):
    with open_reader(path) as reader:
        with open_store(path) as store:
            store.write(batch(30))
            cursor = reader.database.connection.execute("SELECT value FROM metric")
            cursor.fetchone()
            store.write(batch(31))
        said = signs(path)
        cursor.close()
    assert said["log"].state == "note"
    assert "kept for a reader" in said["log"].text
    assert "killed" not in said["writer"].text


@pytest.mark.parametrize(
    ("statement", "what", "words"),
    [
        ("UPDATE symbol SET text = CAST(x'ff' || 'oss' AS TEXT) WHERE text = 'loss'", "values", "Replaced 1 texts"),
        ("UPDATE metric SET value = 'much' WHERE arrival = 7", "values", "Replaced 1 texts and values"),
        ("UPDATE run SET config = '{'", "values", "Replaced 1 texts"),
        ("UPDATE sqlite_master SET sql = 'CREATE VIEW runs AS SELECT 1' WHERE name = 'runs'", "tables", "views anew"),
        ("UPDATE sqlite_master SET sql = 'CREATE TABLE' WHERE name = 'event'", "file", "Saved what could be read"),
    ],
)
def test_what_cannot_be_read_is_told_and_mended(path, statement, what, words):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute(statement)
    found = signs(path)
    assert any(sign.state == "trouble" for sign in found.values())
    assert what in found
    assert any(words in sentence for sentence in mend(path))


def test_a_store_without_checksums_still_has_its_log_folded_in(path, monkeypatch, caplog):
    def fail(_self, _page_size):
        raise OSError("no room for checksums")

    monkeypatch.setattr(seal.Seal, "_count", fail)
    log = path.with_name("runs.db-wal")
    with open_store(path) as store:
        for number in range(20, 420):
            store.write(batch(number, 400))
        assert log.stat().st_size < 6000 * PAGE
        assert path.stat().st_size > 500 * PAGE
    assert [record.message for record in caplog.records] == [
        f"The store '{path}' has no checksums for now: no room for checksums."
    ]
    assert len(values(path)) == 20 * 50 + 400 * 400


def test_a_log_of_a_killed_process_that_another_program_folded_in_is_no_damage_for_the_next_writer(path, caplog):
    killed = (
        "import os, sys\nfrom fedvitals.store import open_store\nfrom store.test_checksums import batch\n"
        f"store = open_store({str(path)!r})\n"
        "for number in range(20, 40):\n    store.write(batch(number))\nos._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", killed], check=False, cwd=TESTS)
    assert path.with_name("runs.db-wal").exists()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("SELECT COUNT(*) FROM metric").fetchall()
    assert not path.with_name("runs.db-wal").exists()
    before = values(path)
    with open_store(path) as store:
        store.write(batch(40))
    assert not caplog.records
    assert len(values(path)) == len(before) + 50
    assert "trouble" not in {sign.state for sign in examine(path)}


def test_two_monitors_of_one_store_do_not_read_it_again_and_again(path, monkeypatch, caplog):
    looks = []
    monkeypatch.setattr(seal, "checksums_of", lambda *about: looks.append(about) or checksums.checksums_of(*about))
    with open_store(path) as one, open_store(path) as other:
        for number in range(20, 60, 2):
            one.write(batch(number))
            other.write(batch(number + 1))
    assert len(looks) <= 2 * (seal.MOST_CHANGES + 1)
    assert len(values(path)) == 60 * 50
    assert not caplog.records
    with open_store(path) as store:
        store.write(batch(60))
    assert signs(path)["file"].state == "fine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_checksums_that_may_not_be_read_are_no_damage(path):
    with open_store(path) as store:
        store.write(batch(20))
        checksums.beside(path).chmod(0)
        with pytest.raises(StoreError, match=r"cannot be read: Permission denied"):
            values(path)
