# SPDX-License-Identifier: Apache-2.0
"""Who is faulty: scores that mean the same in every cohort, evidence that is added up, and nobody where nobody is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from fedvitals import lab
from fedvitals.diagnosis.detectors.exact import untrained_updates
from fedvitals.diagnosis.evidence import log_odds
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF, WORDS
from fedvitals.diagnosis.evidence.faulty_clients import (
    FaultyClientLocator,
    evidence_totals,
    fault_probabilities,
    merge_by_group,
    verdicts,
)
from fedvitals.diagnosis.evidence.scores import FEWEST, Scorer, normal_scores
from fedvitals.diagnosis.evidence.trend import EvidenceTrend, cohort_kind
from fedvitals.diagnosis.evidence.vital_signs import ABSOLUTE, SIGNS, VitalSigns, as_measured, vital_signs_of
from fedvitals.diagnosis.examine import DETECTORS, choose_detectors
from fedvitals.diagnosis.finding import finding
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.errors import ConfigError
from fedvitals.monitor.monitor import Monitor
from fedvitals.records import Event, Finding, Suspect
from fedvitals.store import MemoryStore
from fedvitals_studies.faultbank.run import bank_preset

pytestmark = pytest.mark.thorough  # seconds of training, or of other processes


class WithoutData(MemoryStore):
    """A store of clients that do not describe their data: what these show is reported by other detectors."""

    def write(self, records: Sequence[object], /) -> None:
        super().write([record for record in records if not (isinstance(record, Event) and record.name == "data")])


def watched(**settings: object) -> object:
    """The history of a small run, as the bank records it, but for the clients' data."""
    usual = {"dataset": "digits", "model": lab.MLP(hidden=(32,)), "clients": 12, "rounds": 10, "seed": 3}
    experiment = lab.Experiment(**{**usual, "local": lab.Local(iterations=10, optimizer=lab.SGD(0.2)), **settings})
    store = WithoutData()
    monitor = Monitor(None, probes=bank_preset(), host="lab", detectors=(), sinks=[store])
    lab.run(experiment, monitor, engine="stacked", workers=1)
    monitor.close()
    return store.history(monitor.run.id)


def accusations(history, locator: FaultyClientLocator | None = None) -> dict[str, set[str]]:
    """Who is accused, of what."""
    locator = locator or FaultyClientLocator()
    accused: dict[str, set[str]] = {}
    for number in history.rounds():
        for one in (*untrained_updates(history, number), *locator(history, number)):
            accused.setdefault(one.where.node or "", set()).add(one.issue)
    return accused


def by_integration(t: float, freedom: int) -> float:
    """The normal score with the same upper tail as Student's t, by adding up its density."""
    x = np.linspace(-400, t, 2_000_001)
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    below = float(np.trapezoid(constant * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x))
    low, high = -12.0, 12.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * math.erfc(-middle / math.sqrt(2)) < below else (low, middle)
    return low


@pytest.mark.parametrize("freedom", [3, 5, 10, 30])
@pytest.mark.parametrize("t", [0.5, 1.0, 2.0, 4.0])
def test_student_scores_are_those_of_numerical_integration(t: float, freedom: int) -> None:
    assert float(normal_scores(np.array([t]), freedom)[0]) == pytest.approx(by_integration(t, freedom), abs=0.06)
    assert normal_scores(np.array([-t]), freedom)[0] == -normal_scores(np.array([t]), freedom)[0]


def invented(values: np.ndarray) -> VitalSigns:
    """Vitals of clients that differ only in their values, [clients, SIGNS]."""
    count = len(values)
    nodes = [f"c{i}" for i in range(count)]
    empty = np.full(count, np.nan)
    return VitalSigns(
        nodes, values, np.zeros(count), empty, np.full((count, len(ABSOLUTE)), np.nan), np.full((count, 2), np.nan)
    )


def test_equal_clients_score_zero_and_too_few_are_not_compared() -> None:
    assert Scorer()(invented(np.ones((FEWEST - 1, len(SIGNS))))) is None
    scores = Scorer()(invented(np.ones((FEWEST, len(SIGNS)))))
    assert scores is not None
    assert not scores.peers.any()
    assert not scores.own.any()


def test_signs_that_are_missing_count_for_nothing() -> None:
    values = np.random.default_rng(0).normal(size=(8, len(SIGNS)))
    values[:, 3] = np.nan
    values[2] = np.nan
    scores = Scorer()(invented(values))
    assert scores is not None
    assert np.isfinite(scores.peers).all()
    assert not scores.peers[:, 3].any()
    assert not scores.peers[2].any()


def test_one_far_client_scores_high_and_the_same_distance_less_in_a_smaller_cohort() -> None:
    def score(count: int) -> float:
        values = np.tile(np.linspace(-1, 1, count)[:, None], len(SIGNS))
        values[0] = 12.0
        scores = Scorer()(invented(values))
        assert scores is not None
        return float(scores.peers[0, 0])

    assert score(30) > 4
    assert 1 < score(5) < score(30)


def test_a_change_of_ones_own_shows_against_the_own_past() -> None:
    scorer, chance = Scorer(), np.random.default_rng(1)
    levels = chance.normal(size=(10, 1)) * 5  # clients that differ for good
    for _ in range(6):
        scores = scorer(invented(levels + 0.1 * chance.normal(size=(10, len(SIGNS)))))
    levels[4] += 2
    scores = scorer(invented(levels + 0.1 * chance.normal(size=(10, len(SIGNS)))))
    assert scores is not None
    assert np.abs(scores.own).mean(axis=1).argmax() == 4
    assert np.abs(scores.own[4]).mean() > 3 > np.abs(scores.peers[4]).mean()


def test_cohorts_are_told_apart_by_who_takes_part() -> None:
    assert cohort_kind(10, 10) == "small"
    assert cohort_kind(50, 50) == "large"
    assert cohort_kind(9, 30) == "partial"
    assert cohort_kind(50, 50, exchanged=True) == "exchanging"


def test_every_kind_has_an_issue_and_words() -> None:
    model = log_odds.shipped_model()
    kinds = {kind for view in model.views.values() for kind in view.kinds}
    rules = {"backdoor", "input_constant", "input_missing", "input_repeated"}  # found by rules, and not learnt
    assert kinds | rules == set(ISSUE_OF) == set(WORDS)
    assert set(ISSUE_OF.values()) <= set(ISSUES_BY_CODE)


def test_trees_answer_as_scikit_learns_do() -> None:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    from fedvitals_studies.faultbank.fit import SCORED, as_numbers

    chance = np.random.default_rng(2)
    x = chance.normal(size=(600, SCORED["server"] + 4))
    x[chance.random(x.shape) < 0.1] = np.nan
    y = (np.nan_to_num(x[:, 0]) * np.nan_to_num(x[:, 1]) + 0.3 * chance.normal(size=600) > 0).astype(int)
    trees = HistGradientBoostingClassifier(max_iter=20, random_state=0).fit(x, y)
    straight = LogisticRegression().fit(log_odds.linear_features(x, SCORED["server"]), y)
    ours = log_odds.BoostedTrees.from_json(as_numbers((trees, straight), "server")["trees"])
    assert np.allclose(ours(x), trees.decision_function(x), atol=1e-3)


def test_limits_grow_as_fewer_alarms_are_allowed() -> None:
    for view in log_odds.shipped_model().views.values():
        for cohort in ("partial", "small", "large", "exchanging"):
            limits = [view.limit(cohort, allowed) for allowed in (0.05, 0.2, 1.0, 5.0)]
            assert limits == sorted(limits, reverse=True)
        for exchanging in (False, True):
            chances = [view.probability(total, exchanging=exchanging) for total in np.linspace(0, 20, 30)]
            assert chances == sorted(chances)


def test_nobody_is_accused_where_nobody_is_faulty() -> None:
    assert accusations(watched(rounds=12)) == {}


@pytest.mark.parametrize(
    ("fault", "issue"),
    [
        (lab.label_noise(nodes=["c4"], rate=1.0), "LABEL_NOISE"),
        (lab.sign_flip(nodes=["c4"]), "BYZANTINE"),
        (lab.scaling(nodes=["c4"], factor=10.0), "BYZANTINE"),
    ],
)
def test_the_faulty_client_is_named_with_its_cause(fault, issue: str) -> None:
    history = watched(faults=[fault], rounds=12)
    accused = accusations(history)
    assert set(accused) == {"c4"}
    assert issue in accused["c4"]
    last = history.rounds()[-1]
    ranked = evidence_totals(history, last)
    assert max(ranked, key=lambda node: ranked[node]) == "c4"
    assert verdicts(history, last)["c4"] == "faulty"
    assert fault_probabilities(history, last)["c4"] > 0.5


def test_a_detector_that_begins_late_says_the_same() -> None:
    """Pure: what it remembers of earlier rounds is only to save time."""
    history = watched(faults=[lab.label_noise(nodes=["c4"], rate=1.0)], rounds=8)
    going, last = FaultyClientLocator(), history.rounds()[-1]
    for number in history.rounds():
        step_by_step = list(going(history, number))
    assert [(f.where.node, f.issue, f.confidence) for f in step_by_step] == [
        (f.where.node, f.issue, f.confidence) for f in FaultyClientLocator()(history, last)
    ]


def test_what_is_not_trained_yet_is_not_called_healthy() -> None:
    history = watched(rounds=1)
    assert set(verdicts(history, 0).values()) == {"not yet decidable"}
    history = watched(rounds=12)
    assert "healthy" in verdicts(history, 11).values()


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_tiny_cohorts_are_examined_without_complaint(clients: int) -> None:
    history = watched(clients=clients, rounds=5)
    assert len(vital_signs_of(history, 4).nodes) == clients
    assert accusations(history) == {}


def accusation(node: str, confidence: float) -> Finding:
    suspects = [Suspect(node, confidence)]
    return finding("LABEL_NOISE", 5, f"{node} is odd.", confidence=confidence, node=node, suspects=suspects)


def test_a_group_that_is_ill_as_a_whole_is_accused_as_one() -> None:
    groups = {f"c{i}": f"ring-{i // 3}" for i in range(9)}
    found = [accusation("c3", 0.8), accusation("c4", 0.9), accusation("c8", 0.7)]
    told = list(merge_by_group(found, [f"c{i}" for i in range(9)], groups))
    assert [(one.where.node, one.where.group) for one in told] == [("c8", None), (None, "ring-1")]
    assert [suspect.node for suspect in told[1].suspects] == ["c4", "c3"]


def test_accusations_everywhere_are_no_matter_of_groups() -> None:
    groups = {f"c{i}": f"ring-{i // 3}" for i in range(6)}
    found = [accusation(f"c{i}", 0.8) for i in range(6)]
    assert list(merge_by_group(found, [f"c{i}" for i in range(6)], groups)) == found


def test_the_user_says_how_many_false_alarms_are_allowed() -> None:
    assert choose_detectors("standard") == DETECTORS
    stricter = choose_detectors("standard", 0.1)
    assert len(stricter) == len(DETECTORS)
    assert len([detector for detector in stricter if detector not in DETECTORS]) == 1
    for wrong in (0.0, -1.0, 50.0):
        with pytest.raises(ConfigError, match="per 100 healthy rounds"):
            choose_detectors("standard", wrong)


@pytest.mark.parametrize("fault", [lab.label_noise(nodes=["c4"], since=2), lab.gaussian(nodes=["c4"], since=2)])
def test_what_is_said_of_a_round_does_not_depend_on_which_rounds_were_asked_before(fault) -> None:
    history = watched(faults=[fault], rounds=10)
    going = FaultyClientLocator()
    each = {number: [(f.where.node, f.issue, f.message) for f in going(history, number)] for number in history.rounds()}
    assert any(each.values())
    for number in (3, 6, 9):
        assert [(f.where.node, f.issue, f.message) for f in FaultyClientLocator()(history, number)] == each[number]


def test_what_signs_are_compared_as_can_be_undone():
    """Each sign through its own transformation and back; what is a difference of logs comes back as a ratio."""
    loss, cosine = 1.66, -0.6
    assert as_measured("loss_after", math.log(loss + 0.05)) == pytest.approx(loss)
    assert as_measured("cosine_first", math.atanh(cosine)) == pytest.approx(cosine)
    assert as_measured("nearest", -math.log(1 - 0.97)) == pytest.approx(0.97)
    assert as_measured("confusion", math.sqrt(0.3)) == pytest.approx(0.3)
    assert as_measured("gain", math.log(4.0)) == pytest.approx(4.0)
    assert as_measured("accuracy_after", 0.8) == 0.8
    assert as_measured("a user's own", -3.0) == -3.0
    assert as_measured("norm", None) is None


def test_numbers_are_not_flipped() -> None:
    """Targets that are no classes may be wrong, but not one class labelled as another."""
    series = lab.time_series(series=10, length=120, steps=12)
    history = watched(
        dataset=series, clients=10, rounds=14, partition=lab.natural(), faults=[lab.label_noise(nodes=["c4"], rate=1.0)]
    )
    trend = EvidenceTrend(log_odds.shipped_model(), allowed=5.0)
    for number in history.rounds():
        trend.add_round(history, number)
        assert "label_flip" not in trend.suspected_kinds.values()
