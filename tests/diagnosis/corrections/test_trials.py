# SPDX-License-Identifier: Apache-2.0
"""Corrections: what is proposed, what may be done unasked, how a trial is judged, and that what fails is undone."""

import math

import numpy as np
import pytest

from fedvitals.diagnosis.corrections.catalog import CLIENT_KINDS, CORRECTIONS, KINDS, corrections_for
from fedvitals.diagnosis.corrections.correction_trials import CorrectionTrials, judge_correction, loss_trend_of
from fedvitals.diagnosis.corrections.model_trend import ModelTrend, model_trend_of
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy
from fedvitals.diagnosis.evidence.unusable_updates import UnusableUpdateCheck
from fedvitals.diagnosis.finding import finding
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.errors import ConfigError
from fedvitals.records import Metric, Where
from fedvitals.stats import COUNT, NANS, SUM_SQUARES
from fedvitals.store import MemoryStore

RUN = "r1"
CLIENTS = [f"c{i}" for i in range(10)]


class Ward:
    """A run by hand: losses and findings in, actions out."""

    def __init__(self, policy="auto", **settings):
        self.memory, self.actions, self._at = MemoryStore(), [], 0.0
        self.care = CorrectionTrials(
            RUN, CorrectionPolicy(policy, **settings), self.actions.append, lambda: self.memory.history(RUN)
        )
        self.loss = {}

    def round(self, number, loss, *findings):
        self.loss[number] = loss
        records = [Metric(Where(RUN, number), float(number), "loss", loss, "m", 100 * number)]
        for i, node in enumerate(CLIENTS, 1):
            where = Where(RUN, number, node)
            records.append(Metric(where, float(number), "update.norm", 1.0, "m", 100 * number + i))
        self.memory.write(records)
        for one in findings:
            self.care.add_finding(one)
        return [a for a in self.care.prescribed(number + 1) if a.kind != "checkpoint"]

    def actions_with(self, status=None):
        return [(a.where.round, a.kind, a.target) for a in self.actions if status is None or a.status == status]


def byzantine(number, node="c3", **more):
    return finding("BYZANTINE", number, "Its updates point elsewhere.", **{"confidence": 0.95, "node": node, **more})


def divergence(number):
    return finding("DIVERGENCE", number, "The loss runs away.", confidence=0.95)


# -- what is proposed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("issue", [issue.code for issue in ISSUES])
def test_every_issue_has_corrections_that_end_with_advice(issue):
    found = corrections_for(finding(issue, 4, "Something.", confidence=1.0, node="c1"), MemoryStore().history(RUN))
    assert found[-1].kind == "advise"
    assert {action.kind for action in found} <= set(KINDS)
    assert {action.target for action in found if action.kind in CLIENT_KINDS} <= {"c1"}


def test_corrections_are_of_known_issues():
    assert set(CORRECTIONS) <= {issue.code for issue in ISSUES}


def test_nobody_is_shut_out_where_nobody_is_named():
    found = corrections_for(finding("BYZANTINE", 4, "Somebody.", confidence=1.0), MemoryStore().history(RUN))
    assert "quarantine" not in [action.kind for action in found]


def test_a_claimed_sample_count_is_replaced_by_the_median_of_the_others():
    memory = MemoryStore()
    counts = {"c0": 90, "c1": 110, "c2": 100, "c3": 9000}
    memory.write([Metric(Where(RUN, 2, n), 0.0, "update.samples", v, "m", v) for n, v in counts.items()])
    wrong = finding("WRONG_SAMPLE_COUNT", 2, "It claims too many.", confidence=1.0, node="c3")
    assert corrections_for(wrong, memory.history(RUN))[0].arguments == {"samples": 100}


# -- what may be done unasked -----------------------------------------------------------------------------------------


def test_the_narrower_word_wins():
    policy = CorrectionPolicy({"all": "auto", "client": "off", "LABEL_NOISE": "auto", "roll_back": "suggest"})
    assert policy.word("DIVERGENCE") == "auto"
    assert policy.word("BYZANTINE") == "off"
    assert policy.word("LABEL_NOISE") == "auto"
    assert policy.word("NAN_WEIGHTS", "roll_back") == "suggest"
    assert policy.word("NAN_WEIGHTS", "clip_gradients") == "auto"


def test_by_default_everything_is_suggested_and_nothing_done():
    assert CorrectionPolicy().word("DIVERGENCE") == "suggest"
    assert not CorrectionPolicy().automatic


def test_stopping_a_client_must_be_asked_for_by_name():
    assert CorrectionPolicy("auto").word("NAN_GRADIENT", "stop_client_at_nonfinite") == "suggest"
    asked = CorrectionPolicy({"all": "auto", "stop_client_at_nonfinite": "auto"})
    assert asked.word("NAN_GRADIENT", "stop_client_at_nonfinite") == "auto"


@pytest.mark.parametrize(
    ("cure", "words"),
    [("automatic", "auto"), ({"NAN_GRADENT": "auto"}, "NAN_GRADIENT"), ({"client": "yes"}, "suggest")],
)
def test_a_policy_that_cannot_be_meant_is_refused(cure, words):
    with pytest.raises(ConfigError, match=words):
        CorrectionPolicy(cure)


# -- how a trial is judged --------------------------------------------------------------------------------------------


def judged(before, after, **more):
    path = dict(enumerate(before))
    return judge_correction(loss_trend_of(path, len(before) - 1), after, **more)


HEALTHY = [2.0, 1.4, 1.05, 0.85, 0.72, 0.63, 0.57, 0.53]


def test_a_healthy_run_that_goes_on_learning_is_not_better_for_it():
    for cut in range(3, 6):
        assert judged(HEALTHY[:cut], HEALTHY[cut : cut + 3]) == "same"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.5, 2.2, 3.0], [1.2, 0.9, 0.7], "better"),
        ([1.0, 1.5, 2.2, math.nan], [1.2, 0.9, 0.7], "better"),
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "same"),
        ([1.0, 1.0, 1.0, 1.0], [1.3, 1.3, 1.3], "worse"),
        ([1.0, 0.9, 0.8], [0.7, math.inf], "worse"),
        ([1.0, 1.5, 2.2, 3.0], [1.2, 0.9, 1.4], "same"),  # it begins to rise again
    ],
)
def test_losses_against_the_trend_before(before, after, verdict):
    assert judged(before, after) == verdict


def test_from_a_checkpoint_it_need_only_stay_as_good():
    diverged = [1.0, 0.8, 0.7, 3.0, 9.0]
    assert judged(diverged, [0.7, 0.69, 0.7], restored=0.7) == "better"
    assert judged(diverged, [1.5, 1.6, 1.7], restored=0.7) == "worse"


def test_larger_steps_must_make_it_faster():
    creeping = [2.30, 2.29, 2.28, 2.27]
    assert judged(creeping, [2.24, 2.20, 2.15], raising=True) == "better"
    assert judged(creeping, [2.26, 2.25, 2.24], raising=True) == "same"


def test_without_a_told_loss_the_clients_tell_it():
    memory = MemoryStore()
    values = [(n, c, 1.0 / (n + 1) + (50 if c == "c1" else 0)) for n in range(3) for c in ("c0", "c1", "c2")]
    memory.write([Metric(Where(RUN, n, c), 0.0, "fit.loss_before", v, "m", i) for i, (n, c, v) in enumerate(values)])
    assert model_trend_of(memory.history(RUN)).loss == {-1: 1.0, 0: 0.5, 1: pytest.approx(1 / 3)}


def test_the_best_model_is_the_most_accurate_one_and_lost_only_when_clearly_so():
    path = ModelTrend({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 1: 0.8, 2: 0.79})
    assert path.best_round(3) == 1
    assert path.best_if_worse(3, 0) is None
    worse = ModelTrend({**path.loss, 3: 3.0, 4: 3.0}, {**path.accuracy, 3: 0.6, 4: 0.6})
    assert worse.best_if_worse(5, 0) == 1
    assert ModelTrend({0: 1.0, 1: math.nan, 2: math.nan}, {0: 0.5, 1: 0.9, 2: 0.9}).best_if_worse(3, 0) == 0


def test_nothing_learnt_is_said_only_of_a_model_that_guesses():
    assert ModelTrend({0: 2.31, 1: 2.30, 2: 2.30}, label_entropy=2.3).learnt_nothing
    assert not ModelTrend({0: 0.11, 1: 0.10, 2: 0.10}, label_entropy=2.3).learnt_nothing
    assert not ModelTrend({0: 2.31, 1: 2.2, 2: 1.5}, label_entropy=2.3).learnt_nothing
    assert not ModelTrend({0: 2.31, 1: 2.30, 2: 9.0}, {0: 0.1, 1: 0.1, 2: 0.5}, label_entropy=2.3).learnt_nothing


# -- exact tests of an update -----------------------------------------------------------------------------------------


def rows(count=4, squares=1.0, nans=0.0):
    matrix = np.zeros((2, 9))
    matrix[:, COUNT], matrix[:, SUM_SQUARES], matrix[:, NANS] = count, squares, nans
    return matrix


def test_updates_that_cannot_be_averaged():
    unusable = UnusableUpdateCheck()
    assert not [*unusable(rows())]
    assert not [*unusable(rows())]
    assert [issue for issue, _ in unusable(rows(nans=1))] == ["NAN_UPDATE"]
    assert [issue for issue, _ in unusable(rows(squares=0))] == ["FREE_RIDER"]
    assert [issue for issue, _ in unusable(rows(count=5))] == ["SHAPE_OR_DTYPE_MISMATCH"]


def test_an_update_is_left_out_only_where_that_is_allowed():
    assert Ward("suggest").care.unusable(3, "c1", "NAN_UPDATE", "NaN.") is None
    ward = Ward({"NAN_UPDATE": "auto"})
    assert ward.care.unusable(3, "c1", "FREE_RIDER", "Zero.") is None
    action = ward.care.unusable(3, "c1", "NAN_UPDATE", "NaN.")
    assert (action.kind, action.target, action.status) == ("exclude", "c1", "applied")
    assert ward.actions_with("applied") == [(3, "exclude", "c1")]


# -- trials -----------------------------------------------------------------------------------------------------------


def test_suggestions_are_told_once_and_change_nothing():
    ward = Ward("suggest")
    for number in range(5):
        assert ward.round(number, HEALTHY[number], byzantine(number)) == []
    assert ward.actions_with() == [(0, "quarantine", "c3"), (0, "robust_aggregator", None), (0, "advise", "c3")]
    assert {a.status for a in ward.actions} == {"suggested"}


def test_off_is_silent():
    ward = Ward("off")
    ward.round(0, 1.0, byzantine(0))
    assert not ward.actions


def test_what_helps_is_kept_and_ends_when_the_client_is_well_again():
    ward = Ward(term=4)
    losses = [1.0, 1.05, 0.98, 1.04, 0.6, 0.5, 0.45, 0.42, 0.40, 0.38, 0.37, 0.36, 0.35]
    for number, loss in enumerate(losses):
        ward.round(number, loss, *([byzantine(number)] if 3 <= number <= 6 else []))
    assert [(a.where.round, a.status) for a in ward.actions if a.kind == "quarantine"] == [
        (4, "trial"),
        (7, "applied"),
        (11, "undone"),
    ]
    kept = next(a for a in ward.actions if a.status == "applied")
    assert kept.arguments["before"]["loss"] == 1.04
    assert kept.arguments["after"]["loss"] == 0.45
    assert kept.arguments["why"]
    assert kept.arguments["by"] == "policy"


def test_what_does_not_help_is_undone_and_not_tried_again_soon():
    ward = Ward()
    for number in range(8):
        ward.round(number, HEALTHY[number], byzantine(number))
    assert [(a.where.round, a.status) for a in ward.actions if a.kind == "quarantine"] == [(3, "trial"), (6, "undone")]


def test_a_rise_of_the_loss_ends_a_trial_and_brings_the_best_model_back():
    ward = Ward()
    losses = [1.0, 0.9, 0.8, 0.75, 1.2, 1.4]
    orders = [ward.round(n, loss, *([byzantine(n)] if n == 3 else [])) for n, loss in enumerate(losses)]
    assert [(a.kind, a.target) for a in orders[3]] == [("quarantine", "c3")]
    assert [(a.kind, a.arguments["restore"]) for a in orders[5]] == [("roll_back", 3)]
    assert ward.actions_with("undone") == [(6, "quarantine", "c3")]


def test_clients_that_are_found_one_after_the_other_are_judged_together():
    ward = Ward()
    losses = [1.0, 1.05, 0.98, 1.04, 1.02, 1.0, 0.8, 0.6, 0.5, 0.45]
    for number, loss in enumerate(losses):
        who = {3: ["c3"], 5: ["c4"]}.get(number, [])
        ward.round(number, loss, *(byzantine(number, node) for node in who))
    assert ward.actions_with("applied") == [(9, "quarantine", "c4"), (9, "quarantine", "c3")]


def test_the_whole_run_is_left_alone_while_it_learns():
    ward = Ward()
    for number, loss in enumerate(HEALTHY):
        assert ward.round(number, loss, divergence(number)) == []


def test_a_run_that_diverges_goes_back_and_on_with_smaller_steps():
    ward = Ward()
    losses = [1.0, 0.8, 0.7, 3.0, 9.0]
    for number, loss in enumerate(losses):
        orders = ward.round(number, loss, *([divergence(number)] if number == 4 else []))
    assert [(a.kind, a.arguments["factor"], a.arguments["restore"]) for a in orders] == [("server_rate", 0.3, 2)]
    for number, loss in enumerate([0.69, 0.66, 0.64], 5):
        orders = ward.round(number, loss)
    assert [(a.kind, a.status) for a in orders] == [("server_rate", "applied")]


def test_a_refused_correction_gives_way_to_the_next():
    ward = Ward()
    losses = [1.0, 1.2, 1.5, 1.9, 2.4]
    for number, loss in enumerate(losses[:4]):
        orders = ward.round(number, loss, divergence(number))
    ward.care.refused(orders[0], "This host has no server rate.")
    assert ward.actions[-1].status == "refused"
    assert ward.actions[-1].arguments["why"] == "This host has no server rate."
    assert [a.kind for a in ward.round(4, losses[4], divergence(4))] == ["client_rate"]


def test_never_more_than_two_of_five_clients_are_shut_out():
    ward = Ward()
    for number in range(3):
        orders = ward.round(number, 1.0, *(byzantine(number, node) for node in CLIENTS[:6]))
    assert len(orders) == 4
    assert len(ward.actions_with("refused")) == 2


@pytest.mark.parametrize("doubt", [{"severity": "note"}, {"confidence": 0.5}])
def test_doubtful_findings_are_not_treated(doubt):
    ward = Ward()
    for number in range(4):
        assert ward.round(number, 1.0, byzantine(number, **doubt)) == []


def test_without_any_loss_nothing_is_tried_and_that_is_said():
    ward = Ward()
    ward.care.add_finding(byzantine(0))
    assert [a.kind for a in ward.care.prescribed(1)] == ["checkpoint"]
    assert ward.actions_with("refused") == [(1, "quarantine", "c3")]


def test_the_best_checkpoint_is_kept_and_no_more_than_needed():
    ward = Ward()
    for number, loss in enumerate([1.0, 0.5, 0.9, 0.8]):
        ward.round(number, loss)
    (checkpoint,) = ward.care.prescribed(4)
    assert checkpoint.arguments["keep"] == [1, 3]
