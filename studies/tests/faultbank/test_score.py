# SPDX-License-Identifier: Apache-2.0
"""The fault bank's judgement and figures, on invented runs small enough to be counted by hand."""

import math
from dataclasses import replace

import msgspec
import pytest

from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.lab.description import kind_of
from fedvitals.lab.faults.table import FAULTS
from fedvitals_studies.faultbank.accepted import (
    ALSO,
    OF_THE_WHOLE,
    PAIRED,
    accepted,
    accuses,
    cause_is_right,
    cause_name,
)
from fedvitals_studies.faultbank.figures import FIGURES, of_issue
from fedvitals_studies.faultbank.intervals import calibration, harmonic, median, rate, share
from fedvitals_studies.faultbank.report import damage_class, summarise
from fedvitals_studies.faultbank.score import Alarm, Outcome, Planted, judge

ROUNDS = 20
NODES = tuple(f"c{number}" for number in range(4))
NOISE = Planted("label_noise", "label_noise", "client", "clients", ["c1"], 4, None, 1.0, None)
EXPLODING = Planted("exploding_initialisation", "exploding_gradient", "gradient", "run", list(NODES), 0, None, 20.0)


def alarm(at, issue="LABEL_NOISE", node="c1", group=None, severity="warning", **more):
    return Alarm(at, issue, node, group, more.pop("confidence", 0.9), severity, **more)


def outcome(*alarms, faults=(), **more):
    usual = {
        "case": "case", "bank": "held-out", "domain": "digits-mlp", "dataset": "digits", "model": "mlp",
        "topology": "centralized", "partition": "iid", "clients": 4, "participation": 1.0, "rounds": ROUNDS,
        "faults": list(faults), "lying": False, "accuracy": [0.9] * ROUNDS, "damage": None,
        "present": {node: list(range(ROUNDS)) for node in NODES}, "groups": {}, "seconds_rounds": 10.0,
        "methods": {"fedvitals": list(alarms)}, "seconds_detectors": 0.01,
    }  # fmt: skip
    return Outcome(**{**usual, **more})


def judged(*alarms, faults=(NOISE,), **more):
    return judge(outcome(*alarms, faults=faults, **more), "fedvitals")


def figure(name, *runs):
    return FIGURES[name]([judge(run, "fedvitals") for run in runs]).value


# -- the table --------------------------------------------------------------------------------------------------------


def test_every_fault_of_the_lab_is_answered_by_issues_that_exist():
    kinds = {kind_of(fault.__name__): fault.issue for fault in FAULTS}
    assert set().union(*(accepted(kind, issue) for kind, issue in kinds.items())) <= set(ISSUES_BY_CODE)
    assert set(OF_THE_WHOLE) | set(PAIRED) | set(ALSO) <= set(kinds)
    outside_the_lab = {"input_constant", "input_missing", "input_repeated"}
    assert {kind: issue.upper() for kind, issue in kinds.items() if kind in ISSUE_OF} == {
        kind: issue for kind, issue in ISSUE_OF.items() if kind not in outside_the_lab
    }
    assert accepted("label_noise", "label_noise") == {"LABEL_NOISE"}
    assert accepted("not_finite", "nan_gradient") == {"NAN_GRADIENT", "NAN_UPDATE"}


def test_causes_are_compared_by_name_not_by_spelling():
    assert cause_name("label noise") == cause_name("LABEL_NOISE") == "LABEL_NOISE"
    assert cause_is_right("sign flip", "sign_flip", "byzantine")
    assert cause_is_right("BYZANTINE", "sign_flip", "byzantine")
    assert not cause_is_right("scaling", "sign_flip", "byzantine")
    assert accuses("LABEL_NOISE")
    assert accuses("OF_SOMEBODY_ELSES_OWN")
    assert not accuses("EXPLODING_GRADIENT")


# -- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "delay", "hit"), [(4, 0, True), (9, 5, True), (10, 6, False)])
def test_a_hit_is_within_five_participations_of_the_onset(at, delay, hit):
    (target,) = judged(alarm(at)).targets
    assert (target.delay, target.hit, target.is_located) == (delay, hit, hit)


def test_participations_count_not_rounds():
    present = {**{node: list(range(ROUNDS)) for node in NODES}, "c1": [0, 3, 6, 12, 18]}
    (target,) = judged(alarm(18), present=present).targets
    assert (target.delay, target.hit) == (2, True)  # 6 is the first in which it was struck


def test_of_an_intermittent_fault_the_strikes_count():
    """It strikes in the rounds 4, 7, 10, ..., of which c1 took part in 4, 10 and 13."""
    fault = Planted("label_noise", "label_noise", "client", "clients", ["c1"], 4, every=3)
    present = {**{node: list(range(ROUNDS)) for node in NODES}, "c1": [0, 4, 5, 6, 8, 9, 10, 11, 13, 14]}
    delays = [judged(alarm(at), faults=[fault], present=present).targets[0].delay for at in (4, 9, 10, 14)]
    assert delays == [0, 0, 1, 2]


def test_a_client_that_never_comes_again_is_waited_for_in_rounds():
    gone = Planted("drop_out", "drop_out", "system", "clients", ["c1"], 4)
    present = {**{node: list(range(ROUNDS)) for node in NODES}, "c1": [0, 1, 2, 3]}
    assert [judged(alarm(at, "DROP_OUT"), faults=[gone], present=present).targets[0].delay for at in (4, 11)] == [0, 7]


def test_the_wrong_issue_finds_the_node_only_and_is_no_false_accusation():
    found = judged(alarm(5, "INPUT_NOISE"))
    (target,) = found.targets
    assert (target.hit, target.is_located, target.located) == (False, True, 1)
    assert [(case.verdict, case.right) for case in found.raised] == [("true", False)]
    assert (found.culprits_found, found.wrongly_accused) == (1, 0)


def test_notes_the_wrong_node_and_the_time_before_the_onset_do_not_count():
    found = judged(alarm(6, severity="note"), alarm(6, node="c2"), alarm(3))
    (target,) = found.targets
    assert (target.delay, target.located) == (math.inf, math.inf)
    assert sorted((case.node, case.verdict) for case in found.raised) == [("c1", "false"), ("c2", "false")]
    assert found.wrongly_accused == 2


def test_who_stood_accused_before_the_onset_was_not_found():
    (target,) = judged(*(alarm(at) for at in range(2, 8))).targets
    assert not target.is_located


def test_of_the_whole_run_any_node_will_do():
    for place in ({"node": None}, {"node": "server"}, {"node": "c3"}):
        (target,) = judged(alarm(2, "EXPLODING_GRADIENT", **place), faults=[EXPLODING]).targets
        assert (target.node, target.delay, target.hit) == (None, 2, True)
    assert not judged(alarm(2, "PLATEAU", node=None), faults=[EXPLODING]).targets[0].hit


def test_in_a_run_that_is_ill_as_a_whole_only_blaming_a_client_is_false():
    found = judged(alarm(2, "NAN_GRADIENT"), alarm(2, "LABEL_NOISE", node="c2"), faults=[EXPLODING])
    assert [case.verdict for case in found.raised] == ["unjudged", "false"]


def test_a_trouble_of_the_whole_is_unjudged_after_an_onset_and_false_before():
    found = judged(alarm(1, "OSCILLATION", node=None), alarm(12, "DIVERGENCE", node=None))
    assert [case.verdict for case in found.raised] == ["false", "unjudged"]
    assert found.wrongly_accused == 0


@pytest.mark.parametrize(
    ("topology", "verdict", "hit"),
    [("rings", "true", True), ("hierarchical", "true", True), ("clustered", "unjudged", False)],
)
def test_the_group_is_an_answer_where_its_members_train_on_each_other(topology, verdict, hit):
    groups = {"c0": "ring-0", "c1": "ring-0", "c2": "ring-1", "c3": "ring-1"}
    for place in ({"node": None, "group": "ring-0"}, {"node": "ring-0"}):
        found = judged(alarm(5, **place), topology=topology, groups=groups)
        assert (found.raised[0].verdict, found.targets[0].hit) == (verdict, hit)
    other = judged(alarm(5, node=None, group="ring-1"), topology=topology, groups=groups)
    assert (other.raised[0].verdict, other.wrongly_accused) == ("false", 1)
    assert other.accused_client_rounds == 2  # both members, in one round
    assert judged(alarm(5, node="c0", group="ring-0"), topology=topology, groups=groups).raised[0].verdict == "false"


def test_a_pair_of_copies_cannot_be_told_apart():
    copied = Planted("duplicate", "duplicate_update", "client", "clients", ["c1"], 4)
    found = judged(alarm(5, "DUPLICATE_UPDATE"), alarm(5, "DUPLICATE_UPDATE", node="c2"), faults=[copied])
    assert [case.verdict for case in found.raised] == ["true", "unjudged"]
    assert judged(alarm(5, "DUPLICATE_UPDATE", node="c2")).raised[0].verdict == "false"


def test_after_a_fault_is_over_its_client_is_healthy_again():
    over = replace(NOISE, until=8)
    verdicts = [judged(alarm(at), faults=[over]).raised[0].verdict for at in (13, 14)]
    assert verdicts == ["true", "false"]


def test_a_group_that_is_left_behind_is_no_set_of_culprits():
    behind = Planted("group_left_behind", "group_left_behind", "aggregation", "clients", ["c1", "c2"], 0)
    found = judged(alarm(3, "GROUP_LEFT_BEHIND", node=None), faults=[behind])
    assert (len(found.targets), found.targets[0].hit, found.culprits) == (1, True, 0)


# -- cases, client-rounds, ranks --------------------------------------------------------------------------------------


def test_a_case_that_lasts_is_one_and_one_that_returns_after_long_is_another():
    lasting = [alarm(at) for at in (2, 3, 4, 10)]
    assert len(judged(*lasting, faults=()).raised) == 1  # five silent rounds between 4 and 10
    assert len(judged(*lasting, alarm(17), faults=()).raised) == 2
    rare = {**{node: list(range(ROUNDS)) for node in NODES}, "c1": [2, 17]}
    assert len(judged(alarm(2), alarm(17), faults=(), present=rare).raised) == 1  # nothing in between to be silent in
    assert len(judged(alarm(2), alarm(2, "BYZANTINE"), faults=()).raised) == 2


def test_healthy_client_rounds_and_those_accused():
    found = judged(alarm(5, node="c2"), alarm(6, node="c2"), alarm(6, "BYZANTINE", node="c2"), alarm(5), alarm(1))
    assert found.healthy_client_rounds == 3 * ROUNDS + 4  # the culprit's own before its onset are healthy
    assert found.accused_client_rounds == 3  # c2 in 5 and 6, c1 in 1


@pytest.mark.parametrize(
    ("scores", "top"),
    [
        ({"c0": 1, "c1": 5, "c2": 2}, 0),
        ({"c0": 5, "c1": 5, "c2": 2}, 1),
        ({"c0": 9, "c1": 5, "c2": 7, "c3": 6}, 3),
        ({"c0": 0, "c1": math.nan, "c2": 0}, 2),
        ({}, None),
        ({"c1": 1}, None),
    ],
)
def test_a_tie_is_no_find(scores, top):
    assert judged(scores={"fedvitals": scores}).top == top


def test_the_cause_is_the_likeliest_of_the_newest_alarm_in_the_window():
    early = alarm(5, "UNUSUAL_CLIENT", causes=[("input noise", 0.6), ("label noise", 0.4)])
    late = alarm(8, "UNUSUAL_CLIENT", causes=[("input noise", 0.3), ("label noise", 0.7)])
    after = alarm(15, "UNUSUAL_CLIENT", causes=[("scaling", 1.0)])
    assert judged(early).targets[0].cause == "INPUT_NOISE"
    (target,) = judged(early, late, after).targets
    assert (target.cause, target.cause_right) == ("LABEL_NOISE", True)
    assert judged(alarm(5, "INPUT_NOISE")).targets[0].cause == "INPUT_NOISE"  # where no causes are given
    assert judged(after).targets[0].cause is None


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_four_runs_by_hand():
    hit = outcome(
        alarm(5, view="server"), alarm(6), alarm(7, node="c0"), faults=[NOISE], scores={"fedvitals": {"c1": 2, "c0": 1}}
    )
    named_wrong = outcome(alarm(6, "INPUT_NOISE"), faults=[NOISE], scores={"fedvitals": {"c1": 1, "c0": 1}})
    clean = outcome(alarm(3, "BYZANTINE"), alarm(4, "BYZANTINE"), alarm(9, "PLATEAU", node=None))
    quiet = outcome(rounds=30)
    runs = (hit, named_wrong, clean, quiet)
    # Cases: hit 1 true 1 false, named_wrong 1 true, clean 2 false.
    assert figure("recall", *runs) == 1 / 2
    assert figure("precision", *runs) == 2 / 5
    assert figure("f1", *runs) == pytest.approx(2 * 0.5 * 0.4 / 0.9)
    assert figure("node_recall", *runs) == 1
    # Clients: c1 twice rightly, c0 and the clean run's c1 wrongly.
    assert figure("culprit_precision", *runs) == 2 / 4
    assert figure("culprit_recall", *runs) == 1
    assert figure("culprit_f1", *runs) == pytest.approx(2 / 3)
    assert figure("top_1", *runs) == 1 / 2
    assert figure("top_3", *runs) == 1
    assert figure("delay", *runs) == 1
    assert figure("cause", *runs) == 1 / 2
    assert figure("alarms", *runs) == pytest.approx(100 * 2 / 50)
    assert figure("accused_clean", *runs) == pytest.approx(2 / 160)
    assert figure("accused_faulty", *runs) == pytest.approx(1 / (2 * 64))
    assert figure("time", *runs) == pytest.approx(0.001)
    row = of_issue([judge(run, "fedvitals") for run in runs], "LABEL_NOISE").figures
    assert (row["recall"].value, row["precision"].value, row["alarms"].value) == (1 / 2, 1 / 2, 0)
    assert of_issue([judge(named_wrong, "fedvitals")], "INPUT_NOISE").figures["precision"].value == 0


def test_a_missed_target_delays_the_median_to_infinity():
    found, missed = outcome(alarm(4), faults=[NOISE]), outcome(faults=[NOISE])
    assert figure("delay", found, missed) == 0
    assert figure("delay", found, missed, missed) == math.inf


def test_what_cannot_be_measured_has_no_value():
    assert figure("recall", outcome()) is None
    assert figure("alarms", outcome(faults=[NOISE])) is None
    assert figure("f1", outcome(faults=[NOISE])) == 0
    assert figure("precision", outcome(faults=[NOISE])) is None


# -- intervals --------------------------------------------------------------------------------------------------------


def test_intervals_are_the_same_every_time_and_hold_the_figure():
    part, whole = [1, 0, 1, 1, 0, 1, 1, 1] * 10, [1] * 80
    found = share(part, whole)
    assert found == share(part, whole)
    assert found.value == 0.75
    deviation = math.sqrt(0.75 * 0.25 / 80)
    assert found.low == pytest.approx(0.75 - 1.96 * deviation, abs=0.02)
    assert found.high == pytest.approx(0.75 + 1.96 * deviation, abs=0.02)


def test_runs_are_drawn_not_targets():
    together = share([10, 0, 10, 0], [10, 10, 10, 10])
    apart = share([1, 0, 1, 0] * 10, [1] * 40)
    assert together.high - together.low > 2 * (apart.high - apart.low)


def test_no_exception_seen_is_not_no_exception_possible():
    perfect = share([1] * 32, [1] * 32)
    assert (perfect.value, perfect.high) == (1, 1)
    assert perfect.low == pytest.approx(0.025 ** (1 / 32))  # 32 of 32: a true rate of 89 % at least
    silent = rate([0, 0], [100, 200])
    assert (silent.value, silent.low) == (0, 0)
    assert silent.high == pytest.approx(100 * 3.6889 / 300, rel=1e-3)
    assert harmonic([1] * 10, [1] * 10, [1] * 10, [0] * 10).low < 0.8


def test_the_median_is_where_half_were_found():
    assert median([[0, 1], [2, 3]]).value == 1
    assert median([[0, math.inf, math.inf]]).value == math.inf
    assert median([[], []]).value is None


def test_calibration_by_hand():
    honest = [(0.2, False)] * 4 + [(0.2, True)] + [(0.8, True)] * 4 + [(0.8, False)]
    error, bins = calibration([honest])
    assert error.value == pytest.approx(0)
    assert [(each.stated, each.observed, each.count) for each in bins] == [
        (pytest.approx(0.2), 0.2, 5), (pytest.approx(0.8), 0.8, 5),
    ]  # fmt: skip
    boastful, _ = calibration([[(0.9, True), (0.9, False)], [(0.1, False), (0.1, False)]])
    assert boastful.value == pytest.approx((0.4 * 2 + 0.1 * 2) / 4)
    many = [(place / 1000, place % 3 == 0) for place in range(1000)]
    assert {each.count for each in calibration([many])[1]} == {50}
    assert calibration([[], []])[0].value is None


# -- the whole --------------------------------------------------------------------------------------------------------


def test_an_outcome_survives_a_file():
    before = outcome(
        alarm(5, causes=[("label noise", 0.9)]), faults=[NOISE], scores={"fedvitals": {"c1": 2.0}},
        probabilities=[(0.9, True)], groups={"c0": "ring-0"}, damage=1.5,
    )  # fmt: skip
    after = msgspec.json.decode(msgspec.json.encode(before), type=Outcome)
    assert judge(after, "fedvitals").targets == judge(before, "fedvitals").targets
    assert msgspec.json.encode(after) == msgspec.json.encode(before)


@pytest.mark.parametrize(
    ("points", "word"),
    [(-1, "none"), (0.49, "none"), (0.5, "weak"), (1, "medium"), (5, "strong"), (40, "strong"), (None, "not")],
)
def test_strength_is_told_by_damage(points, word):
    assert damage_class(points).startswith(word)


def test_label_faults_are_split_by_whether_the_model_had_trained():
    late = [0.1] * 9 + [0.6] * 11
    runs = [
        outcome(alarm(5), faults=[NOISE]),
        outcome(faults=[NOISE], accuracy=late),  # 0.6 in round 9: over half of 0.9, under 0.7
        outcome(faults=[NOISE], accuracy=[0.1] * ROUNDS),
    ]
    half, absolute = list(summarise(runs).labels.values())[:2]
    assert {row.name: (row.runs, row.figures["recall"].value) for row in half} == {
        "label_noise, trained": (2, 0.5), "label_noise, not trained": (1, 0),
    }  # fmt: skip
    assert {row.name: row.runs for row in absolute} == {"label_noise, trained": 1, "label_noise, not trained": 2}


def test_the_bars_know_what_was_met_missed_or_not_measured():
    ranked = {"fedvitals": {"c1": 2, "c0": 1, "c2": 0}}
    runs = [outcome(alarm(5), faults=[NOISE], scores=ranked, probabilities=[(0.95, True)]) for _ in range(40)]
    runs += [outcome(alarm(3, "BYZANTINE", node="c0"), domain="digits-cnn", accuracy=[0.9]), *[outcome()] * 39]
    found = {bar.name: bar for bar in summarise(runs).bars}
    f1 = found["detection F1, all fault kinds, right issue and node, clean runs included"]
    assert (f1.verdict, f1.certain, f1.obtained.value) == ("met", True, pytest.approx(2 * 40 / 41 / (1 + 40 / 41)))
    assert found["alarms per 100 healthy rounds, all rules together"].obtained.value == pytest.approx(100 / 800)
    worst = found["the same in the worst group"]
    assert (worst.verdict, worst.obtained.value, worst.note) == ("missed", 5, "worst: digits-cnn (20 healthy rounds)")
    noise = found["one client with label noise 1.0, IID, top-1"]
    assert (noise.verdict, noise.obtained.count, noise.certain) == ("met", 40, False)
    assert found["one client with label noise 1.0, Dirichlet 0.3, top-1"].verdict == "not measured"
    assert found["expected calibration error of the stated probabilities"].obtained.value == pytest.approx(0.05)
    assert found["culprits that lie in their telemetry, F1"].verdict == "not measured"


def test_the_papers_scenarios_are_told_apart_by_round_three():
    vanishing = Planted("vanishing_initialisation", "vanishing_gradient", "gradient", "run", list(NODES), 0)
    runs = [
        outcome(alarm(3, "EXPLODING_GRADIENT", node=None), faults=[EXPLODING]),
        outcome(alarm(4, "VANISHING_GRADIENT", node=None), faults=[vanishing]),  # too late
        outcome(alarm(1, "EXPLODING_GRADIENT", node=None), faults=[vanishing]),  # the other one
        outcome(alarm(2, "VANISHING_GRADIENT", node=None)),
        outcome(),
    ]
    told, wrong = [bar for bar in summarise(runs).bars if "by round 3" in bar.name]
    assert told.obtained.value == pytest.approx(1 / 3)
    assert wrong.obtained.value == 1 / 2


def test_a_method_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match="Did you mean 'fedvitals'"):
        summarise([outcome()], ours="fedvital")
    with pytest.raises(ConfigError, match="Run the bank first"):
        summarise([])
