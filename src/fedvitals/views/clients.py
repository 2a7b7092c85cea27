# SPDX-License-Identifier: Apache-2.0
"""Computes the table of a run's clients: health, attendance, newest signs, and distance from their peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import numpy as np

from fedvitals.diagnosis.cases import Case, severity_rank
from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.outlier_ranking import NEWEST, rank_outlier_clients
from fedvitals.protocols import History
from fedvitals.records import is_client, natural
from fedvitals.store.read.metrics import values_in_round
from fedvitals.store.read.nodes import clients_by_number
from fedvitals.store.read.reader import Reader
from fedvitals.views.cases import Brief, brief, case_key, cases_of, culprits, failures_by_client, marked
from fedvitals.views.cohort import Flags, Matrix, Whole
from fedvitals.views.labels import labels_of
from fedvitals.views.matrix import metric_matrix, rounds_not_finite
from fedvitals.views.memo import Remembered

SHOWN_CASES = 3  # per client in its row
MOST_GROUPS = 500
LOOK_BACK = 60  # newest rounds in which a client's values are searched
REMEMBERED = 8  # number of runs
LOSSES = ("loss", "local.loss", "fit.loss_after", "fit.loss_before")
TIMES = ("time.client_virtual", "time.client")
FAR = 3.5  # robust deviations from which a client is called different; see `diagnosis.evidence.outlier_ranking`
WORST = "worst first: by its worst open finding, then by how far it lies from the other clients"


@dataclass(frozen=True, slots=True)
class ClientRow:
    """One client in the table."""

    name: str
    label: str  # shown beside its name, if it has one: «partition 3»
    group: str | None
    severity: str | None  # of its worst open case; None: no open case
    confidence: float | None
    cases: tuple[Brief, ...]  # the first few that are open
    open_cases: int
    attended: int  # rounds in which it trained or sent an update
    sampled: int  # rounds in which it was asked to
    last_seen: int | None
    loss: float | None
    norm: float | None
    cosine: float | None
    score: float | None  # its distance from its peers; None: not in the newest rounds, or not finite
    why: str  # where it differs most
    broken: bool  # values in the newest rounds were NaN or infinite: no score is worse
    seconds: float | None  # per round, the median of the newest
    bytes: float | None  # sent and received in all rounds
    failures: int
    trouble: str  # which failures: «2 × update.lost»
    odd: tuple[str, ...]  # columns whose newest value is NaN or infinite


@dataclass(frozen=True, slots=True)
class ClientsPage:
    """A page of the table of clients."""

    rows: tuple[ClientRow, ...]
    total: int  # clients of the run
    matching: int
    offset: int
    order: str  # the sorting, in words
    rounds: int
    health: Mapping[str, int]  # how many are critical, warning, note, well
    groups: tuple[str, ...]
    signs: Mapping[str, str]  # column → the metric that it shows, if there is a choice
    newest: int  # rounds used for the score


def open_and_past_cases(reader: Reader, run: str) -> tuple[dict[str, list[Case]], dict[str, list[Case]]]:
    """Return by client the open cases, and the past ones; without muted ones, the worst first."""
    muted = marked(reader, run).muted
    by_client: tuple[dict[str, list[Case]], dict[str, list[Case]]] = {}, {}
    for case in cases_of(reader, run):
        for node in culprits(case) if case_key(case) not in muted else ():
            if is_client(node):
                by_client[not case.still_there].setdefault(node, []).append(case)
    return by_client


def worst_cases(reader: Reader, run: str) -> dict[str, list[Case]]:
    """Return the open cases of each client that has any, without muted ones; worst case and worst client first."""
    return open_and_past_cases(reader, run)[0]


def severities(reader: Reader, run: str) -> dict[str, str]:
    """Return the severity of each client that has an open case, the worst client first."""
    return {node: own[0].severity for node, own in worst_cases(reader, run).items()}


class _Newest:
    """The newest rounds, read one by one and only as far back as needed: a thousand clients in milliseconds.

    It has the part of a `History` that the ranking uses.
    """

    def __init__(self, reader: Reader, run: str, rounds: list[int]) -> None:
        self._reader, self._run, self._rounds = reader, run, rounds
        self.clients = clients_by_number(reader, run)
        self._read: dict[tuple[str, int], dict[str, float]] = {}

    def rounds(self) -> list[int]:
        return self._rounds[-NEWEST:]

    def latest(self, name: str, number: int) -> dict[str, float]:
        if (name, number) not in self._read:
            values = values_in_round(self._reader, self._run, name, number)
            known, lost = self.clients, rounds_not_finite(self._reader, self._run, name)
            self._read[name, number] = {
                known[node]: math.nan if number in lost.get(known[node], ()) else value
                for node, value in values
                if node in known
            }
        return self._read[name, number]

    def column(self, names: Sequence[str], usual: bool = False) -> _Column:
        """Return each client's newest value of the first of these metrics that has any; `usual`: the median of its
        newest.
        """
        chosen = next((name for name in names if self._has(name)), names[0])
        values: dict[str, list[float]] = {}
        for looked, number in enumerate(reversed(self._rounds[-LOOK_BACK:])):
            if looked >= (NEWEST if usual else 1) and len(values) >= len(self.clients):
                break
            for node, value in self.latest(chosen, number).items():
                values.setdefault(node, []).append(value)
        if not usual:
            return _Column(chosen, {node: newest_first[0] for node, newest_first in values.items()})
        return _Column(chosen, {node: median(newest_first[:NEWEST]) for node, newest_first in values.items()})

    def _has(self, name: str) -> bool:
        """Whether any client reported it in the newest rounds."""
        known = self._reader.names.number(name)
        return known is not None and any(self.latest(name, r) for r in reversed(self._rounds[-LOOK_BACK:]))


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """The newest value of a sign, by client."""

    name: str
    values: Mapping[str, float]

    def get(self, node: str) -> float | None:
        value = self.values.get(node, math.nan)
        return value if math.isfinite(value) else None

    def odd(self, node: str) -> bool:
        return node in self.values and not math.isfinite(self.values[node])


def _sums(*matrices: Matrix) -> dict[str, float]:
    """Return each client's sum of all values in these matrices."""
    sums: dict[str, float] = {}
    for matrix in matrices:
        for node, total in zip(matrix.nodes, matrix.sums(axis=1).tolist(), strict=True):
            sums[node] = sums.get(node, 0.0) + total
    return sums


def attended(reader: Reader, run: str) -> dict[str, Whole]:
    """Return the rounds of each client, as in `queries.attendance`, from matrices that other pages use too."""
    matrices = [metric_matrix(reader, run, name) for name in ("steps", "update.norm")]
    rounds = np.union1d(*(np.asarray(matrix.rounds, np.int64) for matrix in matrices))
    there: dict[str, Flags] = {}
    for matrix in matrices:
        columns = np.searchsorted(rounds, np.asarray(matrix.rounds, np.int64))
        for node, own in zip(matrix.nodes, matrix.there, strict=True):
            there.setdefault(node, np.zeros(len(rounds), bool))[columns] |= own
    return {node: rounds[own] for node, own in there.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """Every client, worst first."""

    rows: list[ClientRow]
    signs: Mapping[str, str]  # column → the metric that it shows
    rounds: int


class Rosters:
    """Cached rosters of runs, until the run changes: sorting and paging use the same one."""

    def __init__(self) -> None:
        self._known = Remembered[str, Roster](REMEMBERED)

    def roster(self, reader: Reader, run: str, version: str) -> Roster:
        """Return the roster of a run; `version` changes with every new record or mark of the run."""
        return self._known.get(run, version, lambda: roster(reader, run))


def roster(reader: Reader, run: str) -> Roster:
    """Read every client of a run, the worst first."""
    history = reader.history(run)
    rounds, ill, marks = history.rounds(), worst_cases(reader, run), marked(reader, run)
    newest, labels = _Newest(reader, run, rounds), labels_of(reader, run)
    groups = groups_of(history, rounds[-1]) if rounds else {}
    deviations = {client.name: client for client in rank_outlier_clients(cast("History", newest))}
    columns = {
        "loss": newest.column(LOSSES),
        "norm": newest.column(("update.norm",)),
        "cosine": newest.column(("update.cosine_mean",)),
        "seconds": newest.column(TIMES, usual=True),
    }
    traffic = _sums(*(metric_matrix(reader, run, f"traffic.{way}") for way in ("sent", "received")))
    present, events = attended(reader, run), failures_by_client(reader, run)
    rows = []
    for node in newest.clients.values():
        own, odd, failures = ill.get(node, []), deviations.get(node), events.get(node, [])
        there = present.get(node, np.empty(0, np.int64))
        kinds = Counter(name for name, _ in failures)
        rows.append(
            ClientRow(
                name=node,
                label=labels.get(node, ""),
                group=groups.get(node),
                severity=own[0].severity if own else None,
                confidence=own[0].confidence if own else None,
                cases=tuple(brief(case, marks, labels) for case in own[:SHOWN_CASES]),
                open_cases=len(own),
                attended=len(there),
                sampled=len(there) + sum(number not in there for number in {number for _, number in failures}),
                last_seen=int(there[-1]) if len(there) else None,
                loss=columns["loss"].get(node),
                norm=columns["norm"].get(node),
                cosine=columns["cosine"].get(node),
                score=odd.score if odd is not None and math.isfinite(odd.score) else None,
                why=odd.why if odd is not None else f"not in the newest {NEWEST} rounds",
                broken=odd is not None and not math.isfinite(odd.score),
                seconds=columns["seconds"].get(node),
                bytes=traffic.get(node),
                failures=kinds.total(),
                trouble=", ".join(f"{count} × {name}" for name, count in kinds.most_common()),
                odd=tuple(name for name, column in columns.items() if column.odd(node)),
            )
        )
    shown = {name: column.name for name, column in columns.items()}
    return Roster(sorted(rows, key=_worst_first), shown, len(rounds))


def _worst_first(row: ClientRow) -> tuple[Any, ...]:
    ill = severity_rank(row.severity) if row.severity is not None else math.inf
    return ill, -(row.confidence or 0.0), not row.broken, -(row.score or 0.0), natural(row.name)


SORTS: Mapping[str, Callable[[ClientRow], Any]] = {
    "name": lambda row: natural(row.name),
    "group": lambda row: None if row.group is None else natural(row.group),
    "attended": lambda row: row.attended,
    "last_seen": lambda row: row.last_seen,
    "loss": lambda row: math.inf if "loss" in row.odd else row.loss,
    "norm": lambda row: math.inf if "norm" in row.odd else row.norm,
    "cosine": lambda row: row.cosine,
    "score": lambda row: math.inf if row.broken else row.score,
    "seconds": lambda row: row.seconds,
    "bytes": lambda row: row.bytes,
    "failures": lambda row: row.failures,
    "findings": lambda row: row.open_cases,
}
"""What a column is sorted by; None comes last, whatever the direction."""


def clients_page(
    roster: Roster,
    *,
    sort: str = "worst",
    descending: bool = False,
    search: str = "",
    group: str | None = None,
    health: str | None = None,
    limit: int = 100,
    offset: int = 0,
) -> ClientsPage:
    """Return a page of the table. `health`: «ill» (any open case), a severity, «well», or «failed»."""
    every = roster.rows
    chosen = [row for row in every if _matches(row, search, group, health)]
    order = WORST
    if sort in SORTS:
        key = SORTS[sort]
        known = [row for row in chosen if key(row) is not None]
        chosen = [
            *sorted(known, key=key, reverse=descending),
            *(row for row in chosen if key(row) is None),
        ]
        order = f"by {sort.replace('_', ' ')}, {'largest' if descending else 'smallest'} first"
    elif descending:
        chosen.reverse()
        order = "healthiest first"
    counted = Counter(row.severity or "well" for row in every)
    return ClientsPage(
        rows=tuple(chosen[offset : offset + limit]),
        total=len(every),
        matching=len(chosen),
        offset=offset,
        order=order,
        rounds=roster.rounds,
        health={name: counted[name] for name in ("critical", "warning", "note", "well")},
        groups=tuple(sorted({row.group for row in every if row.group is not None}, key=natural))[:MOST_GROUPS],
        signs=roster.signs,
        newest=NEWEST,
    )


def _matches(row: ClientRow, search: str, group: str | None, health: str | None) -> bool:
    if search.casefold() not in f"{row.name} {row.label}".casefold() or group not in (None, row.group):
        return False
    kinds = {None: True, "ill": row.severity is not None, "well": row.severity is None, "failed": row.failures > 0}
    return kinds.get(health, row.severity == health)
