# SPDX-License-Identifier: Apache-2.0
"""How a round's length follows from its clients' times, so that the length for other times can be computed.

If clients work in parallel, the round waits for the last; if they take turns, in one process or on a few workers, it
takes the sum of their times. The server's work after the last of them stays unchanged.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.analysis.timeline import NodeTime, RoundTime, by_class, span_of_work
from fedvitals.resources.node_spans import CLOSE
from fedvitals.time_parts import JOURNEY, REST

Seconds = npt.NDArray[np.float64]
CLASSES = ("download", "data loading", "compute", "upload", "other")  # of a client's work; the columns of `work`
WAITED = 0.3  # share of clients' Spans spent waiting, from which they share a process


@dataclass(frozen=True, slots=True, eq=False)
class RoundShape:
    """A round as the result of its clients' times."""

    nodes: tuple[str, ...]
    work: Seconds  # [clients, CLASSES]
    fixed: Seconds  # when each began, its waits in between, and its edge's work after it
    line: Seconds  # the part of `fixed` in which each waited while the server sent the model to others
    samples: Seconds  # NaN where unknown
    exchanging: bool  # clients exchange messages after each step, so there are as many messages as steps
    slots: int | None  # clients that work at a time, if they take turns; None: all of them do
    overhead: float  # additional seconds of each turn
    rest: float  # of the round: before the first client and after the last
    seconds: float
    asynchronous: bool = False  # clients come and go: a round lasts as long as it takes for some of them to finish

    def length(
        self, work: Seconds | None = None, keep: npt.NDArray[np.bool_] | None = None, line: float = 1.0
    ) -> float:
        """Return the round's seconds with other times, with only some of the clients, or with a faster line of the
        server.
        """
        work = self.work if work is None else work
        each = work.sum(axis=1)
        if self.asynchronous:  # each finishes once in its own time, so all together Σ 1/time per second
            rates = 1 / np.maximum(each + self.fixed, CLOSE)
            usual = float((1 / np.maximum(self.work.sum(axis=1) + self.fixed, CLOSE)).sum())
            return self.seconds * usual / max(1e-9, float((rates if keep is None else rates[keep]).sum()))
        if self.slots is None:
            ends = each + self.fixed - (1 - line) * self.line
            ends = ends if keep is None else ends[keep]
            return max(0.0, float(ends.max(initial=0.0)) + self.rest)
        each = (each if keep is None else each[keep]) + self.overhead
        return max(0.0, turns_seconds(each, self.slots) + self.rest)

    def without(self, nodes: Collection[str]) -> float:
        """Return the round's seconds without some clients."""
        gone = set(nodes)
        keep = np.array([node not in gone for node in self.nodes], bool)
        return self.seconds if keep.all() else min(self.seconds, self.length(keep=keep))

    @property
    def ends(self) -> Seconds:
        """When each client is done, in seconds since the round began; if they take turns, how long each takes."""
        ends: Seconds = self.work.sum(axis=1)
        return ends + self.fixed if self.slots is None else ends + self.overhead


def shape_of(time: RoundTime) -> RoundShape:
    """Return the shape of a round."""
    clients = [node for node in time.clients if node.busy > 0]
    hulls = np.array([span_of_work(node) for node in clients], np.float64).reshape(-1, 2) - time.began
    slots = _parallel_slots(time, clients, hulls)
    turns = slots is not None
    work = np.array([_work(node, turns=turns) for node in clients], np.float64).reshape(-1, len(CLASSES))
    samples = np.array([np.nan if node.samples is None else node.samples for node in clients], np.float64)
    names = tuple(node.node for node in clients)
    if not clients:
        nothing = np.zeros(0)
        return RoundShape(names, work, nothing, nothing, samples, False, None, 0.0, time.seconds, time.seconds)
    first, last = float(hulls[:, 0].min()), float(hulls[:, 1].max())
    if slots is not None:
        order = np.argsort(hulls[:, 0], kind="stable")
        names, work, samples = tuple(names[i] for i in order), work[order], samples[order]
        each = work.sum(axis=1)
        overhead = max(0.0, last - first - turns_seconds(each, slots)) * slots / len(each)
        rest = time.seconds - turns_seconds(each + overhead, slots)
        nothing = np.zeros(len(each))
        return RoundShape(names, work, nothing, nothing, samples, False, slots, overhead, rest, time.seconds)
    fixed = hulls[:, 1] - work.sum(axis=1) + _seconds_after(time, clients, hulls)
    rest = time.seconds - float((work.sum(axis=1) + fixed).max())
    line = np.array([_line_seconds(node) for node in clients])
    exchanging = any(stay.inner is not None and "download" in stay.inner for node in clients for stay in node.stays)
    return RoundShape(names, work, fixed, line, samples, exchanging, None, 0.0, rest, time.seconds)


def asynchronous_shape(time: RoundTime) -> RoundShape:
    """Return the shape of an asynchronous server's round: whole journeys, including their time before the round."""
    clients = [node for node in time.clients if node.busy > 0]
    reported = [replace(node, parts=node.reported) for node in clients]
    work = np.array([_work(node, turns=False) for node in reported], np.float64).reshape(-1, len(CLASSES))
    samples = np.array([np.nan if node.samples is None else node.samples for node in clients], np.float64)
    queues = np.array([node.reported.get("queue", 0.0) for node in clients])
    nothing = np.zeros(len(clients))
    names = tuple(node.node for node in clients)
    return RoundShape(names, work, queues, nothing, samples, False, None, 0.0, 0.0, time.seconds, True)


def turns_seconds(each: Seconds, slots: int) -> float:
    """Return how long tasks take on `slots` workers, each given to the first that is free."""
    if slots <= 1 or not len(each):
        return float(each.sum())
    free = [0.0] * min(slots, len(each))
    for seconds in each.tolist():
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def _work(node: NodeTime, *, turns: bool) -> list[float]:
    """Return seconds by class; clients trained as one batch each get their share."""
    by_kind = by_class({part: seconds for part, seconds in node.parts.items() if part not in REST})
    row = [by_kind.pop(name, 0.0) for name in CLASSES[:-1]]
    row.append(sum(by_kind.values()))
    shared = max((stay.shared for stay in node.stays), default=1)
    return [seconds / shared for seconds in row] if turns and shared > 1 else row


def _line_seconds(node: NodeTime) -> float:
    """Return the seconds until the server began to send to a client, if that is what it waited for."""
    stay = node.stays[0]
    sent = "download" in stay.parts or (stay.inner is not None and "download" in stay.inner)
    return stay.parts["queue"] if sent and next(iter(stay.parts)) == "queue" else 0.0


def _parallel_slots(time: RoundTime, clients: list[NodeTime], hulls: Seconds) -> int | None:
    """Return how many clients work at a time, or None if all of them do.

    On the virtual clock, or if clients' updates arrive as messages, each has its own machine.
    """
    if time.clock == "virtual" or len(clients) < 2 or any(s.name == JOURNEY for node in clients for s in node.stays):
        return None
    inside = sum(stay.seconds for node in clients for stay in node.stays)
    waited = sum(v for node in clients for stay in node.stays for part, v in stay.parts.items() if part in REST)
    stacked = any(stay.shared > 1 for node in clients for stay in node.stays)
    if stacked or waited > WAITED * inside:
        each = [sum(_work(node, turns=True)) for node in clients]
        under_way = float(hulls[:, 1].max() - hulls[:, 0].min())
        return max(1, round(sum(each) / under_way)) if under_way > 0 else 1
    overlap = max_overlap(hulls)
    return None if overlap >= len(clients) else overlap


def max_overlap(hulls: Seconds) -> int:
    """Return the largest number of intervals [began, ended] that overlap, by more than clocks can distinguish."""
    changes = sorted([(began + CLOSE, 1) for began, _ in hulls] + [(ended, -1) for _, ended in hulls])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return max(1, most)


def _seconds_after(time: RoundTime, clients: list[NodeTime], hulls: Seconds) -> Seconds:
    """Return the seconds that each client's edge needed after its last member, for averaging and sending."""
    last: dict[str, float] = {}
    for node, (_, ended) in zip(clients, hulls, strict=True):
        if node.group is not None:
            last[node.group] = max(last.get(node.group, 0.0), float(ended))
    tails = {
        edge.node: max(0.0, span_of_work(edge)[1] - time.began - last[edge.node])
        for edge in time.edges
        if edge.node in last
    }
    return np.array([tails.get(node.group or "", 0.0) for node in clients])


def scaled_work(shape: RoundShape, factors: Mapping[str, Any]) -> Seconds:
    """Return the clients' work with some classes scaled; a factor is a number, or one per client."""
    work = shape.work.copy()
    for name, factor in factors.items():
        work[:, CLASSES.index(name)] *= factor
    return work
