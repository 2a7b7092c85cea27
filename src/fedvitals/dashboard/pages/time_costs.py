# SPDX-License-Identifier: Apache-2.0
"""Where the time of some rounds went: the profile as a page shows it, of as many rounds as can be read while one waits.

`views.profile` reads all of a run's Spans: half a million, of a thousand clients and five hundred rounds. Here it is
the newest rounds, unless others are asked for, and the page says which. For all rounds there is `views.phases`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple, TypeVar

from fedvitals.analysis.bottleneck import RunVerdict, judge
from fedvitals.analysis.critical_path import CriticalPath, critical_path
from fedvitals.analysis.remedies import Remedy, remedies
from fedvitals.analysis.stragglers import Straggler, stragglers
from fedvitals.analysis.timeline import RoundTime, main_clock, rounds_of_clock, timeline, waiting_for
from fedvitals.analysis.what_if import WhatIfRow, what_if
from fedvitals.errors import ConfigError
from fedvitals.records import Span, Transfer
from fedvitals.store import rows
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.memo import remembered
from fedvitals.views.profile import ORDER

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
    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class RoundLine:
    round: int
    seconds: float
    kind: str  # what it was bound by
    headline: str


@dataclass(frozen=True, slots=True)
class SlowTurn:
    round: int
    seconds: float
    peers: float
    determined: bool


@dataclass(frozen=True, slots=True)
class SlowNode:
    node: str
    rounds: int
    determined: int
    seconds_lost: float
    part: str
    typical: float
    peers: float
    history: tuple[SlowTurn, ...]


@dataclass(frozen=True, slots=True)
class Change:
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
    node: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class Spending:
    run: str
    clock: str
    clocks: tuple[str, ...]
    window: Window
    timed: bool
    headline: str
    kind: str | None
    share: float | None
    shares: Mapping[str, float]
    seconds: float | None  # of a round, the mean
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
    clock: str
    window: Window
    before: float | None  # seconds of a round as it was, the mean
    what_if: tuple[Change, ...]  # the shortest round first
    remedies: tuple[Change, ...]


class _Looked(NamedTuple):
    clock: str
    clocks: tuple[str, ...]
    window: Window
    times: list[RoundTime]
    paths: list[CriticalPath]
    left_open: int | None


def spending(
    reader: Reader, run: str, *, clock: str | None = None, first: int | None = None, last: int | None = None
) -> Spending:
    """The profile of the rounds from `first` to `last`, else of the newest."""
    asked = _asked(reader, run, clock, first, last)
    return remembered(reader, "spending", asked.key, asked.sign, lambda: _spending(reader, asked))


def _spending(reader: Reader, asked: _Asked) -> Spending:
    run, looked = asked.run, _looked(reader, asked)
    times, paths = looked.times, looked.paths
    verdict = judge(times, paths=paths)
    waited = _waited_for(times, paths)
    return Spending(
        run=run,
        clock=looked.clock,
        clocks=looked.clocks,
        window=looked.window,
        timed=verdict is not None,
        headline=verdict.text if verdict else "No round of these was timed: there is nothing to say about their time.",
        kind=verdict.kind if verdict else None,
        share=verdict.share if verdict else None,
        shares=verdict.shares if verdict else {},
        seconds=verdict.seconds if verdict else None,
        path=_spent(link.parts for path in paths for link in path.links),
        clients=_spent(one.parts for time in times for one in time.clients),
        server=_spent(time.server.parts for time in times if time.server is not None),
        rounds=_lines(verdict),
        stragglers=tuple(_slow(one) for one in stragglers(times, most=NAMED, paths=paths)),
        waited_for=waited[:NAMED],
        waited=sum(one.seconds for one in waited),
        unaccounted=median(time.unaccounted for time in times) if times else None,
        left_open=looked.left_open,
    )


def changes(
    reader: Reader, run: str, *, clock: str | None = None, first: int | None = None, last: int | None = None
) -> Changes:
    """What would have made these rounds shorter."""
    asked = _asked(reader, run, clock, first, last)
    return remembered(reader, "changes", asked.key, asked.sign, lambda: _changes(reader, asked))


def _changes(reader: Reader, asked: _Asked) -> Changes:
    looked = _looked(reader, asked)
    verdict = judge(looked.times, paths=looked.paths)
    newest = replace(looked.window, first=looked.window.last)  # of sizes, one round tells as much as many
    found = what_if(looked.times, transfers=_between(reader, asked.run, Transfer, newest), paths=looked.paths)
    better = sorted((row for row in found if row.share >= LEAST), key=lambda row: row.after)
    return Changes(
        looked.clock,
        looked.window,
        max((row.before for row in found), default=None),
        tuple(_change(row) for row in better),
        tuple(_remedy(one) for one in remedies(verdict, found)) if verdict else (),
    )


class _Asked(NamedTuple):
    run: str
    clock: str | None
    window: Window
    key: Hashable
    sign: object  # changes with the records that the answer is made from


def _asked(reader: Reader, run: str, clock: str | None, first: int | None, last: int | None) -> _Asked:
    window, number = window_of(reader, run, first, last), reader.names.number(run) or 0
    counts = "SELECT COUNT(*), MAX(arrival) FROM {} WHERE run = ? AND round BETWEEN ? AND ?"
    spans = reader.database.rows(counts.format("span"), (number, window.first, window.last))
    transfers = reader.database.rows(counts.format("transfer"), (number, window.last, window.last))
    ended = reader.database.rows("SELECT finished FROM run WHERE id = ?", (number,))
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
    """The newest of the rounds that are asked for, as many as can be read in a moment."""
    every = reader.history(run).rounds()
    asked = [n for n in every if (first is None or n >= first) and (last is None or n <= last)]
    told = first is not None or last is not None
    place, budget = reader.names.number(run) or 0, MOST_SPANS if told else SPANS
    kept: list[int] = []
    for number in reversed(asked):
        ((spans,),) = reader.database.rows("SELECT COUNT(*) FROM span WHERE run = ? AND round = ?", (place, number))
        budget -= spans
        if kept and (budget < 0 or (not told and len(kept) >= ROUNDS)):
            break
        kept.append(number)
    narrowed = told and len(kept) < len(asked)
    return Window(kept[-1] if kept else None, kept[0] if kept else None, len(kept), len(every), narrowed)


def _between(reader: Reader, run: str, kind: type[R], window: Window) -> Sequence[R]:
    """The records of these rounds, in order of arrival."""
    if window.first is None:
        return []
    found = reader.database.rows(
        f"{rows.select(kind)} WHERE run = ? AND round BETWEEN ? AND ? ORDER BY arrival",
        (run, window.first, window.last),
    )
    return rows.from_rows(kind, found)


def _spent(parts: Iterable[Mapping[str, float]]) -> tuple[Spent, ...]:
    """Seconds by part, in the one order of parts."""
    sums: dict[str, float] = {}
    for one in parts:
        for part, seconds in one.items():
            sums[part] = sums.get(part, 0.0) + seconds
    whole = sum(sums.values())
    order = sorted(sums, key=lambda part: ORDER.index(part) if part in ORDER else len(ORDER))
    return tuple(Spent(part, sums[part], sums[part] / whole if whole > 0 else 0.0) for part in order)


def _lines(verdict: RunVerdict | None) -> tuple[RoundLine, ...]:
    found = [] if verdict is None else sorted(verdict.by_round, key=lambda one: -one.seconds)
    return tuple(RoundLine(one.round, one.seconds, one.kind, one.text) for one in found)


def _slow(one: Straggler) -> SlowNode:
    turns = tuple(SlowTurn(turn.round, turn.seconds, turn.peers, turn.determined) for turn in one.history)
    return SlowNode(one.node, one.rounds, one.determined, one.seconds_lost, one.part, one.typical, one.peers, turns)


def _change(row: WhatIfRow) -> Change:
    return Change(
        row.name, "", row.before, row.after, row.share, row.assumes, row.costs, row.cut[:CUT], row.lost, row.lost_of,
        row.at_most,
    )  # fmt: skip


def _remedy(one: Remedy) -> Change:
    return Change(
        one.name, one.why, one.before, one.after, one.share, one.assumes, one.costs, (), None, "", one.at_most
    )


def _waited_for(times: Sequence[RoundTime], paths: Sequence[CriticalPath]) -> tuple[WaitedFor, ...]:
    """For whom clients waited, the most first; not where they take turns, and each waits for all the others."""
    found: dict[str, float] = {}
    for time, path in zip(times, paths, strict=True):
        whom = {} if path.shape.slots is not None else waiting_for(time)
        for one in time.clients:
            if one.node in whom:
                found[whom[one.node]] = found.get(whom[one.node], 0.0) + one.parts["wait"]
    whole = sum(found.values())
    order = sorted(found, key=lambda node: -found[node])
    return tuple(WaitedFor(node, found[node], found[node] / whole) for node in order if whole > 0)
