# SPDX-License-Identifier: Apache-2.0
"""What a list tells of one run, by short walks: a store may hold thousands, and some are large."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from fedvitals.diagnosis.issues import SEVERITIES
from fedvitals.records import Run, is_client
from fedvitals.store.marks import Mark
from fedvitals.store.reader import Reader
from fedvitals.views.card import detectors_of
from fedvitals.views.status import planned_rounds
from fedvitals.views.troubles import case_key, cases_of
from fedvitals.views.verdict import Facts, Verdict, judge
from fedvitals.views.verdict import _allowed as allowed_alarms

POINTS = 60  # of a sparkline
SETTLED = 5  # rounds after which no message of a round is still on its way


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
    bytes: float | None
    settled: tuple[int, float]  # up to which round the bytes are known for good, and how many
    findings: Mapping[str, int]  # cases by severity, without muted ones
    verdict: Verdict


def facts_of(reader: Reader, run: str, told: Sequence[Mark] = (), before: RunFacts | None = None) -> RunFacts:
    """The facts of a run with these marks; `before`, of a run that goes on, spares counting all of its bytes again."""
    number = reader.names.number(run) or 0
    ask = reader.database.rows
    ((rounds, last),) = ask("SELECT COUNT(*), MAX(last) FROM run_round WHERE run = ?", (number,))
    ((config, host, finished),) = ask("SELECT config, host, finished FROM run WHERE id = ?", (number,)) or [
        ("{}", "", None)
    ]
    names = ask("SELECT s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ?", (number,))
    clients, settings = sum(is_client(name) for (name,) in names), _read(config)
    accuracy, loss = course_of(reader, run, "accuracy"), course_of(reader, run, "loss")
    total, settled = _bytes(reader, number, (0, 0.0) if before is None else before.settled)
    findings, verdict = _judged(reader, run, settings, told, (rounds, clients, finished is not None))
    return RunFacts(
        rounds=rounds,
        planned=planned_rounds(Run(run, "", host, config=settings)),
        last_record=last if last is not None and math.isfinite(last) else None,
        clients=clients,
        accuracy=_newest(accuracy),
        loss=_newest(loss),
        spark=accuracy or loss,
        bytes=total,
        settled=settled,
        findings=findings,
        verdict=verdict,
    )


def _judged(
    reader: Reader, run: str, settings: Mapping[str, Any], told: Sequence[Mark], facts: tuple[int, int, bool]
) -> tuple[dict[str, int], Verdict]:
    """Cases by severity, and the verdict: as `verdict_of` gives it, but for the details that a list has no room for."""
    rounds, clients, finished = facts
    muted = frozenset(mark.target for mark in told if mark.kind == "muted")
    ours = settings.get("fedvitals")
    known = Run(run, "", config={"fedvitals": ours if isinstance(ours, Mapping) else {}})
    any_finding = "SELECT 1 FROM finding WHERE run = ? LIMIT 1"
    cases = cases_of(reader, run) if reader.database.rows(any_finding, (reader.names.number(run),)) else []
    verdict = judge(
        cases,
        Facts(
            rounds=rounds,
            clients=clients,
            detectors=detectors_of(known),
            false_alarms=allowed_alarms(known),
            finished=finished,
            muted=muted,
            acknowledged=frozenset(mark.target for mark in told if mark.kind == "acknowledged"),
        ),
    )
    counted = Counter(case.severity for case in cases if case_key(case) not in muted)
    return {severity: counted[severity] for severity in SEVERITIES}, verdict


def _read(config: str) -> dict[str, Any]:
    found = json.loads(config)
    return found if isinstance(found, dict) else {}


def _newest(spark: Spark | None) -> float | None:
    return spark.values[-1] if spark else None


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
    medians = {n: [v for v in history.latest(name, n).values() if math.isfinite(v)] for n in picked}
    told = [(n, median(values)) for n, values in medians.items() if values]
    return Spark(name, "median client", tuple(n for n, _ in told), tuple(v for _, v in told)) if told else None


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


def _bytes(reader: Reader, run: int, settled: tuple[int, float]) -> tuple[float | None, tuple[int, float]]:
    """Bytes on the wire, and up to which round they will not change any more."""
    ask = reader.database.rows
    ((newest,),) = ask("SELECT MAX(round) FROM run_round WHERE run = ?", (run,))
    until, known = settled
    sent = reader.names.number("traffic.sent")
    has = ask("SELECT 1 FROM metric WHERE run = ? AND name = ? LIMIT 1", (run, sent))
    # The metric has an index that holds its values; messages must be read one by one.
    table = "metric WHERE run = ? AND name = ?" if has else "transfer WHERE run = ?"
    column, values = ("value", (run, sent)) if has else ("bytes", (run,))
    border = max(until, (newest or 0) - SETTLED)
    ((old,),) = ask(f"SELECT SUM({column}) FROM {table} AND round >= ? AND round < ?", (*values, until, border))  # noqa: S608 - our own words
    ((new,),) = ask(f"SELECT SUM({column}) FROM {table} AND round >= ?", (*values, border))  # noqa: S608
    kept = known + float(old or 0)
    total = kept + float(new or 0)
    return (total if math.isfinite(total) and (total or new is not None) else None), (border, kept)
