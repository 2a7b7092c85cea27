# SPDX-License-Identifier: Apache-2.0
"""What every node did in every round, from its first moment to its last, on the real and on the virtual clock.

A node's parts sum to the round. Before a client's first Span lies `queue`, after its last one `wait`, both from
timestamps; what lies inside of a Span and in none of its parts is `unaccounted`. Where a client's own training is known
beside its way to the server and back, the training says what the way's computing consisted of.

Spans may come from machines that lie, or whose clocks are wrong: what cannot be true is left out and counted, what lies
outside of its round is moved or cut, and nothing in here raises for what a Span says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedvitals.records import Span, natural
from fedvitals.resources.node_spans import (
    CLOSE,
    NODES,
    UNACCOUNTED,
    NodeSpan,
    SpanBlock,
    add,
    blocks_of,
    covered,
    node_span_of,
    recorded_parts,
    refined,
    sums,
    without_overlaps,
)
from fedvitals.time_parts import CLIENT, EDGE, JOURNEY, NESTED, REST, ROUND, SERVER, WORK, clock_of

WAITING = "waiting"  # the class of all parts in which a node waits
SPANS = 32  # of one node in one round
LONGEST = 366 * 86_400.0  # seconds; no Span of a round is longer
LARGEST = 1e15  # since the epoch; beyond it, floats do not tell a second from the next


class Interval(NamedTuple):
    """What a node did from when on, for so long."""

    node: str
    group: str | None
    part: str  # as in `parts`, or «unaccounted»
    began: float
    seconds: float
    folded: bool  # laid out after its neighbours, though in truth they took turns


@dataclass(frozen=True, slots=True)
class NodeTime:
    """A node's time in one round."""

    node: str
    kind: str  # «server», «edge», «client»
    group: str | None
    began: float  # of the round
    seconds: float  # of the round
    parts: dict[str, float]  # sums to the round
    told: dict[str, float]  # as told: asynchronous journeys begin before the round in which they end
    stays: tuple[NodeSpan, ...]
    samples: float | None = None
    steps: float | None = None
    failed: bool = False
    waited_for: str | None = None  # as told; see `waiting_for`

    @property
    def blocks(self) -> list[SpanBlock]:
        """Its whole round in order, without gaps."""
        found: list[SpanBlock] = []
        at = self.began
        before = UNACCOUNTED if self.kind == SERVER else "queue"
        for stay in self.stays:
            if stay.began - at > CLOSE:
                found.append(SpanBlock(at, stay.began - at, {before: stay.began - at}, False, 1))
            found += blocks_of(stay)
            at = max(at, stay.began + stay.seconds)
        left = self.began + self.seconds - at
        if left > CLOSE:
            found.append(SpanBlock(at, left, {UNACCOUNTED if self.kind == SERVER else "wait": left}, False, 1))
        return found

    @property
    def intervals(self) -> list[Interval]:
        found = []
        for block in self.blocks:
            at = block.began
            for part, seconds in block.parts.items():
                found.append(Interval(self.node, self.group, part, at, seconds, block.folded))
                at += seconds
        return found

    @property
    def busy(self) -> float:
        """Seconds in which it did something, known or not."""
        return sum(seconds for part, seconds in self.parts.items() if part not in REST)


@dataclass(frozen=True, slots=True)
class RoundTime:
    """One round on one clock."""

    round: int
    clock: str  # «real», «virtual»
    began: float
    seconds: float
    nodes: dict[str, NodeTime] = field(repr=False)  # the server first, then edges, then clients
    idle: float = 0.0  # seconds since the round before
    complete: bool = True  # False: it has no Span of its own, failed or still open; its length is that of the others
    left_out: int = 0  # Spans that cannot be true, came twice, or were too many
    shifted: dict[str, float] = field(default_factory=dict)  # node → seconds by which its wrong clock was put right

    @property
    def ends(self) -> float:
        return self.began + self.seconds

    @property
    def clients(self) -> list[NodeTime]:
        return [one for one in self.nodes.values() if one.kind == CLIENT]

    @property
    def edges(self) -> list[NodeTime]:
        return [one for one in self.nodes.values() if one.kind == EDGE]

    @property
    def server(self) -> NodeTime | None:
        return next((one for one in self.nodes.values() if one.kind == SERVER), None)

    @property
    def intervals(self) -> list[Interval]:
        return [interval for node in self.nodes.values() for interval in node.intervals]

    @property
    def overlapping(self) -> bool:
        """Whether clients brought what they had begun before it, as in asynchronous aggregation."""
        before = self.began - 0.05 * self.seconds - CLOSE
        return any(self.ends - sum(one.told.values()) < before for one in self.clients if JOURNEY in _names(one))

    @property
    def unaccounted(self) -> float:
        """The largest share of a node's round that no part explains."""
        most = max((node.parts.get(UNACCOUNTED, 0.0) for node in self.nodes.values()), default=0.0)
        return most / self.seconds if self.seconds > 0 else 0.0


def _names(node: NodeTime) -> set[str]:
    return {stay.name for stay in node.stays}


def class_of(part: str) -> str:
    """What a round is bound by that consists of this part: «compute», «upload», ..., «waiting», «unaccounted»."""
    return WORK.get(part) or (WAITING if part in REST else UNACCOUNTED)


def by_class(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by class."""
    found: dict[str, float] = {}
    for part, seconds in parts.items():
        kind = class_of(part)
        found[kind] = found.get(kind, 0.0) + seconds
    return found


def may_tell(span: Span) -> bool:
    """Whether the Span's node may say this: only the whole tells of the round, and only the server of itself."""
    node = span.where.node
    return node is None if span.name == ROUND else node in (None, SERVER) if span.name == SERVER else True


def asynchronous(times: Sequence[RoundTime]) -> bool:
    """Whether most rounds took in what was begun before them: nobody is waited for there."""
    return sum(time.overlapping for time in times) > len(times) / 2


def main_clock(times: Iterable[RoundTime]) -> str:
    """«virtual» where there is one: real seconds of a simulation say nothing of the federation."""
    return "virtual" if any(time.clock == "virtual" for time in times) else "real"


def of_clock(times: Iterable[RoundTime], clock: str | None = None) -> list[RoundTime]:
    """The rounds of one clock, the main one unless told."""
    times = list(times)
    chosen = main_clock(times) if clock is None else clock
    return sorted((time for time in times if time.clock == chosen), key=lambda time: time.round)


def timeline(
    spans: Iterable[Span], *, clock: str | None = None, rounds: Collection[int] | None = None
) -> list[RoundTime]:
    """Every round, by clock (the real one first) and number; of one clock or some rounds where these are given."""
    gathered: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        number = span.where.round
        if number is None or span.name not in NESTED or (rounds is not None and number not in rounds):
            continue
        its = clock_of(span)
        if clock is None or its == clock:
            gathered.setdefault((its, number), []).append(span)
    names = functools.cache(natural)  # each name is looked at once
    found: list[RoundTime] = []
    for (its, number), same in sorted(gathered.items(), key=lambda item: item[0]):
        before = found[-1] if found and found[-1].clock == its else None
        found.append(_round(number, its, same, names, before))
    return found


def _round(
    number: int, clock: str, spans: list[Span], names: Callable[[str], Any], before: RoundTime | None
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
    made = [_node(node, own, began, seconds, shifted) for node, own in by_node.items()]
    made.sort(key=lambda one: (_ORDER[one.kind], names(one.node)))
    idle = 0.0 if before is None else began - before.ends
    return RoundTime(
        number,
        clock,
        began,
        seconds,
        _with_members({one.node: one for one in made}),
        idle if 0 < idle < LONGEST else 0.0,
        bool(whole),
        left_out,
        shifted,
    )


_ORDER = {SERVER: 0, EDGE: 1, CLIENT: 2}


def _usable(spans: list[Span]) -> tuple[list[Span], int]:
    """Those that can be true, each once; and how many are not.

    Ids are told by machines, too: nobody's Span is left out because another node used its id before.
    """
    seen: set[tuple[str, str, str | None]] = set()
    kept = []
    for span in spans:
        fine = 0 <= span.seconds <= LONGEST and -LARGEST < span.at < LARGEST  # NaN is in neither
        own = (span.id, span.name, span.where.node)
        if fine and own not in seen and may_tell(span):
            seen.add(own)
            kept.append(span)
    return kept, len(spans) - len(kept)


def _extent(spans: list[Span], whole: list[Span]) -> tuple[float, float]:
    """When the round began and how long it took; without a Span of its own, from the first to the last of the rest."""
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
    outer = JOURNEY if JOURNEY in names else kind  # how its whole round is seen; its training lies inside of a journey
    stays: list[NodeSpan] = []
    inner: list[Span] = []
    told: dict[str, float] = {}
    for span in sorted(spans, key=lambda one: one.at) if len(spans) > 1 else spans:
        if span.name == outer:
            parts = recorded_parts(span)
            told = add(dict(told), parts) if told else parts
            stay, moved = node_span_of(span, parts, began, began + seconds)
            if abs(moved) > abs(shifted.get(node, CLOSE)):
                shifted[node] = moved
            stays.append(stay)
        elif span.name == CLIENT:
            inner.append(span)
    if outer == JOURNEY and inner:
        stays = [refined(stay, inner) for stay in stays]
    stays = without_overlaps(stays)
    numbers = [*inner, *spans]
    return NodeTime(
        node,
        kind,
        next((span.where.group for span in spans if span.where.group is not None), None),
        began,
        seconds,
        sums(kind, stays, began, seconds),
        told,
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
    """The nodes; of an edge that tells no waiting of its own, it waited while its members were under way.

    Between two of them, where they take turns in one process, it waited for the next one's turn.
    """
    members: dict[str, list[tuple[float, float]]] = {}
    edges = {node: one for node, one in nodes.items() if one.kind == EDGE and one.parts.get(UNACCOUNTED, 0.0) > CLOSE}
    if not edges:
        return nodes
    for one in nodes.values():
        if one.kind == CLIENT and one.group in edges:
            members.setdefault(one.group, []).append(span_of_work(one))
    for node, one in edges.items():
        rest = one.parts[UNACCOUNTED]
        own = members.get(node, ())
        waited = 0.0 if "wait" in one.told else min(rest, _covered(own, one.stays))
        if waited > 0:
            hull = [(min(began for began, _ in own), max(ended for _, ended in own))]
            turns = min(rest - waited, _covered(hull, one.stays) - waited)
            stays = tuple(_waiting(stay, waited / rest, max(0.0, turns) / rest) for stay in one.stays)
            parts = sums(EDGE, list(stays), one.began, one.seconds)
            nodes[node] = NodeTime(node, EDGE, one.group, one.began, one.seconds, parts, one.told, stays)
    return nodes


def _waiting(stay: NodeSpan, share: float, turns: float) -> NodeSpan:
    """With so much of what was unaccounted for as waiting for members, and for the turns of members."""
    rest = stay.parts.get(UNACCOUNTED, 0.0)
    own = {part: v for part, v in stay.parts.items() if part != UNACCOUNTED}
    more = {"queue": rest * turns, UNACCOUNTED: rest * (1 - share - turns)}
    return stay._replace(parts={"wait": rest * share, **own} | {part: v for part, v in more.items() if v > CLOSE})


def _covered(stretches: Iterable[tuple[float, float]], stays: Iterable[NodeSpan]) -> float:
    """Seconds of the stays in which at least one of the stretches was under way."""
    own = list(stretches)
    return sum(covered(own, stay.began, stay.began + stay.seconds) for stay in stays)


def span_of_work(node: NodeTime) -> tuple[float, float]:
    """When it first did something in the round and when it last did; both the round's beginning if it never did.

    Of what is unaccounted for, it is known when it was only where a client trained.
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
    """Whom each node that waits waits for: as told, else the client that was done last, which itself waits for none
    but the server.
    """
    ends = {one.node: span_of_work(one)[1] for one in time.clients if one.busy > 0}
    last = max(ends, key=lambda node: ends[node]) if ends else SERVER
    found = {}
    for node, one in time.nodes.items():
        if one.parts.get("wait", 0.0) > CLOSE:
            known = one.waited_for is not None and (one.waited_for in time.nodes or one.waited_for == SERVER)
            found[node] = one.waited_for if known and one.waited_for else SERVER if node == last else last
    return found
