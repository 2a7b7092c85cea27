# SPDX-License-Identifier: Apache-2.0
"""Metrics as arrays: as the courses tell them, also piece by piece; and nothing that matters is lost in buckets."""

from __future__ import annotations

import base64
import math
import sys
import threading
import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvitals.records import Event, Metric, Transfer, Where, is_client
from fedvitals.store import PostgresStore, open_reader
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import values_of_everybody
from fedvitals.store.sqlite import SqliteStore
from fedvitals.store.upkeep import retention
from fedvitals.store.upkeep.doctor import examine
from fedvitals.views import cohort
from fedvitals.views.cases import failures_by_client
from fedvitals.views.cohort import Matrix, buckets, matrix_of
from fedvitals.views.grid import ABSENT, FAILED, MINUS, NAN, PLUS, VALUE, make_grid
from fedvitals.views.matrix import Matrices, metric_matrix, share
from fedvitals.views.profile import profile_of
from fedvitals.views.traffic_counts import Total, traffic_total
from fedvitals_studies.bench.synthetic import Synthetic, records_of_round, write_run
from support.postgres_server import available, running
from support.store_contract import RUN

VALUES = st.floats(-1e6, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 1e300])
TOLD = st.tuples(
    st.integers(0, 6) | st.none(),  # round
    st.sampled_from(["c0", "c1", "c10", "c2", "server", "edge-1", None]),
    st.sampled_from(["loss", "steps"]),
    VALUES,
    st.integers(0, 3),  # at
    st.sampled_from([None, None, None, "conv.weight"]),
)
BATCHES = st.lists(st.lists(TOLD, max_size=12), min_size=1, max_size=5)


def records(batch, start=0):
    return [
        Metric(Where("r-1", round_, node, None, layer), float(at), name, value, "m", start + i)
        for i, (round_, node, name, value, at, layer) in enumerate(batch, 1)
    ]


def expected(reader, name):
    """What the courses say, as the matrix should: nodes, rounds, values."""
    told = {node: course for node, course in values_of_everybody(reader, "r-1", name).items() if is_client(node)}
    rounds = sorted({number for course in told.values() for number in course})
    there = np.array([[number in course for number in rounds] for course in told.values()], bool)
    largest = float(np.finfo(np.float32).max)
    clip = lambda value: value if math.isinf(value) else min(max(value, -largest), largest)  # noqa: E731
    values = [[clip(course.get(number, math.nan)) for number in rounds] for course in told.values()]
    shape = (len(told), len(rounds))
    return tuple(told), tuple(rounds), np.array(values, np.float32).reshape(shape), there.reshape(shape)


def check(matrix, wanted):
    nodes, rounds, values, there = wanted
    assert matrix.nodes == nodes
    assert tuple(matrix.rounds) == tuple(rounds)
    np.testing.assert_array_equal(matrix.values, values)
    np.testing.assert_array_equal(matrix.there, there)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(BATCHES)
def test_a_matrix_is_what_the_courses_tell_also_piece_by_piece(tmp_path_factory, batches):
    path = tmp_path_factory.mktemp("m") / "runs.db"
    kept, sequence = Matrices(), 0
    with SqliteStore(path) as store:
        store.write([RUN])
        with open_reader(path) as reader:
            for batch in batches:
                store.write(records(batch, sequence))
                sequence += len(batch)
                for name in ("loss", "steps"):
                    wanted = expected(reader, name)
                    check(kept.matrix(reader, "r-1", name), wanted)
                    check(metric_matrix(reader, "r-1", name), wanted)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_metric_of_many_rows_is_read_without_an_object_for_each(tmp_path, steps):
    """A server reads it again for every run that is opened; a row with five numbers takes 200 bytes as objects."""
    told = [
        Metric(Where("r-1", number, f"c{client}"), float(step), "loss", step + client / 7, "m", 1)
        for number in range(1, 401)
        for client in range(10)
        for step in range(steps)
    ]
    with SqliteStore(tmp_path / "runs.db") as store:
        store.write([RUN, *(replace(record, sequence=i) for i, record in enumerate(told, 1))])
    with open_reader(tmp_path / "runs.db") as reader:
        metric_matrix(reader, "r-1", "loss")  # what is loaded once
        tracemalloc.start()
        matrix = metric_matrix(reader, "r-1", "loss")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert matrix.values.shape == (10, 400)
    np.testing.assert_array_equal(matrix.values[3], np.full(400, steps - 1 + 3 / 7, np.float32))
    assert peak < 100 * matrix.values.size  # bytes, of all steps together


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6), st.integers(0, 2**31))
def test_what_is_known_of_earlier_rounds_is_as_if_all_were_computed_anew(steps, seed):
    rng = np.random.default_rng(seed)
    matrix = matrix_of([f"c{i}" for i in range(5)], [0], rng.normal(size=(5, 1)))
    for added, looked_at in steps:
        changed = min(len(matrix.rounds), 1)  # the newest round may still be written
        first = len(matrix.rounds) - changed
        matrix = matrix.grown(range(len(matrix.rounds), len(matrix.rounds) + added), first)
        news = rng.choice([0.0, 1.0, 2.5, np.nan, np.inf], matrix.values[:, first:].shape).astype(np.float32)
        matrix.values[:, first:], matrix.there[:, first:] = news, rng.random(news.shape) < 0.8
        matrix.values[~matrix.there] = np.nan
        if looked_at:
            matrix.band()
            matrix.deviations()
    anew = Matrix(matrix.nodes, matrix.rounds, matrix.values, matrix.there)
    np.testing.assert_array_equal(matrix.deviations(), anew.deviations())
    for name in ("min", "p5", "median", "p95", "max", "count", "odd"):
        np.testing.assert_array_equal(getattr(matrix.band(), name), getattr(anew.band(), name))


def test_what_was_handed_out_before_does_not_change(tmp_path):
    with SqliteStore(tmp_path / "runs.db") as store:
        store.write([RUN, *records([(0, "c1", "loss", 1.0, 0, None)])])
        with open_reader(tmp_path / "runs.db") as reader:
            kept = Matrices()
            before = kept.matrix(reader, "r-1", "loss")
            assert kept.matrix(reader, "r-1", "loss") is before
            store.write(records([(0, "c1", "loss", 5.0, 1, None), (1, "c0", "loss", 2.0, 1, None)], 1))
            after = kept.matrix(reader, "r-1", "loss")
            assert before.values.tolist() == [[1.0]]
            assert after.nodes == ("c0", "c1")
            assert after["c1"] == ([0], [5.0])
            assert after["nobody"] == ([], [])


def test_many_second_values_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("fedvitals.views.matrix.SEEKS", 3)
    with SqliteStore(tmp_path / "runs.db") as store:
        store.write([RUN, *records([(0, f"c{i}", "loss", 1.0, 1, None) for i in range(9)])])
        with open_reader(tmp_path / "runs.db") as reader:
            kept = Matrices()
            kept.matrix(reader, "r-1", "loss")
            store.write(records([(0, f"c{i}", "loss", 2.0, i % 3, None) for i in range(9)], 9))
            check(kept.matrix(reader, "r-1", "loss"), expected(reader, "loss"))


def test_a_deleted_run_is_forgotten_also_when_it_comes_again(tmp_path):
    path = tmp_path / "runs.db"
    kept = Matrices()
    with SqliteStore(path) as store:
        store.write([RUN, *records([(0, "c1", "loss", 1.0, 0, None), (1, "c1", "loss", 1.0, 0, None)])])
    with open_reader(path) as reader:
        assert tuple(kept.matrix(reader, "r-1", "loss").rounds) == (0, 1)
    retention.delete(path, ["r-1"])
    with open_reader(path) as reader:
        assert kept.matrix(reader, "r-1", "loss").nodes == ()
    with SqliteStore(path) as store:
        store.write([RUN, *records([(i, "c2", "loss", 1.0, 0, None) for i in range(5)], 7)])
    with open_reader(path) as reader:
        check(kept.matrix(reader, "r-1", "loss"), expected(reader, "loss"))


def test_no_more_is_remembered_than_allowed_and_answers_stay_right(tmp_path):
    names = [f"user.{i}" for i in range(6)]
    with SqliteStore(tmp_path / "runs.db") as store:
        told = [(r, f"c{c}", name, float(r * c), 0, None) for r in range(5) for c in range(5) for name in names]
        store.write([RUN, *records(told)])
        with open_reader(tmp_path / "runs.db") as reader:
            kept = Matrices(most=5000)
            for name in names * 2:
                check(kept.matrix(reader, "r-1", name), expected(reader, name))
            held = sum(len(run.metrics) for run in kept._runs.values())
            assert 1 <= held < len(names)


def test_threads_share_what_is_remembered(tmp_path):
    path, kept, wrong = tmp_path / "runs.db", Matrices(most=4000), []
    with SqliteStore(path) as store:
        store.write([RUN])

        def look():
            try:
                with open_reader(path) as reader:
                    share(reader, kept)
                    for turn in range(60):
                        matrix = metric_matrix(reader, "r-1", ("loss", "steps", "samples")[turn % 3])
                        assert matrix.values.shape == (len(matrix.nodes), len(matrix.rounds))
            except Exception as error:  # noqa: BLE001 - to be told by the test
                wrong.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for r in range(40):
            told = [(r, f"c{c + r}", name, 1.0, 0, None) for c in range(3) for name in ("loss", "steps", "samples")]
            store.write(records(told, 9 * r))
        for thread in threads:
            thread.join()
        assert wrong == []
        with open_reader(path) as reader:
            check(kept.matrix(reader, "r-1", "loss"), expected(reader, "loss"))


@pytest.mark.postgres
@pytest.mark.thorough
@available
def test_postgresql_gives_the_same(tmp_path):
    with running() as server:
        url, kept = server.database(), Matrices()
        told = [
            (r, f"c{c}", "loss", [1.5, math.nan, math.inf, -math.inf][c % 4], 0, None)
            for r in range(9)
            for c in range(8)
        ]
        with PostgresStore(url) as store:
            store.write([RUN, *records(told)])
        with PostgresStore(url) as store, open_reader(url) as reader:
            check(kept.matrix(reader, "r-1", "loss"), expected(reader, "loss"))
            again = [
                (8, "c3", "loss", 7.0, 1, None),
                (8, "c2", "loss", 7.0, -1, None),
                (9, "c20", "loss", 1.0, 0, None),
            ]
            store.write(records(again, len(told)))
            check(kept.matrix(reader, "r-1", "loss"), expected(reader, "loss"))
            check(metric_matrix(reader, "r-1", "loss"), expected(reader, "loss"))
            assert queries.attendance(reader, "r-1") == {None: list(range(10))}
            share(reader, kept)
            assert traffic_total(reader, "r-1") is None
        retention.delete(url, ["r-1"])
        with open_reader(url) as reader:
            assert kept.matrix(reader, "r-1", "loss").nodes == ()


def test_bytes_are_added_up_as_they_come(tmp_path):
    where = Where("r-1", 1, "c1")
    with SqliteStore(tmp_path / "runs.db") as store:
        store.write([RUN])
        with open_reader(tmp_path / "runs.db") as reader:
            share(reader, Matrices())
            assert traffic_total(reader, "r-1") is None
            for i in range(4):
                store.write([Transfer(where, 1.0, "c1", "server", 10 + i, 40, None, "update", "m", i + 1)])
                assert traffic_total(reader, "r-1") == Total(sum(10 + j for j in range(i + 1)), 0)
                assert traffic_total(reader, "r-2") is None
    with open_reader(tmp_path / "runs.db") as reader:
        assert traffic_total(reader, "r-1") == Total(46, 0)


@pytest.mark.parametrize("share_", [1.0, 0.5])
def test_an_invented_run_looks_like_a_run(tmp_path, share_):
    size = Synthetic(clients=20, rounds=12, layers=6, share=share_, every=4)
    with SqliteStore(tmp_path / "runs.db") as store:
        write_run(store, size)
        store.write(records_of_round(size, 3))  # delivered again
    with open_reader(tmp_path / "runs.db") as reader:
        (run,) = queries.list_runs(reader)
        assert (run.rounds, run.clients, run.lost) == (12, 20, 0)
        assert run.finished is not None
        assert 1 <= run.findings <= 5
        matrix = metric_matrix(reader, size.run, "loss")
        assert matrix.worst_first()[0] == 7 or share_ < 1
        assert matrix.there.sum() >= 0.9 * share_ * matrix.there.size
        rounds, layers, values = queries.whole_layers(reader, size.run, "gradient")
        assert (len(rounds), len(layers), values.shape) == (12, 6, (12, 6, 9))
        assert (queries.whole_layers(reader, size.run, "gradient.histogram")[2].sum(axis=2) > 4000).all()
        assert len(queries.layer_round(reader, size.run, "gradient", 4).nodes) > 5
        profile = profile_of(reader, size.run)
        assert profile.verdict is not None
        assert not [sign for sign in examine(tmp_path / "runs.db") if sign.state == "trouble"]


CELLS = st.floats(-1e3, 1e3, width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


@st.composite
def tables(draw):
    rows, columns = draw(st.integers(0, 7)), draw(st.integers(0, 9))
    cells = draw(st.lists(CELLS, min_size=rows * columns, max_size=rows * columns))
    values = np.array(cells, np.float32).reshape(rows, columns)
    absent = draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    there = ~np.isnan(values) | np.array(absent, bool).reshape(rows, columns)
    return matrix_of([f"c{i}" for i in range(rows)], range(0, 3 * columns, 3), values, there)


@settings(deadline=None)
@given(tables(), st.integers(1, 5))
def test_bands_and_buckets_keep_the_extremes(matrix, columns):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        band, joined, order = matrix.band(), matrix.bucket(columns), matrix.worst_first()
    for i in range(len(matrix.rounds)):
        column = matrix.values[:, i].astype(float)
        finite = column[np.isfinite(column)]
        told = [getattr(band, name)[i] for name in ("min", "p5", "median", "p95", "max")]
        if len(finite):
            np.testing.assert_allclose(told, np.percentile(finite, [0, 5, 50, 95, 100]), rtol=1e-6, atol=1e-6)
        else:
            assert np.isnan(told).all()
        assert band.count[i] - band.odd[i] == len(finite)
    assert sorted(order) == list(range(len(matrix.nodes)))
    assert len(joined.first) <= columns
    for j, (first, last) in enumerate(zip(joined.first, joined.last, strict=True)):
        low, high = matrix.span(first, last)
        for i in range(len(matrix.nodes)):
            part, there = matrix.values[i, low:high], matrix.there[i, low:high]
            finite = part[np.isfinite(part)]
            assert joined.there[i, j] == there.any()
            assert joined.low[i, j] == finite.min() if len(finite) else math.isnan(joined.low[i, j])
            assert joined.high[i, j] == finite.max() if len(finite) else math.isnan(joined.high[i, j])
            if (there & ~np.isfinite(part)).any():
                assert not np.isfinite(joined.worst[i, j])
            elif len(finite):
                away = np.abs(matrix.deviations()[i, low:high])
                assert joined.worst[i, j] == part[np.nanargmax(away)]


def test_who_is_furthest_comes_first_and_newer_rounds_weigh_more():
    values = np.random.default_rng(0).normal(size=(30, 100))
    values[3] += 4  # always
    values[7, 80:] += 20  # of late
    values[5, :20] += 20  # long ago
    values[9, 50] = math.nan
    there = np.ones(values.shape, bool)
    order = matrix_of([f"c{i}" for i in range(30)], range(100), values, there).worst_first().tolist()
    assert order[0] == 9
    assert set(order[1:3]) == {3, 7}
    assert order.index(5) > 2


def test_where_most_are_equal_the_odd_one_still_stands_out():
    values = np.ones((9, 20))
    values[4] = 2
    assert matrix_of([f"c{i}" for i in range(9)], range(20), values).worst_first()[0] == 4


@settings(deadline=None)
@given(st.lists(CELLS, max_size=40), st.integers(1, 12))
def test_a_series_in_buckets_keeps_its_spikes(values, points):
    rounds = list(range(10, 10 + len(values)))
    told = buckets(rounds, values, points)
    assert len(told.rounds) == len(told.values) == len(told.low) == len(told.high) <= points
    assert told.shown_of == len(values)
    finite = [value for value in values if math.isfinite(value)]
    known = [value for value in told.low + told.high if math.isfinite(value)]
    if finite:
        assert min(known) == min(finite)
        assert max(known) == max(finite)
    if values:
        assert told.rounds[-1] == rounds[-1]
        assert any(not math.isfinite(value) for value in told.values) == (len(finite) < len(values))


def unpacked(grid):
    shape = (len(grid.rows), len(grid.columns))
    values = np.frombuffer(base64.b64decode(grid.values), "<f4").reshape(shape)
    return values, np.frombuffer(base64.b64decode(grid.state), np.uint8).reshape(shape)


def test_a_grid_says_of_each_cell_what_it_is():
    values = np.array([[1, 2, math.nan, math.inf], [-math.inf, math.nan, 3, 4]])
    there = np.array([[1, 1, 1, 1], [1, 0, 1, 1]], bool)
    matrix = matrix_of(["c1", "c2"], [0, 1, 5, 6], values, there)
    grid = make_grid(matrix, sort="name", failed={("c2", 1), ("nobody", 1), ("c1", 99)}, unit="nats", title="Loss")
    numbers, state = unpacked(grid)
    assert state.tolist() == [[VALUE, VALUE, NAN, PLUS], [MINUS, FAILED, VALUE, VALUE]]
    assert numbers[0, :2].tolist() == [1, 2]
    assert (grid.smallest, grid.largest, grid.total_rows, grid.total_columns) == (1, 4, 2, 4)
    assert (grid.columns, grid.last, grid.unit, grid.title) == ((0, 1, 5, 6), (0, 1, 5, 6), "nats", "Loss")


def test_a_grid_of_buckets_pages_and_rounds():
    values = np.zeros((50, 100))
    values[31, 77] = 9
    matrix = matrix_of([f"c{i}" for i in range(50)], range(100), values)
    grid = make_grid(matrix, columns=10, limit=5)
    numbers, _ = unpacked(grid)
    assert grid.rows[0] == "c31"
    assert (len(grid.rows), grid.total_rows, grid.total_columns) == (5, 50, 100)
    assert numbers[0].tolist() == [0] * 7 + [9, 0, 0]
    assert (grid.columns[7], grid.last[7]) == (70, 79)
    part = make_grid(matrix, first=20, last=29, rows=["c4", "nobody", "c2"], sort="given", offset=1)
    assert (part.rows, part.columns[0], part.last[-1]) == (("c2",), 20, 29)


@pytest.mark.parametrize("matrix", [matrix_of((), (), np.empty((0, 0))), matrix_of(["c1"], [3], [[math.nan]])])
def test_nothing_told_is_no_error(matrix):
    grid = make_grid(matrix, columns=5)
    assert (grid.low, grid.high, grid.smallest) == (None, None, None)
    assert set(unpacked(grid)[1].ravel().tolist()) <= {ABSENT}


def test_failures_are_found_in_the_events(tmp_path):
    told = [
        Event(Where("r-1", 2, "c3"), 0.0, "error", "client.failed", "no", {}, "m", 1),
        Event(Where("r-1", 4, "c1"), 0.0, "warning", "update.lost", "no", {}, "m", 2),
        Event(Where("r-1", 4, "c2"), 0.0, "info", "labels", "yes", {}, "m", 3),
        Event(Where("r-1", None, "c2"), 0.0, "error", "client.failed", "no", {}, "m", 4),
    ]
    with SqliteStore(tmp_path / "runs.db") as store:
        store.write([RUN, *told])
        with open_reader(tmp_path / "runs.db") as reader:
            assert failures_by_client(reader, "r-1") == {"c3": [("client.failed", 2)], "c1": [("update.lost", 4)]}


def test_a_metric_that_nobody_asks_for_takes_no_memory_with_each_round(tmp_path, monkeypatch):
    """Read once, or ahead, it must not grow while the run is watched; whoever asks for it later gets all of it."""
    monkeypatch.setattr("fedvitals.views.matrix.WAITING", 50)
    clients, matrices = [f"c{i}" for i in range(4)], Matrices()
    with SqliteStore(tmp_path / "runs.db") as store:
        for number in range(60):
            at = [Where("r-1", number, client) for client in clients]
            store.write([Metric(where, 0.0, name, float(number)) for where in at for name in ("loss", "steps")])
            with open_reader(tmp_path / "runs.db") as reader:
                if number == 0:
                    matrices.matrix(reader, "r-1", "steps")
                assert tuple(matrices.matrix(reader, "r-1", "loss").rounds) == tuple(range(number + 1))
            waiting = matrices._runs["r-1"].waiting.values()
            assert sum(len(news) for parts in waiting for news in parts) <= 50
        with open_reader(tmp_path / "runs.db") as reader:
            assert not matrices.holds(reader, "r-1", "steps")
            assert tuple(matrices.matrix(reader, "r-1", "steps").rounds) == tuple(range(60))


def test_what_is_computed_from_a_small_matrix_is_not_kept(monkeypatch):
    """A dashboard that shows a run of few clients would grow with every round by several times the numbers."""
    values = np.random.default_rng(0).normal(size=(10, 300))
    small = matrix_of([f"c{i}" for i in range(10)], range(300), values)
    monkeypatch.setattr(cohort, "LARGE", 1)
    large = matrix_of(small.nodes, small.rounds, values)
    kept = [large.band(), large.deviations(), large.worst_first(), large.extent()]
    monkeypatch.undo()
    again = [small.band(), small.deviations(), small.worst_first(), small.extent()]
    assert small._known == {}
    assert {"band", "deviations", "worst_first", "extent"} <= large._known.keys()
    assert np.array_equal(kept[0].median, again[0].median)
    assert np.array_equal(kept[1], again[1])
    assert np.array_equal(kept[2], again[2])
    assert kept[3] == again[3]
    part = small.take([3, 4], 10, 20)  # whose deviations are from the whole cohort
    assert np.array_equal(part.deviations(), again[1][[3, 4], 10:21])


def test_rounds_that_follow_each_other_take_no_memory():
    """Of ten clients a tuple of rounds takes nearly as much as their values, for each metric that is remembered."""
    names = [f"c{i}" for i in range(10)]
    matrix = matrix_of(names, [3], np.zeros((10, 1)))
    short = sys.getsizeof(matrix.rounds)
    for number in range(4, 2000):
        matrix = matrix.grown([number], len(matrix.rounds))
    assert list(matrix.rounds) == list(range(3, 2000))
    assert sys.getsizeof(matrix.rounds) == short
    gap = matrix.grown([2500, 2501], len(matrix.rounds))
    assert list(gap.rounds) == [*range(3, 2000), 2500, 2501]
    assert cohort.compact([]) == matrix_of([], [], np.empty((0, 0))).rounds
    assert list(cohort.compact([2, 4])) == [2, 4]
