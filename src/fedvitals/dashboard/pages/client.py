# SPDX-License-Identifier: Apache-2.0
"""One client: broken or only different? What was found about it, what it told, what happened to it, who comes next."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedvitals.catalog import CATALOG, meaning_of, unit_of
from fedvitals.diagnosis.cases import Case
from fedvitals.errors import ConfigError
from fedvitals.records import FAILURES as FAILED
from fedvitals.records import Event, natural
from fedvitals.store import rows
from fedvitals.store.read.reader import Reader
from fedvitals.views.briefs import Brief, Marked, brief
from fedvitals.views.cases import cases_of, concerns, traceback_of
from fedvitals.views.clients import FAR, ClientRow, clients_by_number
from fedvitals.views.labels import named
from fedvitals.views.units import number
from fedvitals.views.verdict import WARM, Facts, facts_of, judge

EVENTS = 100
FAILURES = 20
LABELS = 200
MESSAGE, TRACEBACK = 2_000, 20_000  # characters
FACTS = (
    "samples", "update.samples", "steps", "steps.skipped", "label.entropy", "fit.samples", "fit.loss_before",
    "fit.loss_after", "fit.loss_p90", "fit.accuracy_before", "fit.accuracy_after", "fit.confusion",
    "fit.confused_label", "fit.confused_guess", "fit.confident_wrong", "throughput.samples", "update.staleness",
    "update.zero", "update.duplicates", "update.differs", "time.clock_error", "memory.growth",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that a client told, beside the median of all that told it in that round."""

    name: str
    unit: str
    meaning: str
    value: float | None
    round: int
    median: float | None
    clients: int


@dataclass(frozen=True, slots=True)
class LabelShare:
    label: str
    count: int
    share: float  # of its own samples
    others: float | None  # mean share of the other clients that told


@dataclass(frozen=True, slots=True)
class ClientEvent:
    at: float | None
    round: int | None
    level: str
    name: str
    message: str
    exception: str | None
    traceback: str | None  # None: there is none, or privacy kept it


@dataclass(frozen=True, slots=True)
class ClientVerdict:
    state: Literal["ill", "watch", "different", "healthy", "warming", "unjudged"]
    headline: str
    detail: str
    key: str | None = None  # of its worst case


@dataclass(frozen=True, slots=True)
class ClientPage:
    node: str
    verdict: ClientVerdict
    row: ClientRow
    place: int  # among all, 1 is the worst
    clients: int
    worse: str | None  # who comes before it, worst first
    better: str | None
    cases: list[Brief]
    facts: list[Fact]
    labels: list[LabelShare]
    labels_round: int | None
    failures: list[ClientEvent]  # the newest
    total_failures: int
    events: list[ClientEvent]  # the newest first
    tracebacks: bool  # whether any is kept


def client_page(reader: Reader, run: str, node: str, everyone: Sequence[ClientRow]) -> ClientPage:
    """ConfigError where the run has no such client. `everyone`: all clients, worst first."""
    place = next((i for i, row in enumerate(everyone) if row.name == node), None)
    if place is None:
        raise ConfigError(f"The run {run} has no client '{node}'. The page of clients lists those that it has.")
    row = everyone[place]
    found = [case for case in cases_of(reader, run) if concerns(case, node)]
    facts, marked = facts_of(reader, run), Marked(reader, run)
    verdict = client_verdict(row, found, facts)
    events = events_of(reader, run, node)
    failures = events_of(reader, run, node, tuple(FAILED))
    labels, when = _labels(reader, run, node)
    return ClientPage(
        node=node,
        verdict=verdict,
        row=row,
        place=place + 1,
        clients=len(everyone),
        worse=everyone[place - 1].name if place else None,
        better=everyone[place + 1].name if place + 1 < len(everyone) else None,
        cases=[brief(case, marked, facts.labels) for case in found],
        facts=_facts(reader, run, node),
        labels=labels,
        labels_round=when,
        failures=failures[:FAILURES],
        total_failures=row.failures,
        events=events,
        tracebacks=any(event.traceback for event in failures),
    )


def client_verdict(row: ClientRow, found: Sequence[Case], facts: Facts) -> ClientVerdict:
    """From its cases; without any that is open, from how it stands among its peers."""
    name, detail = named(row.name, facts.labels), _detail(row, facts)
    own = judge(found, facts) if found else None
    if own is not None and own.state in ("ill", "watch"):
        return ClientVerdict("ill" if own.state == "ill" else "watch", own.headline, detail, own.key)
    if not facts.detectors and not found:
        return ClientVerdict("unjudged", f"Not judged: no detector looked at the run of {name}.", detail)
    if row.attended < WARM:
        return ClientVerdict("warming", f"Too early to judge {name}: it took part in {row.attended} rounds.", detail)
    if row.broken:
        return ClientVerdict("different", f"{name} stands out, without a finding: {row.why}.", detail)
    if row.score is not None and row.score >= FAR:
        text = f"{name} is different, but nothing says broken: no finding; it stands out by {row.why}."
        return ClientVerdict("different", text, detail)
    muted = f" ({len(found)} muted or over)" if found else ""
    if facts.gaps:
        text = f"No open finding about {name}{muted}, but not all was judged: {'; '.join(facts.gaps)}."
    else:
        text = f"{name} behaves like its peers: no open finding{muted}."
    return ClientVerdict("unjudged" if facts.gaps else "healthy", text, detail)


def _detail(row: ClientRow, facts: Facts) -> str:
    parts = [f"{row.attended} of {facts.rounds} rounds attended"]
    if row.score is not None:
        parts.append(f"{number(row.score)} robust deviations from its peers ({row.why})")
    if row.failures:
        parts.append(f"{row.failures} failure{'s' * (row.failures != 1)}")
    return "; ".join(parts) + "."


def _facts(reader: Reader, run: str, node: str) -> list[Fact]:
    place, own = reader.names.number(run) or 0, reader.names.number(node)
    clients, found = clients_by_number(reader, run), []
    for name in FACTS:
        metric = reader.names.number(name)
        newest = () if metric is None else reader.database.rows(
            # Backwards round by round, each a seek; CROSS JOIN keeps that order.
            "SELECT r.round, m.value FROM run_round AS r CROSS JOIN metric AS m WHERE r.run = ? AND m.run = r.run "
            "AND m.name = ? AND m.round = r.round AND m.node = ? AND m.layer IS NULL "
            "ORDER BY r.round DESC, m.at DESC LIMIT 1",
            (place, metric, own),
        )  # fmt: skip
        for round_, value in newest:
            cohort = cohort_values(reader, run, name, round_, clients)
            finite = [v for v in cohort.values() if math.isfinite(v)]
            middle = float(np.median(finite)) if len(finite) > 1 and CATALOG[name].unit != "class" else None
            known = value if value is not None and math.isfinite(value) else None
            found.append(Fact(name, unit_of(name), meaning_of(name), known, round_, middle, len(cohort)))
    return found


def cohort_values(reader: Reader, run: str, name: str, round_: int, clients: Collection[int]) -> dict[int, float]:
    """What these clients told of a metric in one round, by their numbers; NaN where that was told."""
    found = reader.database.rows(
        "SELECT node, value FROM metric WHERE run = ? AND name = ? AND round = ? AND node IS NOT NULL "
        "AND layer IS NULL",
        (reader.names.number(run) or 0, reader.names.number(name) or 0, round_),
    )
    return {node: math.nan if value is None else value for node, value in found if node in clients}


def _labels(reader: Reader, run: str, node: str) -> tuple[list[LabelShare], int | None]:
    """How many samples of each label it has, as last told, beside the other clients' mean share."""
    newest: dict[str, Event] = {}
    for event in reader.history(run).events("labels"):
        if event.where.node is not None and isinstance(event.data.get("histogram"), Mapping):
            newest[event.where.node] = event
    mine = newest.pop(node, None)
    if mine is None:
        return [], None
    shares: dict[str, float] = {}
    others = [_counts(event) for event in newest.values()]
    others = [counts for counts in others if counts]
    for counts in others:
        total = sum(counts.values())
        for label, count in counts.items():
            shares[label] = shares.get(label, 0.0) + count / total / len(others)
    own = _counts(mine)
    total = sum(own.values()) or 1
    labels = sorted({*own, *shares}, key=natural)[:LABELS]
    return [
        LabelShare(label, own.get(label, 0), own.get(label, 0) / total, shares.get(label, 0.0) if others else None)
        for label in labels
    ], mine.where.round


def _counts(event: Event) -> dict[str, int]:
    """A client may have told anything; only whole numbers of samples count."""
    told = event.data["histogram"]
    return {str(label): count for label, count in told.items() if isinstance(count, int) and 0 < count < 2**53}


def events_of(reader: Reader, run: str, node: str, names: Sequence[str] = (), limit: int = EVENTS) -> list[ClientEvent]:
    """Its newest events, the newest first; of some names where given."""
    numbers = [reader.names.number(name) or 0 for name in names]
    condition = f"AND name IN ({', '.join('?' * len(names))}) " if names else ""
    found = reader.database.rows(
        f"{rows.select(Event)} WHERE arrival IN (SELECT arrival FROM event WHERE run = ? AND node = ? {condition}"  # noqa: S608 - our own words
        "ORDER BY at DESC, arrival DESC LIMIT ?) ORDER BY at DESC, arrival DESC",
        (reader.names.number(run) or 0, reader.names.number(node) or 0, *numbers, limit),
    )
    return [_event(event) for event in rows.from_rows(Event, found)]


def _event(event: Event) -> ClientEvent:
    lines = traceback_of(event)
    kind = event.data.get("exception")
    return ClientEvent(
        at=event.at if math.isfinite(event.at) else None,
        round=event.where.round,
        level=event.level,
        name=event.name,
        message=event.message[:MESSAGE],
        exception=str(kind)[:200] if kind is not None else None,
        traceback="\n".join(lines)[-TRACEBACK:] if lines else None,
    )
