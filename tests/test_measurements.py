# SPDX-License-Identifier: Apache-2.0
"""Measurements stand for single records: every way through fedvitals gives the same for both."""

import contextlib
import dataclasses
import itertools
import math
import sqlite3

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.errors import RecordError
from fedvitals.measurements import (
    NO_STEP,
    Measurements,
    places_of,
    record_count,
    single_records,
    stamped,
)
from fedvitals.probes.node_columns import NodeColumns
from fedvitals.probes.results import Results, measurements_of, metric_of_nodes
from fedvitals.records import LayerStats, Metric, Sketch
from fedvitals.store import MemoryStore, SqliteStore, open_reader
from fedvitals.store.deliveries import Intervals
from fedvitals.store.read.sketches import sketches_of_round
from fedvitals.testing import MemorySink
from fedvitals.transport.privacy import PrivacyPolicy
from fedvitals.transport.queue import Queue
from fedvitals.transport.sink_writer import SinkWriter
from support.measured_tables import RUN, TABLE, measured, messages, results, same, sums


def test_it_stands_for_the_records_that_the_results_tell():
    table = measured()
    records = single_records([table])
    assert len(table) == len(records) == record_count(table)
    assert [r.sequence for r in records] == [*range(10, 10 + len(records))]
    kinds = [type(r) for r in records]
    assert kinds == sorted(kinds, key=[Metric, LayerStats, Sketch].index)
    rng = np.random.default_rng(0)
    again = [results(rng, absent=i == 1) for i in range(4)]
    answers = [(m.where.node, m.name, m.where.step) for m in records if isinstance(m, Metric)]
    assert answers == [(f"c{i}", name, step) for i, own in enumerate(again) for name, _, step in own.metrics]
    values = [m.value for m in records if isinstance(m, Metric)]
    np.testing.assert_array_equal(values, [value for own in again for _, value, _ in own.metrics])
    assert [r.where.group for r in records if isinstance(r, Sketch)] == ["edge-0", None] * 2


def test_absent_and_nan_are_two_things():
    table = measured()
    column = table.names.index("gradient.norm")
    assert table.present[1, column]
    assert math.isnan(table.values[1, column])
    assert not table.present[1, table.names.index("samples")]
    names = [m.name for m in table.records() if isinstance(m, Metric) and m.where.node == "c1"]
    assert names == ["loss", "gradient.norm", "gradient.norm_max"]


def test_a_name_with_several_steps_gets_several_columns():
    own = Results()
    own.metrics += [("weight.difference", float(step), step) for step in range(3)]
    own.metrics += [("weight.difference", 7.0, None)]
    table = measurements_of("r", 0, 1.0, [(("c0", None), own)], lambda *_: None)
    assert table.names == ("weight.difference",) * 4
    assert table.steps.tolist() == [[0, 1, 2, NO_STEP]]
    assert [(m.value, m.where.step) for m in table.records()] == [(0.0, 0), (1.0, 1), (2.0, 2), (7.0, None)]


def test_what_several_results_tell_of_one_node_stands_in_one_row():
    first, second = Results(), Results()
    first.take({"loss": 1.0})
    second.take({"traffic.sent": 9.0, "loss": 2.0})
    rows = [(("c0", None), first), (("c1", None), first), (("c0", None), second)]
    table = measurements_of("r", 0, 1.0, rows, lambda *_: None)
    assert table.nodes == ("c0", "c1")
    assert [(m.where.node, m.name, m.value) for m in table.records()] == [
        ("c0", "loss", 1.0),
        ("c0", "traffic.sent", 9.0),
        ("c0", "loss", 2.0),
        ("c1", "loss", 1.0),
    ]


def test_a_metric_of_nodes_is_what_their_results_would_be():
    values = {("c0", None): 1.5, ("c1", "edge-0"): math.nan}
    own = {key: Results(metrics=[("update.samples", value, None)]) for key, value in values.items()}
    slow = measurements_of("r", 2, 1.0, [*own.items()], lambda *_: None)
    same([*metric_of_nodes("r", 2, 1.0, "update.samples", values).records()], [*slow.records()])


def test_columns_hold_the_metrics_of_the_wanted_names():
    table = measured()
    wanted = [(row, *metric) for row, *metric in table.metrics() if metric[0].startswith("gradient")]
    columns = [
        (row, name, value, step)
        for name, *cells in table.columns(lambda name: name.startswith("gradient"))
        for row, value, step in zip(*cells, strict=True)
    ]
    assert sorted(map(repr, columns)) == sorted(map(repr, wanted))


def test_matrices_without_a_layer_table_are_left_out():
    table = measurements_of(
        "r", 0, 1.0, [(("c0", None), results(np.random.default_rng(0), sketch=False))], lambda *_: None
    )
    assert not table.layers
    assert len(table) == 6


# -- the queue and the stores ------------------------------------------------------------------------------------------


def test_sinks_get_records_unless_they_take_measurements():
    sink, store = MemorySink(), MemoryStore(everything=True)
    writer = SinkWriter([store, sink], policy=PrivacyPolicy(), spill=None, strict=True)
    writer.emit(dataclasses.replace(RUN, source="", sequence=0))
    writer.emit(measured())
    writer.emit(Metric(measured().place(0), 6.0, "loss", 1.0))
    writer.close()
    numbers = [record.sequence for record in sink.records]
    assert numbers == [*range(len(measured()) + 2)]
    same([r for r in sink.records if isinstance(r, Metric)], [*store.records("r", Metric)])


def test_a_sink_gets_no_record_of_a_kind_that_it_ignores():
    class OfMetrics(MemorySink):
        ignores = (LayerStats, Sketch)

    class OfNeither(MemorySink):
        ignores = (LayerStats, Sketch, Metric)

    metrics, neither = OfMetrics(), OfNeither()
    writer = SinkWriter([metrics, neither], policy=PrivacyPolicy(), spill=None, strict=True)
    writer.emit(measured())
    writer.close()
    assert {type(record) for record in metrics.records} == {Metric}
    assert len(metrics.records) == measured().metric_count
    assert not neither.records


def test_a_full_queue_counts_the_records_that_it_loses():
    class Stuck(MemorySink):
        def write(self, records, /):
            raise OSError("full")

    queue = Queue(Stuck(), bulk=4)
    table = measured()
    for _ in range(5):
        queue.put(table)
    lost, waiting = sum(queue.lost.values()), queue.pending
    queue.close(timeout=0.1)
    assert lost > 0
    assert sum(queue.lost.values()) == lost + waiting


def test_a_refused_number_costs_no_other():
    class Picky(MemorySink):
        takes_measurements = True

        def write(self, records, /):
            records = [*records]
            if any(isinstance(r, Measurements) or getattr(r, "name", "") == "samples" for r in records):
                raise RecordError("not samples")
            super().write(records)

    sink = Picky()
    queue = Queue(sink)
    queue.put(measured())
    queue.close()
    refused = sum(r.name == "samples" for r in measured().records() if isinstance(r, Metric))
    assert refused == 3
    assert (len(sink.records), dict(queue.lost)) == (len(measured()) - refused, {"bad record": refused})


def histories(tmp_path, batches):
    memory, store = MemoryStore(), SqliteStore(tmp_path / "runs.db")
    for batch in batches:
        memory.write(batch)
        store.write(batch)
    store.close()
    return memory.history("r"), tmp_path / "runs.db"


def answers(history):
    names = ("loss", "gradient.norm", "gradient.norm_max", "samples", "update.norm", "user.mine")
    return repr(
        (
            history.rounds(),
            history.nodes(),
            history.layers("gradient"),
            [history.latest(name, number) for name in names for number in range(4)],
            [history.series(name, node) for name in names for node in (*history.nodes(), None)],
            [history.matrix("gradient", statistic, "a") for statistic in ("mean", "l2")],
            [history.across("gradient", ["mean", "absmax"], number) for number in range(4)],
        )
    )


def numbered(tables):
    sequences = itertools.accumulate(map(len, tables), initial=1)
    return [stamped(table, "s", first) for table, first in zip(tables, sequences, strict=False)]


def test_stores_say_the_same_of_measurements_and_of_their_records(tmp_path):
    nodes = ["c10", "c2", None, "edge-0", "server"]
    tables = numbered([measured(seed=i, round_index=i % 3, nodes=nodes if i % 2 else None) for i in range(5)])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, file = histories(tmp_path / "a", [[RUN, *tables[:2]], tables[2:]])
    single, other = histories(tmp_path / "b", [[RUN, *single_records(tables[:2])], single_records(tables[2:])])
    assert answers(whole) == answers(single)
    with open_reader(file) as reader, open_reader(other) as twin:
        assert answers(reader.history("r")) == answers(twin.history("r")) == answers(whole)
        for table in ("metric", "sketch", "run_round", "run_node", "delivered"):
            columns = ", ".join(
                row[1] for row in reader.database.rows(f"PRAGMA table_info({table})") if row[1] != "arrival"
            )
            columns = columns.replace("group", '"group"').replace("values", '"values"')
            select = f"SELECT {columns} FROM {table}"
            assert readable(reader, table, select) == readable(twin, table, select)


def test_stores_say_the_same_of_a_node_in_two_rows(tmp_path):
    """As of a client that is in two groups: of its values with the same time, the last record's counts."""
    cells = {"values": np.array([[1.0, 2.0], [3.0, 0.0]]), "present": np.array([[True, True], [True, False]])}
    table = Measurements("r", 0, 1.0, ("c0", "c0"), ("a", "b"), ("loss", "loss"), **cells, source="s", sequence=1)
    for i, batch in enumerate(([table], [*table.records()])):
        (tmp_path / f"{i}").mkdir()
        memory, file = histories(tmp_path / f"{i}", [[RUN, *batch]])
        with open_reader(file) as reader:
            assert reader.history("r").latest("loss", 0) == memory.latest("loss", 0) == {"c0": 3.0}


def test_of_two_sketches_in_a_batch_the_later_one_counts(tmp_path):
    table = measured()
    before = Sketch(table.place(0), 5.0, (1.0,) * 256, "feed", table.sketch_version, "s", 5)
    after = dataclasses.replace(before, sequence=500)
    for i, (batch, kept) in enumerate([([before, table], table.sketches[0]), ([table, after], after.values)]):
        with SqliteStore(tmp_path / f"{i}.db") as store:
            store.write([RUN, *batch])
        with open_reader(tmp_path / f"{i}.db") as reader:
            newest = np.frombuffer(sketches_of_round(reader, "r", 2)["c0"], "<f4")
        np.testing.assert_allclose(newest, kept, rtol=1e-6)


def readable(reader, table, select):
    """Rows with names instead of symbols: their numbers depend on the order in which names came."""
    names = dict(reader.database.rows("SELECT id, text FROM symbol"))
    head = [column.strip().strip('"') for column in select.split("SELECT ")[1].split(" FROM")[0].split(",")]
    symbols = {"run", "node", "group", "name", "source"}
    rows = [
        tuple(names.get(value, value) if column in symbols else value for column, value in zip(head, row, strict=True))
        for row in reader.database.rows(select)
    ]
    return sorted(rows, key=repr)


def test_measurements_that_come_twice_are_stored_once_also_in_part(tmp_path):
    table = measured()
    records = single_records([table])
    for first in ([table], records[:7], records[5:9], records[-1:], []):
        store = MemoryStore(everything=True)
        store.write([RUN, *first])
        store.write([table])
        store.write([table])
        kept = [r for kind in (Metric, LayerStats, Sketch) for r in store.records("r", kind)]
        assert sorted(r.sequence for r in kept) == [r.sequence for r in records]
    with SqliteStore(tmp_path / "runs.db") as store:
        for batch in ([RUN, *records[5:9]], [table], [table], records):
            store.write(batch)
    with open_reader(tmp_path / "runs.db") as reader:
        assert reader.database.rows("SELECT COUNT(*) FROM metric") == [(table.metric_count,)]
        assert reader.database.rows("SELECT COUNT(*) FROM sketch") == [(len(table.sketch_rows),)]
        assert reader.database.rows("SELECT SUM(entries) FROM layer_block") == [(8,)]
        assert reader.database.rows("SELECT first, last FROM delivered") == [(0, 0), (10, 9 + len(table))]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)), max_size=25))
def test_ranges_are_remembered_as_single_numbers_are(ranges):
    by_range, by_number = Intervals(), set()
    for first, length in ranges:
        numbers = {*range(first, first + length)}
        added = by_range.add_range(first, first + length - 1)
        if added:
            assert not numbers & by_number
            by_number |= numbers
        else:
            assert numbers & by_number
            assert (added is False) == (numbers <= by_number)
        covered = {n for a, b in by_range.pairs() for n in range(a, b + 1)}
        assert covered == by_number
        assert all(b + 1 < c for (_, b), (c, _) in itertools.pairwise(by_range.pairs()))
        assert {a: b for a, b in by_range.changed.items() if b is not None} == dict(by_range.pairs())


def test_its_places_are_those_that_something_was_measured_of():
    table = measured()
    assert [place.node for place in places_of(table)] == ["c0", "c1", "c2", "c3"]
    present = table.present.copy()
    present[2] = False
    fewer = dataclasses.replace(table, present=present, layers=(), sketch_rows=(), sketches=None)
    assert [place.node for place in places_of(fewer)] == ["c0", "c1", "c3"]


def test_messages_stand_for_transfers():
    block = messages()
    records = single_records([block])
    assert len(block) == len(records) == record_count(block) == 6
    assert [r.sequence for r in records] == [*range(100, 106)]
    assert [(r.where.node, r.sender, r.receiver) for r in records[:2]] == [
        ("c0", "server", "c0"),
        ("c0", "c0", "server"),
    ]
    assert [(r.where.group, r.at, r.bytes, r.raw_bytes, r.seconds, r.kind) for r in records[2:4]] == [
        ("edge-0", 7.0, 2, 4, None, "model"),
        (None, 8.0, 3, 6, 0.5, "update"),
    ]
    assert [r.receiver for r in block.of_rows([1, 4]).records()] == ["server", "c2"]


def test_messages_reach_a_store_and_a_history_as_their_records_do(tmp_path):
    whole, single = SqliteStore(tmp_path / "a.db"), SqliteStore(tmp_path / "b.db")
    for store, batch in ((whole, [RUN, messages()]), (single, [RUN, *messages().records()])):
        queue = Queue(store)
        queue.put_many(batch)
        queue.close()
    read = []
    for name in "ab":
        with contextlib.closing(sqlite3.connect(tmp_path / f"{name}.db")) as database:
            read.append(database.execute("SELECT * FROM transfer ORDER BY rowid").fetchall())
    assert read[0] == read[1]
    assert len(read[0]) == 6
    noted, told = MemoryStore(), MemoryStore()
    noted.note(messages())
    told.write(messages().records())
    assert noted.history("r").nodes() == told.history("r").nodes() == ["c0", "c1", "c2"]
    assert noted.history("r").rounds() == told.history("r").rounds() == [2]


def test_columns_of_many_nodes_are_the_results_of_each():
    """Also where clients have other names, steps and layers, come in parts, and are left out."""
    rng = np.random.default_rng(1)
    keys = [("c0", None), ("c1", "edge-0"), ("c2", None)]
    matrices = np.stack([sums(rng) for _ in keys])
    columns, each = NodeColumns(keys), [Results(tables={"parameter": TABLE.digest}) for _ in keys]
    columns.put("loss", [1.0, math.nan, 3.0])
    columns.put("gradient.norm_max", [5.0, 6.0], np.array([2, 0]), np.array([7, 8]))
    columns.put("gradient.norm_max", [9.0], np.array([1]))
    columns.put("loss", 4.0, np.array([2]), 1)
    columns.put("nothing", [], np.array([], np.intp))
    columns.put_matrices("gradient", matrices[1:], np.array([1, 2]))
    columns.put_matrices("gradient", matrices[:1], np.array([0]))
    columns.use_tables({"parameter": TABLE.digest})
    columns.put_sketch(1, rng.normal(size=256))
    for row, own in enumerate(each):
        own.take({"loss": [1.0, math.nan, 3.0][row]})
        own.take({"gradient.norm_max": [6.0, 9.0, 5.0][row]}, step=[8, None, 7][row])
        own.matrices.append(("gradient", matrices[row], None))
    each[2].metrics.insert(1, ("loss", 4.0, 1))
    each[1].sketch = columns._sketches[0][1]
    for without in ((), (1,), (0, 2)):
        rows = [(key, own) for row, (key, own) in enumerate(zip(keys, each, strict=True)) if row not in without]
        slow = measurements_of("r", 2, 1.0, rows, lambda *_: TABLE.digest)
        fast = columns.measurements("r", 2, 1.0, lambda *_: TABLE.digest, without)
        by_content = [sorted(map(_content, table.records()), key=repr) for table in (slow, fast)]
        assert by_content[0] == by_content[1]
    parts = [columns.of_row(row).measurements("r", 2, 1.0, lambda *_: TABLE.digest) for row in range(3)]
    split = sorted((_content(record) for part in parts for record in part.records()), key=repr)
    assert split == sorted(
        map(_content, columns.measurements("r", 2, 1.0, lambda *_: TABLE.digest).records()), key=repr
    )


def _content(record):
    """A record without its identity."""
    fields = dataclasses.asdict(dataclasses.replace(record, sequence=0))
    return type(record).__name__, [repr(np.asarray(part).tolist()) for part in fields.values()]
