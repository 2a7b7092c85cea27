# SPDX-License-Identifier: Apache-2.0
"""The chain of work that determined a round's length, as data and in words.

It is followed from the round's end back to its beginning, always to the work that ended last before the next began.
Work that alternated with others' inside one Span is one link, named after its largest part. Gaps between clients' work
are filled with the server's known work; the rest is unaccounted for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from fedvitals.analysis.round_shape import RoundShape, shape_of
from fedvitals.analysis.timeline import WAITING, NodeTime, RoundTime, by_class
from fedvitals.resources.node_spans import CLOSE, UNACCOUNTED, SpanBlock
from fedvitals.time_parts import REST, SERVER, WORK

# Of a round: work of the same node before a pause this short takes precedence over another's that ended in it
SAME = 0.02
WAITED = 0.1  # share of a link that its client spent waiting, from which others took turns with it
LAST_FIRST = ("evaluate", "examine", "aggregate", "receive")  # of a server's sums: its last work first, going back


@dataclass(frozen=True, slots=True)
class PathLink:
    """One link of the chain; a gap that no node's work explains belongs to the server, «unaccounted»."""

    node: str
    part: str  # the part that took longest
    began: float
    seconds: float
    parts: dict[str, float]
    group: str | None = None
    shared: int = 1  # clients that took turns in it, or were trained together


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """What determined a round's length."""

    round: int
    clock: str
    began: float
    seconds: float
    links: tuple[PathLink, ...]  # the first to the last
    slowest: str | None  # the client with most of it; also None if nobody is waited for
    part: str  # the longest part: of that client, or of the server if that is longer
    part_seconds: float
    without: float | None  # the round's seconds without the slowest
    shares: dict[str, float]  # class → share of the round
    text: str
    shape: RoundShape = field(repr=False, compare=False)


class _WorkUnit(NamedTuple):
    ended: float
    began: float
    node: str
    group: str | None
    block: SpanBlock


def critical_path(time: RoundTime) -> CriticalPath:
    """Return the critical path of one round."""
    units = sorted(_units(time), key=lambda unit: unit.ended)
    links = _chain(time, units)
    shape = shape_of(time)
    flown = journey_shares(time) if time.overlapping else {}
    if flown:
        links = [_with_shares(link, flown) if link.node in shape.nodes else link for link in links]
    by_node: dict[str, float] = {}
    sums: dict[str, float] = {}
    for link in links:
        if link.node in shape.nodes:
            by_node[link.node] = by_node.get(link.node, 0.0) + link.seconds
        for part, seconds in link.parts.items():
            sums[part] = sums.get(part, 0.0) + seconds
    slowest = max(by_node, key=lambda node: by_node[node]) if by_node and not flown else None
    saved = None if slowest is None else shape.without([slowest])
    whole = time.seconds if time.seconds > 0 else 1.0
    shares = {kind: seconds / whole for kind, seconds in by_class(sums).items()}
    node, part, seconds = _longest(links, [slowest] if slowest else shape.nodes if flown else [])
    text = (
        _describe_arrivals(time, flown)
        if flown
        else _describe_path(time, links, shape, slowest, saved, (node, part, seconds))
    )
    return CriticalPath(
        time.round,
        time.clock,
        time.began,
        time.seconds,
        tuple(links),
        slowest,
        part,
        seconds,
        saved,
        shares,
        text,
        shape,
    )


def _units(time: RoundTime) -> list[_WorkUnit]:
    """Return every node's work. A server's work in many short pieces has no position of its own: it fills gaps
    later.
    """
    units = []
    for node in time.nodes.values():
        if node.kind != "client" and any(stay.folded for stay in node.stays):
            continue
        for block in node.blocks:
            known = any(part in WORK or (block.folded and part == UNACCOUNTED) for part in block.parts)
            if known and block.seconds > CLOSE:
                units.append(_WorkUnit(block.began + block.seconds, block.began, node.node, node.group, block))
    return units


def _chain(time: RoundTime, units: list[_WorkUnit]) -> list[PathLink]:
    """Return the links, first to last; they cover the round."""
    gaps = _Gaps(time)
    links: list[PathLink] = []
    at, place, following = time.ends, len(units) - 1, ""
    by_node: dict[str, list[_WorkUnit]] = {}
    for unit in units:
        by_node.setdefault(unit.node, []).append(unit)
    while at - time.began > CLOSE:
        while place >= 0 and units[place].ended > at + CLOSE:
            place -= 1
        if place < 0:
            links += gaps.fill(time.began, at, following, "")
            break
        chosen = _before(at, units, place, by_node.get(following, ()), SAME * time.seconds)
        if at - chosen.ended > CLOSE:
            links += gaps.fill(chosen.ended, at, following, chosen.node)
        links.append(_link(chosen, units))
        at, following = max(chosen.began, time.began), chosen.node
    return links[::-1]


def _before(at: float, units: list[_WorkUnit], place: int, own: Collection[_WorkUnit], pause: float) -> _WorkUnit:
    """Return the work that ended last before a moment, preferring that of the same node."""
    newest = units[place]
    mine = max((unit for unit in own if unit.ended <= at + CLOSE), key=lambda unit: unit.ended, default=None)
    if mine is not None and (mine.ended >= newest.ended - CLOSE or mine.ended >= at - pause):
        return mine
    longest = newest
    while place >= 0 and units[place].ended >= newest.ended - CLOSE:
        if units[place].began < longest.began:
            longest = units[place]
        place -= 1
    return longest


def _link(unit: _WorkUnit, units: list[_WorkUnit]) -> PathLink:
    block = unit.block
    waited = sum(seconds for part, seconds in block.parts.items() if part in REST)
    if not block.folded or waited <= WAITED * block.seconds:
        parts = block.parts
        return PathLink(unit.node, _largest(parts), unit.began, block.seconds, dict(parts), unit.group, block.shared)
    # Others trained on the same thread in that time: all of them together explain it.
    beside = [other for other in units if other.block.folded and other.began < unit.ended and other.ended > unit.began]
    pooled: dict[str, float] = {}
    for other in beside:
        common = min(other.ended, unit.ended) - max(other.began, unit.began)
        share = common / other.block.seconds
        for part, seconds in other.block.parts.items():
            if part in WORK:
                pooled[part] = pooled.get(part, 0.0) + seconds * share
    total = sum(pooled.values())
    if total > block.seconds:
        pooled = {part: seconds * block.seconds / total for part, seconds in pooled.items()}
    elif block.seconds - total > CLOSE:
        pooled[UNACCOUNTED] = block.seconds - total
    return PathLink(unit.node, _largest(pooled), unit.began, block.seconds, pooled, unit.group, len(beside))


def _largest(parts: dict[str, float]) -> str:
    """Return the part that took longest, preferring known parts over unaccounted time."""
    known = {part: seconds for part, seconds in parts.items() if part != UNACCOUNTED}
    if not known or max(known.values()) < 0.5 * parts.get(UNACCOUNTED, 0.0):
        return UNACCOUNTED
    return max(known, key=lambda part: known[part])


class _Gaps:
    """The server's work during the gaps between clients' work, from the last gap to the first."""

    def __init__(self, time: RoundTime) -> None:
        server = time.server
        self._time = time
        self._left: dict[str, float] = {}
        if server is not None and any(stay.folded for stay in server.stays):
            work = {part: seconds for part, seconds in server.parts.items() if part in WORK}
            first = {part: work.pop(part) for part in LAST_FIRST if part in work}
            self._left = first | work

    def fill(self, began: float, ended: float, following: str, after: str) -> list[PathLink]:
        """Return the links of a gap between the work of two nodes, from its end to its beginning."""
        links = []
        at = ended
        for part, seconds in list(self._left.items()):
            taken = min(seconds, at - began)
            if taken > CLOSE:
                links.append(PathLink(SERVER, part, at - taken, taken, {part: taken}))
                self._left[part] -= taken
                at -= taken
        if at - began > CLOSE:
            links.append(self._waiting(began, at, following, after))
        return links

    def _waiting(self, began: float, ended: float, following: str, after: str) -> PathLink:
        """Return the link of a wait: for a turn, a process, an answer, or a client that never came."""
        whole = ended - began
        for node, names in ((following, ("queue", "start")), (after, ("reply",)), (SERVER, ("wait",))):
            parts = _waited(self._time.nodes.get(node), names, began, ended)
            if sum(parts.values()) > 0.5 * whole:
                left = whole - sum(parts.values())
                parts = {**parts, UNACCOUNTED: left} if left > CLOSE else parts
                return PathLink(node, _largest(parts), began, whole, parts)
        return PathLink(SERVER, UNACCOUNTED, began, whole, {UNACCOUNTED: whole})


def _waited(node: NodeTime | None, parts: Collection[str], began: float, ended: float) -> dict[str, float]:
    """Return how long a node reports to have waited within this time, by part; sums have no position in time."""
    waited: dict[str, float] = {}
    if node is None:
        return waited
    for block in node.blocks:
        inside = min(block.began + block.seconds, ended) - max(block.began, began)
        for part in parts:
            if not block.folded and part in block.parts and part in node.reported and inside > CLOSE:
                waited[part] = waited.get(part, 0.0) + inside
    return waited


def journey_shares(time: RoundTime) -> dict[str, float]:
    """Return the shares of each part in the journeys that ended in the round, including their time before it.

    Each journey counts equally: the number of arrivals per second is Σ 1/time, so a part's share is what would be
    gained if it took no time.
    """
    shares: dict[str, float] = {}
    for node in time.clients:
        work = {part: seconds for part, seconds in node.reported.items() if part in WORK}
        whole = sum(work.values())
        for part, seconds in work.items() if node.busy > 0 and whole > 0 else ():
            shares[part] = shares.get(part, 0.0) + seconds / whole
    return {part: share / sum(shares.values()) for part, share in shares.items()}


def _with_shares(link: PathLink, flown: Mapping[str, float]) -> PathLink:
    """Return a link of an asynchronous round, divided by the shares of all journeys, of which only the end is in the
    round.
    """
    parts = {part: link.seconds * share for part, share in flown.items()}
    return replace(link, part=_largest(parts), parts=parts)


def _describe_arrivals(time: RoundTime, flown: Mapping[str, float]) -> str:
    each = [sum(v for part, v in node.reported.items() if part in WORK) for node in time.clients if node.busy > 0]
    part = max(flown, key=lambda name: flown[name])
    typical = format_seconds(median(each))
    return (
        f"round {time.round} took {format_seconds(time.seconds)}: {len(each)} updates came in, of {typical} "
        f"in the median, {100 * flown[part]:.0f} % of that {NOUNS.get(part, part)}"
    )


def _longest(links: list[PathLink], clients: Collection[str]) -> tuple[str, str, float]:
    """Return whose part took longest: the slowest client's, or the server's if that is more."""
    sums: dict[tuple[str, str], float] = {}
    for link in links:
        for part, seconds in link.parts.items():
            if part != UNACCOUNTED or link.node != SERVER:
                sums[link.node, part] = sums.get((link.node, part), 0.0) + seconds
    best: tuple[str, str, float] = (SERVER, UNACCOUNTED, 0.0)
    for (node, part), seconds in sums.items():
        if (node == SERVER or node in clients) and part not in REST and seconds > best[2]:
            best = (node, part, seconds)
    return best


def _describe_path(
    time: RoundTime,
    links: list[PathLink],
    shape: RoundShape,
    slowest: str | None,
    saved: float | None,
    longest: tuple[str, str, float],
) -> str:
    text = f"round {time.round} took {format_seconds(time.seconds)}"
    node, part, seconds = longest
    on_it = {link.node for link in links if link.node in shape.nodes}
    if slowest is None or saved is None or not links:
        return text + (f": the server's {NOUNS.get(part, part)}, {format_seconds(seconds)}" if seconds else "")
    # A client that would hardly be missed is not named.
    rest = f"; without {slowest} {format_seconds(saved)}" if saved < (1 - NAMED_FROM) * time.seconds else ""
    if shape.slots is not None and node != SERVER:
        turns = sum(link.seconds for link in links if link.node in shape.nodes)
        count = (
            len(shape.nodes)
            if len(on_it) < len(shape.nodes) and shape.slots > 1
            else max(len(on_it), *(link.shared for link in links))
        )
        how = "one after the other" if shape.slots == 1 else f"{shape.slots} at a time"
        return f"{text}: {count} clients {how}, {format_seconds(turns)}{rest}"
    whose = "the server's" if node == SERVER else f"{node}'s"
    text = f"{text}: {whose} {NOUNS.get(part, part)}, {format_seconds(seconds)}"
    return text if len(shape.nodes) < 2 else f"{text}{rest}"


NOUNS = {
    "examine": "wait for the clients' evaluation",
    "data": "data loading",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimiser",
    "measure": "measuring",
    "receive": "receiving of updates",
    "aggregate": "aggregation",
    "evaluate": "evaluation",
    UNACCOUNTED: "time that is unaccounted for",
}
"""Parts as words behind «c7's»; the others are words already."""


def format_seconds(seconds: float) -> str:
    """Return a duration as `views.units.seconds` does: «8.12 s», «240 ms», «20 min 40 s»."""
    if seconds < 1e-9:
        return "0 s"
    for below, factor, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1.0, "s")):
        if seconds < below:
            return f"{float(f'{seconds * factor:.3g}'):g} {unit}"
    step, large, small = (60, "min", "s") if seconds < 3600 else (3600, "h", "min")
    whole, rest = divmod(round(seconds), step)
    rest = rest if small == "s" else rest // 60
    return f"{whole:,} {large}".replace(",", "\u2009") + (f" {rest} {small}" if rest else "")


# The share of a round by which it must be shorter without its slowest client for that client to be named
NAMED_FROM = 0.02
FEWEST = 3  # rounds: of two, it is unknown which one is usual
LONGER = 1.5  # times the others' median
BEGINNING = ("compute", "data loading", WAITING, UNACCOUNTED)  # slow only at first; a slow link stays slow


class WarmUp(NamedTuple):
    """A warm-up round and the seconds that it took beyond the others' median."""

    round: int
    seconds: float
    extra: float  # beyond the others' median


def warm_up(times: Sequence[RoundTime], paths: Sequence[CriticalPath]) -> WarmUp | None:
    """Return the first round if it was a warm-up, else None; never on the virtual clock, where nothing has to be
    started.
    """
    timed = [(time, path) for time, path in zip(times, paths, strict=True) if time.seconds > 0]
    if len(timed) < FEWEST or timed[0][0].clock == "virtual":
        return None
    (first, path), *others = timed
    extra = first.seconds - median(time.seconds for time, _ in others)
    if first.seconds <= LONGER * (first.seconds - extra):
        return None
    usual = {kind: median(own.shares.get(kind, 0.0) * own.seconds for _, own in others) for kind in path.shares}
    beginning = sum(path.shares[kind] * path.seconds - usual[kind] for kind in path.shares if kind in BEGINNING)
    return WarmUp(first.round, first.seconds, extra) if beginning > 0.5 * extra else None


def without_warm_up(
    times: Sequence[RoundTime], paths: Sequence[CriticalPath]
) -> tuple[list[RoundTime], list[CriticalPath]]:
    """Return the rounds and their paths without a warm-up."""
    first = warm_up(times, paths)
    kept = [(t, p) for t, p in zip(times, paths, strict=True) if first is None or t.round != first.round]
    return [time for time, _ in kept], [path for _, path in kept]
