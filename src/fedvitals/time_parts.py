# SPDX-License-Identifier: Apache-2.0
"""The parts that a round's time is made of, and how a Span holds them.

One Span describes one node in one round; its attribute `parts` holds what the time went to, in seconds by name, in
order. That takes a fifth of the records that a Span for each part would, with the same content: `unfold` gives the
nested Spans wherever they are shown or exported.

    round                      node None: the whole
    ├ server                   node «server»: wait, receive, aggregate, evaluate, examine
    ├ edge                     an edge node, cluster or ring: wait, aggregate
    │ └ journey                a client as its parent sees it: queue, start, download, data, compute, upload, reply,
    │   │                      wait
    └ journey
      └ client                 the client's own training: data, forward, backward, optimizer, measure, wait

Parts follow each other from the Span's beginning, unless `folded` says that each is the sum of many short stretches, as
for the phases of local steps. The attribute `clock` is «virtual» for times of the lab's clock, and absent otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from fedvitals.records import Metric, Span

ROUND, SERVER, EDGE, JOURNEY, CLIENT = "round", "server", "edge", "journey", "client"  # names of Spans
ROUND_SECONDS = "time.round"  # the metric that marks a round as complete
NESTED = (ROUND, SERVER, EDGE, JOURNEY, CLIENT)  # from the outermost to the innermost

WORK = {  # parts in which work is done, and what bounds a round that mostly consists of them
    "download": "download",
    "data": "data loading",
    "forward": "compute",
    "backward": "compute",  # including the loss and clipping
    "optimizer": "compute",
    "compute": "compute",  # if no more is known, as on the virtual clock
    "measure": "compute",  # the work of fedvitals itself
    "upload": "upload",
    "receive": "server",  # reading, checking and measuring updates
    "aggregate": "aggregation",
    "evaluate": "server",
    "examine": "compute",  # clients evaluate, and the server waits for them
}
REST = {  # parts in which a node waits, and what for
    "queue": "for its turn: a free worker, or the server, which serves one after the other",
    "start": "for its process, which is started anew for each message",
    "reply": "for its answer to be sent off, and for the server to look for it",
    "wait": "for others, until the round is closed",
    "idle": "between two rounds",
    "away": "not there at all",
}
_NUMBER = (int, float)  # created once: `int | float` is created anew on every evaluation
LONGEST = 1e12  # seconds; integers of any size may arrive


def of_the_whole(record: Span | Metric) -> bool:
    """Whether a record describes the whole round: only the server may send one, not a client."""
    if isinstance(record, Span):
        return record.name in NESTED and record.name != CLIENT
    if record.name == ROUND_SECONDS:  # for any node: it would cause a round to be examined before it is over
        return True
    return record.where.node is None and record.name.startswith(("time.", "bottleneck."))


def clock_of(span: Span) -> str:
    """Return «real», or «virtual» for times of the lab's clock."""
    return "virtual" if span.attributes.get("clock") == "virtual" else "real"


def parts_of(span: Span) -> dict[str, float]:
    """Return what the Span's time went to, only plausible values, since it may come from a machine that lies."""
    parts = span.attributes.get("parts")
    if not isinstance(parts, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in parts.items()
        if (name in WORK or name in REST) and isinstance(value, _NUMBER) and 0 <= value <= LONGEST
    }


def unfold(span: Span) -> list[Span]:
    """Return the Span's parts as Spans of their own, in sequence from its beginning; their ids derive from its own."""
    children, at = [], span.at
    folded = {"folded": True} if span.attributes.get("folded") else {}
    clock = {"clock": "virtual"} if clock_of(span) == "virtual" else {}
    for name, seconds in parts_of(span).items():
        own = hashlib.blake2b(f"{span.id}/{name}".encode(), digest_size=8).hexdigest()
        attributes = {**clock, **folded}
        children.append(replace(span, at=at, name=name, seconds=seconds, id=own, parent=span.id, attributes=attributes))
        at += seconds
    return children


def edge_span(round_span: str | None, group: str) -> str:
    """Return the id of a group's Span in a round, which every process can derive to name it as a parent."""
    return hashlib.blake2b(f"{round_span}/{group}".encode(), digest_size=8).hexdigest()
