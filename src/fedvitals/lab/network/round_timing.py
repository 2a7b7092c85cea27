# SPDX-License-Identifier: Apache-2.0
"""The timing of a synchronous round on the virtual clock: when it ends, whose update is used, and what each node did.

Every node's parts add up to the round's length exactly, since all times are whole ticks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedvitals.errors import ConfigError
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.network.virtual_clock import EdgeTransfer, Journey, to_ticks
from fedvitals.resources.clocks import Offset

STAGES = ("queue", "download", "data", "compute", "upload")  # of a journey, in this order


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """The timing of an edge node, cluster or ring: from the round's start until its update is at the server."""

    name: str
    parts: Mapping[str, float]  # queue, download, wait (for its members), upload
    waited_for: Node  # the member that was the last to arrive, or that had not at the end

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """The timing of one synchronous round; times in seconds after `began`."""

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
    groups: tuple[GroupTiming, ...] = field(default=())
    evaluate: float = 0.0

    @property
    def seconds(self) -> float:
        return self.closed + self.aggregate + self.evaluate

    @property
    def ends(self) -> float:
        return self.began + self.seconds

    def parts(self, journey: Journey) -> dict[str, float]:
        """Return the seconds of what a client did, in order; they add up to the round."""
        return journey_parts(journey, self.collected, self.seconds)

    def server_parts(self) -> dict[str, float]:
        """Return the seconds of what the server did."""
        parts = {"wait": self.closed, "aggregate": self.aggregate, "evaluate": self.evaluate}
        return {name: seconds for name, seconds in parts.items() if seconds > 0}


def time_synchronous_round(
    journeys: Sequence[Journey],
    *,
    began: float = 0.0,
    needed: int | None = None,
    deadline: float | None = None,
    aggregate: float = 0.0,
    edge_transfers: Mapping[str, EdgeTransfer] | None = None,
) -> RoundTiming:
    """Determine when the round ends, and whose updates are used.

    Updates are accepted until `needed` usable ones have arrived (by default all), or until `deadline` seconds have
    passed; the round ends earlier if no more can arrive. An unavailable client is known at once; a lost update is
    noticed at the deadline, or without one when it would have arrived. Edge nodes with their own transfers
    (`edge_transfers`, by name) then send what they have: the deadline applies to clients only.
    """
    under_way = sorted(
        (journey for journey in journeys if journey.available),
        key=lambda journey: (journey_seconds(journey), journey.node),
    )
    limit = math.inf if deadline is None else to_ticks(deadline)
    needed = len(under_way) if needed is None else needed
    accepted = [journey for journey in under_way if journey.usable and journey_seconds(journey) <= limit][:needed]
    chosen = {journey.node for journey in accepted}
    rest = [journey for journey in under_way if journey.node not in chosen]
    missing = [journey for journey in rest if journey.lost or journey_seconds(journey) > limit]
    cut_off, last = False, None if not under_way else under_way[-1].node
    if accepted and len(accepted) >= needed:
        collected, last = journey_seconds(accepted[-1]), accepted[-1].node
    elif deadline is not None and missing:
        collected, last, cut_off = limit, missing[-1].node, True
    else:
        collected = journey_seconds(under_way[-1]) if under_way else 0.0
    if math.isinf(collected):
        raise ConfigError(f"The round never ends: {last} never finishes. Give the network a deadline_seconds.")
    groups = time_groups(under_way, collected, None if cut_off else last, edge_transfers or {}, chosen)
    slowest = max(groups, key=lambda group: group.seconds, default=None)
    closed = collected
    if slowest is not None and slowest.seconds > collected:
        closed, last = slowest.seconds, slowest.name
    return RoundTiming(
        to_ticks(began),
        tuple(journeys),
        collected,
        closed,
        to_ticks(aggregate),
        accepted=tuple(journey.node for journey in accepted),
        late=tuple(journey.node for journey in rest if journey.usable),
        failed=tuple(journey.node for journey in rest if not journey.usable),
        absent=tuple(journey.node for journey in journeys if not journey.available),
        waited_for=last,
        cut_off=cut_off,
        groups=groups,
    )


def time_groups(
    under_way: Sequence[Journey],
    collected: float,
    last: Node | None,
    edge_transfers: Mapping[str, EdgeTransfer],
    chosen: set[Node],
) -> tuple[GroupTiming, ...]:
    """Return every group's timing, from journeys in the order of their arrival; a group without updates sends nothing.

    `last` is the client whose arrival completed the round, if any; a group that misses a member waits no longer than
    that.
    """
    members: dict[str, list[Journey]] = {}
    for journey in under_way:
        if journey.group is not None:
            members.setdefault(journey.group, []).append(journey)
    groups = []
    for name, group_members in sorted(members.items()):
        edge = edge_transfers.get(name, EdgeTransfer())
        upload = edge.upload if any(journey.node in chosen for journey in group_members) else 0.0
        parts = {"queue": min(edge.queue, collected)}
        parts["download"] = min(edge.download, collected - parts["queue"])
        parts["wait"] = min(journey_seconds(group_members[-1]), collected) - parts["queue"] - parts["download"]
        parts["upload"] = upload
        waited_for = group_members[-1].node if last is None or journey_seconds(group_members[-1]) <= collected else last
        groups.append(GroupTiming(name, {part: seconds for part, seconds in parts.items() if seconds > 0}, waited_for))
    return tuple(groups)


def journey_parts(journey: Journey, cut: float, seconds: float) -> dict[str, float]:
    """Return what a client did in this many seconds; after `cut` of them it is no longer heard, and waits."""
    if not journey.available:
        return {"away": seconds} if seconds > 0 else {}
    parts, at = {}, 0.0
    for name in STAGES:
        lasts = min(to_ticks(getattr(journey, name)), cut - at)
        if lasts > 0:
            parts[name] = lasts
            at += lasts
    if seconds > at:
        parts["wait"] = seconds - at
    return parts


def journey_seconds(journey: Journey) -> float:
    """Return a journey's length in whole ticks, since a fault may have set any number."""
    return sum(to_ticks(getattr(journey, name)) for name in STAGES)


def clock_offset(journey: Journey) -> Offset:
    """Return what the four timestamps of the exchange say about the client's clock."""
    ahead = journey.clock_offset
    return Offset(ahead - journey.upload, ahead + journey.queue + journey.download)


def time_metrics(journey: Journey) -> dict[str, float]:
    """Return the metrics that a server derives from the timestamps in a client's message and its own clock."""
    metrics = {"time.client_virtual": journey.total, "time.compute_virtual": journey.compute}
    error = clock_offset(journey).beyond_doubt
    # Ticks of 2⁻²⁰ s: what is below a thousandth is rounding.
    return metrics if abs(error) < 1e-3 else {**metrics, "time.clock_error": error}
