# SPDX-License-Identifier: Apache-2.0
"""Breakpoints and watchpoints of a session, numbered as in other debuggers."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fedvitals.errors import ConfigError
from fedvitals.protocols import History
from fedvitals.records import Finding
from fedvitals.replay.debugger.cached_history import CachedHistory
from fedvitals.replay.debugger.conditions import RoundCondition, parse, parse_quantity
from fedvitals.replay.debugger.quantities import Quantity


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A breakpoint, which stops, or a watchpoint, which only reports."""

    number: int
    what: RoundCondition | Quantity
    stops: bool
    hits: int = 0

    def __str__(self) -> str:
        times = f", hit {self.hits} time{'s' * (self.hits != 1)}" if self.hits else ""
        return f"{self.number}: {'break' if self.stops else 'watch'} {self.what}{times}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A breakpoint whose condition held in a round, or a watchpoint whose value changed; number 0: requested by the
    user.
    """

    number: int
    round: int
    text: str
    reason: str  # what was seen, with numbers
    stops: bool = True

    def __str__(self) -> str:
        if not self.number:
            return f"Round {self.round}: {self.reason}"
        return f"{'Breakpoint' if self.stops else 'Watchpoint'} {self.number}, round {self.round}: {self.reason}"


Hits = list[Hit]


class Breakpoints:
    """The breakpoints and watchpoints of one session."""

    def __init__(self, *texts: str) -> None:
        self._points: dict[int, Breakpoint] = {}
        self._next = 1
        self._lock = threading.Lock()  # a live run is looked at from another thread
        for text in texts:
            self.add(text)

    def add(self, text: str, history: History | None = None) -> int:
        """Add a breakpoint and return its number. With the history of a finished run, names are checked against it."""
        condition = parse(text)
        if history is not None:
            condition.check(history)
        return self._put(condition, stops=True)

    def watch(self, text: str, history: History | None = None) -> int:
        """Add a watchpoint for a number («accuracy», «update.norm of c7») or a condition, and return its number."""
        what: RoundCondition | Quantity
        try:
            what = parse_quantity(text)
        except ConfigError as no_number:
            try:
                what = parse(text)
            except ConfigError:
                raise no_number from None
        if history is not None:
            what.check(history)
        return self._put(what, stops=False)

    def remove(self, number: int) -> None:
        """Remove a breakpoint or watchpoint. Raises ConfigError if there is none of this number."""
        with self._lock:
            if self._points.pop(number, None) is None:
                known = ", ".join(map(str, self._points)) or "none"
                raise ConfigError(f"There is no breakpoint or watchpoint {number}. There are: {known}.")

    def clear(self) -> None:
        """Remove all breakpoints and watchpoints."""
        with self._lock:
            self._points.clear()

    def list(self) -> tuple[Breakpoint, ...]:
        """Return all breakpoints and watchpoints, by number."""
        with self._lock:
            return tuple(self._points.values())

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def check(
        self,
        history: History,
        findings: Sequence[Finding],
        round_index: int,
        *,
        but: Collection[int] = (),
    ) -> Hits:
        """Return the hits of a round, by number; `but`: numbers that were reported already."""
        points = (point for point in self.list() if point.number not in but)
        hits = [hit for point in points if (hit := _hit_of(point, history, findings, round_index)) is not None]
        with self._lock:
            for hit in hits:
                if hit.number in self._points:
                    point = self._points[hit.number]
                    self._points[hit.number] = replace(point, hits=point.hits + 1)
        return hits

    def first(self, history: History, findings: Sequence[Finding], rounds: Iterable[int]) -> Hit | None:
        """Return the first breakpoint hit in these rounds of a finished run, in their order; None if none is."""
        known, by_round = CachedHistory(history), dict[int | None, list[Finding]]()
        for finding in findings:
            by_round.setdefault(finding.where.round, []).append(finding)
        stopping = [point for point in self.list() if point.stops]
        for round_index in rounds:
            for point in stopping:
                hit = _hit_of(point, known, by_round.get(round_index, ()), round_index)
                if hit is not None:
                    return hit
        return None

    def _put(self, what: RoundCondition | Quantity, *, stops: bool) -> int:
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._points[number] = Breakpoint(number, what, stops)
        return number


def _hit_of(point: Breakpoint, history: History, findings: Sequence[Finding], round_index: int) -> Hit | None:
    if point.stops and isinstance(point.what, RoundCondition):
        words = point.what.holds(history, findings, round_index)
    elif isinstance(point.what, RoundCondition):
        words = _condition_changes(point.what, history, findings, round_index)
    else:
        words = _quantity_changes(point.what, history, round_index)
    return None if words is None else Hit(point.number, round_index, str(point.what), words, point.stops)


def _condition_changes(
    condition: RoundCondition, history: History, findings: Sequence[Finding], round_index: int
) -> str | None:
    """Return in words that a condition begins or ceases to hold in this round; None if neither."""
    before = max((r for r in history.rounds() if r < round_index), default=None)
    now = condition.holds(history, findings, round_index)
    was = None if before is None else condition.holds(history, findings, before)
    if (now is None) == (was is None):
        return None
    return now if now is not None else f"no longer: {condition}"


def _quantity_changes(quantity: Quantity, history: History, round_index: int) -> str | None:
    words = []
    for reading in quantity.readings(history, round_index):
        past = reading.past()
        if not past:
            words.append(f"{reading.label} is {reading.value:.6g}")
        elif past[-1][1] != reading.value and not (math.isnan(past[-1][1]) and math.isnan(reading.value)):
            words.append(f"{reading.label} is {reading.value:.6g}, was {past[-1][1]:.6g} in round {past[-1][0]}")
    return "; ".join(words) or None
