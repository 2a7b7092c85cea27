# SPDX-License-Identifier: Apache-2.0
"""Clients that are away: found when they go, reported until they are back, and never where not being asked is usual."""

import numpy as np
import pytest

from fedvitals.diagnosis.cases import cases
from fedvitals.diagnosis.detectors.absence import drop_outs
from fedvitals.diagnosis.examine import examine
from fedvitals.records import Event, Metric, Where
from fedvitals.store import MemoryStore

RUN = "r"


def history_of(cohorts, *events):
    """A run of these cohorts, one a round, and events as (round, name, node, data), in order."""
    metrics = [
        Metric(Where(RUN, n, node), 1.0, "update.norm", 1.0) for n, nodes in enumerate(cohorts) for node in nodes
    ]
    told = [
        Event(Where(RUN, number, node), float(place), "warning", name, "", data)
        for place, (number, name, node, data) in enumerate(events)
    ]
    store = MemoryStore()
    store.write([type(r)(*(getattr(r, f) for f in r.__slots__[:-2]), "s", i) for i, r in enumerate([*metrics, *told])])
    return store.history(RUN)


def troubles(history, severity=("warning", "critical")):
    """By client, the rounds with a finding."""
    rounds = {}
    for finding in examine(history, detectors=[drop_outs]):
        if finding.severity in severity:
            rounds.setdefault(finding.where.node, []).append(finding.where.round)
    return rounds


def clients(count):
    return [f"c{i}" for i in range(count)]


def without(node, away, count=6, rounds=40):
    return [[name for name in clients(count) if name != node or n not in away] for n in range(rounds)]


# -- missing without a word -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 6, 20])
@pytest.mark.parametrize("last", [0, 1, 2, 9])
def test_who_dies_at_any_time_is_found_after_three_rounds_and_not_forgotten(last, count):
    history = history_of(without("c1", range(last + 1, 40), count))
    assert troubles(history) == {"c1": [*range(last + 3, 40)]}


def test_who_is_back_is_reported_no_more_and_its_case_is_over():
    findings = examine(history_of(without("c1", range(5, 12))), detectors=[drop_outs])
    assert [f.where.round for f in findings] == [*range(7, 12)]
    assert {f.evidence["since"] for f in findings} == {5}
    (case,) = cases(findings, {None: range(40), "c1": [*range(5), *range(12, 40)]})
    assert not case.still_there


def test_a_case_of_a_client_that_stays_away_is_still_there():
    findings = examine(history_of(without("c1", range(5, 40))), detectors=[drop_outs])
    (case,) = cases(findings, {None: range(40), "c1": range(5)})
    assert case.still_there


def test_a_newcomer_does_not_make_one_forget_who_is_missing():
    cohorts = without("c1", range(3, 40))
    for cohort in cohorts[15:]:
        cohort.append("c99")
    assert troubles(history_of(cohorts)) == {"c1": [*range(5, 40)]}


def test_two_that_die_one_after_the_other_are_both_found():
    cohorts = [
        [c for c in clients(8) if (c, n < 4) != ("c1", False) and (c, n < 9) != ("c2", False)] for n in range(20)
    ]
    assert troubles(history_of(cohorts)) == {"c1": [*range(6, 20)], "c2": [*range(11, 20)]}


@pytest.mark.parametrize(("count", "asked"), [(2, 1), (3, 2), (10, 1), (10, 3), (10, 8), (10, 9), (100, 10)])
def test_cohorts_drawn_at_random_have_no_drop_outs(count, asked):
    for seed in range(20):
        stream = np.random.default_rng(seed)
        cohorts = [[f"c{i}" for i in stream.choice(count, asked, replace=False)] for _ in range(60)]
        assert troubles(history_of(cohorts)) == {}, seed


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_clients_that_come_when_they_like_have_no_drop_outs(share):
    for seed in range(20):
        stream = np.random.default_rng(seed)
        cohorts = [[c for c in clients(10) if stream.random() < share] for _ in range(60)]
        assert troubles(history_of(cohorts)) == {}, seed


def test_cohorts_that_rotate_and_populations_that_change_have_no_drop_outs():
    rotating = [[f"c{(i + n // 5) % 12}" for i in range(8)] for n in range(40)]
    assert troubles(history_of(rotating)) == {}
    by_day = [[f"c{i + 6 * (n // 10 % 2)}" for i in range(6)] for n in range(40)]
    assert troubles(history_of(by_day)) == {}
    assert troubles(history_of(without("c1", range(10, 40)), (10, "client.left", "c1", {}))) == {}


# -- by the host's word -----------------------------------------------------------------------------------------------

UNAVAILABLE = {"exception": "NODE_UNAVAILABLE", "code": 5, "phase": "train"}


@pytest.mark.parametrize("number", [0, 1, 7])
def test_who_is_unavailable_is_reported_at_once_and_until_it_is_back(number):
    cohorts = without("c1", range(number, number + 4), rounds=20)
    events = [(number, "client.dropped_out", "c1", UNAVAILABLE), (number + 4, "client.connected", "c1", {})]
    assert troubles(history_of(cohorts, *events)) == {"c1": [*range(number, number + 4)]}
    assert troubles(history_of(without("c1", range(number, 20), rounds=20), *events[:1])) == {
        "c1": [*range(number, 20)]
    }


def test_who_is_gone_from_the_list_of_nodes_is_reported_though_nobody_asks_it():
    stream = np.random.default_rng(0)
    cohorts = [[f"c{i}" for i in stream.choice(10, 3, replace=False)] for _ in range(30)]
    assert troubles(history_of(cohorts, (4, "client.disconnected", "c1", {}))) == {"c1": [*range(4, 30)]}


def test_who_is_listed_again_and_away_again_when_asked_was_never_back():
    events = [(n, name, "c1", UNAVAILABLE) for n in (3, 4, 5) for name in ("client.connected", "client.dropped_out")]
    findings = examine(history_of(without("c1", range(3, 8), rounds=8), *events), detectors=[drop_outs])
    assert {f.evidence["since"] for f in findings} == {3}
    assert [f.where.round for f in findings] == [3, 4, 5, 6, 7]


def test_where_clients_come_and_go_being_away_is_a_note():
    coming = [(n + away, name, f"c{i}", {}) for i in range(4) for n in (2 * i,) for away, name in
              ((0, "client.disconnected"), (1, "client.connected"))]  # fmt: skip
    history = history_of([clients(10)] * 20, *coming, (10, "client.disconnected", "c9", {}))
    assert "c9" not in troubles(history)
    assert troubles(history, ("note",))["c9"] == [*range(10, 20)]


def test_where_most_are_away_there_is_one_case():
    gone = [(5, "client.disconnected", f"c{i}", {}) for i in range(5)]
    findings = examine(history_of([clients(8)] * 5 + [clients(8)[5:]] * 5, *gone), detectors=[drop_outs])
    assert {(f.issue, f.where.node) for f in findings} == {("DROP_OUT", None)}
    assert findings[0].message == "5 of 8 clients are not connected."
    assert [suspect.node for suspect in findings[0].suspects] == clients(5)


# -- often away when asked --------------------------------------------------------------------------------------------


def test_who_is_away_whenever_asked_is_reported_until_it_answers_though_it_is_asked_seldom():
    cohorts = [[c for c in clients(6) if c != "c1" or n in (*range(9), 30)] for n in range(40)]
    calls = [(n, "client.dropped_out", "c1", {}) for n in (9, 12, 15)]
    rounds = troubles(history_of(cohorts, *calls))["c1"]
    assert rounds[-1] == 29
    assert rounds == [*range(rounds[0], 30)]


# -- back under another name ------------------------------------------------------------------------------------------


def partitions(node, rounds, **data):
    return [(n, "client.partition", node, data) for n in rounds]


@pytest.mark.parametrize("identity", [{"partition": 1}, {"name_digest": "0123456789abcdef"}])
def test_who_is_back_under_a_new_id_is_joined_to_its_partition_or_name(identity):
    cohorts = [[*clients(4), *(["c1x"] if n >= 8 else [])] for n in range(15)]
    cohorts = [[c for c in cohort if c != "c1" or n < 4] for n, cohort in enumerate(cohorts)]
    told = partitions("c1", range(4), **identity)
    gone, back = (4, "client.disconnected", "c1", {}), partitions("c1x", range(8, 15), **identity)
    history = history_of(cohorts, *told, gone, *back)
    assert troubles(history) == {"c1": [4, 5, 6, 7]}
    (note,) = [f for f in examine(history, detectors=[drop_outs]) if f.severity == "note"]
    assert (note.where.node, note.where.round) == ("c1", 8)
    assert note.message.startswith("c1 is back as c1x: both say that they are ")
    findings = examine(history, detectors=[drop_outs])
    assert not cases(findings, {None: range(15), "c1": range(4)})[0].still_there


@pytest.mark.parametrize("claim", [{"partition": 2}, {"partition": True}, {"partition": -1}, {"name_digest": "x" * 16}])
def test_what_says_something_else_is_somebody_else(claim):
    cohorts = [[c for c in [*clients(4), *(["c1x"] if n >= 8 else [])] if c != "c1" or n < 4] for n in range(15)]
    events = [*partitions("c1", range(4), partition=1), *partitions("c1x", range(8, 15), **claim)]
    assert troubles(history_of(cohorts, *events, (4, "client.disconnected", "c1", {}))) == {"c1": [*range(4, 15)]}


def test_a_client_that_was_there_before_cannot_take_the_place_of_one_that_is_away():
    events = [*partitions("c1", range(4), partition=1), *partitions("c2", range(4, 15), partition=1)]
    history = history_of(without("c1", range(4, 15), rounds=15), *events, (4, "client.disconnected", "c1", {}))
    assert troubles(history) == {"c1": [*range(4, 15)]}
