# SPDX-License-Identifier: Apache-2.0
"""Three levels of a finding: surer that something is wrong than of the family, and of that than of the cause."""

from __future__ import annotations

import pytest

from fedvitals import lab
from fedvitals.diagnosis.cause_levels import cause_levels
from fedvitals.diagnosis.examine import examine
from support.lab.examined import CULPRIT, ONSET, watched


def test_families_add_up_and_learnt_causes_are_discounted():
    causes = [["label_noise", 0.6], ["label_flip", 0.3], ["input_noise", 0.1]]
    assert cause_levels(0.9, causes, ["data"]) == {
        "wrong": 0.9,
        "family": ["labels", 0.81],
        "cause": ["label_noise", 0.54],
    }
    learnt = cause_levels(0.9, causes, ["server"])
    assert learnt["wrong"] == 0.9
    assert learnt["family"][1] < 0.5
    assert learnt["cause"][1] < learnt["family"][1]


@pytest.mark.parametrize(
    "fault", [lab.label_noise(nodes=CULPRIT, since=ONSET), lab.scaling(nodes=CULPRIT, since=ONSET)]
)
def test_findings_about_clients_have_the_three_levels(fault):
    findings = [f for f in examine(watched(fault)) if f.where.node == "c3" and f.severity != "note"]
    assert findings
    for finding in findings:
        levels = finding.evidence["levels"]
        assert levels["wrong"] >= levels["family"][1] >= levels["cause"][1] > 0
        assert levels["cause"][0] in ("label_noise", "scaling")
