# SPDX-License-Identifier: Apache-2.0
"""One trouble, one case: contradictory names are alternatives, consequences hang below their cause."""

import pytest

from fedvitals import lab
from fedvitals.diagnosis.cases import cases, key_of
from fedvitals.diagnosis.examine import examine
from fedvitals.diagnosis.finding import finding
from fedvitals.records import Suspect
from fedvitals.views.cases import case_key, key_text
from support.histories import lab_history


def seen(issue, rounds, node="c1", confidence=0.8, **more):
    return [finding(issue, number, f"{issue} it is", confidence=confidence, node=node, **more) for number in rounds]


def learnt(issue, rounds, causes, node="c1", confidence=0.9):
    return seen(issue, rounds, node, confidence, severity="warning", more={"causes": causes})


# -- alternatives -----------------------------------------------------------------------------------------------------


def test_contradictory_names_of_one_client_are_one_case_with_probabilities():
    told = [
        *learnt("INPUT_NOISE", [5, 6], [["input_noise", 0.7], ["label_noise", 0.3]]),
        *learnt("LABEL_NOISE", [7, 8], [["label_noise", 0.7], ["input_noise", 0.2], ["gaussian", 0.1]]),
    ]
    (case,) = cases(told)
    assert (case.issue, case.since, case.rounds) == ("LABEL_NOISE", 5, (5, 6, 7, 8))  # it has corrected itself
    assert case.alternatives == (("INPUT_NOISE", pytest.approx(0.2)), ("BYZANTINE", pytest.approx(0.1)))
    assert "or INPUT_NOISE 20 %, BYZANTINE 10 %" in str(case)
    assert len(case.keys) == 2


def test_a_rule_that_is_certain_heads_the_case_of_what_is_only_likely():
    told = [
        *learnt("LABEL_NOISE", [5, 6], [["label_noise", 1.0]], confidence=0.6),
        *seen("FROZEN_LAYER", [5, 6], confidence=1.0),
    ]
    (case,) = cases(told)
    assert case.issue == "FROZEN_LAYER"
    assert case.alternatives == (("LABEL_NOISE", pytest.approx(0.6 / 1.6)),)


def test_running_statistics_are_no_cause_where_the_inputs_were_measured():
    """Inputs times ten make the variances of batch norm wide: whoever reads of FedBN repairs nothing."""
    wide = seen("BATCH_NORM_STATISTICS", [5, 6], confidence=0.95)
    measured = seen("INPUT_SCALE", [5, 6], confidence=0.93, more={"views": ["data"]})
    (case,) = cases([*wide, *measured])
    assert (case.issue, case.alternatives) == ("INPUT_SCALE", ())
    (case,) = cases([*wide, *seen("INPUT_SCALE", [5, 6], confidence=0.93, more={"views": ["server"]})])
    assert case.issue == "BATCH_NORM_STATISTICS"
    broken = seen("BATCH_NORM_STATISTICS", [5, 6], confidence=1.0)  # NaN, or negative: no inputs do that
    (case,) = cases([*broken, *measured])
    assert case.issue == "BATCH_NORM_STATISTICS"


def test_the_key_stays_when_another_name_is_supported_better():
    """Marks of people and addresses are kept under it."""
    early = learnt("INPUT_NOISE", [5], [["input_noise", 1.0]])
    late = learnt("LABEL_NOISE", [6], [["label_noise", 1.0]])
    (before,), (after,) = cases(early), cases([*early, *late])
    assert (before.issue, after.issue) == ("INPUT_NOISE", "LABEL_NOISE")
    assert case_key(before) == case_key(after) == key_text(key_of(early[0]))


def test_troubles_of_other_kinds_times_and_clients_are_cases_of_their_own():
    told = [
        *seen("LABEL_NOISE", [5, 6]),
        *seen("CRASH", [6]),  # what the system reports is a fact
        *seen("MISSING_CLASSES", [6]),  # a note
        *seen("INPUT_NOISE", [20, 21]),  # long after
        *seen("INPUT_NOISE", [5], "c2"),
    ]
    assert sorted((case.node, case.issue) for case in cases(told)) == [
        ("c1", "CRASH"),
        ("c1", "INPUT_NOISE"),
        ("c1", "LABEL_NOISE"),
        ("c1", "MISSING_CLASSES"),
        ("c2", "INPUT_NOISE"),
    ]


def test_evidence_that_a_stranger_wrote_is_no_alternative():
    (case,) = cases(seen("LABEL_NOISE", [1], more={"causes": [["label_noise"], 3, ["mine", 0.5], ["gaussian", "x"]]}))
    assert case.alternatives == ()


# -- still there ------------------------------------------------------------------------------------------------------


def test_still_there_means_in_the_clients_last_participation():
    rounds = list(range(10))
    told = seen("LABEL_NOISE", [5, 6])
    assert cases(told, {None: rounds, "c1": [4, 5, 6]})[0].still_there
    assert not cases(told, {None: rounds, "c1": [4, 5, 6, 9]})[0].still_there
    assert cases(seen("DIVERGENCE", [6], None), {None: rounds})[0].still_there  # the run's signs are measured seldom
    assert not cases(seen("DIVERGENCE", [1], None), {None: rounds})[0].still_there


# -- causes and consequences ------------------------------------------------------------------------------------------


def test_what_a_lost_model_explains_hangs_below_the_client_that_lost_it():
    told = [
        *seen("CRASH", [3, 4], "c5", 1.0),
        *seen("DIVERGENCE", [4], None, 1.0),
        *seen("PLATEAU", [4], None),
        *seen("NAN_WEIGHTS", [3, 4], None, 1.0, suspects=[Suspect("c2", 1.0)]),
        *seen("LABEL_NOISE", [4], "c4"),
        *seen("NAN_GRADIENT", [3, 4], "c2", 1.0),
    ]
    first, *rest = cases(told)
    assert (first.issue, first.node, first.cause) == ("NAN_GRADIENT", "c2", None)
    below = [case.issue for case in rest if case.cause == first.key]
    assert sorted(below) == ["DIVERGENCE", "LABEL_NOISE", "NAN_WEIGHTS", "PLATEAU"]
    assert [case.issue for case in rest][: len(below)] == below  # right after it
    assert (rest[-1].issue, rest[-1].cause) == ("CRASH", None)


def test_what_began_before_or_is_of_another_cause_does_not_follow():
    told = [
        *seen("PLATEAU", [1], None, since=1),
        *seen("NAN_UPDATE", [3], "c2", 1.0),
        *seen("NAN_WEIGHTS", [3], None, 1.0, suspects=[Suspect("c9", 1.0)]),
        *seen("STRAGGLER", [4], "c3"),
    ]
    assert [case.cause for case in cases(told)] == [None] * 4


def test_nothing_follows_from_a_crash():
    told = [*seen("CRASH", [3], "c5", 1.0, severity="critical"), *seen("DIVERGENCE", [4], None, 0.9)]
    assert [case.cause for case in cases(told)] == [None, None]


def test_a_certain_client_by_which_the_loss_runs_away_is_critical():
    attack = learnt("BYZANTINE", [3, 4], [["scaling", 1.0]], confidence=0.99)
    (alone,) = cases(attack)
    assert alone.severity == "warning"
    first, second = cases([*seen("DIVERGENCE", [4], None, 0.9), *attack])
    assert (first.issue, first.severity, second.cause) == ("BYZANTINE", "critical", first.key)
    doubtful = learnt("BYZANTINE", [3, 4], [["scaling", 1.0]], confidence=0.6)
    assert [case.cause for case in cases([*seen("DIVERGENCE", [4], None, 0.9), *doubtful])] == [None, None]


def test_a_client_of_nan_that_destroys_the_model_heads_the_list_not_the_one_that_crashes_beside_it():
    faults = [lab.NotFinite(nodes=["c3"], since=3, layer=0), lab.Crash(nodes=["c1"], since=2)]
    found = cases(examine(lab_history(rounds=7, faults=faults)))
    assert (found[0].node, found[0].severity) == ("c3", "critical")
    assert "NAN_WEIGHTS" in {case.issue for case in found if case.cause == found[0].key}
    (crash,) = [case for case in found if case.issue == "CRASH"]
    assert (crash.node, crash.severity, crash.cause) == ("c1", "warning", None)


def test_a_finding_is_critical_only_if_the_model_is_being_lost():
    """A hundredfold update decides where the model goes; wrong labels of one client do not lose it."""
    scaled = cases(examine(lab_history(rounds=6, faults=[lab.Scaling(nodes=["c3"], since=2, factor=100.0)])))
    assert (scaled[0].node, scaled[0].severity) == ("c3", "critical")
    turned = cases(examine(lab_history(rounds=6, faults=[lab.SignFlip(nodes=["c3"], since=2)])))
    assert {(case.node, case.severity) for case in turned if case.node} == {("c3", "warning")}
