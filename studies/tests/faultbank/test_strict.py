# SPDX-License-Identifier: Apache-2.0
"""Figures by issue and node, and the bars that ask for them, on invented runs small enough to be counted by hand."""

import json

import pytest

from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of
from fedvitals.lab.faults.table import FAULTS
from fedvitals_studies.faultbank.accepted import ATTACKS, DATA_FAULTS, FAMILY_OF, family_of_cause, nature_of
from fedvitals_studies.faultbank.figures import FIGURES
from fedvitals_studies.faultbank.outcome_lines import read_cases, write_outcomes
from fedvitals_studies.faultbank.report import summarise
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted, judge
from fedvitals_studies.faultbank.strict import macro_f1

NODES = tuple(f"c{number}" for number in range(4))
NOISE = Planted("label_noise", "label_noise", "client", "clients", ["c1"], 4, None, 0.6, 0.6)
FLIP = Planted("label_flip", "label_flip", "client", "clients", ["c1"], 4, None, 1.0, 0.3)
SIGN = Planted("sign_flip", "byzantine", "client", "clients", ["c1"], 4, None, 1.0)
DOOR = Planted("backdoor", "byzantine", "client", "clients", ["c1"], 4, None, 0.5)


def alarm(at, issue="LABEL_NOISE", node="c1"):
    return Alarm(at, issue, node, None, 0.9, "warning")


def outcome(*alarms, faults=(), case="case", **more):
    usual = {
        "case": case, "bank": "mine", "domain": "digits-mlp", "dataset": "digits", "model": "mlp",
        "topology": "centralized", "partition": "iid", "clients": 4, "participation": 1.0, "rounds": 20,
        "faults": list(faults), "lying": False, "accuracy": [0.9] * 20, "damage": None,
        "present": {node: list(range(20)) for node in NODES}, "groups": {}, "seconds_rounds": 10.0,
        "methods": {"fedvitals": list(alarms)}, "scores": {"fedvitals": {node: float(node == "c1") for node in NODES}},
    }  # fmt: skip
    return Outcome(**{**usual, **more})


def judged(*outcomes):
    return [judge(each, "fedvitals") for each in outcomes]


def asked(*outcomes):
    return {bar.name: bar for bar in summarise(outcomes).asked}


# -- what belongs where -----------------------------------------------------------------------------------------------


def test_every_fault_of_the_lab_has_a_family():
    assert {kind_of(fault.__name__) for fault in FAULTS} == set(FAMILY_OF)
    assert set(FAMILY_OF.values()) == {"labels", "inputs", "update", "training", "system", "whole run"}
    assert not ATTACKS & DATA_FAULTS
    assert [nature_of(kind) for kind in ("mimic", "input_scale", "crash")] == ["attacks", "data faults", "other faults"]


@pytest.mark.parametrize(
    ("cause", "family"),
    [
        ("label noise", "labels"),
        ("BYZANTINE", "update"),
        ("NAN_UPDATE", "training"),
        ("stale", "update"),
        ("MEMORY_LEAK", "system"),
        ("PLATEAU", "whole run"),
        ("UNUSUAL_CLIENT", None),
        ("somebody's own", None),
    ],
)
def test_a_cause_has_the_family_of_its_fault_or_issue(cause, family):
    assert family_of_cause(cause) == family


# -- figures ----------------------------------------------------------------------------------------------------------


def test_a_wrong_name_on_the_right_client_counts_against_precision_only_by_issue_and_node():
    runs = judged(outcome(alarm(5, "INPUT_NOISE"), alarm(6), faults=[NOISE]))
    assert FIGURES["precision"](runs).value == 1
    assert FIGURES["strict_precision"](runs).value == 1 / 2
    assert FIGURES["strict_f1"](runs).value == pytest.approx(2 / 3)


def test_the_family_of_a_wrong_name_may_be_right():
    runs = judged(outcome(alarm(5, "LABEL_FLIP"), faults=[NOISE]), outcome(alarm(5, "INPUT_NOISE"), faults=[NOISE]))
    assert FIGURES["cause"](runs).value == 0
    assert FIGURES["family"](runs).value == 1 / 2


def test_macro_f1_is_the_mean_over_kinds_each_with_its_clean_twins():
    runs = [
        outcome(alarm(5), faults=[NOISE], case="noise"),
        outcome(alarm(5), case="noise/clean"),  # a false alarm of the noise's twin: precision 1/2, F1 2/3
        outcome(alarm(5, "LABEL_FLIP"), faults=[FLIP], case="flip"),
        outcome(case="flip/clean"),
        outcome(faults=[SIGN], case="sign"),
        outcome(alarm(3), case="a control"),  # belongs to no kind
    ]
    assert macro_f1(judged(*runs)).value == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert macro_f1(judged(outcome())).value is None


def test_parts_are_told_apart():
    runs = [
        outcome(alarm(5), faults=[NOISE], case="noise", transformation="int8"),
        outcome(case="noise/clean", transformation="int8"),
        outcome(alarm(5, "INPUT_NOISE"), faults=[SIGN], case="sign"),
        outcome(case="sign/clean"),
    ]
    rows = {row.name: row for row in summarise(runs).strict}
    assert (rows["data faults"].runs, rows["data faults"].figures["strict_f1"].value) == (2, 1)
    assert rows["attacks"].figures["recall"].value == 0
    assert rows["family: labels"].figures["recall"].value == 1
    assert rows["transformed updates"].figures["recall"].value == 1
    assert rows["updates as they are"].figures["recall"].value == 0
    assert rows["all runs"].figures["recall"].value == 1 / 2


# -- bars -------------------------------------------------------------------------------------------------------------


def test_the_bars_of_the_issue_by_hand():
    runs = [
        *(outcome(alarm(5), faults=[NOISE], case=f"noise-{n}") for n in range(4)),
        *(outcome(alarm(5, "LABEL_FLIP"), faults=[FLIP], case=f"flip-{n}") for n in range(2)),
        outcome(faults=[FLIP], case="flip-missed"),
        *(outcome(case=f"noise-{n}/clean") for n in range(4)),
        outcome(*(alarm(at, node=node) for at in (3, 16) for node in NODES), case="loud", control="feature skew"),
        *(outcome(faults=[NOISE], case=f"noise-{n}", level=2) for n in range(2)),
        *(outcome(alarm(5), faults=[NOISE], case=f"noise-{n}", level=2) for n in range(2, 4)),
        outcome(alarm(5), faults=[NOISE], case="noise-0/lying", lying=True),
    ]
    bars = asked(*runs)
    micro = bars["F1 by issue and node, wrong names counted, all targets"]
    assert micro.obtained.value == pytest.approx(2 * (6 / 7) * (6 / 14) / (6 / 7 + 6 / 14))
    assert bars["one class flipped, 15 % of the client's samples or more, recall"].obtained.value == pytest.approx(
        2 / 3
    )
    assert bars["recall, label noise of 0.4 or more"].verdict == "met"
    assert bars["recall, input noise"].verdict == "not measured"
    assert bars["alarms per 100 healthy rounds, all together"].obtained.value == pytest.approx(8)
    worst = bars["the same in the worst group, lower 95 % limit"]
    assert worst.verdict == "missed"
    assert worst.note == "worst: control: feature skew (20 healthy rounds)"
    assert bars["recall at privacy level 2, as a share of level 3's"].obtained.value == 1 / 2
    assert bars["culprits that lie in their telemetry, F1"].obtained.value == 1
    assert bars["ByzFL's attacks, untuned, F1 by issue and node"].verdict == "not measured"
    summary = summarise(runs)
    assert summary.counts["runs"] == 12  # neither lies nor lower levels count among them
    assert [(row.name, row.runs, row.figures["recall"].value) for row in summary.levels] == [
        ("level 2", 4, 1 / 2), ("level 3", 4, 1),
    ]  # fmt: skip


def test_the_bank_of_attacks_has_bars_of_its_own():
    where = {"bank": "attacks", "partition": "dirichlet 0.5"}
    bars = asked(
        outcome(alarm(5, "BYZANTINE"), faults=[DOOR], attack=0.8, **where),
        outcome(faults=[DOOR], attack=0.2, **where),  # does not succeed
        outcome(faults=[DOOR], attack=0.9, bank="attacks"),  # another partition
        outcome(alarm(5, "BYZANTINE"), faults=[SIGN], **where),
        outcome(**where),
    )
    found = bars["backdoors that succeed in 50 % or more: attackers found"]
    assert (found.obtained.value, found.obtained.count) == (1, 1)
    assert bars["backdoors that succeed in 50 % or more: benign client-rounds accused"].obtained.value == 0
    assert bars["ByzFL's attacks, untuned, F1 by issue and node"].obtained.value == 1
    assert bars["F1 by issue and node, wrong names counted, all targets"].verdict == "not measured"


def test_attackers_are_shown_by_method():
    where = {"bank": "attacks", "partition": "dirichlet 0.5"}
    both = {"fedvitals": [alarm(5, "BYZANTINE")], "AlignIns": []}
    runs = [
        outcome(faults=[DOOR], attack=0.8, methods=both, **where),
        outcome(faults=[DOOR], attack=0.2, methods=both, **where),
        outcome(faults=[SIGN], methods=both, **where),
        outcome(methods={"fedvitals": [], "AlignIns": []}, **where),
    ]
    rows = {row.name: (row.runs, row.figures["culprit_recall"].value) for row in summarise(runs).attackers}
    assert rows == {
        "backdoors that succeed: fedvitals": (1, 1), "backdoors that succeed: AlignIns": (1, 0),
        "ByzFL's attacks: fedvitals": (2, 1), "ByzFL's attacks: AlignIns": (2, 0),
    }  # fmt: skip
    assert summarise([outcome(faults=[SIGN])]).attackers == []


def test_runs_that_were_examined_before_are_reported_apart(tmp_path):
    before = [outcome(faults=[NOISE], case="old"), outcome(faults=[NOISE], case="old/lying", lying=True)]
    seen = read_cases(write_outcomes(before, tmp_path))
    runs = [outcome(alarm(5), faults=[NOISE], case="new"), *before]
    first, second = summarise(runs, seen=seen).looks.items()
    assert (first[0], first[1][0].obtained.value) == ("first look, 1 runs", 1)
    assert (second[0], second[1][0].obtained.value) == ("second look, 1 runs", 0)
    assert summarise(runs).looks == {}
    (tmp_path / "junk").write_text("junk", encoding="utf-8")
    with pytest.raises(ConfigError, match="outcomes"):
        read_cases(tmp_path / "junk")


def test_every_run_is_kept_as_a_line(tmp_path):
    runs = [
        outcome(alarm(5, "INPUT_NOISE"), alarm(6), alarm(7, node="c0"), faults=[NOISE]),
        outcome(faults=[NOISE], level=2),
        outcome(),
    ]
    ill, lower, well = map(json.loads, write_outcomes(runs, tmp_path).read_text(encoding="utf-8").splitlines())
    assert ill["targets"] == [
        {"kind": "label_noise", "node": "c1", "delay": 2, "located": 1, "hit": True, "cause": "LABEL_NOISE"}
    ]
    assert [(case[0], case[-1]) for case in ill["raised"]] == [
        ("INPUT_NOISE", "wrong name"), ("LABEL_NOISE", "right"), ("LABEL_NOISE", "false"),
    ]  # fmt: skip
    assert (lower["level"], lower["targets"][0]["hit"]) == (2, False)
    assert not {"faults", "targets", "raised", "level", "lying"} & set(well)
