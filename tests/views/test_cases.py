# SPDX-License-Identifier: Apache-2.0
"""Findings become cases one after the other: a run that has one in every round need not fit into memory."""

import tracemalloc
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fedvitals.diagnosis.cases import cases, severity_rank
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.records import Finding, Run, Where
from fedvitals.store import open_reader, open_store, rows
from fedvitals.views.cases import cases_of
from fedvitals.views.matrix import Matrices, share


def test_the_cases_of_a_long_run_are_read_without_holding_all_its_findings(tmp_path):
    peaks = []
    for run, rounds in (("short", 1000), ("long", 4000)):
        with open_store(tmp_path / f"{run}.db") as store:
            findings = [
                finding(
                    "LABEL_NOISE",
                    r,
                    "it is ill",
                    confidence=0.8,
                    node="c1",
                    since=0,
                    numbers=[Number("loss", 1.0, 2.0)],
                )
                for r in range(rounds)
            ]
            at = [replace(f, where=replace(f.where, run=run), source="s", sequence=i) for i, f in enumerate(findings)]
            store.write([Run(run, run, source="r"), *at])
        with open_reader(tmp_path / f"{run}.db") as reader:
            cases_of(reader, run)  # what is loaded and remembered once
            tracemalloc.start()
            (case,) = cases_of(reader, run)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert (case.first, case.last, len(case.rounds), case.since) == (0, rounds - 1, rounds, 0)
    assert peaks[1] - peaks[0] < 3000 * 300  # a round and its confidence; a finding takes thousands of bytes
    assert peaks[0] < 600_000  # each thread of a server that answers takes as much


def test_readers_that_share_what_they_know_read_each_finding_once(tmp_path, monkeypatch):
    read, from_rows = [], rows.from_rows

    def noted(kind, values):
        read.extend(values if kind is Finding else [])
        return from_rows(kind, values)

    monkeypatch.setattr(rows, "from_rows", noted)
    path, shared = tmp_path / "runs.db", Matrices()
    with open_store(path) as store:
        store.write([Run("r", "r", source="s")])
        for number in range(250):
            told = finding("LABEL_NOISE", number, "it is ill", confidence=0.5 + number / 1000, node="c1")
            store.write([replace(told, where=replace(told.where, run="r"), source="s", sequence=number + 1)])
            if number % 50 == 49:
                with open_reader(path) as reader:
                    share(reader, shared)
                    known, again = cases_of(reader, "r"), cases_of(reader, "r")
                    assert len(read) == number + 1
                with open_reader(path) as other:
                    assert known == again == cases_of(other, "r")
                    assert [case.last for case in cases_of(other, "r", 10)] == [10]
                del read[number + 1 :]


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(0, 5)), st.sampled_from(["note", "warning", "critical"]),
            st.sampled_from([0.5, 0.7, 0.9]),
        ),
        min_size=1,
        max_size=12,
    )
)  # fmt: skip
def test_a_case_is_the_same_as_with_all_its_findings_at_hand(drawn):
    findings = [
        Finding(Where("r", number, "c1"), 0.0, "LABEL_NOISE", severity, confidence, f"{i}")
        for i, (number, severity, confidence) in enumerate(drawn)
    ]
    (case,) = cases(findings)
    of_rounds = [f for f in findings if f.where.round is not None]
    best = {f.where.round: f for f in sorted(of_rounds, key=lambda f: f.confidence)}  # stable: the later of two equal
    rounds = sorted(best)
    assert case.newest is (best[rounds[-1]] if rounds else findings[-1])
    assert (case.rounds, case.confidences) == (tuple(rounds), tuple(best[r].confidence for r in rounds))
    assert case.severity == min((f.severity for f in findings), key=severity_rank)
    assert case.since == (rounds[0] if rounds else None)
