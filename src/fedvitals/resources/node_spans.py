# SPDX-License-Identifier: Apache-2.0
"""Makes one node's Spans in a round consistent: limited to what is possible, cut to the round, without overlaps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fedvitals.records import Span
from fedvitals.time_parts import CLIENT, JOURNEY, REST, SERVER, parts_of

UNACCOUNTED = "unaccounted"
NODES = 10_000  # in one round; any more are counted and left out
CLOSE = 1e-5  # seconds: times since the epoch are exact to 2.4e-7, ticks of the virtual clock are 9.5e-7
_TRAINING = ("data", "compute")  # the parts of a journey in which the client trains


class SpanBlock(NamedTuple):
    """A period of one part, or of several that alternated (`folded`), of which only the sums are known."""

    began: float
    seconds: float
    parts: dict[str, float]
    folded: bool
    shared: int  # clients that were trained together in it


class NodeSpan(NamedTuple):
    """One Span of a node, as far as it lies in the round; its parts and the unaccounted rest sum to its seconds."""

    name: str
    began: float
    seconds: float
    parts: dict[str, float]
    folded: bool
    shared: int
    inner: dict[str, float] | None  # what data and compute consisted of, if only sums are known


def recorded_parts(span: Span) -> dict[str, float]:
    """Return a Span's parts; if a client's training or journey has none recorded, a single part: compute."""
    try:
        parts = parts_of(span)
    except OverflowError:  # an integer too large for a float
        parts = {}
    return parts or ({"compute": span.seconds} if span.seconds > 0 and span.name in (CLIENT, JOURNEY) else {})


def node_span_of(span: Span, parts: dict[str, float], began: float, ends: float) -> tuple[NodeSpan, float]:
    """Return the Span as far as it lies in the round, and by how much it was moved to lie there.

    The owner of the round observes a journey, which may have begun earlier: it is cut. A client times its training with
    its own clock, which may be wrong: such a Span is moved, as is one that does not touch the round at all.
    """
    at, seconds = span.at, span.seconds
    own = span.name == CLIENT
    moved = 0.0
    outside = at < began - CLOSE or at + seconds > ends + CLOSE
    if outside and (own or at >= ends or at + seconds <= began):
        moved = max(began, min(at, ends - seconds)) - at
        at += moved
    folded = span.attributes.get("folded") is True
    parts = clamped_parts(parts, seconds)
    inner = None
    if folded and span.name == JOURNEY:
        parts, inner = _exchanged(parts)
        folded = False
    low, high = max(at, began), min(at + seconds, ends)
    if high - low < seconds - CLOSE:
        whole = parts.get("compute", 0.0)
        parts = _cut(parts, low - at, max(0.0, high - low), seconds, folded=folded)
        inner = inner and {part: value * parts.get("compute", 0.0) / whole for part, value in inner.items()}
    stacked = span.attributes.get("stacked")
    shared = stacked if isinstance(stacked, int) and 1 <= stacked <= NODES else 1
    return NodeSpan(span.name, min(low, ends), max(0.0, high - low), parts, folded, shared, inner), moved


def clamped_parts(parts: dict[str, float], seconds: float) -> dict[str, float]:
    """Return parts that sum to `seconds`: an excess is scaled down, a shortfall is added as unaccounted."""
    total = sum(parts.values())
    if total > 1e300:  # no way to know which part of that is true
        return {UNACCOUNTED: seconds}
    if total > seconds:
        return {part: value * seconds / total for part, value in parts.items()}
    return {**parts, UNACCOUNTED: seconds - total} if seconds - total > CLOSE else parts


def _exchanged(parts: dict[str, float]) -> tuple[dict[str, float], dict[str, float] | None]:
    """Return the parts of a journey that goes back and forth many times, and what its middle consists of.

    The exchanges become one period; the client waits before the first of them and after the last.
    """
    inner = {part: value for part, value in parts.items() if part not in REST}
    if not inner:
        return parts, None
    first = {part: parts[part] for part in ("queue",) if part in parts}
    last = {part: value for part, value in parts.items() if part in REST and part not in first}
    return {**first, "compute": sum(inner.values()), **last}, inner


def _cut(parts: dict[str, float], skip: float, keep: float, seconds: float, *, folded: bool) -> dict[str, float]:
    """Return the parts between `skip` and `skip + keep` seconds; for folded parts, their share of it."""
    if folded:
        return {part: value * keep / seconds for part, value in parts.items()}
    parts_held, at = {}, 0.0
    for part, value in parts.items():
        inside = min(at + value, skip + keep) - max(at, skip)
        if inside > 0:
            parts_held[part] = inside
        at += value
    return parts_held


def refined(stay: NodeSpan, inner: list[Span]) -> NodeSpan:
    """Return a journey with the client's own account of its training, limited to the time it can have trained."""
    room = sum(stay.parts.get(part, 0.0) for part in _TRAINING)
    parts: dict[str, float] = {}
    for span in inner:
        add(parts, recorded_parts(span))
    if not room or not any(parts.values()) or stay.inner is not None:
        return stay
    return stay._replace(inner=clamped_parts(parts, room))


def without_overlaps(stays: list[NodeSpan]) -> list[NodeSpan]:
    """Return the Spans in order, without overlaps: the same time reported by two Spans of a node counts once."""
    if len(stays) < 2:
        return stays
    merged: list[NodeSpan] = []
    at = -math.inf
    for stay in sorted(stays, key=lambda span: span.began):
        over = at - stay.began
        if over > CLOSE:
            left = max(0.0, stay.seconds - over)
            parts = _cut(stay.parts, over, left, stay.seconds or 1.0, folded=stay.folded)
            stay = stay._replace(began=at, seconds=left, parts=parts, inner=None)  # noqa: PLW2901 - the remaining part
        at = max(at, stay.began + stay.seconds)
        merged.append(stay)
    return merged


def sums(kind: str, stays: list[NodeSpan], began: float, seconds: float) -> dict[str, float]:
    """Return seconds by part; they sum to the round."""
    seconds_by_part: dict[str, float] = {}
    at = began
    for stay in stays:
        if stay.began > at:
            add(seconds_by_part, {UNACCOUNTED if kind == SERVER else "queue": stay.began - at})
        if stay.inner is None:
            add(seconds_by_part, stay.parts)
        else:
            add(seconds_by_part, {part: value for part, value in stay.parts.items() if part not in _TRAINING})
            add(seconds_by_part, stay.inner)
        at = max(at, stay.began + stay.seconds)
    left = began + seconds - at
    if left > 0:
        add(seconds_by_part, {UNACCOUNTED if kind == SERVER else "wait": left})
    return seconds_by_part


def add(parts: dict[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the parts with the seconds in `more` added to them."""
    for part, value in more.items():
        parts[part] = parts.get(part, 0.0) + value
    return parts


def blocks_of(stay: NodeSpan) -> list[SpanBlock]:
    """Return the blocks that a node's span consists of, in order of time."""
    if stay.folded:
        return [SpanBlock(stay.began, stay.seconds, stay.parts, True, stay.shared)] if stay.seconds > 0 else []
    blocks: list[SpanBlock] = []
    at, inner = stay.began, stay.inner
    for part, value in stay.parts.items():
        if inner is not None and part in _TRAINING:
            room = sum(stay.parts.get(part, 0.0) for part in _TRAINING)
            blocks.append(SpanBlock(at, room, inner, True, stay.shared))
            at, inner = at + room, None
        elif (stay.inner is None or part not in _TRAINING) and value > 0:
            blocks.append(SpanBlock(at, value, {part: value}, False, stay.shared))
            at += value
    return blocks


def covered(stretches: Iterable[tuple[float, float]], began: float = -math.inf, ended: float = math.inf) -> float:
    """Return the seconds between these times in which at least one of the periods was active."""
    total, until = 0.0, began
    for first, last in sorted(stretches):
        total += max(0.0, min(last, ended) - max(first, until))
        until = max(until, last)
    return total
