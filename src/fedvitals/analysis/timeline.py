# SPDX-License-Identifier: Apache-2.0
"""What every node did in every round, from its first moment to its last, on the real and on the virtual clock.

A node's parts add up to the round. Before a client's first Span it is in `queue`, after its last one in `wait`, both
from timestamps; time inside a Span that none of its parts covers is `unaccounted`. If a client's own training is known
in addition to its journey, the training details the journey's computing.

Spans may come from hostile machines, or from wrong clocks: impossible ones are dropped and counted, those outside of
their round are moved or cut, and nothing here raises because of a Span's content.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedvitals.records import Span, natural
from fedvitals.resources import node_spans
from fedvitals.resources.node_spans import CLOSE, NODES, UNACCOUNTED, NodeSpan, SpanBlock
from fedvitals.time_parts import CLIENT, EDGE, JOURNEY, NESTED, REST, ROUND, SERVER, WORK, clock_of

WAITING = "waiting"  # the class of all parts in which a node waits
SPANS = 32  # of one node in one round
LONGEST = 366 * 86_400.0  # seconds; no Span of a round is longer
LARGEST = 1e15  # since the epoch; beyond it, floats do not distinguish one second from the next


class Interval(NamedTuple):
    """A node's activity from a moment on, and its duration."""

    node: str
    group: str | None
    part: str  # as in `parts`, or «unaccounted»
    began: float
    seconds: float
    folded: bool  # placed after its neighbours, though in reality they alternated


@dataclass(frozen=True, slots=True)
class NodeTime:
    """A node's time in one round."""

    node: str
    kind: str  # «server», «edge», «client»
    group: str | None
    began: float  # of the round
    seconds: float  # of the round
    parts: dict[str, float]  # sums to the round
    reported: dict[str, float]  # as reported: asynchronous journeys begin before the round in which they end
    stays: tuple[NodeSpan, ...]
    samples: float | None = None
    steps: float | None = None
    failed: bool = False
    waited_for: str | None = None  # as reported; see `waiting_for`

    @property
    def blocks(self) -> list[SpanBlock]:
        """The node's whole round in order, without gaps."""
        blocks: list[SpanBlock] = []
        at = self.began
        before = UNACCOUNTED if self.kind == SERVER else "queue"
        for stay in self.stays:
            if stay.began - at > CLOSE:
                blocks.append(SpanBlock(at, stay.began - at, {before: stay.began - at}, False, 1))
            blocks += node_spans.blocks_of(stay)
            at = max(at, stay.began + stay.seconds)
        left = self.began + self.seconds - at
        if left > CLOSE:
            blocks.append(SpanBlock(at, left, {UNACCOUNTED if self.kind == SERVER else "wait": left}, False, 1))
        return blocks

    @property
    def intervals(self) -> list[Interval]:
        intervals = []
        for block in self.blocks:
            at = block.began
            for part, seconds in block.parts.items():
                intervals.append(Interval(self.node, self.group, part, at, seconds, block.folded))
                at += seconds
        return intervals

    @property
    def busy(self) -> float:
        """The seconds in which it was active, known or not."""
        return sum(seconds for part, seconds in self.parts.items() if part not in REST)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """One round on one clock."""

    round: int
    clock: str  # «real», «virtual»
    began: float
    seconds: float
    nodes: dict[str, NodeTime] = field(repr=False)  # the server first, then edges, then clients
    idle: float = 0.0  # seconds since the previous round
    # False: it has no Span of its own, because it failed or is still open; its length is that of the other Spans
    complete: bool = True
    left_out: int = 0  # Spans that cannot be true, arrived twice, or were too many
    shifted: dict[str, float] = field(default_factory=dict)  # node → seconds by which its wrong clock was corrected

    @property
    def ends(self) -> float:
        return self.began + self.seconds

    @property
    def clients(self) -> list[NodeTime]:
        return [node for node in self.nodes.values() if node.kind == CLIENT]

    @property
    def edges(self) -> list[NodeTime]:
        return [node for node in self.nodes.values() if node.kind == EDGE]

    @property
    def server(self) -> NodeTime | None:
        return next((node for node in self.nodes.values() if node.kind == SERVER), None)

    @property
    def intervals(self) -> list[Interval]:
        return [interval for node in self.nodes.values() for interval in node.intervals]

    @property
    def overlapping(self) -> bool:
        """Whether clients delivered work begun before the round, as in asynchronous aggregation."""
        before = self.began - 0.05 * self.seconds - CLOSE
        journeys = (node for node in self.clients if any(stay.name == JOURNEY for stay in node.stays))
        return any(self.ends - sum(node.reported.values()) < before for node in journeys)

    @property
    def unaccounted(self) -> float:
        """The largest share of a node's round that no part explains."""
        most = max((node.parts.get(UNACCOUNTED, 0.0) for node in self.nodes.values()), default=0.0)
        return most / self.seconds if self.seconds > 0 else 0.0


def by_class(parts: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by class of work: «compute», «upload», ..., «waiting», «unaccounted»."""
    seconds_by_class: dict[str, float] = {}
    for part, seconds in parts.items():
        kind = WORK.get(part) or (WAITING if part in REST else UNACCOUNTED)
        seconds_by_class[kind] = seconds_by_class.get(kind, 0.0) + seconds
    return seconds_by_class


def may_report(span: Span) -> bool:
    """Return whether the Span's node may report it: only the whole reports the round, and only the server itself."""
    node = span.where.node
    return node is None if span.name == ROUND else node in (None, SERVER) if span.name == SERVER else True


def asynchronous(times: Sequence[RoundTime]) -> bool:
    """Return whether most rounds include work begun before them: nobody is waited for there."""
    return sum(time.overlapping for time in times) > len(times) / 2


def main_clock(times: Iterable[RoundTime]) -> str:
    """Return «virtual» if there is a virtual clock: real seconds of a simulation say nothing about the federation."""
    return "virtual" if any(time.clock == "virtual" for time in times) else "real"


def rounds_of_clock(times: Iterable[RoundTime], clock: str | None = None) -> list[RoundTime]:
    """Return the rounds of one clock, by default the main one."""
    times = list(times)
    chosen = main_clock(times) if clock is None else clock
    return sorted((time for time in times if time.clock == chosen), key=lambda time: time.round)


def timeline(
    spans: Iterable[Span], *, clock: str | None = None, rounds: Collection[int] | None = None
) -> list[RoundTime]:
    """Return every round, by clock (the real one first) and number; optionally of one clock or some rounds only."""
    gathered: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        number = span.where.round
        if number is None or span.name not in NESTED or (rounds is not None and number not in rounds):
            continue
        span_clock = clock_of(span)
        if clock is None or span_clock == clock:
            gathered.setdefault((span_clock, number), []).append(span)
    names = functools.cache(natural)  # each name is parsed once
    rounds_found: list[RoundTime] = []
    for (span_clock, number), spans_of_round in sorted(gathered.items(), key=lambda entry: entry[0]):
        before = rounds_found[-1] if rounds_found and rounds_found[-1].clock == span_clock else None
        rounds_found.append(_round(number, span_clock, spans_of_round, names, before))
    return rounds_found


def _round(
    round_index: int, clock: str, spans: list[Span], names: Callable[[str], Any], before: RoundTime | None
) -> RoundTime:
    usable, left_out = _usable(spans)
    whole = [span for span in usable if span.name == ROUND]
    began, seconds = _extent(usable, whole)
    superseded = {span.id for span in whole[:-1]}
    by_node: dict[str, list[Span]] = {}
    for span in usable:
        if span.name == ROUND:
            continue
        node = SERVER if span.name == SERVER else span.where.node
        own = by_node.get(node or "")
        if not node or span.parent in superseded or (len(own) >= SPANS if own else len(by_node) >= NODES):
            left_out += 1
        elif own:
            own.append(span)
        else:
            by_node[node] = [span]
    shifted: dict[str, float] = {}
    nodes = [_node(node, own, began, seconds, shifted) for node, own in by_node.items()]
    nodes.sort(key=lambda node_time: (_ORDER[node_time.kind], names(node_time.node)))
    idle = 0.0 if before is None else began - before.ends
    return RoundTime(
        round_index,
        clock,
        began,
        seconds,
        _with_members({node_time.node: node_time for node_time in nodes}),
        idle if 0 < idle < LONGEST else 0.0,
        bool(whole),
        left_out,
        shifted,
    )


_ORDER = {SERVER: 0, EDGE: 1, CLIENT: 2}


def _usable(spans: list[Span]) -> tuple[list[Span], int]:
    """Return the spans that are possible, each once, and the number of the others.

    Ids come from machines, too: no Span is left out because another node used its id before.
    """
    seen: set[tuple[str, str, str | None]] = set()
    kept = []
    for span in spans:
        fine = 0 <= span.seconds <= LONGEST and -LARGEST < span.at < LARGEST  # NaN is in neither
        own = (span.id, span.name, span.where.node)
        if fine and own not in seen and may_report(span):
            seen.add(own)
            kept.append(span)
    return kept, len(spans) - len(kept)


def _extent(spans: list[Span], whole: list[Span]) -> tuple[float, float]:
    """Return when the round began and how long it took; without its own Span, from the first to the last of the
    rest.
    """
    if whole:
        whole.sort(key=lambda span: span.at)
        return whole[-1].at, whole[-1].seconds
    trusted = [span for span in spans if span.name in (SERVER, EDGE, JOURNEY)] or spans
    began = min((span.at for span in trusted), default=0.0)
    ends = max((span.at + span.seconds for span in trusted), default=0.0)
    return began, min(max(0.0, ends - began), LONGEST)


def _node(node: str, spans: list[Span], began: float, seconds: float, shifted: dict[str, float]) -> NodeTime:
    names = {span.name for span in spans}
    kind = SERVER if SERVER in names else EDGE if EDGE in names else CLIENT
    # The name of its Spans for the whole round; its training lies inside of a journey
    outer = JOURNEY if JOURNEY in names else kind
    stays: list[NodeSpan] = []
    inner: list[Span] = []
    reported: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.at) if len(spans) > 1 else spans:
        if span.name == outer:
            parts = node_spans.recorded_parts(span)
            reported = node_spans.add(dict(reported), parts) if reported else parts
            stay, moved = node_spans.node_span_of(span, parts, began, began + seconds)
            if abs(moved) > abs(shifted.get(node, CLOSE)):
                shifted[node] = moved
            stays.append(stay)
        elif span.name == CLIENT:
            inner.append(span)
    if outer == JOURNEY and inner:
        stays = [node_spans.refined(stay, inner) for stay in stays]
    stays = node_spans.without_overlaps(stays)
    numbers = [*inner, *spans]
    return NodeTime(
        node,
        kind,
        next((span.where.group for span in spans if span.where.group is not None), None),
        began,
        seconds,
        node_spans.sums(kind, stays, began, seconds),
        reported,
        tuple(stays),
        _number(numbers, "samples"),
        _number(numbers, "steps"),
        any(span.attributes.get("failed") is True for span in spans),
        next((who for span in spans if isinstance(who := span.attributes.get("waited_for"), str)), None),
    )


def _number(spans: list[Span], name: str) -> float | None:
    for span in spans:
        value = span.attributes.get(name)
        if isinstance(value, int | float) and 0 <= value < LARGEST:
            return float(value)
    return None


def _with_members(nodes: dict[str, NodeTime]) -> dict[str, NodeTime]:
    """Return the nodes, with edges that report no waiting marked as waiting while their members were in progress.

    Between two members that take turns in one process, the edge waited for the next one's turn.
    """
    members: dict[str, list[tuple[float, float]]] = {}
    edges = {n: own for n, own in nodes.items() if own.kind == EDGE and own.parts.get(UNACCOUNTED, 0.0) > CLOSE}
    if not edges:
        return nodes
    for node_time in nodes.values():
        if node_time.kind == CLIENT and node_time.group in edges:
            members.setdefault(node_time.group, []).append(span_of_work(node_time))
    for node, node_time in edges.items():
        rest = node_time.parts[UNACCOUNTED]
        own = members.get(node, ())
        waited = 0.0 if "wait" in node_time.reported else min(rest, _covered_seconds(own, node_time.stays))
        if waited > 0:
            hull = [(min(began for began, _ in own), max(ended for _, ended in own))]
            turns = min(rest - waited, _covered_seconds(hull, node_time.stays) - waited)
            stays = tuple(_with_waiting(stay, waited / rest, max(0.0, turns) / rest) for stay in node_time.stays)
            parts = node_spans.sums(EDGE, list(stays), node_time.began, node_time.seconds)
            nodes[node] = NodeTime(
                node, EDGE, node_time.group, node_time.began, node_time.seconds, parts, node_time.reported, stays
            )
    return nodes


def _with_waiting(stay: NodeSpan, share: float, turns: float) -> NodeSpan:
    """Return the stay with shares of its unaccounted time as waiting for members, and for their turns."""
    rest = stay.parts.get(UNACCOUNTED, 0.0)
    own = {part: v for part, v in stay.parts.items() if part != UNACCOUNTED}
    more = {"queue": rest * turns, UNACCOUNTED: rest * (1 - share - turns)}
    return stay._replace(parts={"wait": rest * share, **own} | {part: v for part, v in more.items() if v > CLOSE})


def _covered_seconds(stretches: Iterable[tuple[float, float]], stays: Iterable[NodeSpan]) -> float:
    """Return the seconds of the stays in which at least one of the intervals was in progress."""
    own = list(stretches)
    return sum(node_spans.covered(own, stay.began, stay.began + stay.seconds) for stay in stays)


def span_of_work(node: NodeTime) -> tuple[float, float]:
    """Return when the node first and last did something in the round; both are the round's start if it never did.

    The time of unaccounted work is known only if a client trained.
    """
    first, last = math.inf, -math.inf
    for stay in node.stays:
        at = stay.began
        if stay.folded:
            if stay.seconds > 0 and any(part not in REST for part in stay.parts):
                first, last = min(first, at), max(last, at + stay.seconds)
            continue
        for part, seconds in stay.parts.items():
            if part in WORK and seconds > 0:
                first, last = min(first, at), max(last, at + seconds)
            at += seconds
    return (first, last) if first <= last else (node.began, node.began)


def waiting_for(time: RoundTime) -> dict[str, str]:
    """Return the node that each waiting node waits for: as reported, else the client that was done last.

    That client itself waits for the server only.
    """
    ends = {node_time.node: span_of_work(node_time)[1] for node_time in time.clients if node_time.busy > 0}
    last = max(ends, key=lambda node: ends[node]) if ends else SERVER
    waits = {}
    for node, node_time in time.nodes.items():
        if node_time.parts.get("wait", 0.0) > CLOSE:
            whom = node_time.waited_for
            known = whom in time.nodes or whom == SERVER
            waits[node] = whom if whom and known else SERVER if node == last else last
    return waits
