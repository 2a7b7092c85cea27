# SPDX-License-Identifier: Apache-2.0
"""Computes the page of one round: what every node did and when, the critical path, and who waited for whom.

Only that round's Spans are read: a run of a thousand clients and rounds has a million of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedvitals.analysis.bottleneck import judge_round
from fedvitals.analysis.critical_path import CriticalPath, critical_path
from fedvitals.analysis.timeline import NodeTime, RoundTime, main_clock, timeline, waiting_for
from fedvitals.errors import ConfigError
from fedvitals.plain_json import copied
from fedvitals.protocols import Node
from fedvitals.records import Span, is_client, natural
from fedvitals.store.read import queries
from fedvitals.store.read.metrics import value_of_federation
from fedvitals.store.read.paging import records_of_kind
from fedvitals.store.read.reader import Reader
from fedvitals.views.matrix import rounds_not_finite
from fedvitals.views.outline import Known, known_metric

SLOWEST = 10  # rounds listed as the slowest
NAMED = 5  # nodes named in a line about waiting
CLOCKS = {"real": "time.round", "virtual": "time.round_virtual"}
SLOWEST_FIRST = ("time.client_virtual", "time.client")
SHOWN = (  # metrics of a round's table, unless others are requested; those of them that were measured
    "loss", "accuracy", "fit.loss_before", "fit.loss_after", "gradient.norm", "update.norm", "update.cosine_mean",
    "scale.gsc", "samples", "steps", "time.client", "time.client_virtual", "memory.resident", "traffic.sent",
    "traffic.received",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LanePart:
    """A period in a lane of the waterfall."""

    name: str
    start: float  # seconds since the round began
    seconds: float
    critical: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One node's round."""

    node: str
    kind: str  # «server», «edge», «client»
    group: str | None
    busy: float
    on_path: bool
    waits_for: str | None
    failed: bool
    parts: tuple[LanePart, ...]


@dataclass(frozen=True, slots=True)
class Waited:
    """Nodes that waited for one other."""

    whom: str
    nodes: tuple[str, ...]  # the first few
    count: int
    seconds: float  # total of all of them


@dataclass(frozen=True, slots=True)
class RoundLength:
    """A round and how long it took."""

    round: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPage:
    """Everything that the page of a round shows; for a round that was not timed, only its neighbours."""

    run: str
    round: int
    clock: str
    clocks: tuple[str, ...]
    timed: bool = False  # False: nothing of this round was timed
    complete: bool = False  # False: it has no end yet, or it failed
    seconds: float | None = None
    headline: str = "Nothing of this round was timed."
    kind: str | None = None  # what bounds it
    share: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)  # of the critical path, by kind of work
    previous: int | None
    next: int | None
    slowest: tuple[RoundLength, ...]  # rounds, the longest first
    place: int | None  # rank of this round among all, 1 is the longest
    rounds: int
    path: tuple[LanePart, ...] = ()
    lanes: tuple[Lane, ...] = ()
    total: int = 0  # nodes
    waited: tuple[Waited, ...] = ()
    folded: bool = False  # some node's parts are sums, drawn one after the other
    unaccounted: float | None = None  # largest share of a node's round that no part explains
    left_out: int = 0  # Spans that cannot be true
    in_turns: bool = False  # clients shared a process, so each waits for all the others


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One node's metrics in a round."""

    node: str
    client: bool
    values: tuple[float | None, ...]
    odd: tuple[int, ...]  # columns whose value is NaN or infinite


@dataclass(frozen=True, slots=True)
class RoundTable:
    """The metrics of a round, a row for each node."""

    run: str
    round: int
    columns: tuple[Known, ...]
    whole: tuple[float | None, ...]  # the federation's own values
    rows: tuple[RoundRow, ...]
    total: int
    sort: str


def round_page(
    reader: Reader,
    run: str,
    number: int,
    *,
    clock: str | None = None,
    sort: str = "slowest",
    limit: int = 200,
    offset: int = 0,
) -> RoundPage:
    """Return a round's waterfall, critical path and neighbours; the lanes are limited, the path is complete."""
    rounds = reader.history(run).rounds()
    if number not in set(rounds):
        there = f"It has rounds {rounds[0]} to {rounds[-1]}." if rounds else "It has no round yet."
        raise ConfigError(f"The run {run} has no round {number}. {there}")
    times = timeline(records_of_kind(reader, run, Span, number))
    clocks = tuple(time.clock for time in times)
    chosen = clock or (main_clock(times) if times else "real")
    if clock is not None and times and clock not in clocks:
        raise ConfigError(f"Round {number} of {run} was not timed on a {clock} clock, only on the {clocks[0]} one.")
    time = next((timed for timed in times if timed.clock == chosen), None)
    place = rounds.index(number)
    lengths = lengths_of(reader, run, chosen)
    longest = sorted(lengths, key=lambda round_index: -lengths[round_index])
    around = {
        "run": run,
        "round": number,
        "clock": chosen,
        "clocks": clocks,
        "previous": rounds[place - 1] if place else None,
        "next": rounds[place + 1] if place + 1 < len(rounds) else None,
        "slowest": tuple(RoundLength(round_index, lengths[round_index]) for round_index in longest[:SLOWEST]),
        "place": longest.index(number) + 1 if number in lengths else None,
        "rounds": len(rounds),
    }
    if time is None:
        return copied(RoundPage, **around)
    path = critical_path(time)
    verdict = judge_round(time, path)
    turns = path.shape.slots is not None
    whom = {} if turns else waiting_for(time)
    nodes = _ordered(time, path, sort)
    return copied(
        RoundPage,
        time,
        verdict,
        timed=True,
        headline=f"{verdict.text[:1].upper()}{verdict.text[1:]}.",
        path=tuple(_path_parts(path, time)),
        lanes=tuple(_lane(node, path, whom) for node in nodes[offset : offset + limit]),
        total=len(nodes),
        waited=_waited(time, whom),
        folded=any(stay.folded for node in nodes for stay in node.stays),
        in_turns=turns,
        **around,
    )


def lengths_of(reader: Reader, run: str, clock: str) -> dict[int, float]:
    """Return the seconds of every round on a clock, from the federation's own metric."""
    rounds, values = reader.history(run).series(CLOCKS[clock], None)
    return {number: value for number, value in zip(rounds, values, strict=True) if math.isfinite(value)}


def _ordered(time: RoundTime, path: CriticalPath, sort: str) -> list[NodeTime]:
    """Return the server, the edges, then clients: those on the path and the slowest first, or by name."""
    if sort == "name":
        return list(time.nodes.values())
    on_path = {link.node for link in path.links}
    rank = {"server": 0, "edge": 1}
    return sorted(
        time.nodes.values(),
        key=lambda node: (rank.get(node.kind, 2), path.slowest != node.node, node.node not in on_path, -node.busy),
    )


def _lane(node: NodeTime, path: CriticalPath, whom: Mapping[str, str]) -> Lane:
    links = [(link.began, link.began + link.seconds) for link in path.links if link.node == node.node]
    parts = tuple(
        LanePart(
            interval.part,
            interval.began - path.began,
            interval.seconds,
            _covered(interval.began, interval.seconds, links) > interval.seconds / 2,
            "a sum of many short stretches" if interval.folded else "",
        )
        for interval in node.intervals
    )
    return Lane(node.node, node.kind, node.group, node.busy, bool(links), whom.get(node.node), node.failed, parts)


def _covered(began: float, seconds: float, links: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(began + seconds, end) - max(began, start)) for start, end in links)


def _path_parts(path: CriticalPath, time: RoundTime) -> list[LanePart]:
    """Return the chain link by link, each with the node that did the work."""
    parts = []
    for link in path.links:
        at = link.began - time.began
        for part, seconds in link.parts.items() or ((link.part, link.seconds),):
            whose = link.node if link.shared < 2 else f"{link.node} and {link.shared - 1} more in turns"
            parts.append(LanePart(part, at, seconds, True, whose))
            at += seconds
    return parts


def _waited(time: RoundTime, whom: Mapping[str, str]) -> tuple[Waited, ...]:
    waiting: dict[str, list[str]] = {}
    for node, other in whom.items():
        waiting.setdefault(other, []).append(node)
    waits = [
        Waited(other, tuple(nodes[:NAMED]), len(nodes), sum(time.nodes[node].parts.get("wait", 0.0) for node in nodes))
        for other, nodes in waiting.items()
    ]
    return tuple(sorted(waits, key=lambda wait: -wait.seconds)[:SLOWEST])


def round_table(
    reader: Reader,
    run: str,
    number: int,
    names: Sequence[str] = (),
    *,
    sort: str = "",
    limit: int = 100,
    offset: int = 0,
) -> RoundTable:
    """Return the round's metrics, a row per node, sorted by a metric, by «name», or slowest first."""
    history = reader.history(run)
    measured = set(queries.metric_names(reader, run))
    wanted = [name for name in (names or SHOWN) if name in measured]
    if names and not wanted:
        raise ConfigError(f"The run {run} has no metric '{names[0]}'. `fedvitals show {run}` says which it has.")
    values = {name: _values(reader, run, name, history.latest(name, number), number) for name in wanted}
    wanted = [name for name in wanted if names or any(map(is_client, values[name]))]
    sort = sort or next((name for name in SLOWEST_FIRST if name in wanted), "name")
    nodes = sorted({node for name in wanted for node in values[name]}, key=natural)
    if sort.lstrip("-") in values:
        by, sign = values[sort.lstrip("-")], 1 if sort.startswith("-") else -1
        nodes.sort(key=lambda node: sign * by[node] if math.isfinite(by.get(node, math.nan)) else math.inf)
    return RoundTable(
        run,
        number,
        tuple(map(known_metric, wanted)),
        tuple(value_of_federation(reader, run, name, number) for name in wanted),
        tuple(
            RoundRow(
                node,
                is_client(node),
                tuple(values[name].get(node) for name in wanted),
                tuple(i for i, name in enumerate(wanted) if not math.isfinite(values[name].get(node, 0.0))),
            )
            for node in nodes[offset : offset + limit]
        ),
        len(nodes),
        sort,
    )


def _values(reader: Reader, run: str, name: str, stored: Mapping[Node, float], number: int) -> dict[Node, float]:
    """Return a metric of a round by node; the norm of values that are not finite is NaN."""
    lost = rounds_not_finite(reader, run, name)
    return {node: math.nan if number in lost.get(node, ()) else value for node, value in stored.items()}
