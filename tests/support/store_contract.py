# SPDX-License-Identifier: Apache-2.0
"""What every store must do, written once: a subclass says how its store is made, read and opened again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
import pytest

from fedvitals.errors import ConfigError, RecordError
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Sketch,
    Snapshot,
    Span,
    Suspect,
    Transfer,
    Truth,
    Where,
)
from fedvitals.stats import FAMILIES, empty_sums
from fedvitals.store.upkeep import compaction

LAYERS = tuple(Layer(name, (3, 4), "float32") for name in ("conv.weight", "conv.bias", "head.weight"))
TABLE = LayerTable("parameter", LAYERS)
OTHER = LayerTable("parameter", LAYERS[::-1])
RUN = Run("r-1", "digits", tables=(TABLE, OTHER), config={"lr": 0.1}, started=100.0, source="m", sequence=0)

AT = Where("r-1", 3, "c7", 5, "conv.bias", "edge-2")
EVERY_TYPE = [
    Metric(AT, 1.5, "loss", 0.25, "m", 1),
    Event(AT, 1.5, "warning", "client.dropped", "c7 is gone", {"after": 2.5, "who": ["c7"]}, "m", 2),
    Span(AT, 1.5, "train", 0.5, "a" * 32, "b" * 16, None, {"steps": 4}, "m", 3),
    Span(AT, 1.5, "step", 0.5, "a" * 32, "c" * 16, "b" * 16, {}, "m", 4),
    Transfer(AT, 1.5, "c7", "server", 10, 40, None, "update", "m", 5),
    Transfer(AT, 1.5, "server", "c7", 10, 40, 0.25, "model", "m", 6),
    Sketch(AT, 1.5, (0.5, -0.25, 2.0), "d1", 2, "m", 7),
    Finding(AT, 1.5, "label-noise", "critical", 0.75, "c7 learns noise", {"p": 0.5},
            (Suspect("c7", 0.75, "loss"), Suspect("c2", 0.25)), "m", 8),
    Action(AT, 1.5, "f-1", "exclude", "c7", {"rounds": 3}, "applied", "m", 9),
    Action(AT, 1.5, "f-1", "lower", None, {}, "suggested", "m", 10),
    Snapshot(AT, 1.5, "global", "d2", 99, "m", 11),
    Metric(Where("r-1"), 1.5, "accuracy", 0.5, "m", 12),
    Truth(Where("r-1"), 1.5, "label_noise", ("c7", "c2"), 2, None, {"family": "client", "rate": 0.8}, "m", 13),
    Truth(Where("r-1"), 1.5, "drop_out", (), 0, 5, {}, "m", 14),
]  # fmt: skip


def metric(round_, node, value, *, at=None, sequence=0, name="loss", source="m"):
    return Metric(Where("r-1", round_, node), round_ if at is None else at, name, value, source, sequence)


def sums(seed, layers=3):
    """Nine sums of some tensor, as a probe makes them."""
    values = np.random.default_rng(seed).normal(size=(layers, 50)).astype(np.float32).astype(np.float64)
    rows = empty_sums(layers)
    rows[:, 0], rows[:, 1], rows[:, 2] = 50, values.sum(1), (values**2).sum(1)
    rows[:, 3], rows[:, 4], rows[:, 5] = np.abs(values).sum(1), values.min(1), values.max(1)
    return rows


def stats(round_, node, seed=0, sequence=0, family="gradient", *, table=TABLE, at=None, step=None):
    columns = len(FAMILIES[family].columns)
    matrix = sums(seed) if columns == 9 else np.random.default_rng(seed).random((3, columns))
    where = Where("r-1", round_, node, step)
    return LayerStats(where, round_ if at is None else at, family, matrix, table.digest, "m", sequence)


def same(a, b):
    """Equality that takes NaN for equal to NaN, in whatever it is found."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


class StoreContract(ABC):
    @abstractmethod
    def make(self, folder): ...

    @abstractmethod
    def reopen(self, store):
        """The store after its process has ended and another has begun."""

    @abstractmethod
    def history(self, store, run="r-1"): ...

    @abstractmethod
    def read(self, store, kind, run="r-1"): ...

    @abstractmethod
    def run(self, store, run="r-1"): ...

    @pytest.fixture
    def store(self, tmp_path):
        store = self.make(tmp_path)
        yield store
        store.close()

    @pytest.mark.parametrize(
        "kind", dict.fromkeys(type(record) for record in EVERY_TYPE), ids=lambda kind: kind.__name__
    )
    def test_every_record_comes_back_as_it_was(self, store, kind):
        store.write([RUN, *EVERY_TYPE])
        assert list(self.read(store, kind)) == [record for record in EVERY_TYPE if type(record) is kind]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_layer_statistics_of_every_family_come_back(self, store, family):
        written = [stats(1, node, seed, seed, family) for seed, node in enumerate(["c1", None, "c10"], start=1)]
        store.write([RUN, *written])
        # The whole and the nodes may lie apart.
        found = sorted(self.read(store, LayerStats), key=lambda f: f.sequence)
        assert [(f.where, f.at, f.family, f.table, f.source, f.sequence) for f in found] == [
            (w.where, w.at, w.family, w.table, w.source, w.sequence) for w in written
        ]
        for f, w in zip(found, written, strict=True):
            np.testing.assert_allclose(f.matrix, w.matrix, rtol=2e-6, atol=1e-5)

    def test_a_run_comes_back_and_its_newest_version_wins(self, store):
        store.write([RUN])
        assert self.run(store) == RUN
        done = replace(RUN, finished=200.0, sequence=9)
        store.write([done])
        store.write([RUN])  # an old batch, delivered again
        assert self.run(store) == done
        assert self.run(self.reopen(store)) == done

    def test_a_run_without_layers_comes_back(self, store):
        bare = Run("r-1", "bare", tables=(LayerTable("buffer", ()),))
        store.write([bare])
        assert self.run(store) == bare

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7e308])
    def test_every_number_survives(self, store, value):
        store.write([RUN, metric(1, "c1", value, sequence=1)])
        history = self.history(store)
        assert same(history.latest("loss", 1), {"c1": value})
        assert same(history.series("loss", "c1"), ([1], [value]))
        assert same(self.read(store, Metric)[0].value, value)

    def test_numbers_that_json_lacks_are_texts_in_data(self, store):
        data = {"loss": math.nan, "top": (math.inf, -math.inf), "n": np.int64(3), "x": np.float32(0.5), "t": {1: Where}}
        store.write([RUN, Event(AT, 1.0, "info", "odd", "", data, "m", 1)])
        (event,) = self.history(store).events()
        assert event.data == {
            "loss": "NaN", "top": ["Infinity", "-Infinity"], "n": 3, "x": 0.5, "t": {"1": str(Where)}
        }  # fmt: skip

    def test_nonfinite_layer_statistics_survive(self, store):
        matrix = empty_sums(3)  # nothing counted: smallest +inf, largest -inf
        matrix[1] = (10, 1e300, 1e300, 1e300, -1e300, 1e300, 0, 0, 0)  # beyond float32
        matrix[2] = (10, 0, 0, 0, math.inf, -math.inf, 0, 10, 0)  # nothing but NaN
        store.write([RUN, LayerStats(Where("r-1", 1, "c1"), 1.0, "gradient", matrix, TABLE.digest, "m", 1)])
        history = self.history(store)
        assert history.matrix("gradient", "nans", "head.weight")[2].tolist() == [[10.0]]
        assert math.isnan(history.matrix("gradient", "mean", "head.weight")[2][0, 0])
        assert history.matrix("gradient", "max", "conv.bias")[2].tolist() == [[math.inf]]
        assert history.matrix("gradient", "min", "conv.weight")[2].tolist() == [[math.inf]]

    def test_delivered_twice_stored_once(self, store):
        batch = [RUN, *EVERY_TYPE, *(stats(1, f"c{i}", i, 20 + i) for i in range(5))]
        store.write(batch)
        store.write(batch)
        store = self.reopen(store)
        store.write(batch)
        store.write([*batch[4:], metric(9, "c1", 1.0, sequence=99)])
        assert len(self.read(store, Span)) == 2
        assert len(self.read(store, Metric)) == 3
        assert len(self.read(store, LayerStats)) == 5
        store.close()

    def test_twice_in_one_batch_is_stored_once(self, store):
        store.write([RUN, metric(1, "c1", 0.5, sequence=3), metric(1, "c1", 0.5, sequence=3)])
        assert len(self.read(store, Metric)) == 1

    def test_gaps_may_be_filled_in_any_order(self, store):
        order = [5, 1, 2, 9, 8, 3, 7, 0, 4, 6]
        for sequence in order:
            store.write([metric(sequence, "c1", float(sequence), sequence=sequence, source="s")])
        store.write([metric(sequence, "c1", 0.0, sequence=sequence, source="s") for sequence in range(11)])
        assert self.history(store).series("loss", "c1") == (list(range(11)), [*map(float, range(10)), 0.0])

    def test_sources_and_runs_count_apart(self, store):
        here = metric(1, "c1", 1.0, sequence=1)
        there = replace(here, where=replace(here.where, run="r-2"))
        store.write([here, replace(here, source="other"), there])
        assert len(self.read(store, Metric)) == 2
        assert len(self.read(store, Metric, "r-2")) == 1

    def test_without_a_source_there_is_no_identity(self, store):
        store.write([metric(1, "c1", 1.0, source=""), metric(1, "c1", 2.0, source="")])
        assert len(self.read(store, Metric)) == 2

    def test_history_of_an_unknown_run_is_empty(self, store):
        store.write([RUN, metric(1, "c1", 1.0, sequence=1)])
        history = self.history(store, "nobody")
        assert history.rounds() == history.nodes() == []
        assert history.layers("gradient") == ()
        assert history.latest("loss", 1) == {}
        assert history.series("loss", "c1") == ([], [])
        assert history.matrix("gradient", "l2", "conv.bias")[2].shape == (0, 0)
        assert same(history.across("gradient", ("l2", "max"), 1), ([], np.empty((0, 0, 2))))
        assert list(history.events()) == []

    def test_nodes_are_sorted_as_people_count(self, store):
        names = ["c10", "c2", "c1", "edge-2", "server", "c02", "", "é3", "c" + "9" * 5000]
        store.write([metric(1, name, 1.0, sequence=i) for i, name in enumerate(names)])
        wanted = ["", "c1", "c02", "c2", "c10", "c" + "9" * 5000, "edge-2", "server", "é3"]
        assert self.history(store).nodes() == wanted
        assert list(self.history(store).latest("loss", 1)) == wanted

    def test_the_newest_value_is_the_one_measured_last(self, store):
        store.write([metric(1, "c1", 1.0, at=5.0, sequence=1), metric(1, "c1", 2.0, at=4.0, sequence=2)])
        assert self.history(store).latest("loss", 1) == {"c1": 1.0}
        store.write([metric(1, "c1", 3.0, at=5.0, sequence=3)])  # at the same time: the later arrival
        assert self.history(store).latest("loss", 1) == {"c1": 3.0}

    def test_the_whole_is_neither_a_node_nor_a_group(self, store):
        group = Metric(Where("r-1", 1, None, group="edge-1"), 9.0, "loss", 7.0, "m", 3)
        layer = Metric(Where("r-1", 1, "c1", layer="conv.bias"), 9.0, "loss", 8.0, "m", 4)
        store.write([metric(1, None, 1.0, sequence=1), metric(1, "c1", 2.0, sequence=2), group, layer])
        history = self.history(store)
        assert history.series("loss", None) == ([1], [1.0])
        assert history.series("loss", "c1") == ([1], [2.0])
        assert history.latest("loss", 1) == {"c1": 2.0}
        assert history.nodes() == ["c1"]

    def test_matrix_has_nan_where_a_node_took_no_part(self, store):
        written = [stats(1, "c10", 1, 1), stats(1, "c2", 2, 2), stats(4, "c2", 3, 3)]
        store.write([RUN, *written])
        rounds, nodes, matrix = self.history(store).matrix("gradient", "l2", "conv.bias")
        wanted = [record.get("l2")[1] for record in written]
        assert (rounds, nodes) == ([1, 4], ["c2", "c10"])
        np.testing.assert_allclose(matrix, [[wanted[1], wanted[0]], [wanted[2], math.nan]], rtol=1e-6)

    def test_one_round_across_its_nodes(self, store):
        newest = stats(4, "c2", 3, 3, at=9.0)
        others = [stats(4, "c10", 1, 1), stats(3, "c1", 5, 5), stats(4, None, 6, 6), stats(4, "c7", 7, 7, step=2)]
        store.write([RUN, newest, *others, stats(4, "c2", 2, 2, at=8.0)])
        nodes, found = self.history(store).across("gradient", ("l2", "max"), 4)
        assert nodes == ["c2", "c10"]
        assert found.shape == (2, len(TABLE.names), 2)
        for row, record in zip(found, (newest, others[0]), strict=True):
            np.testing.assert_allclose(row.T, [record.get("l2"), record.get("max")], rtol=1e-6)
        assert self.history(store).across("gradient", (), 4)[1].shape == (2, len(TABLE.names), 0)
        assert self.history(store).across("weight", ("l2",), 4)[0] == []
        with pytest.raises(ConfigError, match="l3"):
            self.history(store).across("gradient", ("l2", "l3"), 4)

    def test_layers_in_another_order_or_missing_are_told_as_such(self, store):
        fewer = LayerTable("parameter", TABLE.layers[:2])
        part = LayerStats(Where("r-1", 1, "c2"), 1.0, "gradient", sums(2, 2), fewer.digest, "m", 2)
        turned = stats(1, "c1", 1, 1, table=OTHER)
        store.write([replace(RUN, tables=(TABLE, OTHER, fewer)), turned, part, stats(1, "c3", 3, 3)])
        nodes, found = self.history(store).across("gradient", ("l2",), 1)
        assert nodes == ["c1", "c2", "c3"]
        np.testing.assert_allclose(found[0, :, 0], turned.get("l2")[::-1], rtol=1e-6)
        np.testing.assert_allclose(found[1, :, 0], [*part.get("l2"), math.nan], rtol=1e-6)

    def test_a_layer_is_found_in_whichever_table_a_record_has(self, store):
        store.write([RUN, stats(1, "c1", 1, 1), stats(2, "c1", 1, 2, table=OTHER)])
        rounds, _, matrix = self.history(store).matrix("gradient", "l2", "conv.weight")
        assert rounds == [1, 2]
        np.testing.assert_allclose(matrix[:, 0], sums(1)[[0, 2], 2] ** 0.5, rtol=1e-6)
        assert self.history(store).layers("gradient") == OTHER.names

    def test_the_layers_are_those_of_the_record_that_arrived_last(self, store):
        """Also where the records of one batch have different tables, and one of them comes again."""
        tables = [TABLE, OTHER, TABLE]
        store.write([RUN, *(stats(1, f"c{i}", i, i, table=table) for i, table in enumerate(tables, start=1))])
        assert self.history(store).layers("gradient") == TABLE.names

    def test_of_two_records_of_the_same_time_the_later_arrival_counts(self, store):
        """Also where they have different tables, and a record with the first one's table follows."""
        first, second = stats(1, "c1", 1, 1), stats(1, "c1", 2, 2, table=OTHER)
        store.write([RUN, first, second, stats(1, "c2", 3, 3)])
        nodes, found = self.history(store).across("gradient", ("l2",), 1)
        assert nodes == ["c1", "c2"]
        np.testing.assert_allclose(found[0, :, 0], second.get("l2")[::-1], rtol=1e-6)

    def test_statistics_whose_table_is_unknown_wait_for_it(self, store):
        store.write([stats(1, "c1", 1, 1)])
        assert self.history(store).layers("gradient") == ()
        assert self.history(store).matrix("gradient", "l2", "conv.bias")[0] == []
        store.write([RUN])
        assert self.history(store).layers("gradient") == TABLE.names
        assert self.history(store).matrix("gradient", "l2", "conv.bias")[0] == [1]

    @pytest.mark.parametrize(("limit", "value"), [("CHUNK_ROUNDS", 4), ("CHUNK_BYTES", 2000), ("CHUNK_BLOCKS", 5)])
    def test_compaction_changes_no_answer(self, store, monkeypatch, limit, value):
        twin = [stats(r, f"c{c}", 10 * r + c, 10 * r + c, at=r - (r == 7)) for r in range(40) for c in range(3)]
        twin += [stats(5, "c1", 999, 999, at=6.0), stats(0, None, 998, 998), stats(20, "c9", 997, 997, step=4)]
        store.write([RUN])
        for i in range(0, len(twin), 5):
            store.write(twin[i : i + 5])
        before = self.answers(store)
        store.close()
        monkeypatch.setattr(compaction, limit, value)
        store = self.reopen(store)
        late = [stats(3, "c1", 996, 1000, at=50.0), stats(60, "c1", 995, 1001)]
        store.write(late)
        after = self.answers(store)
        monkeypatch.undo()
        plain = self.make_second(store)
        plain.write([RUN, *twin, *late])
        assert same(after, self.answers(plain))
        assert not same(before, after)
        plain.close()
        store.close()

    def test_compaction_moves_no_record_behind_a_later_one_of_the_same_time(self, store, monkeypatch):
        """The later one has another layer table, and so is not in the block that the others are merged into."""
        monkeypatch.setattr(compaction, "CHUNK_ROUNDS", 2)
        later = stats(0, "c1", 2, 2, table=OTHER, at=0.0)
        for batch in ([RUN, stats(0, "c1", 1, 1, at=0.0)], [later], [stats(1, "c1", 3, 3)], [stats(20, "c1", 4, 4)]):
            store.write(batch)
        _, found = self.history(store).across("gradient", ("l2",), 0)
        np.testing.assert_allclose(found[0, :, 0], later.get("l2")[::-1], rtol=1e-6)

    def answers(self, store):
        history = self.history(store)
        layers = [history.matrix("gradient", "mean", layer) for layer in TABLE.names]
        across = [history.across("gradient", ("mean", "l2"), number) for number in history.rounds()]
        return [history.rounds(), history.nodes(), history.layers("gradient"), layers, across]

    @abstractmethod
    def make_second(self, store):
        """Another store, empty, that compacts nothing of what the tests write."""

    def test_events_are_told_oldest_first(self, store):
        def event(at, round_, name, sequence):
            return Event(Where("r-1", round_), at, "info", name, "", {}, "m", sequence)

        late, early, roundless = event(9.0, 1, "a", 1), event(2.0, 5, "b", 2), event(3.0, None, "a", 3)
        store.write([late, early, roundless])
        history = self.history(store)
        assert list(history.events()) == [early, roundless, late]
        assert list(history.events("a")) == [roundless, late]
        assert list(history.events(since=2)) == [early]
        assert list(history.events("a", since=1)) == [late]

    @pytest.mark.parametrize(
        "name", ["ünï-cødé", "o'brien\"; DROP TABLE run; --", "🦆", "x" * 10_000, "a\x00b", "%s ?"]
    )
    def test_any_name_is_kept(self, store, name):
        table = LayerTable("parameter", (Layer(name, (1,), name),))
        where = Where(name, 1, name, None, None, name)
        run = Run(name, name, config={name: name}, tables=(table,))
        records = [
            run,
            Metric(where, 1.0, name, 1.0, name, 1),
            Event(where, 1.0, name, name, name, {name: name}, name, 2),
            LayerStats(where, 1.0, "gradient", sums(1, 1), table.digest, name, 3),
        ]
        store.write(records)
        history = self.history(store, name)
        assert self.run(store, name) == run
        assert history.nodes() == [name]
        assert history.latest(name, 1) == {name: 1.0}
        assert list(history.events(name)) == [records[2]]
        assert history.layers("gradient") == table.names
        assert history.matrix("gradient", "count", table.names[0])[2].tolist() == [[50.0]]

    def test_what_is_no_record_is_refused_and_nothing_of_its_batch_kept(self, store):
        with pytest.raises(RecordError, match=r"takes records.*got str"):
            store.write([metric(1, "c1", 1.0, sequence=1), "loss"])
        store.write([metric(1, "c1", 2.0, sequence=1)])
        assert self.history(store).latest("loss", 1) == {"c1": 2.0}

    def test_an_empty_batch_is_nothing(self, store):
        store.write([])
