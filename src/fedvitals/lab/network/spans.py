# SPDX-License-Identifier: Apache-2.0
"""What the observer hears of the virtual clock: a span for each node and round, with its parts (`time_parts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedvitals.lab.engines.work import Node
from fedvitals.lab.network.timetable import Timetable, offset_of, times_told
from fedvitals.lab.network.virtual_clock import Journey
from fedvitals.protocols import Observer
from fedvitals.time_parts import EDGE, JOURNEY, ROUND, SERVER

MEASURED = ("queue", "download", "data", "upload", "wait")  # parts that become metrics; compute is one already


def tell(tables: Sequence[Timetable], observer: Observer, *, metrics: bool) -> None:
    """The round as spans: the whole, the server, groups, and everybody's journey; `metrics`: also as scalars."""
    if not tables:
        return
    began, seconds = tables[0].began, tables[-1].ends - tables[0].began
    whole = observer.span(None, ROUND, began, seconds, clock="virtual")
    tell_server(observer, whole, began, seconds, tables)
    for table in tables:
        parents = {
            group.name: observer.span(
                group.name,
                EDGE,
                table.began,
                group.seconds,
                parent=whole,
                clock="virtual",
                parts=group.parts,
                waited_for=group.waited_for,
            )
            for group in table.groups
        }
        accepted, late, failed = set(table.accepted), set(table.late), set(table.failed)
        for one in table.journeys:
            parts = table.parts(one)
            trouble = {"late": True} if one.node in late else {"lost": True} if one.node in failed else {}
            whom = "server" if one.node == table.waited_for else table.waited_for
            parent = parents.get(one.group or "", whole)
            tell_journey(observer, one, table.seconds, parts, parent, whom, trouble)
            if one.node in accepted:
                observer.log({**times_told(one), **(part_metrics(parts) if metrics else {})}, node=one.node)
    observer.log({"time.round_virtual": seconds})


def tell_server(
    observer: Observer, whole: str | None, began: float, seconds: float, tables: Sequence[Timetable]
) -> None:
    parts: dict[str, float] = {}
    for table in tables:
        for name, spent in table.server_parts().items():
            parts[name] = parts.get(name, 0.0) + spent
    more: dict[str, object] = {"folded": True} if len(tables) > 1 else {}
    if tables[-1].waited_for is not None:
        more["waited_for"] = tables[-1].waited_for
    if any(table.cut_off for table in tables):
        more["deadline"] = True
    observer.span("server", SERVER, began, seconds, parent=whole, clock="virtual", parts=parts, **more)


def tell_journey(
    observer: Observer,
    one: Journey,
    seconds: float,
    parts: Mapping[str, float],
    parent: str | None,
    waited_for: Node | None,
    trouble: Mapping[str, bool],
) -> None:
    """A client's way as its parent sees it, by the server's clock; what is known of the client's own stands beside."""
    more: dict[str, object] = {**trouble}
    if "wait" in parts and waited_for is not None:
        more["waited_for"] = waited_for
    if one.messages > 1:
        more["folded"] = True
    if one.group is not None:
        more["group"] = one.group
    if one.clock_offset:
        offset = offset_of(one)
        more |= {"clock_offset": offset.seconds, "clock_error": offset.error}
    observer.span(one.node, JOURNEY, one.began, seconds, parent=parent, clock="virtual", parts=parts, **more)


def part_metrics(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts of a journey as scalars, those that took time."""
    return {f"time.{name}": parts[name] for name in MEASURED if name in parts}
