# SPDX-License-Identifier: Apache-2.0
"""Updates far larger than anybody else's, from numbers by hand: named unless the client's own report explains them."""

import pytest
from tests.support.histories import history_of

from fedvitals.diagnosis.detectors.oversized_updates import oversized_updates
from fedvitals.diagnosis.examine import examine

CLIENTS, ROUNDS = [f"c{i}" for i in range(6)], 6
GRADIENTS = {("gradient.norm", node): [1.0] * ROUNDS for node in CLIENTS}
SAMPLES = {("update.samples", node): [100.0] * ROUNDS for node in CLIENTS}


def named(sizes, report):
    """Who is named in which rounds; `sizes`: of the updates by client, 1 in each round where none are given."""
    norms = {("update.norm", node): sizes.get(node, [1.0] * ROUNDS) for node in CLIENTS}
    findings = examine(history_of(norms | report), detectors=[oversized_updates])
    assert {finding.issue for finding in findings} <= {"BYZANTINE"}
    return {(finding.where.node, finding.where.round) for finding in findings}


@pytest.mark.parametrize("report", [GRADIENTS, SAMPLES], ids=["gradients", "samples"])
def test_an_update_that_was_always_scaled_is_named_from_the_second_round_on(report):
    assert named({"c2": [8.0] * ROUNDS}, report) == {("c2", number) for number in range(1, ROUNDS)}


def test_of_clients_that_nothing_is_known_of_one_may_simply_train_on_more_data():
    assert named({"c2": [8.0] * ROUNDS}, {}) == set()
    begun = {"c2": [1.0, 1.0, 1.0, 8.0, 8.0, 8.0]}  # it was as the others are
    assert named(begun, {}) == {("c2", 4), ("c2", 5)}


def test_an_attack_that_pauses_is_named_whenever_it_strikes():
    assert named({"c2": [8.0, 1.0] * 3}, GRADIENTS) == {("c2", 2), ("c2", 4)}


def test_accomplices_are_named_together():
    assert {node for node, _ in named({"c2": [8.0] * ROUNDS, "c4": [9.0] * ROUNDS}, GRADIENTS)} == {"c2", "c4"}


@pytest.mark.parametrize(
    "report",
    [
        GRADIENTS | {("gradient.norm", "c2"): [7.0] * ROUNDS},
        GRADIENTS | {("steps", node): [40.0 if node == "c2" else 5.0] * ROUNDS for node in CLIENTS},
        GRADIENTS | {("update.samples", node): [900.0 if node == "c2" else 100.0] * ROUNDS for node in CLIENTS},
    ],
    ids=["large gradients", "many steps", "many samples"],
)
def test_what_a_client_reports_explains_a_large_update(report):
    assert named({"c2": [8.0] * ROUNDS}, report) == set()


def test_half_of_the_clients_are_a_population_of_their_own():
    assert named({node: [8.0] * ROUNDS for node in CLIENTS[:3]}, GRADIENTS) == set()


def test_a_single_large_update_is_no_reason():
    assert named({"c2": [1.0, 8.0, 1.0, 1.0, 1.0, 1.0]}, GRADIENTS) == set()


def test_without_a_report_nobody_is_named_once_the_others_have_converged():
    """Wrong labels alone then make updates that are many times as large."""
    shrinking = [1.0, 1.0, 0.1, 0.1, 0.1, 0.1]
    assert named({node: [1.0] * ROUNDS if node == "c2" else shrinking for node in CLIENTS}, SAMPLES) == set()


def test_the_text_dates_nothing_since_it_looks_at_the_newest_rounds_alone():
    norms = {("update.norm", node): [8.0 if node == "c2" else 1.0] * ROUNDS for node in CLIENTS}
    newest = [*examine(history_of(norms | GRADIENTS), detectors=[oversized_updates])][-1]
    assert newest.message.startswith("The update of c2 is 8 times as large as the largest of the others'")
    assert "round" not in newest.message
