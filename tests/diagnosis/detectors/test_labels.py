# SPDX-License-Identifier: Apache-2.0
"""Missing classes: said of one among many that have them, and of nobody where data differ anyway."""

from __future__ import annotations

import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.data import DETECTORS as WRONG_DATA
from fedvitals.diagnosis.detectors.labels import DETECTORS
from support.lab.examined import findings_by, first_rounds, watched


def test_one_client_without_classes_that_all_others_have_is_named() -> None:
    history = watched(lab.missing_classes(nodes=["c3"], missing=(0, 1, 2)), rounds=3)
    assert first_rounds(findings_by(history, DETECTORS)) == {("MISSING_CLASSES", "c3"): 0}
    message = findings_by(history, DETECTORS)[0].message
    assert "class 0, 1, 2" in message


@pytest.mark.parametrize("partition", [lab.iid(), lab.dirichlet(0.1), lab.dirichlet(1.0)])
def test_clients_that_differ_anyway_are_left_in_peace(partition) -> None:
    assert findings_by(watched(rounds=2, partition=partition), DETECTORS) == []


def test_few_samples_may_miss_a_class_by_chance() -> None:
    assert findings_by(watched(rounds=2, clients=60), DETECTORS) == []


def test_a_client_that_loses_a_class_is_named_among_clients_that_differ_anyway() -> None:
    fault = lab.missing_classes(nodes=["c2"], missing=(1, 3), since=2)
    history = watched(fault, rounds=5, partition=lab.dirichlet(1.0))
    assert first_rounds(findings_by(history, DETECTORS)) == {("MISSING_CLASSES", "c2"): 2}
    assert "the rest of its data is as before" in findings_by(history, DETECTORS)[0].message


def test_new_data_without_a_class_is_no_loss() -> None:
    changes = lab.Population(changes=[lab.new_data(nodes=["c1", "c4"], since=2, alpha=0.3)])
    assert findings_by(watched(rounds=5, partition=lab.dirichlet(1.0), population=changes), DETECTORS) == []


@pytest.mark.parametrize("since", [0, 2])
def test_a_class_whose_samples_are_labelled_as_another_is_not_missing(since: int) -> None:
    history = watched(lab.label_flip(nodes=["c3"], source=1, target=2, since=since), rounds=4, clients=6)
    assert findings_by(history, DETECTORS) == []
    assert first_rounds(findings_by(history, WRONG_DATA)) == {("LABEL_FLIP", "c3"): since}
