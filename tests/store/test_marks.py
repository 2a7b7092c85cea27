# SPDX-License-Identifier: Apache-2.0
"""Marks of people, set beside a training; and the whole federation's layers, which are read without the clients'."""

import contextlib
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvitals.errors import ConfigError, StoreError
from fedvitals.records import LayerStats, Where
from fedvitals.stats import FAMILIES, merge
from fedvitals.store import open_reader, open_store
from fedvitals.store.lock import WriterLock
from fedvitals.store.marks import LONGEST, clear_mark, marks, set_mark
from fedvitals.store.read import federation_layers, queries
from fedvitals.store.read.federation_layers import whole_layers
from fedvitals.store.upkeep import compaction, retention
from fedvitals.store.upkeep.doctor import examine
from support.paths import GOLDEN, ROOT
from support.postgres_server import available, running
from support.store_contract import OTHER, RUN, TABLE, metric, stats


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.db"


def stored_marks(where, run=None):
    with open_reader(where) as reader:
        return [(mark.run, mark.kind, mark.target, mark.value) for mark in marks(reader, run)]


def try_everything(where):
    """What marks must do, in any database."""
    with open_store(where) as store:
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
    assert stored_marks(where) == []
    before = time.time()
    mark = set_mark(where, "r-1", "tag", "good one")
    assert before <= mark.at <= time.time()
    set_mark(where, "r-1", "muted", "LABEL_NOISE~c7~~", "known; it's the old camera")
    set_mark(where, "r-1", "tag", "good one", "again")
    assert stored_marks(where, "r-1") == [
        ("r-1", "muted", "LABEL_NOISE~c7~~", "known; it's the old camera"),
        ("r-1", "tag", "good one", "again"),
    ]
    assert stored_marks(where, "r-2") == []
    assert clear_mark(where, "r-1", "tag", "good one")
    assert not clear_mark(where, "r-1", "tag", "good one")
    hostile = "<img src=x onerror=alert(1)>'; DROP TABLE mark; --\x00"
    set_mark(where, "r-1", "tag", hostile, hostile)
    assert stored_marks(where)[-1][2:] == (hostile, hostile)
    set_mark(where, "r-1", "tag", "c\udc80")
    assert stored_marks(where)[-1][2] == "c?"
    with pytest.raises(ConfigError, match="Unknown run 'r-9'"):
        set_mark(where, "r-9", "tag", "x")
    assert not [sign for sign in examine(where) if sign.state == "trouble"]
    retention.delete(where, ["r-1"])
    assert stored_marks(where) == []


def test_marks_are_set_written_over_cleared_and_go_with_their_run(path):
    try_everything(path)


@pytest.mark.postgres
@pytest.mark.thorough
@available
def test_postgresql_has_marks_too():
    with running() as server:
        try_everything(server.database())


def test_what_is_no_mark_is_refused(path):
    with pytest.raises(StoreError, match="There is no store"):
        set_mark(path, "r-1", "tag", "x")
    with open_store(path) as store:
        store.write([RUN])
    with pytest.raises(ConfigError, match="kind of mark 'mood'"):
        set_mark(path, "r-1", "mood", "x")
    with pytest.raises(ConfigError, match="needs a text"):
        set_mark(path, "r-1", "tag", " ")
    with pytest.raises(ConfigError, match="at most 2000 characters"):
        set_mark(path, "r-1", "muted", "x", "y" * (LONGEST + 1))
    assert stored_marks(path) == []


def test_an_old_store_has_no_marks_until_one_is_set(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.executescript((GOLDEN / "schema_v2.sql").read_text())
        database.execute("INSERT INTO symbol VALUES (1, 'r-1'), (2, 'gradient')")
        database.execute("INSERT INTO run VALUES (1, 'digits', 'lab', NULL, '{}', 0, 1.0, 2.0, '{}', '[]', 1, 1)")
        database.commit()
    before = path.read_bytes()
    assert stored_marks(path) == []
    with open_reader(path) as reader:
        assert [run.id for run in queries.list_runs(reader)] == ["r-1"]
        assert whole_layers(reader, "r-1", "gradient")[0] == []
        with pytest.raises(StoreError):
            reader.database.execute("INSERT INTO mark VALUES (1, 'tag', 'x', '', 0.0)")
    assert path.read_bytes() == before
    lock = WriterLock(path)
    code = (
        "from pathlib import Path; from fedvitals.store.marks import set_mark\n"
        f"set_mark(Path({str(path)!r}), 'r-1', 'tag', 'x')"
    )
    lock.hold()
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is being written by process" in second.stderr
    lock.release()
    set_mark(path, "r-1", "tag", "x")
    assert stored_marks(path) == [("r-1", "tag", "x", "")]


@pytest.mark.thorough
def test_marks_are_set_while_another_process_trains(path):
    """Neither fails, nothing is lost, and the training's names and blocks stay in order."""
    code = (
        "import sys, time; sys.path.insert(0, 'tests')\n"
        "from support.store_contract import RUN, metric, stats; from fedvitals.store import open_store\n"
        f"with open_store({str(path)!r}) as store:\n"
        "    store.write([RUN]); print('began', flush=True)\n"
        "    for r in range(120):\n"
        "        store.write([metric(r, f'c{r}', 1.0, sequence=2 * r + 1), stats(r, f'c{r}', r, 2 * r + 2)])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True) as training:
        assert training.stdout.readline() == "began\n"
        for i in range(40):
            set_mark(path, "r-1", "tag", f"tag {i}")
        for i in range(0, 40, 2):
            clear_mark(path, "r-1", "tag", f"tag {i}")
        training.communicate()
    assert training.returncode == 0
    assert [target for _, _, target, _ in stored_marks(path)] == [f"tag {i}" for i in range(1, 40, 2)]
    with open_reader(path) as reader:
        assert reader.history("r-1").nodes() == [f"c{r}" for r in range(120)]
        assert len(queries.records(reader, "r-1", LayerStats)) == 120
    assert not [sign for sign in examine(path) if sign.state == "trouble"]


PLACES = st.tuples(
    st.integers(0, 7) | st.none(),
    st.sampled_from([None, None, "c1", "c2", "server"]),
    st.sampled_from([None, None, None, 3]),  # step
    st.sampled_from([None, None, "edge-1"]),
    st.integers(0, 3),  # at
)


def expected(records, family):
    """The whole as a plain reading of the records finds it, where somebody told it."""
    newest = {}
    for record in records:
        where = record.where
        if record.family != family or where.round is None or (where.node, where.group, where.step) != (None,) * 3:
            continue
        if where.round not in newest or record.at >= newest[where.round].at:
            newest[where.round] = record
    return {number: newest[number].matrix for number in sorted(newest)}


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(PLACES, max_size=8), min_size=1, max_size=6), st.booleans())
def test_the_whole_is_what_a_plain_reading_finds(batches, forget):
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(compaction, "CHUNK_ROUNDS", 2),
        patch.object(compaction, "NEWEST_ROUNDS", 1),
    ):
        path, written = Path(folder) / "runs.db", []
        with open_store(path) as store:
            store.write([RUN])
            for i, batch in enumerate(batches):
                records = [
                    replace(
                        stats(0, None, len(written) + j, 100 * i + j),
                        where=Where("r-1", *place[:3], None, place[3]),
                        at=float(place[4]),
                    )
                    for j, place in enumerate(batch, 1)
                ]
                store.write(records)
                written += records
        if forget:  # as a store of version 2 has it
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
                database.execute("UPDATE layer_block SET whole = NULL")
        wanted = expected(written, "gradient")
        with open_reader(path) as reader:
            rounds, layers, matrix = whole_layers(reader, "r-1", "gradient")
        if wanted:
            assert rounds == list(wanted)
            assert layers == TABLE.names
            np.testing.assert_allclose(matrix, np.stack(list(wanted.values())), rtol=1e-5, atol=1e-5)


def test_the_whole_is_put_together_where_nobody_told_it(path, monkeypatch):
    written = [stats(r, f"c{c}", 10 * r + c, 100 * r + c + 1) for r in range(20) for c in range(4)]
    ratios = [
        stats(r, f"c{c}", 10 * r + c, 5000 + 100 * r + c, "update.alignment") for r in range(20) for c in range(5)
    ]
    with open_store(path) as store:
        store.write([RUN, *written, *ratios])
    with open_reader(path) as reader:
        rounds, layers, matrix = whole_layers(reader, "r-1", "gradient")
        assert (rounds, layers) == (list(range(20)), TABLE.names)
        together = merge("gradient", [record.matrix for record in written if record.where.round == 7])
        np.testing.assert_allclose(matrix[7], together, rtol=1e-5, atol=1e-4)
        _, _, found = whole_layers(reader, "r-1", "update.alignment")
        same = np.stack([record.matrix for record in ratios if record.where.round == 7])
        np.testing.assert_allclose(found[7], np.median(same, axis=0), rtol=1e-6)
        size = len(written) * 3 * len(FAMILIES["gradient"].columns) * 4
        monkeypatch.setattr(federation_layers, "MOST", size // 5 + 1)
        assert whole_layers(reader, "r-1", "gradient")[0] == [4, 9, 14, 19]


def test_only_the_layers_that_are_trained_now_are_told(path):
    with open_store(path) as store:
        store.write([RUN, stats(1, None, 1, 1), stats(2, None, 2, 2, table=OTHER), stats(3, None, 3, 3, table=OTHER)])
    with open_reader(path) as reader:
        rounds, layers, matrix = whole_layers(reader, "r-1", "gradient")
        assert (rounds, layers, matrix.shape) == ([2, 3], OTHER.names, (2, 3, 9))
        assert whole_layers(reader, "r-1", "weight")[0] == []
        assert whole_layers(reader, "r-9", "gradient")[0] == []


def test_what_is_put_together_meanwhile_is_read_again(path, monkeypatch):
    """A training merges blocks between the two statements of one reading."""
    with open_store(path) as store:
        store.write([RUN, *[stats(r, None, r, r + 1) for r in range(5)]])
        with open_reader(path) as reader:
            asked, first = federation_layers._numbers, []

            def numbers(*arguments):
                if not first:
                    first.append(True)
                    monkeypatch.setattr(compaction, "CHUNK_ROUNDS", 3)
                    store.write([stats(r, None, r, r + 1) for r in range(5, 40)])
                return asked(*arguments)

            monkeypatch.setattr(federation_layers, "_numbers", numbers)
            assert whole_layers(reader, "r-1", "gradient")[0] == list(range(40))
