# SPDX-License-Identifier: Apache-2.0
"""A learning rate of one's own: read from the optimiser, named among few and many, and no one's fault without a common
rate.
"""

from __future__ import annotations

import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.learning_rate import DETECTORS
from fedvitals.diagnosis.examine import examine
from support.histories import history_of
from support.lab.examined import CULPRIT, ONSET, findings_by, first_rounds, watched


def rates(*series: list[float]):
    return history_of({("optimizer.learning_rate", f"c{i}"): own for i, own in enumerate(series)})


@pytest.mark.parametrize("factor", [8.0, 0.2])
def test_another_learning_rate_is_named_in_its_first_round_and_by_nothing_else(factor):
    history = watched(lab.wrong_learning_rate(nodes=CULPRIT, factor=factor, since=ONSET))
    assert first_rounds(findings_by(history, DETECTORS)) == {("WRONG_LEARNING_RATE", "c3"): ONSET}
    everything = [finding for finding in examine(history) if finding.severity != "note"]
    assert {(finding.issue, finding.where.node) for finding in everything} == {("WRONG_LEARNING_RATE", "c3")}


def test_the_message_has_both_rates():
    (*_, last) = findings_by(rates([0.1, 0.8], [0.1, 0.1], [0.1, 0.1]), DETECTORS)
    assert last.message == "c0 trains with a learning rate of 0.8; the others use 0.1."


def test_of_two_clients_the_one_that_changed():
    history = rates([0.1, 0.1, 0.1], [0.1, 0.1, 0.01])
    assert first_rounds(findings_by(history, DETECTORS)) == {("WRONG_LEARNING_RATE", "c1"): 2}


@pytest.mark.parametrize(
    "series",
    [
        [[0.1, 0.08], [0.1, 0.1], [0.1, 0.1]],  # a little less
        [[0.1, 0.01]] * 4,  # a schedule of all
        [[0.1, 0.01], [0.2, 0.02], [0.3, 0.03], [0.4, 0.04]],  # each its own
        [[0.1, 0.01], [0.1, 0.01], [0.1, 0.1], [0.1, 0.1]],  # schedules by participation
        [[0.1, 0.1], [0.01, 0.01]],  # of two that always differed
        [[0.0, 0.0], [0.0, 0.0], [0.1, 0.1]],
        [[float("nan")] * 2, [0.1] * 2, [0.1] * 2],
    ],
)
def test_nobody_is_named_without_a_common_rate(series):
    assert findings_by(rates(*series), DETECTORS) == []
