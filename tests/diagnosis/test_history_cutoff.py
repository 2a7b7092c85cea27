# SPDX-License-Identifier: Apache-2.0
"""A history that is cut off answers from what it keeps as it would anew, and what it keeps does not grow."""

from __future__ import annotations

import numpy as np
import pytest

from fedvitals.diagnosis.detectors import signals
from fedvitals.diagnosis.evidence.label_counts import LabelCounts
from fedvitals.diagnosis.examine import DETECTORS, DetectorExamination
from fedvitals.diagnosis.history_cutoff import (
    CutoffRound,
    HistoryCutoff,
    shared,
    state_of,
)
from fedvitals.errors import ConfigError
from fedvitals.measurements import Measurements
from fedvitals.protocols import History
from fedvitals.records import Event, Layer, LayerStats, LayerTable, Metric, Run, Where
from fedvitals.stats import FAMILIES, empty_sums, statistics_of
from fedvitals.store.in_memory import MemoryHistory, MemoryStore

TABLE = LayerTable("parameter", tuple(Layer(name, (4, 4), "float32") for name in ("0.weight", "0.bias", "1.weight")))


def written(store: MemoryStore, round_index: int, nodes: list[str], chance: np.random.Generator) -> None:
    """Write what a small round measures."""
    start = 1000.0 * round_index
    where = [Where("r", round_index, node) for node in nodes]
    names = ("update.norm", "weight.drift", "steps", "gradient.norm", "memory.resident", "samples", "update.samples")
    metrics = [Metric(place, start, name, float(1 + chance.random())) for place in where for name in names]
    sums = empty_sums(len(nodes), len(TABLE.names)) + chance.random((len(nodes), len(TABLE.names), 9))
    sums[..., 4:6], sums[..., 7:] = (-1.0, 1.0), 0.0
    stats = [
        LayerStats(place, start, family, matrix, TABLE.digest)
        for family in ("update", "gradient", "weight")
        for place, matrix in zip(where, sums, strict=True)
    ]
    labels = [Event(place, start, "info", "labels", "", {"histogram": {"0": 5, "1": 5}}) for place in where]
    loss = Metric(Where("r", round_index), start, "loss", float(chance.random()))
    store.write([*metrics, *stats, *labels, loss])


def opened(rounds: int | None = None) -> MemoryStore:
    store = MemoryStore(rounds=rounds)
    store.write([Run("r", "r", tables=(TABLE,))])
    return store


def test_answers_are_those_of_the_history_itself() -> None:
    store, chance, horizon = opened(), np.random.default_rng(1), CutoffRound()
    live, later = (HistoryCutoff(store.history("r"), horizon, finished=finished) for finished in (False, True))
    for number in range(6):
        written(store, number, ["c2", "c10", "c1"], chance)
    for number in range(6):
        horizon.move_to(number)
        for history in (live, later):
            for past in range(number + 1):
                for family in ("update", "gradient.steps", "gradient.histogram"):
                    for statistics in (statistics_of(family)[:3], statistics_of(family)[-2:]):
                        nodes, values = history.across(family, statistics, past)
                        expected = store.history("r").across(family, statistics, past)
                        assert nodes == expected[0]
                        np.testing.assert_array_equal(values, expected[1])
                assert history.latest("steps", past) == store.history("r").latest("steps", past)
                events = [e for e in store.history("r").events(None, past) if (e.where.round or 0) <= number]
                assert list(history.events(None, past)) == events
                assert list(history.events("labels", past)) == events
            assert history.latest("steps", number + 1) == {}
            assert history.across("update", ("l2",), number + 1)[0] == []
            assert len(history.events()) == 3 * (number + 1)
            with pytest.raises(ConfigError, match="statistic"):
                history.across("update", ("nonsense",), number)
            with pytest.raises(ConfigError, match="family"):
                history.across("nonsense", ("l2",), number)


def test_a_family_is_read_once_a_round_whichever_statistics_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, horizon = opened(), CutoffRound()
    written(store, 0, ["c1", "c2"], np.random.default_rng(1))
    history, read = HistoryCutoff(store.history("r"), horizon), list[str]()
    across = MemoryHistory.across
    monkeypatch.setattr(
        MemoryHistory, "across", lambda self, family, *rest: read.append(family) or across(self, family, *rest)
    )
    horizon.move_to(0)
    for statistic in statistics_of("update"):
        history.across("update", (statistic,), 0)
    assert read == ["update"]


def test_records_that_come_late_are_seen() -> None:
    store, chance, horizon = opened(), np.random.default_rng(1), CutoffRound()
    history = HistoryCutoff(store.history("r"), horizon)

    @shared
    def total(history: History, round_index: int) -> float:
        return sum(history.latest("steps", round_index).values()) + len(
            history.across("update", ("l2",), round_index)[0]
        )

    for number in range(3):
        written(store, number, ["c1", "c2"], chance)
    horizon.move_to(1)
    first = total(history, 1)
    written(store, 1, ["c3"], chance)
    assert total(history, 1) == first  # detectors of one round see the same
    horizon.move_to(2)
    assert total(history, 1) > first + 1
    assert list(history.latest("steps", 1)) == ["c1", "c2", "c3"]


def test_a_statistic_is_computed_once_a_round_and_again_only_where_its_records_change() -> None:
    store, chance, horizon = opened(), np.random.default_rng(1), CutoffRound()
    history, calls = HistoryCutoff(store.history("r"), horizon), list[tuple[str, str]]()

    @shared
    def over_rounds(history: History, round_index: int, name: str) -> int:
        calls.append(("over rounds", name))
        return len(history.series("loss", None)[0])  # which later rounds may change

    @shared
    def of_round(history: History, round_index: int, name: str) -> int:
        calls.append(("of a round", name))
        return len(history.latest("steps", round_index)) + len(history.across("update", ("l2",), round_index - 1)[0])

    @shared
    def nested(history: History, round_index: int, name: str) -> int:
        calls.append(("nested", name))
        return of_round(history, round_index, name)

    def ask() -> list[tuple[str, str]]:
        calls.clear()
        for _ in range(3):
            over_rounds(history, 2, "a")
            assert nested(history, 2, "a") == of_round(history, 2, "a") == of_round(history, 2, "b")
        return [*calls]

    for number in range(8):
        written(store, number, ["c1", "c2"], chance)
    everything = [("over rounds", "a"), ("nested", "a"), ("of a round", "a"), ("of a round", "b")]
    horizon.move_to(2)
    assert ask() == everything
    horizon.move_to(3)
    assert ask() == everything[:1]
    store.write([Metric(Where("r", 2), 1.0, "bottleneck.upload", 1.0)])  # on which they do not rest
    horizon.move_to(4)
    assert ask() == everything[:1]
    written(store, 1, ["c3"], chance)
    horizon.move_to(5)
    assert ask() == everything
    store.write([Metric(Where("r", 2, "c1"), 1e9, "steps", 9.0)])  # in place of another value
    horizon.move_to(6)
    assert ask() == everything
    horizon.move_to(7)
    horizon.move_to(8)
    history.rounds()
    assert ask() == everything  # what nobody asked for in two rounds was dropped
    calls.clear()
    assert nested(store.history("r"), 2, "a") == nested(store.history("r"), 2, "a") == 5
    assert calls == [("nested", "a"), ("of a round", "a")] * 2  # nothing is kept of other histories


def test_a_statistic_that_fails_leaves_nothing_behind() -> None:
    store, horizon = opened(), CutoffRound()
    history = HistoryCutoff(store.history("r"), horizon)

    @shared
    def failing(history: History, round_index: int) -> float:
        history.rounds()
        raise ZeroDivisionError

    @shared
    def careful(history: History, round_index: int) -> float:
        with pytest.raises(ZeroDivisionError):
            failing(history, round_index)
        return 1.0

    for number in range(2):
        horizon.move_to(number)
        assert careful(history, 0) == 1.0
        with pytest.raises(ZeroDivisionError):
            failing(history, 0)


def test_state_is_kept_for_a_cutoff_only() -> None:
    store, horizon = opened(), CutoffRound()
    history = HistoryCutoff(store.history("r"), horizon)
    assert state_of(history, list) is state_of(history, list)
    assert state_of(store.history("r"), list) is not state_of(store.history("r"), list)


def test_what_is_kept_does_not_grow_with_the_rounds_nor_with_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "LONGEST_GAP", 8)
    store, chance = opened(rounds=40), np.random.default_rng(1)
    examination = DetectorExamination(store.history("r"), DETECTORS, None)
    sizes = []
    for number in range(160):
        written(store, number, [f"c{8 * number + i}" for i in range(8)], chance)  # each is there once
        list(examination.findings_of(number))
        sizes.append(examination.history.kept_answers())
    assert max(sizes[100:]) <= 1.1 * max(sizes[50:100])  # rounds differ in what they ask for
    assert max(sizes) < 1000
    # Beside these: histograms of the clients of the window, and the range of the clients' losses in each of its rounds.
    assert len(state_of(examination.history, LabelCounts).histograms) <= 8 * 42
    assert len(signals.CLIENT_LOSS_RANGES.known_rounds(examination.history)) <= 42 + 8
    memory = store.memory("r")
    assert len(memory.events) <= 8 * 42
    assert all(len(by_round) <= 42 for by_round in memory.metrics.values())


def test_a_measurement_in_place_of_another_is_seen() -> None:
    store, horizon = opened(), CutoffRound()
    history = HistoryCutoff(store.history("r"), horizon)
    present = np.ones((2, 1), np.bool_)
    for number, value in enumerate((1.0, 2.0, 3.0)):
        values = np.full((2, 1), value)
        store.write([Measurements("r", 0, value, ("c1", "c2"), (None, None), ("steps",), values, present)])
        horizon.move_to(number)
        assert history.latest("steps", 0) == {"c1": value, "c2": value}


def test_every_family_has_its_columns_among_its_statistics() -> None:
    for family, kind in FAMILIES.items():
        assert set(kind.columns) <= set(statistics_of(family))
