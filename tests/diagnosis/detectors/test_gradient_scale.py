# SPDX-License-Identifier: Apache-2.0
"""The detector on the gradient scale: against the own past, earlier runs, and as a trend."""

import math

import pytest

import fedvitals as fv
from fedvitals import lab
from fedvitals.diagnosis.detectors.gradient_scale import gradient_scale
from fedvitals.records import EARLIER_SCALES, Event, Metric, Run, Where
from fedvitals.store import MemoryStore, open_reader

CLIENTS = ("c0", "c1", "c2", "c3")


def history(levels, *, clients=CLIENTS, earlier=(), turns=True):
    """A run whose clients take turns to measure these scales, one a round; or all of them in every round."""
    store = MemoryStore()
    store.write([Run("r", "r")])
    for number, level in enumerate(levels):
        for place, node in enumerate(clients):
            store.write([Metric(Where("r", number, node), 1.0, "loss", 1.0)])
            if not turns or number % len(clients) == place:
                store.write([Metric(Where("r", number, node), 1.0, "scale.gsc", level)])
    if earlier:
        runs = [{"id": f"old{i}", "name": "old", "levels": each} for i, each in enumerate(earlier)]
        store.write([Event(Where("r"), 1.0, "info", EARLIER_SCALES, "", {"runs": runs})])
    return store.history("r")


def messages(past, round_index):
    return [finding.message for finding in gradient_scale(past, round_index)]


@pytest.mark.parametrize(("level", "words"), [(3e6, "8 orders of magnitude above"), (0.0, "far below")])
def test_a_jump_against_the_own_past(level, words):
    usual = [0.02, 0.03, 0.02, 0.04, 0.03]
    assert not any(messages(history(usual), number) for number in range(5))
    jumped = history([*usual, level, level])
    assert messages(jumped, 5) == []  # one client alone has told so far
    (message,) = messages(jumped, 6)
    assert words in message
    assert "rounds before" in message


def test_a_lone_client_needs_nobody_to_agree():
    assert messages(history([0.02, 0.03, 0.02, 0.04, 0.03, 1e5], clients=("c0",)), 5)


def test_one_client_of_many_cannot_raise_it():
    store = MemoryStore()
    store.write([Run("r", "r")])
    for number in range(8):
        for node in CLIENTS:
            value = 1e200 if node == "c3" and number > 4 else 0.02
            store.write([Metric(Where("r", number, node), 1.0, "scale.gsc", value)])
    assert not any(messages(store.history("r"), number) for number in range(8))


def test_growth_by_orders_round_after_round_is_a_trend():
    (message,) = messages(history([10.0 ** (number * 0.45 - 3) for number in range(7)], turns=False), 6)[-1:]
    assert "grows by 0.5 orders of magnitude a round, for 6 rounds" in message or "grows by 0.4" in message
    slow = history([10.0 ** (number * 0.3 - 3) for number in range(12)], turns=False)
    assert not any("grows" in text for number in range(12) for text in messages(slow, number))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scales_that_are_no_numbers_stop_nothing(value):
    for number in range(6):
        messages(history([value] * 6), number)


def test_against_earlier_runs_of_the_same_model():
    earlier = [{"0": 0.01, "1": 0.012}, {"0": 0.02}, {"0": 0.015, "1": 0.02}]
    (message,) = messages(history([6.9e6, 6.9e6], earlier=earlier, turns=False), 0)
    assert message == (
        "The gradient scale (GSC) is 9 orders of magnitude above the last 3 runs of this model in this round: 6.9e+06 "
        "against 0.01 to 0.02."
    )
    assert messages(history([1.0], earlier=earlier, turns=False), 0) == []
    assert messages(history([6.9e6], earlier=earlier[:1], turns=False), 0) == []  # one earlier run proves nothing


def test_a_run_is_compared_with_the_last_ones_of_its_model_in_the_store(tmp_path):
    """Other models in the same store do not count, and the finding says so of a stored run as well."""
    store = tmp_path / "runs.db"

    def train(name, model):
        local = lab.Local(iterations=2, optimizer=lab.adam())
        experiment = lab.Experiment(dataset="digits", model=model, clients=3, rounds=2, seed=1, local=local)
        with fv.Monitor(store, run=name) as monitor:
            lab.run(experiment, monitor, engine="sequential")
            monitor.flush()
            return monitor.findings(), monitor.run.id

    for name in ("a", "b", "c"):
        healthy, _ = train(name, lab.paper_cnn())
        assert "GRADIENT_SCALE" not in {finding.issue for finding in healthy}
    other, _ = train("other", lab.mlp(hidden=(8,)))
    findings, run = train("ill", lab.paper_cnn(scenario="exploding"))
    assert "GRADIENT_SCALE" not in {finding.issue for finding in other}
    (first, *_) = [finding for finding in findings if finding.issue == "GRADIENT_SCALE"]
    assert "above the last 3 runs of this model" in first.message
    assert first.where.round == 0
    with open_reader(store) as reader:
        past = reader.history(run)
        assert [finding.message for finding in gradient_scale(past, 0)] == [first.message]
