# SPDX-License-Identifier: Apache-2.0
"""Computes where the time of some rounds went, of as many rounds as can be read while a person waits.

`views.profile` reads all of a run's Spans: half a million, of a thousand clients and five hundred rounds. Here it is
the newest rounds, unless others are asked for, and the page says which. For all rounds there is `views.phases`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, TypeVar

from fedvitals.analysis.bottleneck import RunVerdict, judge
from fedvitals.analysis.critical_path import CriticalPath, critical_path
from fedvitals.analysis.remedies import remedies
from fedvitals.analysis.stragglers import stragglers
from fedvitals.analysis.timeline import RoundTime, main_clock, rounds_of_clock, timeline
from fedvitals.analysis.what_if import what_if
from fedvitals.errors import ConfigError
from fedvitals.plain_json import copied
from fedvitals.records import Span, Transfer
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import end_of_run
from fedvitals.store.read.spans import count_between, count_spans, records_between
from fedvitals.views.memo import remembered
from fedvitals.views.profile import seconds_by_part, waited_for

R = TypeVar("R", Span, Transfer)
SPANS = 4000  # that are read unless somebody asks for more: a third of a second
MOST_SPANS = 20_000  # that are read at all: a second or two
ROUNDS = 50  # that are looked at unless somebody asks for more
NAMED = 10  # nodes in a list
CUT = 5  # clients that a row of the what-if table names
LEAST = 0.02  # of a round: a smaller gain is not worth a line


@dataclass(frozen=True, slots=True)
class Window:
    """Which rounds were looked at."""

    first: int | None
    last: int | None
    rounds: int
    of: int  # rounds that the run has
    narrowed: bool  # fewer than were asked for, since they would be too many Spans


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one part."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class RoundLine:
    """One round and what it was bound by."""

    round: int
    seconds: float
    kind: str  # what it was bound by
    headline: str


@dataclass(frozen=True, slots=True)
class SlowTurn:
    """A round in which a straggler took part."""

    round: int
    seconds: float
    peers: float
    determined: bool


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A straggler."""

    node: str
    rounds: int
    determined: int
    seconds_lost: float
    part: str
    typical: float
    peers: float
    history: tuple[SlowTurn, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """What another setting would give: a row of the what-if table, or a remedy."""

    name: str
    why: str
    before: float
    after: float
    share: float
    assumes: str
    costs: str
    cut: tuple[str, ...]
    lost: float | None
    lost_of: str
    at_most: bool


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """A node that others waited for."""

    node: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCosts:
    """Where the time of some rounds went."""

    run: str
    clock: str
    clocks: tuple[str, ...]
    window: Window
    timed: bool
    headline: str
    kind: str | None = None
    share: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None  # of a round, the mean
    path: tuple[Spent, ...]  # the rounds' own length, along their critical paths
    clients: tuple[Spent, ...]  # all clients' time together
    server: tuple[Spent, ...]
    rounds: tuple[RoundLine, ...]  # the longest first
    stragglers: tuple[SlowNode, ...]
    waited_for: tuple[WaitedFor, ...]
    waited: float
    unaccounted: float | None
    left_open: int | None  # a round without an end: nothing of it is in here


@dataclass(frozen=True, slots=True)
class Changes:
    """What would have made these rounds shorter."""

    clock: str
    window: Window
    before: float | None  # seconds of a round as it was, the mean
    what_if: tuple[Gain, ...]  # the shortest round first
    remedies: tuple[Gain, ...]


class _Looked(NamedTuple):
    clock: str
    clocks: tuple[str, ...]
    window: Window
    times: list[RoundTime]
    paths: list[CriticalPath]
    left_open: int | None


def time_costs(
    reader: Reader, run: str, *, clock: str | None = None, first: int | None = None, last: int | None = None
) -> TimeCosts:
    """Read the profile of the rounds from `first` to `last`, else of the newest."""
    asked = _asked(reader, run, clock, first, last)
    return remembered(reader, "time costs", asked.key, asked.sign, lambda: _time_costs(reader, asked))


def _time_costs(reader: Reader, asked: _Asked) -> TimeCosts:
    run, looked = asked.run, _looked(reader, asked)
    times, paths = looked.times, looked.paths
    verdict = judge(times, paths=paths)
    waited = _waited_for(times, paths)
    return copied(
        TimeCosts,
        looked,
        verdict,
        run=run,
        timed=verdict is not None,
        headline=verdict.text if verdict else "No round of these was timed: there is nothing to say about their time.",
        path=_spent(link.parts for path in paths for link in path.links),
        clients=_spent(client.parts for time in times for client in time.clients),
        server=_spent(time.server.parts for time in times if time.server is not None),
        rounds=_lines(verdict),
        stragglers=tuple(
            copied(SlowNode, slow, history=tuple(copied(SlowTurn, turn) for turn in slow.history))
            for slow in stragglers(times, most=NAMED, paths=paths)
        ),
        waited_for=waited[:NAMED],
        waited=sum(waiting.seconds for waiting in waited),
        unaccounted=median(time.unaccounted for time in times) if times else None,
    )


def changes(
    reader: Reader, run: str, *, clock: str | None = None, first: int | None = None, last: int | None = None
) -> Changes:
    """Compute what would have made these rounds shorter."""
    asked = _asked(reader, run, clock, first, last)
    return remembered(reader, "changes", asked.key, asked.sign, lambda: _changes(reader, asked))


def _changes(reader: Reader, asked: _Asked) -> Changes:
    looked = _looked(reader, asked)
    verdict = judge(looked.times, paths=looked.paths)
    newest = replace(looked.window, first=looked.window.last)  # of sizes, one round tells as much as many
    rows = what_if(looked.times, transfers=_between(reader, asked.run, Transfer, newest), paths=looked.paths)
    better = sorted((row for row in rows if row.share >= LEAST), key=lambda row: row.after)
    return Changes(
        looked.clock,
        looked.window,
        max((row.before for row in rows), default=None),
        tuple(copied(Gain, row, why="", cut=row.cut[:CUT]) for row in better),
        tuple(copied(Gain, remedy, cut=(), lost=None, lost_of="") for remedy in remedies(verdict, rows))
        if verdict
        else (),
    )


class _Asked(NamedTuple):
    run: str
    clock: str | None
    window: Window
    key: Hashable
    sign: object  # changes with the records that the answer is made from


def _asked(reader: Reader, run: str, clock: str | None, first: int | None, last: int | None) -> _Asked:
    window = window_of(reader, run, first, last)
    spans = count_between(reader, run, Span, window.first, window.last)
    transfers = count_between(reader, run, Transfer, window.last, window.last)
    ended = end_of_run(reader, run)
    return _Asked(run, clock, window, (run, clock, first, last), (window, spans, transfers, ended))


def _looked(reader: Reader, asked: _Asked) -> _Looked:
    """Both pages look at the same."""
    return remembered(reader, "rounds", asked.key, asked.sign, lambda: _look(reader, asked))


def _look(reader: Reader, asked: _Asked) -> _Looked:
    run, clock, window, _, _ = asked
    everything = timeline(_between(reader, run, Span, window))
    clocks = tuple(dict.fromkeys(time.clock for time in everything))
    if clock is not None and clocks and clock not in clocks:
        raise ConfigError(f"The run {run} has no {clock} clock in these rounds, only the {clocks[0]} one.")
    chosen = clock or (main_clock(everything) if everything else "real")
    times = rounds_of_clock(everything, chosen)
    left_open = None
    if times and not times[-1].complete and queries.get_run(reader, run).finished is None:
        left_open = times.pop().round
    return _Looked(chosen, clocks, window, times, [critical_path(time) for time in times], left_open)


def window_of(reader: Reader, run: str, first: int | None, last: int | None) -> Window:
    """Choose the newest of the rounds that are asked for, as many as can be read in a moment."""
    every = reader.history(run).rounds()
    asked = [n for n in every if (first is None or n >= first) and (last is None or n <= last)]
    chosen = first is not None or last is not None
    budget = MOST_SPANS if chosen else SPANS
    kept: list[int] = []
    for number in reversed(asked):
        budget -= count_spans(reader, run, number)
        if kept and (budget < 0 or (not chosen and len(kept) >= ROUNDS)):
            break
        kept.append(number)
    narrowed = chosen and len(kept) < len(asked)
    return Window(kept[-1] if kept else None, kept[0] if kept else None, len(kept), len(every), narrowed)


def _between(reader: Reader, run: str, kind: type[R], window: Window) -> Sequence[R]:
    """The records of these rounds, in order of arrival."""
    if window.first is None or window.last is None:
        return []
    return records_between(reader, run, kind, window.first, window.last)


def _spent(parts: Iterable[Mapping[str, float]]) -> tuple[Spent, ...]:
    sums = seconds_by_part(parts)
    whole = sum(sums.values())
    return tuple(Spent(part, seconds, seconds / whole if whole > 0 else 0.0) for part, seconds in sums.items())


def _lines(verdict: RunVerdict | None) -> tuple[RoundLine, ...]:
    rounds = [] if verdict is None else sorted(verdict.by_round, key=lambda judged: -judged.seconds)
    return tuple(copied(RoundLine, judged, headline=judged.text) for judged in rounds)


def _waited_for(times: Sequence[RoundTime], paths: Sequence[CriticalPath]) -> tuple[WaitedFor, ...]:
    """For whom clients waited, the most first."""
    waited = waited_for(times, paths)
    whole = sum(waited.values())
    return tuple(WaitedFor(node, seconds, seconds / whole) for node, seconds in waited.items() if whole > 0)
