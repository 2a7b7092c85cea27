# SPDX-License-Identifier: Apache-2.0
"""What a lab made ill is kept in the store, survives what the rest survives, and cannot be asked for by a detector."""

from __future__ import annotations

import contextlib
import inspect
import sqlite3
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import fedvitals as fv
from fedvitals.errors import RecordError
from fedvitals.protocols import History, NullObserver
from fedvitals.records import Event, Metric, Run, Truth, Where
from fedvitals.stats import FAMILIES, statistics_of
from fedvitals.store import MemoryStore, ddl, open_reader, open_store, postgres, schema
from fedvitals.store.read import queries
from fedvitals.store.sqlite import PAGE
from fedvitals.store.upkeep import retention
from fedvitals.store.upkeep.doctor import examine
from fedvitals.store.upkeep.repair import mend
from fedvitals.store.upkeep.salvage import salvage
from fedvitals.testing import MemorySink, examples_of_records, tiny_run
from fedvitals.transport.wire.payload import MAGIC, VERSION, decode, encode
from support.paths import GOLDEN
from support.postgres_server import available, running
from support.store_contract import RUN, TABLE, metric, same, stats

FAULT = {"kind": "label_noise", "nodes": ["c4", "c9"], "since": 3, "until": 7, "family": "client", "rate": 0.8}
TOLD = Truth(Where("r-1"), 1.5, "label_noise", ("c4", "c9"), 3, 7, {"family": "client", "rate": 0.8}, "m", 900)
# Nobody should write one like this; if somebody does, still nothing of it may show.
MISPLACED = Truth(
    Where("r-1", 77, "c99", 5, "conv.bias", "edge-9"), 1.5, "secret_fault", ("c98",), 76, None, {}, "m", 901
)
RECORDS = [
    *(metric(r, f"c{c}", r + c / 10, sequence=10 * r + c + 1) for r in range(4) for c in range(3)),
    *(stats(r, "c1", r, 500 + r) for r in range(4)),
    Event(Where("r-1", 2, "c1"), 2.0, "warning", "client.dropped", "gone", {"after": 1}, "m", 800),
]


def every_answer(history):
    """What each method of a `History` says, to all that could be asked of this run."""
    asked = {
        "rounds": [()],
        "nodes": [()],
        "layers": [(family,) for family in FAMILIES],
        "latest": [(name, r) for name in ("loss", "label_noise", "truth") for r in (0, 3, 76, 77)],
        "series": [(name, node) for name in ("loss", "truth") for node in (None, "c1", "c4", "c98", "c99")],
        "matrix": [(f, statistics_of(f)[0], layer) for f in FAMILIES for layer in TABLE.names],
        "across": [(f, statistics_of(f)[:2], r) for f in FAMILIES for r in (0, 3, 77)],
        "events": [(name, since) for name in (None, "truth", "label_noise") for since in (None, 0, 77)],
    }
    # A method that is new must be asked here, too.
    assert set(asked) == {name for name, _ in inspect.getmembers(History, inspect.isfunction) if name[0] != "_"}
    # What keeps answers, and says when they have changed, tells nothing of its own.
    keeping = {"changes_of", "computed", "kept_answers", "state"}
    assert {name for name in dir(history) if name[0] != "_"} - keeping == set(asked)
    return {name: [getattr(history, name)(*each) for each in some] for name, some in asked.items()}


@contextlib.contextmanager
def memory(_folder, records):
    store = MemoryStore()
    store.write(records)
    yield store.history("r-1"), lambda: store.truth_of("r-1")


@contextlib.contextmanager
def sqlite(folder, records):
    path = Path(folder) / f"{len(records)}.db"
    with open_store(path) as store:
        store.write(records)
    with open_reader(path) as reader:
        yield reader.history("r-1"), lambda: queries.truth_of(reader, "r-1")


@pytest.mark.parametrize("opened", [memory, sqlite])
def test_no_method_of_a_history_shows_it(tmp_path, opened):
    """The same run with and without a truth gives the same answers; and none of them is empty for want of records."""
    with (
        opened(tmp_path, [RUN, *RECORDS]) as (clean, _),
        opened(tmp_path, [RUN, TOLD, MISPLACED, *RECORDS]) as (ill, truth),
    ):
        answers = every_answer(ill)
        assert same(list(answers.values()), list(every_answer(clean).values()))
        if opened is memory:
            places = [(name, number) for name in ("loss", "gradient", "truth", "label_noise") for number in (0, 3, 77)]
            assert [ill.changes_of(*each) for each in places] == [clean.changes_of(*each) for each in places]
        assert answers["rounds"] == [[0, 1, 2, 3]]
        assert answers["nodes"] == [["c0", "c1", "c2"]]
        for word in ("label_noise", "secret", "c98", "c99", "lr"):  # lr stands in the run's config
            assert word not in repr(answers)
        assert truth() == [TOLD, MISPLACED]


def test_it_is_found_by_name_and_delivered_twice_it_is_stored_once(tmp_path):
    store = MemoryStore()
    with open_store(tmp_path / "runs.db") as sql:
        for each in (store, sql):
            each.write([RUN, TOLD])
            each.write([TOLD, *RECORDS])
    with open_reader(tmp_path / "runs.db") as reader:
        assert queries.truth_of(reader, "digits") == queries.truth_of(reader, "r-1") == [TOLD]
    assert store.truth_of("r-1") == [TOLD]
    assert store.truth_of("another") == []


def test_memory_tells_it_as_sql_would(tmp_path):
    odd = replace(TOLD, data={"limits": (1, float("nan")), "what": Path("x")})
    with memory(tmp_path, [RUN, odd]) as (_, one), sqlite(tmp_path, [RUN, odd]) as (_, other):
        assert one() == other() == [replace(TOLD, data={"limits": [1, "NaN"], "what": "x"})]


# -- from a host ------------------------------------------------------------------------------------------------------


def test_what_a_host_tells_before_the_first_round_is_not_lost(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", run="ill", strict=True, host="lab") as monitor:
        monitor.host.truth(FAULT)
        monitor.host.truth({"kind": "zero_weight"})
        with monitor.round(0):
            monitor.host.truth({"kind": "crash", "nodes": "all", "at_step": 2})
    with open_reader(tmp_path / "runs.db") as reader:
        told = queries.truth_of(reader, "ill")
        assert reader.history(monitor.run.id).nodes() == ["server"]
    assert [(t.kind, t.nodes, t.since, t.until, t.data) for t in told] == [
        ("label_noise", ("c4", "c9"), 3, 7, {"family": "client", "rate": 0.8}),
        ("zero_weight", (), 0, None, {}),
        ("crash", ("all",), 0, None, {"at_step": 2}),
    ]
    assert {t.where for t in told} == {Where(monitor.run.id)}


@pytest.mark.parametrize("privacy", range(5))
def test_no_privacy_level_holds_it_back(privacy):
    sink = MemorySink()
    with fv.Monitor(None, sinks=[sink], privacy=privacy, strict=True) as monitor:
        monitor.host.truth(FAULT)
    assert [record.kind for record in sink.records if isinstance(record, Truth)] == ["label_noise"]


def test_a_host_that_forgets_the_kind_does_not_stop_the_training(caplog):
    with fv.Monitor(None) as monitor:
        monitor.host.truth({"nodes": ["c1"]})
    assert "could not finish truth(): KeyError" in caplog.text
    NullObserver().truth(FAULT)


def test_live_detectors_have_neither_truth_nor_configuration_in_reach(tmp_path):
    seen = []

    def curious(history, number):
        every_answer(history)
        seen.append((vars(vars(history)["_history"])["_store"], history.nodes(), number))
        return ()

    with fv.Monitor(tmp_path / "runs.db", detectors=[curious], config={"faults": [FAULT]}, strict=True) as monitor:
        monitor.host.truth(FAULT)
        for number in range(2):
            with monitor.round(number), monitor.client("c1"):
                pass
    assert [number for *_, number in seen] == [0, 1]
    store, nodes, _ = seen[-1]
    assert nodes == ["c1"]
    assert store.truth_of(monitor.run.id) == []
    assert store.runs[monitor.run.id].config == {}
    with open_reader(tmp_path / "runs.db") as reader:  # where people look, both are there
        assert queries.get_run(reader, monitor.run.id).config["faults"] == [FAULT]
        assert len(queries.truth_of(reader, monitor.run.id)) == 1


# -- on the wire ------------------------------------------------------------------------------------------------------


def test_a_worker_cannot_send_one():
    *others, truth = examples_of_records()
    assert isinstance(truth, Truth)
    assert len(decode(encode(others))) == len(others)
    for records in ([truth], [*others, truth], [metric(1, "c1", 1.0), TOLD]):
        with pytest.raises(RecordError, match="got Truth"):
            encode(records)


@pytest.mark.parametrize("tag", [10, 11, 12, "Truth"])
def test_no_payload_is_read_as_one(tag):
    place, header = [1, 0, 2, None, None, None], [0, 0.0, 1, 0]
    for fields in ([1, ["c4"], 3, 7, {}], [1, [1], 3, None, b""], []):
        head = msgspec.msgpack.encode(([], [place], [[tag, *header, *fields]]))
        payload = struct.pack("<2sBBII", MAGIC, VERSION, 0, len(head), zlib.crc32(head)) + head
        with pytest.raises(RecordError):
            decode(payload)
        sink = MemorySink()
        with fv.Monitor(None, sinks=[sink]) as monitor:
            monitor.host.absorb(payload)
            assert monitor.lost == 1
        assert not [record for record in sink.records if isinstance(record, Truth)]


def test_an_honest_worker_has_no_word_for_it():
    with fv.Monitor(None) as monitor:
        assert not hasattr(monitor.host.for_worker(), "truth")


# -- over the life of a store -----------------------------------------------------------------------------------------


def fill(path):
    with open_store(path) as store:
        store.write([replace(RUN, finished=200.0), TOLD, *RECORDS])


def stored_truth(path):
    with open_reader(path) as reader:
        return queries.truth_of(reader, "r-1")


FIRST = {
    table.name: ", ".join(ddl.quoted(column.name) for column in table.columns if column.since == 1)
    for table in schema.TABLES
    if table.since == 1
}


@pytest.fixture
def old(tmp_path):
    """A store of version 1, which knew no truths, large enough that every page of it is taken."""
    more = [stats(r, f"c{c}", r, 1000 + 50 * r + c) for r in range(40) for c in range(20)]
    more += [Event(Where("r-1", r), float(r), "info", "log", "x" * 200, {}, "m", 5000 + r) for r in range(400)]
    with open_store(tmp_path / "new.db") as store:
        store.write([replace(RUN, finished=200.0), *RECORDS, *more])
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as database:
        database.execute(f"PRAGMA page_size = {PAGE}")
        database.executescript((GOLDEN / "schema_v1.sql").read_text())
        database.execute("ATTACH ? AS new", (str(tmp_path / "new.db"),))
        for table, columns in FIRST.items():
            database.execute(f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM new.{table}")
    (tmp_path / "new.db").unlink()
    return tmp_path / "runs.db"


def make_first(url):
    """Take from a store in PostgreSQL what came after version 1."""
    with postgres.maintain_postgres(url) as database:
        for view in ddl.views(database.dialect):
            database.execute(f"DROP VIEW {view}")
        for table in schema.TABLES:
            if table.since > 1:
                database.execute(f"DROP TABLE {table.name}")
            for column in table.columns:
                if table.since == 1 < column.since:
                    database.execute(f"ALTER TABLE {table.name} DROP COLUMN {column.name}")  # and its indexes
        for table in schema.TABLES:
            if table.view and table.since == 1:
                columns = tuple(column for column in table.columns if column.since == 1)
                database.execute(ddl._readable(replace(table, columns=columns)))
        database.execute(f"COMMENT ON SCHEMA fedvitals IS '{postgres._MARK}1'")


def test_it_goes_with_its_run_and_stays_when_a_run_is_thinned(tmp_path):
    path = tmp_path / "runs.db"
    fill(path)
    retention.thin(path, retention.SMALLEST)
    assert stored_truth(path) == [TOLD]
    retention.delete(path, ["r-1"])
    with open_reader(path) as reader:
        assert queries.records(reader, "r-1", Truth) == []


def test_it_is_salvaged(tmp_path):
    path = tmp_path / "runs.db"
    fill(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:  # a second, which nobody can read
        columns = "run, at, kind, nodes, since, until, data, source, sequence"
        database.execute(
            f"INSERT INTO truth ({columns}) SELECT run, at, kind, x'00', since, until, data, source, 901 FROM truth"
        )
    said = salvage(path)
    assert "1 of truth" in said
    assert stored_truth(tmp_path / "runs.salvaged.db") == [TOLD]


@pytest.mark.thorough
@pytest.mark.parametrize("gone", [0, 84, 200])
def test_a_damaged_store_of_version_1_is_salvaged_without_inventing_any(tmp_path, old, gone):
    """Its header may be gone, and with it the version; or the list of its tables as well."""
    with old.open("r+b") as file:
        file.write(b"SQLite format 3\x00" + bytes(gone))
    salvage(old)
    with open_reader(tmp_path / "runs.salvaged.db") as reader:
        assert len(queries.records(reader, "r-1", Metric)) == 12
        assert queries.records(reader, "r-1", Truth) == []
        assert reader.database.rows("SELECT COUNT(*) FROM truth") == [(0,)]


def test_a_store_of_version_1_is_examined_mended_and_brought_up_to_date(old):
    signs = {sign.what: sign for sign in examine(old)}
    assert f"version 1; the next training brings it to {schema.VERSION}" in signs["schema"].text
    assert not [sign for sign in signs.values() if sign.state == "trouble"]
    mend(old)
    with open_store(old) as store:
        store.write([TOLD])
    assert stored_truth(old) == [TOLD]
    assert not [sign for sign in examine(old) if sign.state != "fine"]


@pytest.mark.postgres
@pytest.mark.thorough
@available
def test_postgresql_keeps_it_too_and_brings_an_old_database_up_to_date():
    with running() as server:
        url = server.database()
        with open_store(url) as store:
            store.write([RUN, *RECORDS])
        make_first(url)
        with open_store(url) as store:
            store.write([TOLD, MISPLACED])
        with open_reader(url) as reader:
            assert queries.truth_of(reader, "digits") == [TOLD, MISPLACED]
            clean = MemoryStore()
            clean.write([RUN, *RECORDS])
            answers, wanted = every_answer(reader.history("r-1")), every_answer(clean.history("r-1"))
            assert same(list(answers.values()), list(wanted.values()))
        assert not [sign for sign in examine(url) if sign.state == "trouble"]
        retention.delete(url, ["r-1"])
        with open_reader(url) as reader:
            assert queries.records(reader, "r-1", Truth) == []


def test_a_run_of_a_plain_training_has_none(tmp_path):
    run = tiny_run(tmp_path / "runs.db", strict=True).run
    assert isinstance(run, Run)
    with open_reader(tmp_path / "runs.db") as reader:
        assert queries.truth_of(reader, run.id) == []
