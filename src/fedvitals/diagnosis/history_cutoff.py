# SPDX-License-Identifier: Apache-2.0
"""A view of a run's history truncated at a given round, so that detectors replayed on a stored run see exactly what
they saw live.

Live, later rounds may already be present, because records arrive in batches. The cutoff is set here, once, so that
detectors need not enforce it.

Answers are cached for all detectors of a round, and so are statistics that several detectors need (`shared`). While a
statistic is computed, the metrics and layer statistics that it depends on are noted, with their rounds. If it depends
on nothing else, it is also kept for the next examined round, as long as nothing is added to these and every examined
round asks for it. What two consecutive examined rounds do not ask for is dropped, so the cache does not grow with the
length of a run.
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

WIDEST_MATRIX = 16  # columns of a family up to which all of them are read together

T = TypeVar("T")
P = ParamSpec("P")


@runtime_checkable
class CountsChanges(Protocol):
    """A history that can tell whether data behind its answers was added."""

    def changes_of(self, name: str, round_index: int) -> Hashable:
        """Return a value that changes when answers about a metric or a family in a round may have changed."""
        ...


def shared(
    function: Callable[Concatenate[History, int, P], T],
) -> Callable[Concatenate[History, int, P], T]:
    """Compute a statistic of a history and a round once for all detectors. The result must not be modified.

    It must depend on the history and the arguments alone. If the history is not a `HistoryCutoff`, it is computed in
    each call. Further arguments are positional and hashable.
    """

    @functools.wraps(function)
    def once(history: History, round_index: int, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not isinstance(history, HistoryCutoff):
            return function(history, round_index, *args, **kwargs)
        return history.computed((function, round_index, args), lambda: function(history, round_index, *args, **kwargs))

    return once


def state_of(history: History, kind: type[T]) -> T:
    """Return a detector's state for a history: an object of this class, created on first use.

    If the history is not a `HistoryCutoff`, a new one each time.
    """
    return history.state(kind) if isinstance(history, HistoryCutoff) else kind()


Basis = dict[tuple[str, int | None], Hashable]
"""The dependencies of an answer: metrics or families of a round, each with the value that changes when it does.

Without a round: the names of a family's layers.
"""


@dataclass(slots=True)
class _Answer:
    """An answer, its dependencies (None: more than can be compared), and when it was last asked for."""

    answer: Any
    basis: Basis | None
    move: int


class CutoffRound:
    """The last round that detectors may see. The examination advances it; detectors have no access to it."""

    def __init__(self) -> None:
        self.round = -1
        self.moves = 0

    def move_to(self, round_index: int) -> None:
        """Let detectors see everything up to and including this round."""
        self.round = round_index
        self.moves += 1


class HistoryCutoff:
    """A `protocols.History` of the rounds up to and including the cutoff round.

    `finished`: nothing is being added to the history, so answers about all of its rounds may be cached.
    """

    def __init__(self, history: History, horizon: CutoffRound, *, finished: bool = False) -> None:
        self._history = history
        self._horizon = horizon
        self._finished = finished
        self._changes = history if isinstance(history, CountsChanges) else None
        self._moves = 0
        self._kept: dict[Hashable, Any] = {}  # answers about the whole run
        self._answers: dict[Hashable, _Answer] = {}  # answers about one round, and statistics of it
        self._noted: list[Basis | None] = []  # dependencies of the statistics being computed, innermost last
        self._states: dict[type, Any] = {}
        self._seen: dict[int, frozenset[Node]] = {}  # nodes present, by round

    @property
    def _round(self) -> int:
        return self._horizon.round

    def _follow(self) -> None:
        """After the cutoff has moved, drop what the next round must not know or does not need."""
        if self._moves == self._horizon.moves:
            return
        self._moves = self._horizon.moves
        if not self._finished:
            self._kept.clear()
        self._answers = {
            key: kept for key, kept in self._answers.items() if kept.basis is not None and kept.move >= self._moves - 1
        }

    def _ask(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """Return an answer about the whole run, looked up once, or once per examined round while the run continues."""
        self._follow()
        self._note(None)
        if key not in self._kept:
            self._kept[key] = look_up()
        answer: T = self._kept[key]
        return answer

    def computed(self, key: Hashable, look_up: Callable[[], T]) -> T:
        """Return a cached answer, or look it up and note its dependencies."""
        self._follow()
        kept = self._answers.get(key)
        if kept is None or (kept.move != self._moves and not self._still_holds(kept.basis)):
            self._noted.append({})
            try:
                answer = look_up()
            except BaseException:
                self._noted.pop()
                self._note(None)  # an enclosing statistic may continue without it
                raise
            kept = self._answers[key] = _Answer(answer, self._noted.pop(), self._moves)
        kept.move = self._moves
        self._note(kept.basis)
        result: T = kept.answer
        return result

    def _note(self, basis: Basis | None) -> None:
        """Note a dependency of the statistic being computed; None: more than can be compared."""
        if self._noted and self._noted[-1] is not None:
            if basis is None:
                self._noted[-1] = None
            else:
                self._noted[-1].update(basis)

    def _still_holds(self, basis: Basis | None) -> bool:
        return basis is not None and all(self._state_of(*part) == state for part, state in basis.items())

    def _state_of(self, name: str, round_index: int | None) -> Hashable:
        if round_index is None:
            return self._kept_layers(name)
        return self._changes.changes_of(name, round_index) if self._changes is not None else None

    def _rests_on(self, name: str, round_index: int | None) -> None:
        """Note that an answer depends on a metric or a family in a round, or on the layers of a family."""
        if round_index is not None and (round_index > self._round or not (self._finished or self._changes)):
            self._note(None)
        elif round_index is None or not self._finished:
            self._note({(name, round_index): self._state_of(name, round_index)})

    def state(self, kind: type[T]) -> T:
        """Return the object of this class that is kept across all examined rounds."""
        if kind not in self._states:
            self._states[kind] = kind()
        state: T = self._states[kind]
        return state

    def kept_answers(self) -> int:
        """Return the number of cached answers; tests check that it does not grow."""
        return len(self._answers) + len(self._kept) + len(self._seen)

    def _all_rounds(self) -> list[int]:
        return self._ask("rounds", self._history.rounds)

    def _span(self, rounds: Sequence[int]) -> slice:
        """Return the slice of these (ascending) rounds that may be seen."""
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
        names = self._kept_layers(family)
        self._note({(family, None): names})
        return names

    def _kept_layers(self, family: str) -> tuple[str, ...]:
        self._follow()
        key = ("layers", family)
        if key not in self._kept:
            self._kept[key] = self._history.layers(family)
        names: tuple[str, ...] = self._kept[key]
        return names

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        if round_index > self._round:
            self._note(None)
            return {}

        def look_up() -> Mapping[Node, float]:
            self._rests_on(name, round_index)
            return self._history.latest(name, round_index)

        return self.computed(("latest", name, round_index), look_up)

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
        if round_index > self._round:
            self._note(None)
            for statistic in statistics:  # an unknown one is an error whenever it is asked for
                self._history.across(family, (statistic,), round_index)
            return [], np.empty((0, len(self.layers(family)), len(statistics)))
        columns, known = (FAMILIES[family].columns, statistics_of(family)) if family in FAMILIES else ((), ())
        # Only the live history has all columns for certain: a recording of the fault bank keeps what detectors ask for.
        if self._changes is None or len(columns) > WIDEST_MATRIX or any(name not in known for name in statistics):
            nodes, values = self._read(family, tuple(statistics), round_index)
            return list(nodes), values.copy()
        nodes, sums = self._read(family, columns, round_index)
        values = np.empty((*sums.shape[:2], len(statistics)))
        with np.errstate(all="ignore"):
            for column, statistic in enumerate(statistics):
                values[..., column] = derive(family, sums, statistic)
        return list(nodes), values

    def _read(self, family: str, statistics: tuple[str, ...], round_index: int) -> tuple[list[Node], Array]:
        """Return the statistics of a round as the history has them. The result must not be modified."""

        def look_up() -> tuple[list[Node], Array]:
            self._rests_on(family, None)
            self._rests_on(family, round_index)
            return self._history.across(family, statistics, round_index)

        return self.computed(("across", family, statistics, round_index), look_up)

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        # An event without a round comes from before the first one.
        if since is None:
            return list(self.computed(("events", name), lambda: self._events_up_to_now(name)))
        if not self._finished:
            events = self._ask(("events", name, since), lambda: self._history.events(name, since))
            return [event for event in events if event.where.round is not None and event.where.round <= self._round]
        by_round = self._ask(("events by round", name), lambda: self._events_by_round(name))
        numbered = [pair for n, pairs in by_round.items() if since <= n <= self._round for pair in pairs]
        return [event for _, event in sorted(numbered, key=lambda pair: pair[0])]

    def _events_up_to_now(self, name: str | None) -> list[Event]:
        events = self._ask(("events", name), lambda: self._history.events(name))
        return [event for event in events if event.where.round is None or event.where.round <= self._round]

    def _events_by_round(self, name: str | None) -> dict[int, list[tuple[int, Event]]]:
        """Return the events of each round with their positions in the overall order."""
        by_round: dict[int, list[tuple[int, Event]]] = {}
        for place, event in enumerate(self._ask(("events", name), lambda: self._history.events(name))):
            if event.where.round is not None:
                by_round.setdefault(event.where.round, []).append((place, event))
        return by_round
