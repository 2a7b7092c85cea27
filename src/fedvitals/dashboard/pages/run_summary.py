# SPDX-License-Identifier: Apache-2.0
"""What a list tells of one run, by short walks: a store may hold thousands, and some are large."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from fedvitals.diagnosis.issues.table import SEVERITIES
from fedvitals.plain_json import finite
from fedvitals.records import Run, is_client
from fedvitals.store.marks import Mark
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
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


def facts_of(reader: Reader, run: str, told: Sequence[Mark] = ()) -> RunFacts:
    """The facts of a run with these marks."""
    number = reader.names.number(run) or 0
    ask = reader.database.rows
    ((rounds, last),) = ask("SELECT COUNT(*), MAX(last) FROM run_round WHERE run = ?", (number,))
    ((config, host, finished),) = ask("SELECT config, host, finished FROM run WHERE id = ?", (number,)) or [
        ("{}", "", None)
    ]
    names = ask("SELECT s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ?", (number,))
    clients = sum(is_client(name) for (name,) in names)
    described = Run(run, "", host, config=_read(config), finished=finished)
    total = traffic_total(reader, run)
    findings, verdict = _judged(reader, described, told, rounds, clients)
    return RunFacts(
        rounds=rounds,
        planned=planned_rounds(described),
        last_record=finite(last),
        clients=clients,
        accuracy=finite(queries.newest(reader, run, "accuracy")),
        loss=finite(queries.newest(reader, run, "loss")),
        spark=course_of(reader, run, "accuracy") or course_of(reader, run, "loss"),
        bytes=None if total is None else total.bytes,
        findings=findings,
        verdict=verdict,
    )


def _judged(
    reader: Reader, run: Run, told: Sequence[Mark], rounds: int, clients: int
) -> tuple[dict[str, int], Verdict]:
    """Cases by severity, and the verdict: as `verdict_of` gives it, but for the details that a list has no room for."""
    any_finding = "SELECT 1 FROM finding WHERE run = ? LIMIT 1"
    there = reader.database.rows(any_finding, (reader.names.number(run.id),))
    cases = cases_of(reader, run.id) if there else []
    facts = facts_in_short(run, rounds, clients, told, gaps_of(reader, run.id))
    counted = Counter(case.severity for case in cases if case_key(case) not in facts.muted)
    return {severity: counted[severity] for severity in SEVERITIES}, judge(cases, facts)


def _read(config: str) -> dict[str, Any]:
    found = json.loads(config)
    return found if isinstance(found, dict) else {}


def course_of(reader: Reader, run: str, name: str) -> Spark | None:
    """The federation's own values, else the median client's of some rounds; None where nothing was measured."""
    history = reader.history(run)
    for node in (None, "server"):
        rounds, values = history.series(name, node)
        if rounds:
            return Spark(name, "federation", *thinned(rounds, values))
    known = history.rounds()
    if not known or not _has(reader, run, name):
        return None
    picked = (
        known if len(known) <= POINTS else [known[round(i * (len(known) - 1) / (POINTS - 1))] for i in range(POINTS)]
    )
    cohort = {n: [v for node, v in history.latest(name, n).items() if is_client(node)] for n in picked}
    told = [(n, _median(own)) for n, own in cohort.items() if own]
    return Spark(name, "median client", tuple(n for n, _ in told), tuple(v for _, v in told)) if told else None


def _median(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else None


def _has(reader: Reader, run: str, name: str) -> bool:
    sql = "SELECT 1 FROM metric WHERE run = ? AND name = ? LIMIT 1"
    return bool(reader.database.rows(sql, (reader.names.number(run), reader.names.number(name))))


def thinned(rounds: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """At most `POINTS`: the smallest and the largest of each stretch, and the newest. None: not finite."""
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
