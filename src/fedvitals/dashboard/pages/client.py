# SPDX-License-Identifier: Apache-2.0
"""Computes the page of one client: verdict, findings, facts, failures, events, vital signs, times, and its neighbours.

Its own values and its newest deviation take a few seeks each, even among a thousand clients; the cohort's band beside
them comes from `views.series`, sign by sign. Spans are found by round, not by node: with many clients, only the newest
rounds are read, and the answer says how many.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedvitals.analysis.timeline import NodeTime, main_clock, timeline
from fedvitals.catalog import CATALOG, meaning_of, unit_of
from fedvitals.dashboard.pages.loss_bands import LossBands, loss_bands
from fedvitals.diagnosis.cases import Case
from fedvitals.diagnosis.evidence.outlier_ranking import FEWEST, robust_scores
from fedvitals.diagnosis.medians import finite_median
from fedvitals.errors import ConfigError
from fedvitals.plain_json import copied, finite
from fedvitals.records import FAILURES as FAILED
from fedvitals.records import Event, natural
from fedvitals.store.read import queries
from fedvitals.store.read.events import events_of_node
from fedvitals.store.read.metrics import newest_of_node, values_of_nodes
from fedvitals.store.read.nodes import clients_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.spans import spans_of_node
from fedvitals.time_parts import REST
from fedvitals.views.cases import Brief, brief, cases_of, concerns, marked, traceback_of
from fedvitals.views.cause_levels import CauseLevel
from fedvitals.views.clients import FAR, ClientRow
from fedvitals.views.evidence_signs import metrics_behind
from fedvitals.views.labels import named
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.profile import ORDER
from fedvitals.views.series import Numbers, Series, json_numbers, series
from fedvitals.views.verdict import WARM, Facts, facts_of, judge

EVENTS = 100
FAILURES = 20
LABELS = 200
MESSAGE, TRACEBACK = 2_000, 20_000  # characters
FACTS = (
    "samples", "update.samples", "steps", "steps.skipped", "label.entropy", "fit.samples", "fit.loss_before",
    "fit.loss_after", "fit.loss_p90", "fit.accuracy_before", "fit.accuracy_after", "fit.confusion",
    "fit.confused_label", "fit.confused_guess", "fit.confident_wrong", "train.loss_first", "train.loss_last",
    "train.accuracy", "train.confusion", "train.confused_label", "train.confused_guess", "train.loss_common",
    "train.loss_rare", "train.loss_short", "train.loss_long", "train.residual_mean",
    "train.residual_std", "train.residual_kurtosis", "optimizer.learning_rate", "optimizer.momentum",
    "optimizer.weight_decay", "batch.size", "data.mean", "data.std", "data.min", "data.max", "data.missing",
    "data.constant", "data.out_of_range", "data.within_classes", "data.explained", "data.duplicates", "data.length",
    "throughput.samples", "update.staleness",
    "update.zero", "update.duplicates", "update.differs", "update.factor", "update.base_age", "time.clock_error",
    "memory.growth",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that a client reported, with the median of all that reported it in that round."""

    name: str
    title: str  # the name for users
    unit: str
    meaning: str
    value: float | None
    round: int
    median: float | None
    clients: int


@dataclass(frozen=True, slots=True)
class LabelShare:
    """The number of samples that a client has of one label."""

    label: str
    count: int
    share: float  # of its own samples
    others: float | None  # mean share of the other clients that reported


@dataclass(frozen=True, slots=True)
class ClientEvent:
    """An event of a client."""

    at: float | None
    round: int | None
    level: str
    name: str
    message: str
    exception: str | None
    traceback: str | None  # None: there is none, or privacy withheld it


@dataclass(frozen=True, slots=True)
class ClientVerdict:
    """The summary shown first for a client."""

    state: Literal["ill", "watch", "different", "healthy", "warming", "unjudged"]
    headline: str
    detail: str
    key: str | None = None  # of its worst case
    levels: tuple[CauseLevel, ...] = ()  # of that case: something is wrong, of which family, the exact cause
    why: str = ""  # what was seen
    next_step: str = ""  # what to do first


@dataclass(frozen=True, slots=True)
class ClientPage:
    """Everything that the page of a client shows at once."""

    node: str
    verdict: ClientVerdict
    row: ClientRow
    place: int  # rank among all, 1 is the worst
    clients: int
    worse: str | None  # the client before it, worst first
    better: str | None
    cases: list[Brief]
    facts: list[Fact]
    labels: list[LabelShare]
    labels_round: int | None
    losses: list[LossBands]
    failures: list[ClientEvent]  # the newest
    total_failures: int
    events: list[ClientEvent]  # the newest first
    tracebacks: bool  # whether any is stored


def client_page(reader: Reader, run: str, node: str, everyone: Sequence[ClientRow]) -> ClientPage:
    """Read the page of a client; ConfigError if there is none. `everyone`: all clients, worst first."""
    place = next((i for i, row in enumerate(everyone) if row.name == node), None)
    if place is None:
        raise ConfigError(f"The run {run} has no client '{node}'. The page of clients lists those that it has.")
    row = everyone[place]
    cases = [case for case in cases_of(reader, run) if concerns(case, node)]
    facts, marks = facts_of(reader, run), marked(reader, run)
    verdict = client_verdict(row, cases, facts)
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
        cases=[brief(case, marks, facts.labels) for case in cases],
        facts=_facts(reader, run, node),
        labels=labels,
        labels_round=when,
        losses=loss_bands(reader, run, node),
        failures=failures[:FAILURES],
        total_failures=row.failures,
        events=events,
        tracebacks=any(event.traceback for event in failures),
    )


def client_verdict(row: ClientRow, cases: Sequence[Case], facts: Facts) -> ClientVerdict:
    """Judge a client by its cases; without an open one, by its distance from its peers."""
    name, detail = named(row.name, facts.labels), _detail(row, facts)
    own = judge(cases, facts) if cases else None
    if own is not None and own.state in ("ill", "watch"):
        return copied(ClientVerdict, own, detail=detail)
    if not facts.detectors and not cases:
        return ClientVerdict("unjudged", f"Not judged: no detector looked at the run of {name}.", detail)
    if row.attended < WARM:
        return ClientVerdict("warming", f"Too early to judge {name}: it took part in {row.attended} rounds.", detail)
    if row.broken:
        return ClientVerdict("different", f"{name} stands out, without a finding: {row.why}.", detail)
    if row.score is not None and row.score >= FAR:
        text = f"{name} is different, but nothing says broken: no finding; it stands out by {row.why}."
        return ClientVerdict("different", text, detail)
    muted = f" ({len(cases)} muted or over)" if cases else ""
    if facts.gaps:
        text = f"No open finding about {name}{muted}, but not fully examined: {'; '.join(facts.gaps)}."
    else:
        text = f"{name} behaves like its peers: no open finding{muted}."
    return ClientVerdict("unjudged" if facts.gaps else "healthy", text, detail)


def _detail(row: ClientRow, facts: Facts) -> str:
    parts = [f"{row.attended} of {facts.rounds} rounds attended"]
    if row.score is not None and row.score >= 1:
        parts.append(f"{row.score:.1f} σ from the other clients' median ({row.why})")
    elif row.score is not None:
        parts.append("within 1 σ of the other clients' median")
    if row.failures:
        parts.append(f"{row.failures} failure{'s' * (row.failures != 1)}")
    return "; ".join(parts) + "."


def _facts(reader: Reader, run: str, node: str) -> list[Fact]:
    clients, facts = clients_by_number(reader, run), []
    for name in FACTS:
        newest = newest_of_node(reader, run, name, node)
        if newest is None:
            continue
        round_index, value = newest
        cohort = values_of_nodes(reader, run, name, round_index, clients)
        known = [v for v in cohort.values() if math.isfinite(v)]
        middle = float(np.median(known)) if len(known) > 1 and CATALOG[name].unit != "class" else None
        facts.append(
            Fact(
                name,
                metric_title(name),
                unit_of(name),
                meaning_of(name),
                finite(value),
                round_index,
                middle,
                len(cohort),
            )
        )
    return facts


def _labels(reader: Reader, run: str, node: str) -> tuple[list[LabelShare], int | None]:
    """Return its number of samples of each label, as last reported, with the other clients' mean share."""
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
    """Return integer numbers of samples; all else is ignored, since a client may have reported anything."""
    histogram = event.data["histogram"]
    return {str(label): count for label, count in histogram.items() if isinstance(count, int) and 0 < count < 2**53}


def events_of(reader: Reader, run: str, node: str, names: Sequence[str] = ()) -> list[ClientEvent]:
    """Read a client's newest events, the newest first; of some names if given."""
    return [_event(event) for event in events_of_node(reader, run, node, names, limit=EVENTS)]


def _event(event: Event) -> ClientEvent:
    lines = traceback_of(event)
    kind = event.data.get("exception")
    return copied(
        ClientEvent,
        event,
        at=finite(event.at),
        round=event.where.round,
        message=event.message[:MESSAGE],
        exception=str(kind)[:200] if kind is not None else None,
        traceback="\n".join(lines)[-TRACEBACK:] if lines else None,
    )


SIGNS = (
    "accuracy", "loss", "local.accuracy", "local.loss", "fit.loss_before", "fit.accuracy_after", "gradient.norm",
    "gradient.norm_max", "scale.gsc", "update.norm", "update.cosine_mean", "update.cosine_previous", "weight.drift",
    "weight.update_ratio", "time.client_virtual", "time.client", "traffic.sent", "traffic.received", "memory.resident",
)  # fmt: skip
BEHIND = 3  # signs that a finding is based on
OWN = 8  # user-defined metrics
FLOOR = 0.05  # of the median: spread that peers always have, so that rounding does not become a deviation


@dataclass(frozen=True, slots=True)
class ClientSign:
    """One vital sign of a client."""

    series: Series
    value: float | None  # the newest; None: NaN or infinite
    median: float | None  # of all clients in that round
    round: int | None
    z: float | None  # σ from the other clients' median; None: too few peers, or not finite
    odd: bool  # the newest value is NaN or infinite
    evidence: bool  # its worst finding is based on it


def client_signs(
    reader: Reader, run: str, node: str, points: int = 500, first: int | None = None, last: int | None = None
) -> list[ClientSign]:
    """Return the signs that the client reported: those behind its worst finding, then the most deviating first."""
    names = queries.metric_names(reader, run)
    own = [name for name in names if name.startswith("user.")][:OWN]
    case = next((case for case in cases_of(reader, run) if concerns(case, node) and case.still_there), None)
    behind = [] if case is None else metrics_behind(case, names)[:BEHIND]
    asked = _Asked(reader, run, node, clients_by_number(reader, run), points, first, last)
    signs = [sign for name in dict.fromkeys((*behind, *SIGNS, *own)) if (sign := _sign(asked, name))]
    signs = [replace(sign, evidence=sign.series.name in behind) for sign in signs]
    return sorted(signs, key=lambda sign: (not sign.evidence, not sign.odd, -abs(sign.z or 0.0)))


@dataclass(frozen=True, slots=True)
class _Asked:
    reader: Reader
    run: str
    node: str
    clients: Collection[int]
    points: int
    first: int | None
    last: int | None


def _sign(asked: _Asked, name: str) -> ClientSign | None:
    reader, run, node = asked.reader, asked.run, asked.node
    if reader.names.number(name) is None:
        return None
    line = series(reader, run, name, node, asked.points, asked.first, asked.last)
    rounds = [number for number, value in zip(line.last, line.values, strict=True) if value is not None]
    newest = max([*rounds[-1:], *line.odd[-1:]], default=None)
    if newest is None:
        return None
    cohort = values_of_nodes(reader, run, name, newest, asked.clients)
    odd = newest in line.odd
    value = math.nan if odd else cohort.get(reader.names.number(node) or 0, math.nan)
    middle, z = deviation(value, cohort)
    return ClientSign(line, value if math.isfinite(value) else None, middle, newest, z, odd, evidence=False)


def deviation(value: float, cohort: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return the cohort's median, and the value's distance in robust standard deviations (see `robust_scores`)."""
    finite = np.array([v for v in cohort.values() if math.isfinite(v)])
    if not len(finite):
        return None, None
    middle = float(np.median(finite))
    if len(finite) < FEWEST or not math.isfinite(value):
        return middle, None
    with np.errstate(divide="ignore", invalid="ignore"):
        z = float(robust_scores(finite, FLOOR * abs(middle), np.array(value)))
    # All are equal, and there is nothing to compare with but zero.
    return middle, z if math.isfinite(z) else 0.0 if value == middle else None


SPANS = 30_000  # examined, of all nodes
FEWEST_ROUNDS = 10
MOST_ROUNDS = 400
LENGTH = {"real": "time.client", "virtual": "time.client_virtual"}


@dataclass(frozen=True, slots=True)
class TimePart:
    """One part of a client's time over the rounds."""

    name: str
    values: Numbers  # seconds
    waiting: bool  # the client itself is inactive in it


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Where a client's time went."""

    clock: str
    rounds: list[int]
    parts: list[TimePart]  # in the order of a round
    own: Numbers  # seconds that the client took, by the same clock as `median`
    median: Numbers  # of all clients
    failed: list[int]  # rounds
    of: int  # the run's number of rounds


def client_times(
    reader: Reader, run: str, node: str, first: int | None = None, last: int | None = None, most: int = SPANS
) -> ClientTimes:
    """Read where a client's time went in the newest rounds, or in those from `first` to `last`."""
    every = reader.history(run).rounds()
    wanted = [r for r in every if (first is None or r >= first) and (last is None or r <= last)]
    clients = clients_by_number(reader, run)
    wanted = wanted[-min(MOST_ROUNDS, max(FEWEST_ROUNDS, most // max(1, len(clients)))) :]
    times = timeline(spans_of_node(reader, run, node, wanted[0], wanted[-1])) if wanted else []
    clock = main_clock(times) if times else "real"
    own: dict[int, NodeTime] = {
        time.round: time.nodes[node] for time in times if time.clock == clock and node in time.nodes
    }
    rounds = sorted(own)
    names = {part for times_of_round in own.values() for part, seconds in times_of_round.parts.items() if seconds > 0}
    order = sorted(names, key=lambda part: ORDER.index(part) if part in ORDER else len(ORDER))
    # Clients that train in one batch share its spans, so they are compared by the duration assigned to each.
    lengths = [values_of_nodes(reader, run, LENGTH[clock], number, clients) for number in rounds]
    return ClientTimes(
        clock=clock,
        rounds=rounds,
        parts=[
            TimePart(part, json_numbers([own[r].parts.get(part, 0.0) for r in rounds]), part in REST) for part in order
        ],
        own=json_numbers([values.get(reader.names.number(node) or 0, math.nan) for values in lengths]),
        median=json_numbers([finite_median(values.values()) for values in lengths]),
        failed=[number for number in rounds if own[number].failed],
        of=len(every),
    )
