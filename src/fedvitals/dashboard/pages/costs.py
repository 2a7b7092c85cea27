# SPDX-License-Identifier: Apache-2.0
"""Computes a run's memory and traffic from metrics, so that it is fast at any size.

The terminal's figures (`views.machine`, `analysis.traffic`) are computed from every record; here the same figures come
from the matrices that other pages use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.analysis.traffic import AccuracyMilestone, accuracy_milestones
from fedvitals.catalog import CATALOG
from fedvitals.records import is_client
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.transfers import bytes_by_kind
from fedvitals.views.cohort import Matrix, Reals, buckets
from fedvitals.views.machine import ROOM, SHARES, Machine, machine_of
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.series import Numbers, json_numbers
from fedvitals.views.traffic_counts import traffic_total

POINTS = 400  # per trend
NAMED = 20  # clients in a list
MESSAGES_ROUNDS = 20  # newest rounds whose messages are counted by kind


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The largest value of a memory metric (the smallest of a limit), and the largest growth over the run."""

    metric: str
    meaning: str
    bytes: float
    node: str | None
    round: int
    growth_bytes: float
    growth_node: str | None
    title: str = ""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of something that has a name."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Trend:
    """A number for every round; if rounds share a point, also their smallest and largest."""

    name: str
    rounds: list[int]
    values: Numbers
    low: Numbers
    high: Numbers
    total: int  # rounds that these points represent


@dataclass(frozen=True, slots=True)
class MemoryPage:
    """The memory that a run used."""

    peaks: tuple[MemoryPeak, ...]
    node: str | None  # the client whose tensors take most memory
    shares: tuple[Bytes, ...]  # its bytes by purpose
    batch: float | None  # samples behind its activations
    clients: tuple[Bytes, ...]  # the largest first
    of: str  # metric of the list of clients: «memory.tensors» or «memory.resident»
    grown: tuple[Bytes, ...]  # growth of the process while one client trained, over all rounds
    trends: tuple[Trend, ...]  # of the largest and of the median client


@dataclass(frozen=True, slots=True)
class ClientBytes:
    """The bytes that one client sent and received."""

    node: str
    sent: float
    received: float
    rounds: int  # with any transfer


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of one kind."""

    kind: str
    bytes: float
    raw_bytes: float
    messages: int
    share: float


@dataclass(frozen=True, slots=True)
class TrafficPage:
    """The traffic of a run."""

    total: float | None  # of the training, every message once
    telemetry: float | None  # fedvitals' own, in addition
    sent: float  # by clients
    received: float
    between: float  # sent by the server and by edges, clusters and rings
    trends: tuple[Trend, ...]
    clients: tuple[ClientBytes, ...]  # ordered by bytes transferred, the most first
    total_clients: int
    kinds: tuple[Messages, ...]  # of the newest rounds
    kinds_rounds: int
    reached: tuple[AccuracyMilestone, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Memory, traffic and machine of a run."""

    run: str
    memory: MemoryPage | None
    traffic: TrafficPage | None
    machine: tuple[Machine, ...]


def costs(reader: Reader, run: str) -> Costs:
    """Read memory, traffic and machine of a run, by its id."""
    return Costs(run, memory_page(reader, run), traffic_page(reader, run), machine_of(reader, run))


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_page(reader: Reader, run: str) -> MemoryPage | None:
    """Read the memory that the run used; None if nothing was measured."""
    names = [name for name in queries.metric_names(reader, run) if name.startswith("memory.")]
    known = {name: metric_matrix(reader, run, name) for name in names}
    own = [name for name in names if name.removeprefix("memory.") not in (*SHARES, "batch")]
    peaks = [peak for name in own if (peak := _peak(reader, run, name, known[name])) is not None]
    if not peaks:
        return None
    of = next((name for name in ("memory.tensors", "memory.resident") if name in known and known[name].nodes), "")
    clients = _largest(known[of]) if of else ()
    worst = clients[0].name if clients and of == "memory.tensors" else None
    return MemoryPage(
        tuple(peaks),
        worst,
        () if worst is None else _shares(known, worst),
        None if worst is None else _at_its_largest(known.get("memory.batch"), known[of], worst),
        clients[:NAMED],
        of,
        _grown(known.get("memory.growth")),
        _trends(known.get("memory.resident")),
    )


def _peak(reader: Reader, run: str, name: str, matrix: Matrix) -> MemoryPeak | None:
    pick = min if name in ROOM else max
    peaks: list[tuple[float, str | None, int, float, str | None]] = []
    values = np.where(np.isfinite(matrix.values), matrix.values, np.nan)
    if values.size and not np.isnan(values).all():
        place = int(np.nanargmin(values) if pick is min else np.nanargmax(values))
        row, column = np.unravel_index(place, values.shape)
        peaks.append((float(values[row, column]), str(matrix.nodes[row]), matrix.rounds[int(column)], *_growth(matrix)))
    for node in (None, "server"):
        rounds, own = reader.history(run).series(name, node)
        finite = [(v, n) for n, v in zip(rounds, own, strict=True) if np.isfinite(v)]
        if finite:
            value, number = pick(finite)
            peaks.append((value, node, number, finite[-1][0] - finite[0][0], node))
    if not peaks:
        return None
    value, whose, number = pick(peaks, key=lambda peak: peak[0])[:3]
    growth, who = max(((peak[3], peak[4]) for peak in peaks), key=lambda peak: peak[0])
    return MemoryPeak(
        name, CATALOG[name].meaning if name in CATALOG else "", value, whose, number, growth, who, metric_title(name)
    )


def _growth(matrix: Matrix) -> tuple[float, str | None]:
    """Return the growth from the first value to the last, of the node that grew most."""
    finite = np.isfinite(matrix.values)
    rows = np.flatnonzero(finite.sum(axis=1) > 1)
    if not len(rows):
        return 0.0, None
    first = finite[rows].argmax(axis=1)
    last = finite.shape[1] - 1 - finite[rows][:, ::-1].argmax(axis=1)
    grew = matrix.values[rows, last].astype(float) - matrix.values[rows, first]
    most = int(grew.argmax())
    return float(grew[most]), matrix.nodes[rows[most]]


def _largest(matrix: Matrix) -> tuple[Bytes, ...]:
    top = np.where(np.isfinite(matrix.values), matrix.values, -np.inf).max(axis=1, initial=-np.inf)
    order = np.argsort(-top, kind="stable")
    return tuple(Bytes(matrix.nodes[i], float(top[i])) for i in order if np.isfinite(top[i]))


def _shares(known: dict[str, Matrix], node: str) -> tuple[Bytes, ...]:
    shares = [(share, _at_its_largest(known.get(f"memory.{share}"), known["memory.tensors"], node)) for share in SHARES]
    return tuple(Bytes(share, value) for share, value in shares if value)


def _at_its_largest(matrix: Matrix | None, whole: Matrix, node: str) -> float | None:
    """Return a node's value in the round in which `whole` was largest: the newest up to then, as only changes are
    reported.
    """
    if matrix is None:
        return None
    rounds, values = whole[node]
    when = rounds[int(np.nanargmax(values))] if rounds and not np.isnan(values).all() else None
    earlier = [v for n, v in zip(*matrix[node], strict=True) if when is not None and n <= when and np.isfinite(v)]
    return earlier[-1] if earlier else None


def _grown(matrix: Matrix | None) -> tuple[Bytes, ...]:
    if matrix is None or not matrix.nodes:
        return ()
    total = matrix.sums(axis=1)
    order = np.argsort(-total, kind="stable")[:NAMED]
    return tuple(Bytes(matrix.nodes[i], float(total[i])) for i in order if total[i] > 0)


def _trends(matrix: Matrix | None) -> tuple[Trend, ...]:
    if matrix is None or not matrix.nodes:
        return ()
    band = matrix.band()
    lines = (("largest client", band.max), ("median client", band.median))
    return tuple(_trend(name, matrix.rounds, values) for name, values in lines)


def _trend(name: str, rounds: Sequence[int], values: Sequence[float] | Reals) -> Trend:
    points = buckets(rounds, np.asarray(values, float).tolist(), POINTS)
    return Trend(
        name, points.rounds, json_numbers(points.values), json_numbers(points.low), json_numbers(points.high),
        points.shown_of,
    )  # fmt: skip


# -- traffic ----------------------------------------------------------------------------------------------------------


def traffic_page(reader: Reader, run: str) -> TrafficPage | None:
    """Read the run's traffic; None if no transfer was recorded."""
    sent, received = metric_matrix(reader, run, "traffic.sent"), metric_matrix(reader, run, "traffic.received")
    others = _of_others(reader, run)
    total = traffic_total(reader, run)
    if not sent.nodes and not received.nodes and not others and total is None:
        return None
    up, down = _by_round(sent), _by_round(received)
    kinds, rounds = _kinds(reader, run)
    clients = _clients(sent, received)
    every = {n: up.get(n, 0.0) + others.get(n, 0.0) for n in sorted({*up, *others})}
    named = (("sent by clients", up), ("received by clients", down))
    return TrafficPage(
        None if total is None else float(total.bytes),
        None if total is None else float(total.telemetry),
        sum(up.values()),
        sum(down.values()),
        sum(others.values()),
        tuple(_trend(name, list(of), list(of.values())) for name, of in named if of),
        tuple(clients[:NAMED]),
        len(clients),
        kinds,
        rounds,
        _reached(reader, run, every),
    )


def _by_round(matrix: Matrix) -> dict[int, float]:
    return dict(zip(matrix.rounds, matrix.sums(axis=0).tolist(), strict=True))


def _of_others(reader: Reader, run: str) -> dict[int, float]:
    """Return the bytes that the server, edges, clusters and rings sent, by round."""
    by_round: dict[int, float] = {}
    history = reader.history(run)
    for node in history.nodes():
        if not is_client(node):
            for number, value in zip(*history.series("traffic.sent", node), strict=True):
                by_round[number] = by_round.get(number, 0.0) + (value if np.isfinite(value) else 0.0)
    return by_round


def _clients(sent: Matrix, received: Matrix) -> list[ClientBytes]:
    sums: dict[str, list[float]] = {}
    for column, matrix in enumerate((sent, received)):
        total = matrix.sums(axis=1)
        for node, value, rounds in zip(matrix.nodes, total.tolist(), matrix.there.sum(axis=1).tolist(), strict=True):
            own = sums.setdefault(node, [0.0, 0.0, 0.0])
            own[column] += value
            own[2] = max(own[2], rounds)
    clients = [ClientBytes(node, up, down, int(rounds)) for node, (up, down, rounds) in sums.items()]
    return sorted(clients, key=lambda client: -client.sent - client.received)


def _kinds(reader: Reader, run: str) -> tuple[tuple[Messages, ...], int]:
    """Return the messages of the newest rounds by kind: models, updates, telemetry. For all rounds they would be
    millions.
    """
    rounds = reader.history(run).rounds()[-MESSAGES_ROUNDS:]
    if not rounds:
        return (), 0
    sums = bytes_by_kind(reader, run, rounds[0], rounds[-1])
    whole = sum(row[1] for row in sums) or 1
    kinds = [Messages(kind, float(sent), float(raw), count, sent / whole) for kind, sent, raw, count in sums]
    return tuple(sorted(kinds, key=lambda messages: -messages.bytes)), len(rounds)


def _reached(reader: Reader, run: str, spent: dict[int, float]) -> tuple[AccuracyMilestone, ...]:
    """Return what it took to reach an accuracy, by the federation's own evaluation, else by its median client."""
    history = reader.history(run)
    accuracy: dict[int, float] = {}
    for node in (None, "server"):
        accuracy = accuracy or dict(zip(*history.series("accuracy", node), strict=True))
    if not accuracy:
        cohort = metric_matrix(reader, run, "accuracy").band()
        accuracy = dict(zip(cohort.rounds, np.asarray(cohort.median).tolist(), strict=True))
    if not accuracy:
        return ()
    times = [dict(zip(*history.series(name, None), strict=True)) for name in ("time.round", "time.round_virtual")]
    whole = {number: int(value) for number, value in spent.items()}
    return accuracy_milestones(accuracy, seconds=times[0], virtual_seconds=times[1], bytes=whole)
