# SPDX-License-Identifier: Apache-2.0
"""Clients against their own past: a lasting change of one is found, in any unit, and the usual scatter is not."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.histories import history_of

from fedvitals.diagnosis.detectors.changed_clients import changed_losses, changed_sizes
from fedvitals.diagnosis.evidence.own_past import LOSS, OwnPast, usual_values
from fedvitals.records import Event, Where

ROUNDS, ONSET = 24, 12


def losses_of(seed, clients, *, culprit=None, factor=6.0, unit=1.0, every=1, rounds=ROUNDS, events=(), more=None):
    """Losses that fall, of clients whose data are of different difficulty, as {(metric, node): series}."""
    chance = np.random.default_rng(seed)
    difficulty = chance.normal(0, 0.4, clients)
    values = {}
    for i in range(clients):
        series = []
        for number in range(rounds):
            loss = unit * np.exp(-0.15 * number + difficulty[i] + chance.normal(0, 0.15)) + 0.05 * unit
            loss *= factor if f"c{i}" == culprit and number >= ONSET else 1.0
            series.append(float(loss) if (number + i) % every == 0 else None)
        values["fit.loss_before", f"c{i}"] = series
        values["steps", f"c{i}"] = [4.0] * rounds
    return history_of({**values, **(more or {})}, events)


def named(history, detector=changed_losses, rounds=ROUNDS):
    findings = [finding for number in range(rounds) for finding in detector(history, number)]
    return {finding.where.node: finding for finding in reversed(findings)}


@pytest.mark.parametrize("clients", [2, 3, 5, 12])
def test_a_client_whose_loss_rises_for_good_is_found_among_any_number(clients):
    for seed in range(5):
        history = losses_of(seed, clients, culprit="c1")
        assert set(named(history)) == {"c1"}
        first = named(history)["c1"]
        assert ONSET <= first.where.round <= ONSET + 5
        assert abs(first.evidence["since"] - ONSET) <= 1


def test_a_client_with_other_texts_than_before_has_no_wrong_labels():
    """The targets of a text are its own tokens: a change is worth a note, and nobody's labels are wrong."""
    tokens = {("tokens", f"c{i}"): [100.0] * ROUNDS for i in range(5)}
    found = named(losses_of(0, 5, culprit="c1", more=tokens))["c1"]
    assert (found.issue, found.severity) == ("UNUSUAL_CLIENT", "note")
    assert "texts" in found.message


@pytest.mark.parametrize("clients", [2, 3, 5, 12])
def test_what_clients_scatter_is_nobodys_fault(clients):
    assert all(named(losses_of(seed, clients)) == {} for seed in range(10))


def data_of(client, rounds, labels):
    """What a client tells of its data in some rounds: the checksums of inputs and labels."""
    return [
        Event(
            Where("by hand", number, client),
            float(number),
            "info",
            "data",
            "",
            {"samples": 10, "inputs": number, "labels": checksum, "looks": number},
            sequence=1000 + number,
            source="data",
        )
        for number, checksum in zip(rounds, labels, strict=True)
    ]


@pytest.mark.parametrize(
    ("rounds", "labels", "accused"),
    [([0], [1], False), ([0, ONSET], [1, 2], True), ([0, ONSET], [1, 1], False), ([0, ONSET - 8], [1, 2], False)],
    ids=["never changed", "new samples", "the same labels", "changed long before"],
)
def test_a_loss_that_rises_on_labels_that_did_not_change_is_the_models(rounds, labels, accused):
    history = losses_of(0, 6, culprit="c1", events=data_of("c1", rounds, labels))
    assert set(named(history)) == ({"c1"} if accused else set())


def test_units_mean_nothing():
    """A loss in squared metres or in nats: the same client in the same round."""
    rounds = {named(losses_of(3, 6, culprit="c2", unit=unit))["c2"].where.round for unit in (1e-4, 1.0, 1e5)}
    assert len(rounds) == 1


def test_losses_measured_in_turns_are_compared_with_the_newest_of_the_peers():
    history = losses_of(4, 12, culprit="c5", every=4, rounds=40)
    assert set(named(history, rounds=40)) == {"c5"}


def test_a_rise_of_all_is_no_fault_of_one():
    values = {("fit.loss_before", f"c{i}"): [1.0 + 0.01 * i] * 12 + [5.0 + 0.01 * i] * 8 for i in range(6)}
    values |= {("steps", f"c{i}"): [4.0] * 20 for i in range(6)}
    assert named(history_of(values), rounds=20) == {}


def test_a_scaled_update_is_found_without_any_telemetry():
    chance = np.random.default_rng(1)
    sizes = np.exp(chance.normal(0, 0.1, (6, ROUNDS)))
    sizes[2, ONSET:] *= 10
    history = history_of({("update.norm", f"c{i}"): list(row) for i, row in enumerate(sizes)})
    assert set(named(history, changed_sizes)) == {"c2"}
    assert "times as large" in named(history, changed_sizes)["c2"].message


def test_an_update_that_the_client_trained_is_not_called_scaled():
    sizes = np.exp(np.random.default_rng(1).normal(0, 0.1, (6, ROUNDS)))
    sizes[2, ONSET:] *= 10
    values = {("update.norm", f"c{i}"): list(row) for i, row in enumerate(sizes)}
    values |= {("weight.drift", f"c{i}"): list(row) for i, row in enumerate(sizes)}
    assert named(history_of(values), changed_sizes) == {}


def test_values_that_are_no_numbers_are_left_out():
    values = {("fit.loss_before", f"c{i}"): [1.0, np.nan, np.inf, -1.0, 0.0] * 4 for i in range(4)}
    values |= {("steps", f"c{i}"): [4.0] * 20 for i in range(4)}
    past = OwnPast(LOSS)
    history = history_of(values)
    for number in range(20):
        past.add_round(history, number)
    assert past.changes == {}


def test_among_few_clients_each_is_compared_with_the_others():
    assert usual_values(np.array([3.0, 1.0])).tolist() == [1.0, 3.0]
    assert usual_values(np.array([3.0, 1.0, 2.0, 9.0])).tolist() == [2.0] * 4
