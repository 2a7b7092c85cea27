# SPDX-License-Identifier: Apache-2.0
"""Findings that follow from what the whole run has."""

from __future__ import annotations

import pytest

from fedvitals.diagnosis.examine import examine
from fedvitals.diagnosis.finding import finding
from fedvitals.records import Metric, Where
from fedvitals.store.in_memory import MemoryStore


def reported(*planned, more=None):
    """Examine ten rounds with a detector that reports the planned (round, issue, node).

    `more`: evidence of the findings about clients.
    """
    store = MemoryStore()
    store.write([Metric(Where("run", n), 1.0, "loss", 1.0, "s", n) for n in range(10)])

    def detector(history, round_index):
        for number, issue, node in planned:
            if number == round_index:
                code, _, severity = issue.partition(" ")
                yield finding(
                    code, round_index, "", confidence=0.9, node=node, severity=severity or None, more=node and more
                )

    return [(f.where.round, f.issue, f.where.node) for f in examine(store.history("run"), detectors=[detector])]


DRIFT = [(n, "CLIENT_DRIFT", None) for n in range(2, 7)]


def test_clients_are_not_accused_of_what_the_whole_run_has():
    assert reported(*DRIFT, (5, "BYZANTINE", "c1"), (6, "FROZEN_LAYER", "c2")) == DRIFT


@pytest.mark.parametrize("issue", ["INPUT_SCALE", "NAN_UPDATE", "STRAGGLER"])
def test_what_is_read_from_a_client_itself_is_reported_all_the_same(issue):
    assert (5, issue, "c1") in reported(*DRIFT, (5, issue, "c1"))


def test_a_client_accused_before_or_with_the_cause_stays_accused():
    early = [(1, "BYZANTINE", "c1"), (6, "BYZANTINE", "c1"), (3, "BYZANTINE", "c2"), (5, "BYZANTINE", "c2")]
    assert set(reported(*DRIFT, *early)) == {*DRIFT, *early}


def test_nobody_is_accused_of_what_a_global_model_with_nan_does():
    nan = [(n, "NAN_WEIGHTS", None) for n in range(2, 7)]
    same_round = (2, "BYZANTINE", "c2")
    assert set(reported(*nan, same_round, (3, "BYZANTINE", "c1"), (6, "STALE_UPDATE", "c3"))) == {*nan, same_round}


def test_a_cause_that_is_over_explains_nothing():
    late = (9, "BYZANTINE", "c1")
    assert late in reported(*DRIFT, late)
    again = [(9, "CLIENT_DRIFT", None), late]
    assert set(reported(DRIFT[0], *again)) == {DRIFT[0], *again}


def test_first_weights_that_no_client_chose_explain_accusations_at_once():
    start, accused = (0, "POOR_INITIALISATION", None), (0, "BYZANTINE", "c1")
    assert reported(start, accused) == [start]
    assert accused in reported((0, "POOR_INITIALISATION note", None), accused)  # a remark, no problem


@pytest.mark.parametrize("evidence", [{"views": ["data"]}, {"views": ["exact"], "relation": "negated"}])
def test_what_data_or_an_equality_prove_is_no_consequence(evidence):
    accused = (6, "BYZANTINE", "c1")
    assert accused in reported(*DRIFT, accused, more=evidence)
    guessed = {"views": ["exact"], "relation": "opposed"}  # by cosines: so are two groups of a model that is lost
    assert accused not in reported(*DRIFT, accused, more=guessed)


def test_a_cause_explains_from_the_round_in_which_it_began():
    drift = [(n, "CLIENT_DRIFT", None) for n in range(2, 5)]
    assert reported(*drift, (3, "BYZANTINE", "c1"), (3, "BYZANTINE", "c2")) != drift
    store = MemoryStore()
    store.write([Metric(Where("run", n), 1.0, "loss", 1.0, "s", n) for n in range(4)])

    def detector(history, round_index):
        if round_index >= 2:
            yield finding("CLIENT_DRIFT", round_index, "", confidence=0.9, since=round_index - 1)
        if round_index == 3:
            yield finding("BYZANTINE", round_index, "", confidence=0.9, node="c1")

    assert {f.issue for f in examine(store.history("run"), detectors=[detector])} == {"CLIENT_DRIFT"}


def test_units_that_are_dead_everywhere_explain_a_layer_that_stands_still():
    dead = [(n, "DEAD_UNITS", None) for n in range(2, 7)]
    assert reported(*dead, (2, "FROZEN_LAYER", "c1")) == dead
    byzantine = (5, "BYZANTINE", "c1")
    assert byzantine in reported(*dead, byzantine)  # and nothing else
