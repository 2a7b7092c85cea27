# SPDX-License-Identifier: Apache-2.0
"""Computes the list of runs, a page at a time: filtered, sorted, each with its health at a glance.

What a list shows of a run is computed once and cached until the run changes; what is not needed to filter and sort is
only computed for the runs of the page.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal, get_args

from fedvitals.diagnosis.issues.table import SEVERITIES
from fedvitals.diagnosis.medians import finite_median
from fedvitals.plain_json import copied, finite
from fedvitals.records import Run, is_client
from fedvitals.store import Target
from fedvitals.store.marks import Mark, marks
from fedvitals.store.read import runs as stored_runs
from fedvitals.store.read.metrics import has_metric, newest_outcomes
from fedvitals.store.read.nodes import count_clients
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import RunHead
from fedvitals.store.read.storage import count_layer_matrices, count_rows, packed_bytes
from fedvitals.store.tapes import tape_bytes
from fedvitals.views.cases import case_key, cases_of
from fedvitals.views.memo import Remembered
from fedvitals.views.status import RunState, planned_rounds, state_of
from fedvitals.views.traffic_counts import traffic_total
from fedvitals.views.verdict import State, Verdict, facts_in_short, judge

Sort = Literal[
    "newest", "worst", "health", "name", "progress", "accuracy", "findings", "duration", "bytes", "clients", "host",
    "started",
]  # fmt: skip
Order = Literal["up", "down"]
WORST_FIRST: tuple[State, ...] = ("ill", "watch", "warming", "unjudged", "healthy")
DOWN_BY_ITSELF = ("accuracy", "findings", "duration", "bytes", "clients", "progress", "started")  # largest first
FROM_HEADS = ("newest", "name", "host", "started")  # columns that can be sorted without the facts
REMEMBERED = 20_000  # runs


@dataclass(frozen=True, slots=True)
class RunsAsked:
    """Which runs are requested, and in which order."""

    search: str = ""
    state: RunState | None = None
    health: State | None = None
    tag: str | None = None
    sort: Sort = "newest"
    order: Order | None = None  # None: the natural order of the column
    limit: int = 50
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in the list."""

    id: str
    name: str
    host: str
    topology: str | None
    tags: tuple[str, ...]
    state: RunState
    written: bool  # whether a process that may still write to it is alive
    health: State
    headline: str  # the verdict
    key: str | None  # of the worst case
    findings: Mapping[str, int]  # cases by severity, without muted ones
    rounds: int
    planned: int | None
    started: float | None
    finished: float | None
    last_record: float | None
    seconds: float | None  # so far, if it is not finished
    clients: int
    accuracy: float | None
    loss: float | None
    spark: Spark | None
    bytes: int | None  # of the training, without telemetry


@dataclass(frozen=True, slots=True)
class RunsPage:
    """A page of the list."""

    total: int  # that match the request
    stored: int  # in the store
    running: int
    tags: tuple[str, ...]  # of all runs
    runs: tuple[RunRow, ...]


@dataclass(frozen=True, slots=True)
class _Head(RunHead):
    """What is known of every run without reading its records."""

    last_record: float | None  # of runs without an end
    written: bool
    state: RunState
    marks: tuple[Mark, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(sorted(mark.target for mark in self.marks if mark.kind == "tag"))


class RunList:
    """The list of runs, with a cache for each; thread-safe."""

    def __init__(self) -> None:
        self._facts = Remembered[str, RunFacts](REMEMBERED)

    def page(
        self,
        reader: Reader,
        version: Callable[[str], str],
        asked: RunsAsked,
        is_written: Callable[[str, bool], bool] = lambda _run, _newest: False,
        now: float | None = None,
    ) -> RunsPage:
        """Return a page. `version(run)` changes with the run; `is_written(run, newest)`: whether it is written."""
        heads = _heads(reader, is_written, time.time() if now is None else now)
        chosen = [head for head in heads if _is_asked(head, asked)]
        rows: Iterable[RunRow]
        if asked.health is None and asked.sort in FROM_HEADS:
            chosen = _sorted(chosen, asked)
            rows = [self._row(reader, version, head) for head in chosen[asked.offset : asked.offset + asked.limit]]
            total = len(chosen)
        else:
            every = [self._row(reader, version, head) for head in chosen]
            matching = _sorted([row for row in every if asked.health in (None, row.health)], asked)
            rows, total = matching[asked.offset : asked.offset + asked.limit], len(matching)
        return RunsPage(
            total=total,
            stored=len(heads),
            running=sum(head.state == "running" for head in heads),
            tags=tuple(sorted({tag for head in heads for tag in head.tags})),
            runs=tuple(rows),
        )

    def _row(self, reader: Reader, version: Callable[[str], str], head: _Head) -> RunRow:
        facts = self._facts.get(head.id, version(head.id), lambda: facts_of(reader, head.id, head.marks))
        end = head.finished if head.finished is not None else facts.last_record
        seconds = None if end is None or head.started is None else max(0.0, end - head.started)
        # If both have a last record, the facts' one is used: a head only knows it for runs without an end.
        return copied(RunRow, facts, head, facts.verdict, health=facts.verdict.state, state=head.state, seconds=seconds)


def _heads(reader: Reader, is_written: Callable[[str, bool], bool], now: float) -> list[_Head]:
    runs = list(stored_runs.run_heads(reader))
    by_run = {
        run: tuple(same) for run, same in groupby(sorted(marks(reader), key=attrgetter("run")), key=attrgetter("run"))
    }
    last_records = stored_runs.last_records_of_open_runs(reader)
    newest = max((run.started or 0.0 for run in runs if run.finished is None), default=None)
    heads = []
    for run in runs:
        last, written = None, False
        if run.finished is None:
            last = last_records.get(run.number)
            last = run.started if last is None else last
            written = is_written(run.id, (run.started or 0.0) == newest)
        state = state_of(run.finished, last, run.started, written=written, now=now)
        marks_of_run = by_run.get(run.id, ())
        heads.append(copied(_Head, run, last_record=last, written=written, state=state, marks=marks_of_run))
    return heads


def _is_asked(head: _Head, asked: RunsAsked) -> bool:
    words = asked.search.casefold().split()
    text = " ".join((head.name, head.id, head.host, head.topology or "", *head.tags)).casefold()
    return (
        all(word in text for word in words)
        and asked.state in (None, head.state)
        and (asked.tag is None or asked.tag in head.tags)
    )


def _sorted(heads: list[Any], asked: RunsAsked) -> list[Any]:
    """Return heads or rows in the requested order; missing values come last either way, and among equals the newest
    first.
    """
    newest = sorted(heads, key=lambda head: (-(head.started or 0.0), head.id))
    if asked.sort == "newest":
        order = sorted(newest, key=lambda head: head.state != "running")
        return order[::-1] if asked.order == "up" else order
    down = asked.order == "down" if asked.order else asked.sort in DOWN_BY_ITSELF
    value = VALUES[asked.sort]
    known = [head for head in newest if value(head) is not None]
    known.sort(key=value, reverse=down)
    return known + [head for head in newest if value(head) is None]


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "worst": lambda row: (WORST_FIRST.index(row.health), *(-row.findings[severity] for severity in SEVERITIES)),
    "health": lambda row: WORST_FIRST.index(row.health),
    "name": lambda head: head.name.casefold(),
    "host": lambda head: (head.host, head.topology or ""),
    "started": attrgetter("started"),
    "progress": lambda row: row.rounds / row.planned if row.planned else float(row.finished is not None),
    "accuracy": attrgetter("accuracy"),
    "findings": lambda row: tuple(row.findings[severity] for severity in SEVERITIES),
    "duration": attrgetter("seconds"),
    "bytes": attrgetter("bytes"),
    "clients": attrgetter("clients"),
}
assert set(VALUES) == set(get_args(Sort)) - {"newest"}  # noqa: S101 - a sort key without a value is a bug of ours


# The size of a row with its part of the indexes, measured in stores of real runs; packed data are counted exactly.
_ROWS = {"metric": 75, "event": 400, "span": 390, "transfer": 75, "sketch": 150, "finding": 1400, "action": 500}


@dataclass(frozen=True, slots=True)
class Contents:
    """What deleting the run would remove."""

    id: str
    name: str
    rounds: int
    records: int
    bytes: int  # approximately
    tape_bytes: int = 0  # of its tape, which is deleted with it


def contents_of(reader: Reader, run: str, store: Target = None) -> Contents:
    """Count what deleting a run would remove; `store`: where its tape lies, if that counts too."""
    counts = count_rows(reader, run, _ROWS)
    return Contents(
        id=run,
        name=stored_runs.run_name(reader, run),
        rounds=len(reader.history(run).rounds()),
        records=sum(counts.values()) + count_layer_matrices(reader, run),
        bytes=packed_bytes(reader, run) + sum(_ROWS[table] * count for table, count in counts.items()),
        tape_bytes=0 if store is None else tape_bytes(store, run),
    )


POINTS = 60  # per sparkline


@dataclass(frozen=True, slots=True)
class Spark:
    """A metric over the rounds in a few points, which keep the extremes."""

    name: str
    of: str  # «federation» or «median client»
    rounds: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the list shows of a run."""

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
    rounds = stored_runs.span_of_rounds(reader, run)
    described, clients = stored_runs.run_settings(reader, run) or Run(run, "", ""), count_clients(reader, run)
    total, outcomes = traffic_total(reader, run), newest_outcomes(reader, run, ("accuracy", "loss"))
    findings, verdict = _judged(reader, described, marks, rounds.count, clients)
    return RunFacts(
        rounds=rounds.count,
        planned=planned_rounds(described),
        last_record=finite(rounds.last_record),
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
    """Return cases by severity, and the verdict as from `verdict_of`, without details that do not fit a list."""
    cases = cases_of(reader, run.id)
    facts = facts_in_short(reader, run, rounds, clients, marks)
    counted = Counter(case.severity for case in cases if case_key(case) not in facts.muted)
    return {severity: counted[severity] for severity in SEVERITIES}, judge(cases, facts)


def sparkline_of(reader: Reader, run: str, name: str) -> Spark | None:
    """Return the federation's own values, else the median client's of some rounds; None if nothing was measured."""
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
    medians = [(n, finite(finite_median(own))) for n, own in cohort.items() if own]
    return Spark(name, "median client", tuple(n for n, _ in medians), tuple(v for _, v in medians)) if medians else None


def thinned(rounds: Sequence[int], values: Sequence[float]) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """Reduce to `POINTS`: the smallest and largest of each section, and the newest; None for what is not finite."""
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
