# SPDX-License-Identifier: Apache-2.0
"""A queue whose sink is slower than the training: what is left out follows a rule, is counted, and is not lost."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedvitals as fv
from fedvitals.measurements import single_records
from fedvitals.records import Event, LayerStats, Metric, Sketch, Where
from fedvitals.report.write import report
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.store.sqlite import SqliteStore
from fedvitals.transport.queue import Queue
from fedvitals.transport.thinning import ThinnedClientRounds, is_kept, levels, room_of, thinned
from fedvitals.views.status import status_of
from support.measured_tables import measured, messages, same
from support.models import mlp
from support.sinks import Hanging, ending_queues
from support.verbs import run
from support.waiting import PATIENCE


@pytest.fixture
def make_queue():
    with ending_queues() as make:
        yield make


def stays(record, detail, rest):
    """The rule, for a single record of measurements."""
    bulk = isinstance(record, LayerStats | Sketch) or record.where.step is not None
    here = record.where.node, record.where.round
    return is_kept(*here, rest) and (not bulk or is_kept(*here, detail))


@given(
    st.integers(0, 1000), st.integers(0, 4), st.sampled_from([["c3"], [f"c{i}" for i in range(9)], ["server", "c1"]])
)
def test_measurements_are_thinned_as_their_single_records_are(seed, level, nodes):
    table = measured(len(nodes), seed, round_index=seed, nodes=nodes)
    rest = max(0, level - 2)
    kept, without = thinned(table, level, rest)
    expected = [record for record in table.records() if stays(record, level, rest)]
    unnumbered = [
        [dataclasses.replace(record, sequence=0) for record in records]
        for records in (single_records([] if kept is None else [kept]), expected)
    ]
    same(*unnumbered)
    assert without == [node for node in nodes if not is_kept(node, seed, level)]
    assert (kept is table) == (not without)


@pytest.mark.parametrize("level", range(5))
def test_messages_are_thinned_as_their_single_records_are(level):
    block = messages(9)
    kept, without = thinned(block, level, level)
    expected = [own for record in block.records() if (own := thinned(record, level, level)[0]) is not None]
    ends = [
        [(r.sender, r.receiver, r.bytes) for r in single_records(own)] for own in ([kept] if kept else [], expected)
    ]
    assert ends[0] == ends[1]
    assert without == [f"c{i}" for i in range(9) if not is_kept(f"c{i}", 2, level)]
    assert room_of(block) == len(block)


def test_the_rule():
    assert [levels(share / 8) for share in range(9)] == [(0, 0)] * 4 + [(1, 0), (2, 0), (3, 1), (4, 3), (5, 5)]
    everybody = [(f"c{i}", number) for i in range(100) for number in range(100)]
    for level in range(1, 5):
        kept = {place for place in everybody if is_kept(*place, level)}
        assert len(kept) == pytest.approx(10_000 / 2**level, rel=0.1)
        assert kept <= {place for place in everybody if is_kept(*place, level - 1)}
    assert all(is_kept(node, 3, 4) for node in (None, "server", "edge-1", "cluster-0"))


def test_a_client_round_is_counted_once():
    counts = ThinnedClientRounds()
    gone = [node for node in map("c{}".format, range(40)) if not is_kept(node, 7, 1)]
    counts.add(7, gone, 0)
    counts.add(7, gone, 1)
    assert (counts.detail, counts.rest) == (len(gone), len(gone))
    counts.add(8, ["c1"], 0)
    assert (counts.detail, counts.rest) == (len(gone) + 1, len(gone))


@pytest.mark.parametrize("arrays", [True, False])
def test_nothing_is_lost_while_thinning_is_enough(make_queue, arrays, caplog):
    sink = Hanging()
    sink.takes_measurements = arrays
    rounds = [measured(20, number, round_index=number) for number in range(40)]
    whole = sum(map(room_of, rounds))
    queue = make_queue(sink, bulk=whole // 2, strict=True)
    queue.put(Metric(Where("r", 0, "c1"), 0.0, "loss", 0.0))
    assert sink.entered.wait(PATIENCE)
    aside = []
    for table in rounds:
        place = Where("r", table.round)
        aside += [Event(place, 1.0, "info", "note", ""), Metric(place, 1.0, "time.round", 1.0)]
        queue.put(table)
        queue.put_many(aside[-2:])
    sink.go.set()
    assert queue.flush()
    assert queue.lost == {}
    written = single_records(sink.records)
    assert [record for record in written if record in aside] == aside
    rest = [record for record in written if isinstance(record, Metric) and record.name == "samples"]
    statistics = {(r.where.node, r.where.round) for r in written if isinstance(r, LayerStats)}
    assert 40 * 20 - len(statistics) == queue.thinned.detail > 200
    absent = len([m for table in rounds for m in table.metrics() if m[1] == "samples"]) - len(rest)
    assert absent == 0 if not arrays else absent <= queue.thinned.rest
    assert "slower than the training" in caplog.text


def test_a_sink_that_ignores_layer_statistics_is_not_thinned(make_queue):
    sink = Hanging()
    sink.ignores = (LayerStats, Sketch)
    queue = make_queue(sink, bulk=40 * room_of(measured(20)))
    for number in range(40):
        queue.put(measured(20, number, round_index=number))
    sink.go.set()
    assert queue.flush()
    assert queue.thinned.detail == 0
    assert len(sink.records) == sum(measured(20, number).metric_count for number in range(40))


def test_a_queue_that_is_less_than_half_full_takes_everything(make_queue):
    sink = Hanging()
    sink.takes_measurements = True
    queue = make_queue(sink, bulk=2 * 30 * room_of(measured(20)) + 2, strict=True)
    for number in range(30):
        queue.put(measured(20, number, round_index=number))
    sink.go.set()
    assert queue.flush()
    assert queue.thinned.detail == 0
    assert sum(map(len, sink.records)) == sum(len(measured(20, number)) for number in range(30))


def test_a_slow_store_is_thinned_and_says_so(tmp_path, monkeypatch, capsys):
    write, entered, go = SqliteStore.write, threading.Event(), threading.Event()

    def slow(self, records, /):
        entered.set()
        go.wait(PATIENCE)
        write(self, records)

    monkeypatch.setattr(SqliteStore, "write", slow)
    monkeypatch.setitem(Queue.__init__.__kwdefaults__, "bulk", 800)
    store = tmp_path / "runs.db"
    monitor = fv.Monitor(store, "slow", detectors=(), machine=False, probes="light")
    for number in range(12):
        with monitor.round(number, mlp()):
            for client in range(30):
                with monitor.client(client, mlp()):
                    pass
        assert entered.wait(PATIENCE)  # from the second round on, everything waits in the queue
    go.set()
    assert monitor.flush(PATIENCE)
    monitor.close()
    monkeypatch.undo()
    assert monitor.lost == 0
    with open_reader(store) as reader:
        identity = monitor.run.id
        lost, count = queries.left_out(reader, identity)
        assert (lost, status_of(reader, identity).thinned) == (0, count)
        assert 0 < count <= 12 * 30
        history = reader.history(identity)
        assert history.series("time.round", None)[0] == [*range(12)]
        (event,) = history.events("telemetry.thinned")
        assert event.data["client_rounds"] == count
        assert f"Layer statistics of {count} client-rounds were left out" in event.message
    code, out, _ = run(capsys, "show", "slow", "--store", store)
    assert code == 0
    assert f"lost: 0 records, thinned: {count} client-rounds" in " ".join(out.split())
    with open_reader(store) as reader:
        report(reader, ["slow"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"layer statistics of {count} client-rounds" in page
    assert f"layer statistics of {count} client-rounds were left out" in str(monitor.findings().gaps)
