# SPDX-License-Identifier: Apache-2.0
"""Every client of a run in one row: its health, its attendance, its newest signs, how far it lies from its peers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.attendance import ASKED, groups_of
from fedvitals.diagnosis.cases import Case, rank
from fedvitals.diagnosis.standout import NEWEST, StandOut, clients_that_stand_out
from fedvitals.protocols import History
from fedvitals.records import is_client, natural
from fedvitals.stats import Array
from fedvitals.store.marks import marks
from fedvitals.store.reader import Reader
from fedvitals.views.cohort import EMPTY, Matrix
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.troubles import case_key, cases_of, culprits

SHOWN_CASES = 3  # of one client in its row
MOST_GROUPS = 500
LOOK_BACK = 50  # newest rounds in which a client's usual time is looked for
LOSSES = ("loss", "local.loss", "fit.loss_after", "fit.loss_before")
TIMES = ("time.client_virtual", "time.client")
TROUBLES = (*ASKED, "worker.lost")
FAR = 3.5  # robust deviations, from which a client is called different; see `diagnosis.standout`
WORST = "worst first: by its worst open finding, then by how far it lies from its peers"


@dataclass(frozen=True, slots=True)
class RowCase:
    key: str
    issue: str
    title: str
    severity: str
    confidence: float | None
    since: int | None


@dataclass(frozen=True, slots=True)
class ClientRow:
    name: str
    group: str | None
    severity: str | None  # of its worst open case; None: no open case
    confidence: float | None
    cases: tuple[RowCase, ...]  # the first few that are open
    open_cases: int
    attended: int  # rounds in which it trained or sent an update
    sampled: int  # rounds in which it was asked to
    last_seen: int | None
    loss: float | None
    norm: float | None
    cosine: float | None
    score: float | None  # how far it lies from its peers; None: not in the newest rounds, or not finite
    why: str  # in what it stands out most
    broken: bool  # values in the newest rounds were NaN or infinite: no score is worse
    seconds: float | None  # a round, the median of the newest
    bytes: float | None  # sent and received in all rounds
    failures: int
    trouble: str  # which: «2 × update.lost»
    odd: tuple[str, ...]  # columns whose newest value is NaN or infinite


@dataclass(frozen=True, slots=True)
class ClientsPage:
    rows: tuple[ClientRow, ...]
    total: int  # clients of the run
    matching: int
    offset: int
    order: str  # how they are sorted, in words
    rounds: int
    health: Mapping[str, int]  # how many are critical, warning, note, well
    groups: tuple[str, ...]
    signs: Mapping[str, str]  # column → the metric that it shows, where there is a choice
    newest: int  # rounds that the score looks at


def worst_cases(reader: Reader, run: str) -> dict[str, list[Case]]:
    """The open cases of each client that has any, worst first; without those that are muted. Worst client first."""
    muted = {mark.target for mark in marks(reader, run) if mark.kind == "muted"}
    found: dict[str, list[Case]] = {}
    for case in cases_of(reader, run):
        if case.still_there and case_key(case) not in muted:
            for node in culprits(case):
                found.setdefault(node, []).append(case)
    return {node: own for node, own in found.items() if is_client(node)}


def severities(reader: Reader, run: str) -> dict[str, str]:
    """The severity of each client that has an open case, the worst client first."""
    return {node: own[0].severity for node, own in worst_cases(reader, run).items()}


class _Newest:
    """The part of a History that the ranking asks for, out of matrices: a thousand clients in milliseconds."""

    def __init__(self, reader: Reader, run: str, rounds: list[int]) -> None:
        self._matrix: Callable[[str], Matrix] = lambda name: metric_matrix(reader, run, name)
        self._rounds = rounds

    def rounds(self) -> list[int]:
        return self._rounds

    def latest(self, name: str, number: int) -> dict[str, float]:
        matrix = self._matrix(name)
        low, high = matrix.span(number, number)
        if low == high:
            return {}
        here = np.flatnonzero(matrix.there[:, low])
        return dict(zip((matrix.nodes[i] for i in here), matrix.values[here, low].tolist(), strict=True))


def stand_outs(reader: Reader, run: str) -> dict[str, StandOut]:
    """Every client of the newest rounds by how far it lies from its peers, the furthest first."""
    history = cast("History", _Newest(reader, run, reader.history(run).rounds()[-NEWEST:]))
    return {one.name: one for one in clients_that_stand_out(history)}


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


def _first_known(reader: Reader, run: str, names: Sequence[str]) -> tuple[str, Matrix]:
    found = ((name, metric_matrix(reader, run, name)) for name in names)
    return next(((name, matrix) for name, matrix in found if len(matrix.rounds)), (names[0], EMPTY))


def _newest_values(name: str, matrix: Matrix) -> _Column:
    if not matrix.there.size:
        return _Column(name, {})
    last = matrix.there.shape[1] - 1 - np.argmax(matrix.there[:, ::-1], axis=1)
    values = matrix.values[np.arange(len(matrix.nodes)), last].astype(float).tolist()
    return _Column(name, dict(zip(matrix.nodes, values, strict=True)))


def _usual_values(name: str, matrix: Matrix) -> _Column:
    """The median over the newest rounds."""
    newest = matrix.values[:, -LOOK_BACK:]
    middle = medians(newest.T)
    known = {node: value for node, value in zip(matrix.nodes, middle.tolist(), strict=False) if math.isfinite(value)}
    return _Column(name, known)


def medians(values: npt.NDArray[np.floating]) -> Array:
    """The median of the finite values in each column; NaN where there is none."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)  # NaN comes last
    counts = np.sum(~np.isnan(ordered), axis=0)
    found = np.full(values.shape[1], np.nan)
    some = np.flatnonzero(counts)
    low, high = ordered[(counts[some] - 1) // 2, some], ordered[counts[some] // 2, some]
    found[some] = (low.astype(float) + high) / 2
    return found


def _sums(*matrices: Matrix) -> dict[str, float]:
    """Of each client all values of all these, added up."""
    found: dict[str, float] = {}
    for matrix in matrices:
        finite = np.where(np.isfinite(matrix.values), matrix.values, 0).astype(float)
        for node, total in zip(matrix.nodes, finite.sum(axis=1).tolist(), strict=True):
            found[node] = found.get(node, 0.0) + total
    return found


def _attendance(reader: Reader, run: str) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """The rounds in which each client trained or sent an update."""
    found: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for name in ("steps", "update.norm"):
        matrix = metric_matrix(reader, run, name)
        numbers = np.asarray(matrix.rounds, dtype=np.int64)
        for node, row in zip(matrix.nodes, matrix.there, strict=True):
            own = numbers[row]
            before = found.get(node)
            same = before is None or (len(before) == len(own) and bool((before == own).all()))
            found[node] = own if same else np.union1d(cast("Any", before), own)
    return found


def troubles_by_client(reader: Reader, run: str) -> dict[str, list[tuple[str, int]]]:
    """Events about each client that was asked and of which nothing useful came: name and round."""
    names, levels = ", ".join("?" * len(TROUBLES)), ("warning", "error", "critical")
    found = reader.database.rows(
        "SELECT node.text, name.text, e.round FROM event AS e JOIN symbol AS name ON name.id = e.name "  # noqa: S608 - our own words
        "JOIN symbol AS node ON node.id = e.node WHERE e.run = (SELECT id FROM symbol WHERE text = ?) AND e.level IN "
        f"(SELECT id FROM symbol WHERE text IN (?, ?, ?)) AND name.text IN ({names}) AND e.round IS NOT NULL",
        (run, *levels, *TROUBLES),
    )
    events: dict[str, list[tuple[str, int]]] = {}
    for node, name, number in found:
        events.setdefault(node, []).append((name, number))
    return events


def roster(reader: Reader, run: str) -> list[ClientRow]:
    """Every client, worst first."""
    history = reader.history(run)
    rounds, ill = history.rounds(), worst_cases(reader, run)
    groups = groups_of(history, rounds[-1]) if rounds else {}
    standing, present, events = stand_outs(reader, run), _attendance(reader, run), troubles_by_client(reader, run)
    columns = {
        "loss": _newest_values(*_first_known(reader, run, LOSSES)),
        "norm": _newest_values("update.norm", metric_matrix(reader, run, "update.norm")),
        "cosine": _newest_values("update.cosine_mean", metric_matrix(reader, run, "update.cosine_mean")),
        "seconds": _usual_values(*_first_known(reader, run, TIMES)),
    }
    traffic = _sums(*(metric_matrix(reader, run, f"traffic.{way}") for way in ("sent", "received")))
    nothing = np.empty(0, np.int64)
    rows = []
    for node in history.nodes():
        if not is_client(node):
            continue
        own, odd, came = ill.get(node, []), standing.get(node), present.get(node, nothing)
        vain = {number for _, number in events.get(node, [])}
        kinds = Counter(name for name, _ in events.get(node, []))
        rows.append(
            ClientRow(
                name=node,
                group=groups.get(node),
                severity=own[0].severity if own else None,
                confidence=own[0].confidence if own else None,
                cases=tuple(_row_case(case) for case in own[:SHOWN_CASES]),
                open_cases=len(own),
                attended=len(came),
                sampled=len(vain.union(came.tolist())) if vain else len(came),
                last_seen=int(came[-1]) if len(came) else None,
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
    return sorted(rows, key=_worst_first)


def _row_case(case: Case) -> RowCase:
    since = case.since if case.since is not None else case.first
    return RowCase(case_key(case), case.issue, case.known.title, case.severity, case.confidence, since)


def _worst_first(row: ClientRow) -> tuple[Any, ...]:
    ill = rank(row.severity) if row.severity is not None else math.inf
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
    reader: Reader,
    run: str,
    *,
    sort: str = "worst",
    descending: bool = False,
    search: str = "",
    group: str | None = None,
    health: str | None = None,
    limit: int = 100,
    offset: int = 0,
) -> ClientsPage:
    """A page of the table. `health`: «ill» (any open case), a severity, «well», or «failed»."""
    every = roster(reader, run)
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
    loss, seconds = (_first_known(reader, run, names)[0] for names in (LOSSES, TIMES))
    counted = Counter(row.severity or "well" for row in every)
    return ClientsPage(
        rows=tuple(chosen[offset : offset + limit]),
        total=len(every),
        matching=len(chosen),
        offset=offset,
        order=order,
        rounds=len(reader.history(run).rounds()),
        health={name: counted[name] for name in ("critical", "warning", "note", "well")},
        groups=tuple(sorted({row.group for row in every if row.group is not None}, key=natural))[:MOST_GROUPS],
        signs={"loss": loss, "norm": "update.norm", "cosine": "update.cosine_mean", "seconds": seconds},
        newest=NEWEST,
    )


def _matches(row: ClientRow, search: str, group: str | None, health: str | None) -> bool:
    if search.casefold() not in row.name.casefold() or group not in (None, row.group):
        return False
    kinds = {None: True, "ill": row.severity is not None, "well": row.severity is None, "failed": row.failures > 0}
    return kinds.get(health, row.severity == health)
