# SPDX-License-Identifier: Apache-2.0
"""Summarises one run for the list of runs by few reads: a store may hold thousands of runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from fedvitals.diagnosis.issues.table import SEVERITIES
from fedvitals.plain_json import finite
from fedvitals.records import Run, is_client
from fedvitals.store.marks import Mark
from fedvitals.store.read.metrics import has_metric, newest_outcomes
from fedvitals.store.read.nodes import count_clients
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import rounds_and_last_record, run_settings
from fedvitals.views.cases import case_key, cases_of
from fedvitals.views.gaps import gaps_of
from fedvitals.views.status import planned_rounds
from fedvitals.views.traffic_counts import traffic_total
from fedvitals.views.verdict import Verdict, facts_in_short, judge

POINTS = 60  # of a sparkline


@dataclass(frozen=True, slots=True)
class Spark:
    """A metric's course in few points, which keep the extremes."""

    name: str
    of: str  # «federation» or «median client»
    rounds: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the list tells of a run."""

    rounds: int
    planned: int | None
    last_record: float | None
    clients: int
    accuracy: float | None
    loss: float | None
    spark: Spark | None
    bytes: int | None  # of the training, without telemetry
    findings: dict[str, int]  # cases by severity, without muted ones
    verdict: Verdict


def facts_of(reader: Reader, run: str, marks: Sequence[Mark] = ()) -> RunFacts:
    """Read the facts of a run that has these marks."""
    rounds, last = rounds_and_last_record(reader, run)
    described, clients = run_settings(reader, run) or Run(run, "", ""), count_clients(reader, run)
    total, outcomes = traffic_total(reader, run), newest_outcomes(reader, run, ("accuracy", "loss"))
    findings, verdict = _judged(reader, described, marks, rounds, clients)
    return RunFacts(
        rounds=rounds,
        planned=planned_rounds(described),
        last_record=finite(last),
        clients=clients,
        accuracy=finite(outcomes["accuracy"]),
        loss=finite(outcomes["loss"]),
        spark=sparkline_of(reader, run, "accuracy") or sparkline_of(reader, run, "loss"),
        bytes=None if total is None else total.bytes,
        findings=findings,
        verdict=verdict,
    )


def _judged(
    reader: Reader, run: Run, marks: Sequence[Mark], rounds: int, clients: int
) -> tuple[dict[str, int], Verdict]:
    """Cases by severity, and the verdict: as `verdict_of` gives it, but for the details that a list has no room for."""
    cases = cases_of(reader, run.id)
    facts = facts_in_short(run, rounds, clients, marks, gaps_of(reader, run.id))
    counted = Counter(case.severity for case in cases if case_key(case) not in facts.muted)
    return {severity: counted[severity] for severity in SEVERITIES}, judge(cases, facts)


def sparkline_of(reader: Reader, run: str, name: str) -> Spark | None:
    """Return the federation's own values, else the median client's of some rounds; None where nothing was measured."""
    history = reader.history(run)
    for node in (None, "server"):
        rounds, values = history.series(name, node)
        if rounds:
            return Spark(name, "federation", *thinned(rounds, values))
    known = history.rounds()
    if not known or not has_metric(reader, run, name):
        return None
    picked = (
        known if len(known) <= POINTS else [known[round(i * (len(known) - 1) / (POINTS - 1))] for i in range(POINTS)]
    )
    cohort = {n: [v for node, v in history.latest(name, n).items() if is_client(node)] for n in picked}
    medians = [(n, _median(own)) for n, own in cohort.items() if own]
    return Spark(name, "median client", tuple(n for n, _ in medians), tuple(v for _, v in medians)) if medians else None


def _median(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def thinned(rounds: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Reduce to `POINTS`: the smallest and largest of each stretch, and the newest; None for what is not finite."""
    places = list(range(len(rounds)))
    if len(places) > POINTS:
        stretches, newest = (POINTS - 1) // 2, places.pop()
        cuts = [i * len(places) // stretches for i in range(stretches + 1)]
        kept: list[int] = []
        for start, end in pairwise(cuts):
            finite = [p for p in places[start:end] if math.isfinite(values[p])] or places[start : start + 1]
            kept += sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})
        places = [*kept, newest]
    return tuple(rounds[p] for p in places), tuple(values[p] if math.isfinite(values[p]) else None for p in places)
