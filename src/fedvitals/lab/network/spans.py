# SPDX-License-Identifier: Apache-2.0
"""Report the virtual clock to the observer: a span for each node and round, with its parts (`time_parts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.network.round_timing import RoundTiming, clock_offset, time_metrics
from fedvitals.lab.network.virtual_clock import Journey
from fedvitals.protocols import Observer
from fedvitals.time_parts import EDGE, JOURNEY, ROUND, SERVER

MEASURED = ("queue", "download", "data", "upload", "wait")  # parts that become metrics; compute is one already


def record_round_spans(timings: Sequence[RoundTiming], observer: Observer, *, metrics: bool) -> None:
    """Record the spans of a round: the whole, the server, groups and every client's journey; `metrics`: also as
    scalars.
    """
    if not timings:
        return
    began, seconds = timings[0].began, timings[-1].ends - timings[0].began
    round_span = observer.span(None, ROUND, began, seconds, clock="virtual")
    record_server_span(observer, round_span, began, seconds, timings)
    for timing in timings:
        parents: dict[str, str | None] = {}
        for group in timing.groups:
            more = {"clock": "virtual", "parts": group.parts, "waited_for": group.waited_for}
            span = observer.span(group.name, EDGE, timing.began, group.seconds, parent=round_span, **more)
            parents[group.name] = span
        accepted, late, failed = set(timing.accepted), set(timing.late), set(timing.failed)
        for journey in timing.journeys:
            parts = timing.parts(journey)
            trouble = {"late": True} if journey.node in late else {"lost": True} if journey.node in failed else {}
            waited_for = "server" if journey.node == timing.waited_for else timing.waited_for
            parent = parents.get(journey.group or "", round_span)
            record_journey_span(observer, journey, timing.seconds, parts, parent, waited_for, trouble)
            if journey.node in accepted:
                observer.log({**time_metrics(journey), **(part_metrics(parts) if metrics else {})}, node=journey.node)
    observer.log({"time.round_virtual": seconds})


def record_server_span(
    observer: Observer, round_span: str | None, began: float, seconds: float, timings: Sequence[RoundTiming]
) -> None:
    """Record the server's span with its parts."""
    parts: dict[str, float] = {}
    for table in timings:
        for name, spent in table.server_parts().items():
            parts[name] = parts.get(name, 0.0) + spent
    more: dict[str, object] = {"folded": True} if len(timings) > 1 else {}
    if timings[-1].waited_for is not None:
        more["waited_for"] = timings[-1].waited_for
    if any(table.cut_off for table in timings):
        more["deadline"] = True
    observer.span("server", SERVER, began, seconds, parent=round_span, clock="virtual", parts=parts, **more)


def record_journey_span(
    observer: Observer,
    journey: Journey,
    seconds: float,
    parts: Mapping[str, float],
    parent: str | None,
    waited_for: Node | None,
    trouble: Mapping[str, bool],
) -> None:
    """Record a client's journey by the server's clock, with the offset of the client's own clock as an attribute."""
    more: dict[str, object] = {**trouble}
    if "wait" in parts and waited_for is not None:
        more["waited_for"] = waited_for
    if journey.messages > 1:
        more["folded"] = True
    if journey.group is not None:
        more["group"] = journey.group
    if journey.clock_offset:
        offset = clock_offset(journey)
        more |= {"clock_offset": offset.seconds, "clock_error": offset.error}
    observer.span(journey.node, JOURNEY, journey.began, seconds, parent=parent, clock="virtual", parts=parts, **more)


def part_metrics(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of a journey that took time, as scalars."""
    return {f"time.{name}": parts[name] for name in MEASURED if name in parts}
