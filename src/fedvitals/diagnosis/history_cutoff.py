# SPDX-License-Identifier: Apache-2.0
"""A view of a run's history truncated at a given round, so that detectors replayed on a stored run see exactly what
they saw live.

Live, later rounds may be present already, because records arrive in batches. The cutoff is set here, once, so that no
detector has to be trusted with it.

Answers are kept for all detectors of a round, and so are statistics that several detectors need (`shared`). Those that
rest on the records of a few rounds alone (`shared_while_unchanged`) are kept for the next round too: as long as these
rounds get no further records, and as long as every examined round asks for them again. What is not asked for in two
examined rounds in a row is dropped, so what is kept does not grow with the length of a run.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np

from fedvitals.protocols import History, Node
from fedvitals.records import Event
from fedvitals.stats import FAMILIES, Array, derive, statistics_of

LOOK_BACK = 1000  # rounds that detectors see; a long training must not exhaust memory
# A node exists from the first round in which it has one of these metrics, or an event.
SIGNS_OF_LIFE = ("time.client", "steps", "update.norm", "samples", "update.samples", "weight.difference")

WIDEST_MATRIX = 16  # columns of a family up to which all of them are read at once

T = TypeVar("T")
P = ParamSpec("P")


@runtime_checkable
class CountsChanges(Protocol):
    """A history that tells whether a round has got further records."""

    def changes_of(self, round_index: int) -> Hashable:
        """Return a value that differs whenever answers about this round may differ."""
        ...


def shared(
    function: Callable[Concatenate[History, int, P], T],
) -> Callable[Concatenate[History, int, P], T]:
    """Compute a statistic of a history and a round once for all detectors that examine a round. Nobody may change it.

    Where the history is no `HistoryCutoff`, it is computed in each call. Further arguments are positional and hashable.
    """

    @functools.wraps(function)
    def once(history: History, round_index: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(history, HistoryCutoff):
            return function(history, round_index, *args, **kwargs)
        return history.computed((function, round_index, args), lambda: function(history, round_index, *args, **kwargs))

    return once


def shared_while_unchanged(
    *families: str, back: int = 0
) -> Callable[[Callable[Concatenate[History, int, P], T]], Callable[Concatenate[History, int, P], T]]:
    """Like `shared`, for a statistic that rests on nothing but the records of this round and of `back` rounds before,
    and on the names of the layers of `families`: it is kept until one of these changes.
    """

    def decorate(
        function: Callable[Concatenate[History, int, P], T],
    ) -> Callable[Concatenate[History, int, P], T]:
        @functools.wraps(function)
        def once(history: History, round_index: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
            if not isinstance(history, HistoryCutoff):
                return function(history, round_index, *args, **kwargs)
            return history.computed(
                (function, round_index, args),
                lambda: function(history, round_index, *args, **kwargs),
                families=families,
                rounds=range(round_index - back, round_index + 1),
            )

        return once

    return decorate


def state_of(history: History, kind: type[T]) -> T:
    """Return what a detector keeps of a history from round to round: an object of this class, made when first asked
    for. Where the history is no `HistoryCutoff`, a new one each time.
    """
    return history.state(kind) if isinstance(history, HistoryCutoff) else kind()


@dataclass(slots=True)
class _Answer:
    """An answer, what it rests on (None: on more than can be compared), and when it was last asked for."""

    answer: Any
    basis: Hashable
    move: int


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
        self._changes = history if isinstance(history, CountsChanges) else None
        self._moves = 0
        self._kept: dict[Hashable, Any] = {}  # answers about the whole run
        self._answers: dict[Hashable, _Answer] = {}  # answers about one round, and statistics of it
        self._states: dict[type, Any] = {}
        self._seen: dict[int, frozenset[Node]] = {}  # nodes present, by round

    @property
    def _round(self) -> int:
        return self._horizon.round

    def _follow(self) -> None:
        """Drop what the next round must not, or need not, know, once the cutoff has moved."""
        if self._moves == self._horizon.moves:
            return
        self._moves = self._horizon.moves
        if not self._finished:
            self._kept.clear()
        self._answers = {
            key: kept for key, kept in self._answers.items() if kept.basis is not None and kept.move >= self._moves - 1
        }

    def _ask(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """Return an answer about the whole run; looked up once, or once for each examined round while it goes on."""
        self._follow()
        if key not in self._kept:
            self._kept[key] = look_up()
        answer: T = self._kept[key]
        return answer

    def computed(
        self, key: Hashable, look_up: Callable[[], T], families: Sequence[str] = (), rounds: Sequence[int] = ()
    ) -> T:
        """Return an answer that rests on the records of `rounds` and on the layers of `families`, if these are given;
        else it is looked up again for each examined round.
        """
        self._follow()
        kept = self._answers.get(key)
        if kept is None or kept.move != self._moves:
            basis = self._basis(families, rounds) if rounds else None
            if kept is None or basis is None or kept.basis != basis:
                kept = self._answers[key] = _Answer(look_up(), basis, self._moves)
            kept.move = self._moves
        answer: T = kept.answer
        return answer

    def _basis(self, families: Sequence[str], rounds: Sequence[int]) -> Hashable:
        """Return what an answer rests on, to be compared later; None where the history cannot tell."""
        if rounds[-1] > self._round:
            return None
        names = tuple(self.layers(family) for family in families)
        if self._finished:
            return names
        if self._changes is None:
            return None
        return (names, *(self._changes.changes_of(round_index) for round_index in rounds))

    def state(self, kind: type[T]) -> T:
        """Return the object of this class that is kept for all examined rounds."""
        if kind not in self._states:
            self._states[kind] = kind()
        state: T = self._states[kind]
        return state

    def kept_answers(self) -> int:
        """Return how many answers are kept: for tests, which count that they do not grow."""
        return len(self._answers) + len(self._kept) + len(self._seen)

    def _all_rounds(self) -> list[int]:
        return self._ask("rounds", self._history.rounds)

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
        rounds = self.rounds()
        self._seen = {n: nodes for n, nodes in self._seen.items() if rounds and n >= rounds[0]}
        for round_index in rounds:
            if round_index not in self._seen:
                alive = (self._history.latest(name, round_index) for name in SIGNS_OF_LIFE)
                mentioned = {
                    event.where.node for event in self.events(since=round_index) if event.where.round == round_index
                }
                self._seen[round_index] = frozenset(
                    node for nodes in (*alive, mentioned) for node in nodes if node is not None
                )
        present = {node for round_index in rounds for node in self._seen[round_index]}
        return [node for node in self._history.nodes() if node in present]

    def layers(self, family: str) -> tuple[str, ...]:
        return self._ask(("layers", family), lambda: self._history.layers(family))

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        if round_index > self._round:
            return {}
        return self.computed(
            ("latest", name, round_index), lambda: self._history.latest(name, round_index), rounds=(round_index,)
        )

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        rounds, values = self._ask(("series", name, node), lambda: self._history.series(name, node))
        span = self._span(rounds)
        return rounds[span], values[span]

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        key = ("matrix", family, statistic, layer)
        rounds, nodes, values = self._ask(key, lambda: self._history.matrix(family, statistic, layer))
        span = self._span(rounds)
        rounds, values = rounds[span], values[span]
        # Nodes that appear only later, or never had a value, are left out.
        there = np.flatnonzero(~np.isnan(values).all(axis=0)) if len(rounds) else np.arange(0)
        return rounds, [nodes[i] for i in there], values[:, there]

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        kind, known = FAMILIES.get(family), statistics_of(family) if family in FAMILIES else ()
        if kind is None or len(kind.columns) > WIDEST_MATRIX or any(name not in known for name in statistics):
            key = ("across", family, tuple(statistics), round_index)
            nodes, values = self.computed(
                key, lambda: self._history.across(family, statistics, round_index), (family,), (round_index,)
            )
            return (list(nodes), values.copy()) if round_index <= self._round else ([], values[:0])
        if round_index > self._round:
            return [], np.empty((0, len(self.layers(family)), len(statistics)))
        nodes, sums = self.computed(
            ("sums", family, round_index),
            lambda: self._history.across(family, kind.columns, round_index),
            (family,),
            (round_index,),
        )
        values = np.empty((*sums.shape[:2], len(statistics)))
        with np.errstate(all="ignore"):
            for column, statistic in enumerate(statistics):
                values[..., column] = derive(family, sums, statistic)
        return list(nodes), values

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        # An event without a round comes from before the first one.
        if since is None:
            return list(self.computed(("events", name), lambda: self._events_up_to_now(name)))
        if not self._finished:
            events = self.computed(("events", name, since), lambda: self._history.events(name, since))
            return [event for event in events if event.where.round is not None and event.where.round <= self._round]
        by_round = self._ask(("events by round", name), lambda: self._events_by_round(name))
        numbered = [pair for n, pairs in by_round.items() if since <= n <= self._round for pair in pairs]
        return [event for _, event in sorted(numbered, key=lambda pair: pair[0])]

    def _events_up_to_now(self, name: str | None) -> list[Event]:
        events = self._ask(("events", name), lambda: self._history.events(name))
        return [event for event in events if event.where.round is None or event.where.round <= self._round]

    def _events_by_round(self, name: str | None) -> dict[int, list[tuple[int, Event]]]:
        """Return the events of each round with their places in the order of all."""
        by_round: dict[int, list[tuple[int, Event]]] = {}
        for place, event in enumerate(self._ask(("events", name), lambda: self._history.events(name))):
            if event.where.round is not None:
                by_round.setdefault(event.where.round, []).append((place, event))
        return by_round
