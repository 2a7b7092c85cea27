# SPDX-License-Identifier: Apache-2.0
"""A view of a run's history truncated at a given round, so that detectors replayed on a stored run see exactly what
they saw live.

Live, later rounds may be present already, because records arrive in batches. The cutoff is set here, once, so that no
detector has to be trusted with it. Answers are cached.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from fedvitals.protocols import History, Node
from fedvitals.records import Event
from fedvitals.stats import Array

LOOK_BACK = 1000  # rounds that detectors see; a long training must not exhaust memory
# A node exists from the first round in which it has one of these metrics, or an event.
SIGNS_OF_LIFE = ("time.client", "steps", "update.norm", "samples", "update.samples", "weight.difference")

T = TypeVar("T")


class CutoffRound:
    """The last round that detectors may see. The examination moves it; detectors have no access to it."""

    def __init__(self) -> None:
        self.round = -1
        self.moves = 0

    def move_to(self, round_index: int) -> None:
        """Let detectors see everything up to and including this round."""
        self.round = round_index
        self.moves += 1


class HistoryCutoff:
    """A `protocols.History` of the rounds up to and including the cutoff round.

    `finished`: nothing is being added to the history, so that answers about all of its rounds may be kept.
    """

    def __init__(self, history: History, horizon: CutoffRound, *, finished: bool = False) -> None:
        self._history = history
        self._horizon = horizon
        self._finished = finished
        self._moves = 0
        self._kept: dict[Hashable, Any] = {}  # answers about the whole run
        self._of_round: dict[Hashable, Any] = {}  # answers that only this round's detectors need
        self._seen: dict[int, frozenset[Node]] = {}  # nodes present, by round

    @property
    def _round(self) -> int:
        return self._horizon.round

    def _ask(self, kept: dict[Hashable, Any], key: Hashable, look_up: Callable[[], T]) -> T:
        if self._moves != self._horizon.moves:
            self._moves = self._horizon.moves
            self._of_round.clear()
            if not self._finished:
                self._kept.clear()
        if key not in kept:
            kept[key] = look_up()
        answer: T = kept[key]
        return answer

    def _all_rounds(self) -> list[int]:
        return self._ask(self._kept, "rounds", self._history.rounds)

    def _span(self, rounds: Sequence[int]) -> slice:
        """Return the part of these (ascending) rounds that may be seen."""
        every = self._all_rounds()
        last = bisect_right(every, self._round)
        first = every[max(0, last - LOOK_BACK)] if last else 0
        return slice(bisect_left(rounds, first), bisect_right(rounds, self._round))

    def rounds(self) -> list[int]:
        every = self._all_rounds()
        return every[self._span(every)]

    def nodes(self) -> list[Node]:
        for round_index in self.rounds():
            if round_index not in self._seen:
                alive = (self._history.latest(name, round_index) for name in SIGNS_OF_LIFE)
                mentioned = {
                    event.where.node for event in self.events(since=round_index) if event.where.round == round_index
                }
                self._seen[round_index] = frozenset(
                    node for nodes in (*alive, mentioned) for node in nodes if node is not None
                )
        present = {node for round_index in self.rounds() for node in self._seen[round_index]}
        return [node for node in self._history.nodes() if node in present]

    def layers(self, family: str) -> tuple[str, ...]:
        return self._ask(self._kept, ("layers", family), lambda: self._history.layers(family))

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        if round_index > self._round:
            return {}
        return self._ask(self._of_round, ("latest", name, round_index), lambda: self._history.latest(name, round_index))

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        rounds, values = self._ask(self._kept, ("series", name, node), lambda: self._history.series(name, node))
        span = self._span(rounds)
        return rounds[span], values[span]

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        key = ("matrix", family, statistic, layer)
        rounds, nodes, values = self._ask(self._kept, key, lambda: self._history.matrix(family, statistic, layer))
        span = self._span(rounds)
        rounds, values = rounds[span], values[span]
        # Nodes that appear only later, or never had a value, are left out.
        there = np.flatnonzero(~np.isnan(values).all(axis=0)) if len(rounds) else np.arange(0)
        return rounds, [nodes[i] for i in there], values[:, there]

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        key = ("across", family, tuple(statistics), round_index)
        nodes, values = self._ask(self._of_round, key, lambda: self._history.across(family, statistics, round_index))
        return (list(nodes), values.copy()) if round_index <= self._round else ([], values[:0])

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        # An event without a round comes from before the first one.
        events = self._ask(self._kept, ("events", name), lambda: self._history.events(name))
        seen = [event for event in events if event.where.round is None or event.where.round <= self._round]
        return seen if since is None else [e for e in seen if e.where.round is not None and e.where.round >= since]
