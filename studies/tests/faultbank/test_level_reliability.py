# SPDX-License-Identifier: Apache-2.0
"""Three stated probabilities beside what was so, on invented runs."""

from fedvitals_studies.faultbank.level_reliability import statements, table
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted

NOISE = Planted("label_noise", "label_noise", "client", "clients", ["c1"], 4)


def outcome(*alarms, faults=(NOISE,)):
    described = dict.fromkeys(("case", "bank", "domain", "dataset", "model", "topology", "partition"), "x")
    numbers = {"clients": 2, "participation": 1.0, "rounds": 9, "seconds_rounds": 1.0}
    rest = {"lying": False, "accuracy": [], "damage": None, "groups": {}, "faults": [*faults]}
    present = {node: [*range(9)] for node in ("c0", "c1")}
    return Outcome(**described, **numbers, **rest, present=present, methods={"fedvitals": alarms})


def alarm(node, at=5, issue="LABEL_NOISE", causes=(("label_noise", 0.9), ("input_noise", 0.1)), view="data"):
    return Alarm(at, issue, node, None, 0.9, "warning", view, causes)


def test_each_level_is_judged_by_itself():
    flip = alarm("c1", issue="LABEL_FLIP", causes=(("label_flip", 1.0),))
    (_, right), (_, family), (_, none) = statements(outcome(alarm("c1"), flip, alarm("c0")))
    assert right == {"wrong": (0.9, True), "family": (0.81, True), "cause": (0.81, True)}
    assert family == {"wrong": (0.9, True), "family": (0.9, True), "cause": (0.9, False)}
    assert {level: so for level, (_, so) in none.items()} == {"wrong": False, "family": False, "cause": False}


def test_a_case_counts_once_and_only_after_the_onset():
    runs = [outcome(alarm("c1", at=5), alarm("c1", at=6)), outcome(alarm("c1", at=2), alarm("c9", at=5))]
    assert [stated["wrong"][1] for run in runs for _, stated in statements(run)] == [True, False]


def test_the_learnt_evidence_has_lines_of_its_own():
    text = table([outcome(alarm("c1"), alarm("c0", view="telemetry and server"))])
    assert [line.split(" | ")[:3] for line in text.splitlines()[2:]] == [
        [f"| {part}", level, "1"]
        for part in ("exact, data, own past", "learnt evidence")
        for level in ("wrong", "family", "cause")
    ]
