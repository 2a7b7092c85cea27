# SPDX-License-Identifier: Apache-2.0
"""Spans written by hand: rounds of which every second is known."""

from fedvitals.records import Span, Where

STARTED = 1.7e9


def span(node, name, began, seconds, number=0, *, group=None, parent=None, own=None, **attributes):
    """`began`: seconds after the run did."""
    own = own or f"{name}/{node}/{number}/{began}"
    where = Where("r", number, node, group=group)
    return Span(where, STARTED + began, name, seconds, "t", own, parent or f"round/None/{number}", attributes)


def whole(seconds, number=0, began=0.0, **attributes):
    return span(None, "round", began, seconds, number, own=f"round/None/{number}", parent=None, **attributes)


def journey(node, number=0, began=0.0, ends=None, *, group=None, clock="virtual", **parts):
    """A client's way; `ends`: the round's end, up to which it waits."""
    attributes = {"clock": clock} if clock == "virtual" else {}
    seconds = sum(parts.values())
    if ends is not None and ends - began > seconds:
        parts["wait"] = ends - began - seconds
    more = {"parts": parts, **attributes}
    return span(node, "journey", began, sum(parts.values()), number, group=group, **more)


def server(seconds, number=0, began=0.0, *, clock="virtual", folded=False, **parts):
    more = ({"clock": "virtual"} if clock == "virtual" else {}) | ({"folded": True} if folded else {})
    return span("server", "server", began, seconds, number, parts=parts, **more)


def side_by_side(ways, number=0, began=0.0, aggregate=0.5, groups=None, samples=None):
    """A synchronous round on the virtual clock: node → {part: seconds}; the server averages at last."""
    length = max(sum(parts.values()) for parts in ways.values())
    ends = began + length + aggregate
    spans = [
        whole(length + aggregate, number, began, clock="virtual"),
        server(length + aggregate, number, began, wait=length, aggregate=aggregate),
    ]
    for node, parts in ways.items():
        made = journey(node, number, began, ends, group=(groups or {}).get(node), **parts)
        made.attributes.update({"samples": samples[node]} if samples else {})
        spans.append(made)
    return spans


def in_turn(seconds, number=0, began=0.0, gap=0.0, after=0.0, shares=None):
    """A plain loop: node → seconds, one after the other with a pause; their parts by `shares`, folded."""
    at, spans = began, []
    shares = shares or {"data": 0.2, "forward": 0.3, "backward": 0.5}
    for node, lasts in seconds.items():
        parts = {part: share * lasts for part, share in shares.items()}
        spans.append(span(node, "client", at, lasts, number, parts=parts, folded=True))
        at += lasts + gap
    return [whole(at - began + after, number, began), *spans]
