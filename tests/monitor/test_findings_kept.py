# SPDX-License-Identifier: Apache-2.0
"""A run keeps its findings for whoever asks, in bounded memory: an ill client has one in every round, for days."""

import gc
import tracemalloc

import fedvitals as fv
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.monitor import findings as findings_module
from fedvitals.monitor.findings import KeptFindings

COUNT = 400
NUMBERS = [Number(f"metric.{i}", 1.5 * i, 2.5 * i, 3.5 * i) for i in range(10)]


def ill(round_index):
    return finding("LABEL_NOISE", round_index, "It is ill.", confidence=0.9, node="c1", numbers=NUMBERS)


def test_findings_are_kept_in_a_fraction_of_the_memory_that_they_take(tmp_path):
    with fv.Monitor(tmp_path / "runs.db", detectors=()) as monitor:
        with monitor.round(0):
            pass
        tracemalloc.start()
        try:
            sizes = []
            for first in (0, COUNT, 2 * COUNT):  # at first, buffers on the way to the store grow, too
                for number in range(first, first + COUNT):
                    monitor._run.findings.take(ill(number))
                assert monitor.flush()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            before = tracemalloc.get_traced_memory()[0]
            findings = [ill(number) for number in range(COUNT)]
            as_objects = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert sizes[2] - sizes[1] < 0.35 * as_objects
        assert {f.where.round for f in monitor.findings()} == set(range(3 * COUNT))
        assert monitor.findings()[0].evidence == findings[0].evidence


def test_findings_that_recur_are_thinned_and_single_ones_stay():
    kept = KeptFindings(most=100)
    kept.add(finding("FREE_RIDER", 0, "Once.", confidence=0.9, node="c0"))
    for number in range(1, 5000):
        kept.add(ill(number))
        rounds = [f.where.round for f in kept]
        assert len(rounds) <= 100
        assert rounds[:2] == [0, 1]
        assert rounds[-1] == number
    assert rounds == sorted(set(rounds))
    assert kept.dropped == 5000 - len(rounds)


def test_findings_of_any_number_of_clients_are_bounded():
    kept = KeptFindings(most=10)
    for number in range(100):
        kept.add(finding("FREE_RIDER", number, "Once.", confidence=0.9, node=f"c{number}"))
    assert [f.where.round for f in kept] == list(range(90, 100))


def test_a_run_says_how_many_findings_it_has_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(findings_module.KeptFindings.__init__, "__defaults__", (10,))
    with fv.Monitor(tmp_path / "runs.db", detectors=()) as monitor:
        with monitor.round(0):
            pass
        for number in range(30):
            monitor._run.findings.take(ill(number))
        found = monitor.findings()
        assert len(found) <= 10
        assert found.gaps == (f"{30 - len(found)} earlier findings are no longer in memory",)


def test_findings_come_back_as_they_were_in_the_order_in_which_they_came():
    kept = KeptFindings(most=1000)
    added = [
        finding(issue, number, f"In round {number}.", confidence=0.5 + number / 1000, node=node, numbers=NUMBERS)
        for number in range(40)
        for issue, node in (("LABEL_NOISE", "c1"), ("LABEL_NOISE", "c2"), ("FREE_RIDER", "c1"))
    ]
    for one in added:
        kept.add(one)
    assert [*kept] == added
    assert [*kept] == added  # not used up
