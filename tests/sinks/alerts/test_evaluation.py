# SPDX-License-Identifier: Apache-2.0
"""When a rule holds, and when it no longer does: live as later, whatever order records come in."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedvitals as fv
from fedvitals import lab
from fedvitals.cli.alerts import _replayed
from fedvitals.diagnosis.cases import QUIET_ROUNDS
from fedvitals.diagnosis.issues.table import ISSUES
from fedvitals.records import Finding, LayerStats, Metric, Where
from fedvitals.sinks.alerts import evaluation as alert_evaluation
from fedvitals.sinks.alerts.evaluation import CaseDeduplication, RuleEvaluation, replay
from fedvitals.sinks.alerts.message import value_text
from fedvitals.sinks.alerts.rules import rule
from fedvitals.sinks.alerts.sink import Alerts, File
from fedvitals.store import open_reader
from fedvitals.testing import check_sink, examples_of_records
from support.conditions import holds_for_each

FAMILIES = {issue.code: issue.family for issue in ISSUES}


def metric(name, number, value, node=None, **where):
    return Metric(Where("r1", number, node, **where), 10.0 * number, name, value)


def finding(number, node="c1", issue="NAN_UPDATE", severity="critical", confidence=1.0, layer=None, group=None):
    where = Where("r1", number, node, layer=layer, group=group)
    return Finding(where, 10.0 * number + 1, issue, severity, confidence, f"{issue} at {node}")


def complete(number):
    return metric("time.round", number, 1.0)


def judged(rules, values, name="update.norm", node="c1", **settings):
    """The alerts on a metric that has these values, one a round; None: the node took no part."""
    rules = [rule(text, **settings) for text in ([rules] if isinstance(rules, str) else rules)]
    metrics = []
    for number, value in enumerate(values):
        by_node = value if isinstance(value, dict) else {node: value}
        metrics += [metric(name, number, v, who) for who, v in by_node.items() if v is not None]
        metrics.append(complete(number))
    return replay("r1", rules, metrics, [], FAMILIES)


def summaries(alerts):
    return [(alert.kind, alert.round, alert.onset) for alert in alerts]


def test_a_limit_that_must_last():
    """It fires in the last of the rounds asked for, names the first, and is over when it does not hold."""
    made = judged("accuracy < 0.8 for 3 rounds", [0.9, 0.7, 0.7, 0.9, 0.7, 0.6, 0.5, 0.4, 0.85], "accuracy", None)
    assert summaries(made) == [("firing", 6, 4), ("resolved", 8, 4)]
    assert made[0].message == "accuracy of the whole run is 50 % (< 80 %), for 3 rounds, since round 4"
    assert made[1].message == "accuracy of the whole run is 85 %: no longer «accuracy < 0.8 for 3 rounds»"
    assert made[0].id != made[1].id


def test_rounds_without_the_node_do_not_count():
    """A node's rounds are those it took part in."""
    made = judged("update.norm > 5 for 2 rounds", [9, None, None, 9, None, 1])
    assert summaries(made) == [("firing", 3, 0), ("resolved", 5, 0)]


def test_own_median_is_of_the_rounds_before_the_stretch():
    """What breaks the rule does not become the usual, until it has lasted for the whole window."""
    made = judged("update.norm > 5 × own median for 2 rounds", [1, 1, 9, 1.2, 9, 9, *[9] * 40, 1.0])
    assert summaries(made) == [("firing", 5, 4), ("resolved", 46, 4)]
    assert "(> 5 × its own median, 1.1)" in made[0].message
    assert summaries(judged("update.norm > 5 × own median", [1, 9, 9])) == []  # two values are no usual
    assert summaries(judged("update.norm > 5 × own median", [1, 1, 1, *[9] * 60]))[-1] == ("resolved", 53, 3)


def test_cohort_median_is_of_the_round():
    """Against all nodes in the same round; the server and the whole are none."""
    rounds = [{f"c{i}": 1.0 for i in range(5)} | {"c3": 9.0, "server": 100.0, None: 100.0}] * 2
    made = judged("update.norm > 4 × cohort median", rounds, node="*")
    assert {(alert.node, alert.round) for alert in made} == {("c3", 0), ("server", 0), (None, 0)}
    made = judged("update.norm > 4 × cohort median", [{"c1": 1.0, "c2": 50.0}])
    assert made == []  # two nodes are no cohort


def test_a_drop_is_against_what_was_before_it():
    """It is over when the ground is made good, not when it stops falling; exactly the step counts."""
    made = judged("accuracy drops by 0.03", [0.8, 0.77, 0.76, 0.79], "accuracy")
    assert summaries(made) == [("firing", 1, 1), ("resolved", 3, 1)]
    assert made[0].message == "accuracy of c1 is 77 %, after 80 %"
    assert summaries(judged("accuracy drops by 0.03", [0.8, 0.79, 0.78, 0.77, 0.76], "accuracy")) == []
    assert summaries(judged("accuracy drops by 0.03 within 5 rounds", [0.8, 0.79, 0.78, 0.77], "accuracy")) == [
        ("firing", 3, 3)
    ]
    assert summaries(judged("loss rises by 1", [1.0, 1.5, 2.6], "loss")) == [("firing", 2, 2)]


def test_what_is_not_a_number_breaks_every_rule_on_it():
    """NaN is above and below nothing, and is never fine."""
    for text in ("update.norm > 5", "update.norm < 5", "update.norm > 5 × own median"):
        made = judged(text, [5.0, 5.0, 5.0, math.nan, math.inf if ">" in text else 1.0, 5.0])
        assert ("firing", 3) in [(alert.kind, alert.round) for alert in made]
        assert "NaN" in made[0].message
    made = judged("update.norm > 5 × own median", [math.nan, math.nan, 1.0], gap="0 rounds")
    assert summaries(made) == [("firing", 0, 0), ("resolved", 2, 0)]  # though nothing usual is known yet


def test_the_gap_keeps_what_flutters_quiet():
    """Within the gap nothing is said of it; if it is there when the gap is over, that is said."""
    values = [9, 1, 9, 1, 9, 9, 9, 9, 1]
    assert summaries(judged("update.norm > 5", values, gap="0 rounds"))[:4] == [
        ("firing", 0, 0), ("resolved", 1, 0), ("firing", 2, 2), ("resolved", 3, 2),
    ]  # fmt: skip
    assert summaries(judged("update.norm > 5", values, gap="6 rounds")) == [
        ("firing", 0, 0), ("resolved", 1, 0), ("firing", 6, 4), ("resolved", 8, 4),
    ]  # fmt: skip
    assert summaries(judged("update.norm > 5", values, gap="1 min")) == summaries(
        judged("update.norm > 5", values, gap="6 rounds")
    )


def test_nodes_that_are_meant():
    """By name, by pattern, or the federation as a whole."""
    rounds = [{"c1": 9.0, "c2": 9.0, "edge-1": 9.0, None: 9.0}]
    for node, wanted in (("c1", {"c1"}), ("c*", {"c1", "c2"}), ("whole", {None}), (None, {"c1", "c2", "edge-1", None})):
        assert {alert.node for alert in judged("update.norm > 5", rounds, **{"node": "x"} | {})} == {
            "c1",
            "c2",
            "edge-1",
            None,
        }
        made = replay("r1", [rule("update.norm > 5", node=node)], _flat(rounds), [], {})
        assert {alert.node for alert in made} == wanted


def _flat(rounds):
    for number, by_node in enumerate(rounds):
        yield from (metric("update.norm", number, value, node) for node, value in by_node.items())
        yield complete(number)


def test_only_what_is_about_a_node_or_the_whole():
    """Values of a layer, and of one edge's whole, are something else."""
    metrics = [
        metric("update.norm", 0, 9.0, "c1", layer="0.weight"),
        metric("update.norm", 0, 9.0, None, group="edge-1"),
    ]
    assert replay("r1", [rule("update.norm > 5")], [*metrics, complete(0)], [], {}) == []


def attended(rounds, node="c1"):
    return [one for number in rounds for one in (metric("steps", number, 3.0, node), complete(number))]


def test_a_case_is_told_once_and_over_when_it_is_quiet():
    """As many rounds with the node and without the trouble as `diagnosis.cases` asks for."""
    found = [finding(1), finding(2), finding(4), finding(12)]
    made = replay("r1", [rule("finding NAN_UPDATE")], attended(range(20)), found, {})
    assert summaries(made) == [
        ("firing", 1, 1),
        ("resolved", 4 + QUIET_ROUNDS + 1, 1),
        ("firing", 12, 12),
        ("resolved", 18, 12),
    ]
    assert (made[0].severity, made[0].message) == ("critical", "NAN_UPDATE at c1")
    assert "has not been seen since round 4" in made[1].message
    # Rounds that the node does not take part in do not make it well.
    metrics = [*attended([0, 1, 2]), *(complete(number) for number in range(3, 20))]
    assert summaries(replay("r1", [rule("finding")], metrics, [finding(1)], {})) == [("firing", 1, 1)]


def test_which_findings_a_rule_means():
    """By issue, family, severity, confidence and node, and how often it was seen."""
    found = [
        finding(1, "c1", "NAN_UPDATE", "critical", 1.0),
        finding(1, "c2", "STRAGGLER", "note", 0.6),
        finding(1, None, "PLATEAU", "warning", 0.9),
        finding(1, None, "MY_OWN", "warning", 0.9, group="edge-1"),
        finding(2, "c2", "STRAGGLER", "note", 0.9),
    ]
    for text, settings, wanted in (
        ("finding", {}, {"NAN_UPDATE", "STRAGGLER", "PLATEAU", "MY_OWN"}),
        ("finding STRAGGLER", {}, {"STRAGGLER"}),
        (f"finding in {FAMILIES['NAN_UPDATE']}", {}, {"NAN_UPDATE"}),
        ("finding in user", {}, {"MY_OWN"}),
        ("finding severity >= warning", {}, {"NAN_UPDATE", "PLATEAU", "MY_OWN"}),
        ("finding confidence >= 0.95", {}, {"NAN_UPDATE"}),
        ("finding", {"node": "c*"}, {"NAN_UPDATE", "STRAGGLER"}),
        ("finding", {"node": "edge-1"}, {"MY_OWN"}),
        ("finding for 2 rounds", {}, {"STRAGGLER"}),
    ):
        families = {**FAMILIES, "STRAGGLER": "system", "PLATEAU": "convergence"}
        made = replay("r1", [rule(text, **settings)], attended(range(3)), found, families)
        assert {alert.issue for alert in made} == wanted, text


FOUND = [
    finding(n, who) for who, rounds in {"c1": (1, 2, 5, 14, 15), "c2": (3,), "c3": (9, 20)}.items() for n in rounds
]
FOUND.sort(key=lambda finding: finding.where.round)
RULES = [rule("finding"), rule("finding for 2 rounds", name="twice"), rule("update.norm > 5 for 2 rounds")]
METRICS = [
    one
    for number in range(25)
    for one in (
        *(metric("update.norm", number, 9.0 if number % 7 > 4 else 1.0, f"c{i}") for i in (1, 2, 3)),
        complete(number),
    )
]


@given(st.lists(st.integers(0, len(METRICS)), min_size=len(FOUND), max_size=len(FOUND)), st.randoms())
def test_alerts_do_not_depend_on_when_findings_arrive(places, random):
    """Findings may come long after their round, or, being important, before it: the alerts are those of the replay."""
    places.sort()  # among themselves they keep their order
    stream = list(METRICS)
    for place, one in reversed(list(zip(places, FOUND, strict=True))):
        stream.insert(place, one)
    evaluation, made = RuleEvaluation("r1", RULES, clock=lambda: 0.0), []
    for record in stream:
        evaluation.see(record)
        if random.random() < 0.2:
            made += evaluation.alerts()
    made += evaluation.finish()
    once = CaseDeduplication(RULES, [""])
    made = [alert for alert in made if once.channels(alert)]
    wanted = replay("r1", RULES, METRICS, FOUND, {})
    assert sorted(made, key=repr) == sorted(wanted, key=repr)
    assert len({alert.id for alert in made}) == len(made) >= 8


def test_a_training_that_goes_on_hears_that_a_case_is_over():
    """Not at once, since detectors lag, but once a later finding has come or some time has passed."""
    for settle in ("time", "finding"):
        now = [0.0]
        evaluation = RuleEvaluation("r1", [rule("finding NAN_UPDATE")], clock=lambda now=now: now[0])
        for record in (finding(0), *attended(range(8))):
            evaluation.see(record)
        assert summaries(evaluation.alerts()) == [("firing", 0, 0)]
        if settle == "time":
            now[0] = alert_evaluation.SETTLE_SECONDS
        else:
            evaluation.see(finding(7, "c2", "DEAD_LAYER"))
        assert summaries(evaluation.alerts()) == [("resolved", 6, 0)]


def test_after_a_restart_nothing_is_said_again():
    """What an earlier process told is open here, too: it goes on in silence, and ends with a word."""
    place = json.dumps({"issue": "NAN_UPDATE", "node": "c1", "group": None, "layer": None})
    open_alerts = [("finding", place, 3), ("update.norm > 5", json.dumps({"node": "c1"}), 4), ("gone", "{}", 1)]
    evaluation = RuleEvaluation("r1", [rule("finding"), rule("update.norm > 5")], open_alerts=open_alerts)
    for record in (finding(8), metric("update.norm", 8, 9.0, "c1"), *attended(range(8, 20))):
        evaluation.see(record)
    evaluation.see(metric("update.norm", 20, 1.0, "c1"))
    assert sorted(summaries(evaluation.finish())) == [("resolved", 14, 3), ("resolved", 20, 4)]


def test_memory_is_bounded(monkeypatch):
    """Names that a hostile client invents for ever are counted, not kept; so are rounds that never end."""
    monkeypatch.setattr(alert_evaluation, "MOST_PLACES", 50)
    evaluation = RuleEvaluation("r1", [rule("update.norm > 5"), rule("finding")])
    for number in range(300):
        for i in range(3):
            evaluation.see(metric("update.norm", number, 1.0, f"n{number}-{i}"))
            evaluation.see(finding(number, f"n{number}-{i}"))
        if number % 150 == 149:
            evaluation.see(complete(number))
            evaluation.alerts()
    assert evaluation.left_out > 500
    assert holds_for_each(len(states) <= 50 for states in evaluation._states.values())
    assert len(evaluation._waiting["update.norm"]) <= alert_evaluation.MOST_ROUNDS_AHEAD
    assert len(evaluation._attended) <= 52


def test_it_is_a_sink(tmp_path):
    """It takes every kind of record, twice, and says nothing twice."""
    check_sink(lambda: Alerts(rules=["loss > -1", "finding"], channels=[File(tmp_path / "a.jsonl")], folder=tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert any(isinstance(record, LayerStats) for record in examples_of_records())
    assert len({line["id"] for line in lines}) == len(lines) >= 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "faults", [[lab.NotFinite(nodes=["c1"], since=2, layer=0)], [lab.Crash(nodes=["c2"], since=1)]]
)
def test_live_and_later_are_twins(tmp_path, faults):
    """What a monitored run told its channel, and when, is what `alerts check` says of the stored run."""
    torch.manual_seed(0)
    experiment = lab.Experiment(
        dataset=lab.Synthetic(samples=400, features=12, classes=3),
        clients=8, rounds=14, local=lab.Local(iterations=3, batch=8), model=lab.MLP(), faults=faults, participation=0.7,
    )  # fmt: skip
    rules = [
        rule("finding", gap="3 rounds"), rule("finding in client severity >= warning for 2 rounds"),
        rule("clients.failed >= 1"),
        rule("update.norm > 1.05 × own median"), rule("update.norm > 1.1 × cohort median for 2 rounds"),
        rule("accuracy drops by 0.001"), rule("time.round > 1.2 × own median", gap="10 s"),
    ]  # fmt: skip
    log = tmp_path / "alerts.jsonl"
    alerts = Alerts(rules=rules, channels=[File(log)], folder=tmp_path / "waiting", families=FAMILIES)
    with fv.Monitor(tmp_path / "runs.db", "twin", sinks=[alerts], strict=True) as monitor:
        lab.run(experiment, monitor, engine="sequential")
        run = monitor.run.id
    live = [json.loads(line) for line in log.read_text().splitlines()]
    with open_reader(tmp_path / "runs.db") as reader:
        later = _replayed(reader, run, rules)
    wanted = {(a.id, a.kind, a.round, a.at, a.message, a.node) for a in later}
    assert {(a["id"], a["kind"], a["round"], a["at"], a["message"], a["node"]) for a in live} == wanted
    assert len(live) == len(later) >= 3  # how many depends on how long the rounds took
    assert {a.rule for a in later} >= {"finding"}


def test_a_share_is_written_as_everywhere():
    assert [value_text(value, "accuracy") for value in (0.958217, math.nan)] == ["95.8 %", "NaN"]
