# SPDX-License-Identifier: Apache-2.0
"""Findings that follow from what the whole run has."""

from __future__ import annotations

import pytest

from fedvitals.diagnosis.examine import examine
from fedvitals.diagnosis.finding import finding
from fedvitals.records import Metric, Where
from fedvitals.store.in_memory import MemoryStore


def reported(*planned):
    """Examine ten rounds with a detector that reports the planned (round, issue, node)."""
    store = MemoryStore()
    store.write([Metric(Where("run", n), 1.0, "loss", 1.0, "s", n) for n in range(10)])

    def detector(history, round_index):
        for number, issue, node in planned:
            if number == round_index:
                yield finding(issue, round_index, "", confidence=0.9, node=node)

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
