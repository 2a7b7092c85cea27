# SPDX-License-Identifier: Apache-2.0
"""Wrong labels against faults of the inputs, by how many samples are classified right."""

from __future__ import annotations

import pytest

from fedvitals.diagnosis.evidence.wrong_labels import wrong_label_odds


def test_fewer_right_than_by_chance_speaks_for_wrong_labels():
    assert wrong_label_odds(0, 48, usual=0.9, chance=0.1) > 50


def test_as_many_right_as_by_chance_or_more_speaks_for_neither():
    assert 0.2 < wrong_label_odds(12, 48, usual=0.9, chance=0.1) < 5


def test_nearly_as_many_right_as_usual_speaks_for_the_inputs():
    assert wrong_label_odds(40, 48, usual=0.9, chance=0.1) < 0.2


@pytest.mark.parametrize(("total", "usual", "chance"), [(0, 0.9, 0.1), (48, 0.9, 0.0), (48, 0.12, 0.1)])
def test_where_nothing_is_known_it_says_nothing(total, usual, chance):
    assert wrong_label_odds(0, total, usual, chance) == 1.0
