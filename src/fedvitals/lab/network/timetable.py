# SPDX-License-Identifier: Apache-2.0
"""A synchronous round on the virtual clock: when it ends, who is in it, and what everybody did all the time.

Every node's parts add up to the round's length exactly, since all times are whole ticks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedvitals.errors import ConfigError
from fedvitals.lab.engines.work import Node
from fedvitals.lab.network.virtual_clock import EdgeWay, Journey, tick
from fedvitals.resources.clocks import Offset

STAGES = ("queue", "download", "data", "compute", "upload")  # of a journey, in this order


@dataclass(frozen=True, slots=True)
class Group:
    """An edge node, cluster or ring: from the round's beginning until what it has is at the server."""

    name: str
    parts: Mapping[str, float]  # queue, download, wait (for its members), upload
    waited_for: Node  # the member that was the last to arrive, or that had not at the end

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Timetable:
    """Times in seconds after `began`."""

    began: float
    journeys: tuple[Journey, ...]
    collected: float  # when the last client was taken in; who is still under way is cut off
    closed: float  # when the server stopped waiting; later where edge nodes have a way of their own
    aggregate: float
    accepted: tuple[Node, ...]  # in the order of their arrival
    late: tuple[Node, ...]  # still under way when the round was closed
    failed: tuple[Node, ...]  # lost or corrupted on the way
    absent: tuple[Node, ...]  # never began
    waited_for: Node | None = None  # whose arrival closed the round, or who had not arrived at the deadline
    cut_off: bool = False  # closed by the deadline
    groups: tuple[Group, ...] = field(default=())
    evaluate: float = 0.0

    @property
    def seconds(self) -> float:
        return self.closed + self.aggregate + self.evaluate

    @property
    def ends(self) -> float:
        return self.began + self.seconds

    def parts(self, one: Journey) -> dict[str, float]:
        """What a client did, in sequence; they add up to the round."""
        return journey_parts(one, self.collected, self.seconds)

    def server_parts(self) -> dict[str, float]:
        """The same of the server."""
        found = {"wait": self.closed, "aggregate": self.aggregate, "evaluate": self.evaluate}
        return {name: seconds for name, seconds in found.items() if seconds > 0}


def synchronous(
    journeys: Sequence[Journey],
    *,
    began: float = 0.0,
    needed: int | None = None,
    deadline: float | None = None,
    aggregate: float = 0.0,
    ways: Mapping[str, EdgeWay] | None = None,
) -> Timetable:
    """When the round ends, and who is in it.

    Updates are taken until `needed` usable ones are there (all, unless told), or for `deadline` seconds; less long if
    nothing is under way any more. Who is not available says so at once; of a lost update one learns at the deadline, or
    without one when it would have come. Edge nodes with a way of their own (`ways`, by name) then send what they have:
    the deadline is for clients.
    """
    under_way = sorted((one for one in journeys if one.available), key=lambda one: (lasting(one), one.node))
    limit = math.inf if deadline is None else tick(deadline)
    needed = len(under_way) if needed is None else needed
    accepted = [one for one in under_way if one.usable and lasting(one) <= limit][:needed]
    chosen = {one.node for one in accepted}
    rest = [one for one in under_way if one.node not in chosen]
    missing = [one for one in rest if one.lost or lasting(one) > limit]
    cut_off, last = False, None if not under_way else under_way[-1].node
    if accepted and len(accepted) >= needed:
        collected, last = lasting(accepted[-1]), accepted[-1].node
    elif deadline is not None and missing:
        collected, last, cut_off = limit, missing[-1].node, True
    else:
        collected = lasting(under_way[-1]) if under_way else 0.0
    if math.isinf(collected):
        raise ConfigError(f"The round never ends: {last} takes for ever. Give the network a deadline_seconds.")
    groups = gathered(under_way, collected, None if cut_off else last, ways or {}, chosen)
    slowest = max(groups, key=lambda group: group.seconds, default=None)
    closed = collected
    if slowest is not None and slowest.seconds > collected:
        closed, last = slowest.seconds, slowest.name
    return Timetable(
        tick(began),
        tuple(journeys),
        collected,
        closed,
        tick(aggregate),
        accepted=tuple(one.node for one in accepted),
        late=tuple(one.node for one in rest if one.usable),
        failed=tuple(one.node for one in rest if not one.usable),
        absent=tuple(one.node for one in journeys if not one.available),
        waited_for=last,
        cut_off=cut_off,
        groups=groups,
    )


def gathered(
    under_way: Sequence[Journey], collected: float, last: Node | None, ways: Mapping[str, EdgeWay], chosen: set[Node]
) -> tuple[Group, ...]:
    """Every group's time, from journeys in the order of their arrival; one that has nothing to send sends nothing.

    `last`: whose arrival was enough for all, if one's was; a group that misses a member waits no longer than that.
    """
    members: dict[str, list[Journey]] = {}
    for one in under_way:
        if one.group is not None:
            members.setdefault(one.group, []).append(one)
    found = []
    for name, own in sorted(members.items()):
        way = ways.get(name, EdgeWay())
        upload = way.upload if any(one.node in chosen for one in own) else 0.0
        parts = {"queue": min(way.queue, collected)}
        parts["download"] = min(way.download, collected - parts["queue"])
        parts["wait"] = min(lasting(own[-1]), collected) - parts["queue"] - parts["download"]
        parts["upload"] = upload
        whom = own[-1].node if last is None or lasting(own[-1]) <= collected else last
        found.append(Group(name, {part: seconds for part, seconds in parts.items() if seconds > 0}, whom))
    return tuple(found)


def journey_parts(one: Journey, cut: float, seconds: float) -> dict[str, float]:
    """What a client did in so many seconds; after `cut` of them it is not heard any more, and waits."""
    if not one.available:
        return {"away": seconds} if seconds > 0 else {}
    parts, at = {}, 0.0
    for name in STAGES:
        lasts = min(tick(getattr(one, name)), cut - at)
        if lasts > 0:
            parts[name] = lasts
            at += lasts
    if seconds > at:
        parts["wait"] = seconds - at
    return parts


def lasting(one: Journey) -> float:
    """A journey's length in whole ticks; a fault may have put in any number."""
    return sum(tick(getattr(one, name)) for name in STAGES)


def offset_of(journey: Journey) -> Offset:
    """What the four times of the exchange say of the client's clock."""
    ahead = journey.clock_offset
    return Offset(ahead - journey.upload, ahead + journey.queue + journey.download)


def times_told(journey: Journey) -> dict[str, float]:
    """What a server reads from the times that stand in a client's message, and those of its own clock around them."""
    told = {"time.client_virtual": journey.total, "time.compute_virtual": journey.compute}
    error = offset_of(journey).beyond_doubt
    # Ticks of 2⁻²⁰ s: what is below a thousandth is rounding.
    return told if abs(error) < 1e-3 else {**told, "time.clock_error": error}
