# SPDX-License-Identifier: Apache-2.0
"""Computes where the time of some rounds went, as many as can be read interactively.

`views.profile` reads all of a run's Spans: half a million for a thousand clients and five hundred rounds. Here it is
the newest rounds, unless others are requested, and the page says which. For all rounds there is `views.phases`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from fedvitals.analysis.bottleneck import RunVerdict, judge
from fedvitals.analysis.stragglers import costly, stragglers
from fedvitals.plain_json import copied
from fedvitals.records import Transfer
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.views.memo import remembered
from fedvitals.views.profile import gains_of, seconds_by_part
from fedvitals.views.timed_rounds import AskedRounds, Window, asked_rounds, records_in, timed_rounds
from fedvitals.views.waiting import waiting_of

NAMED = 10  # nodes in a list
CUT = 5  # clients named in a row of the what-if table


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one part."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class RoundLine:
    """One round and what bound it."""

    round: int
    seconds: float
    kind: str  # what bound it
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
    """The effect of another setting: a row of the what-if table, or a remedy."""

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
    seconds: float | None = None  # mean of a round
    path: tuple[Spent, ...]  # the rounds' own length, along their critical paths
    clients: tuple[Spent, ...]  # total of all clients' time
    server: tuple[Spent, ...]
    rounds: tuple[RoundLine, ...]  # the longest first
    stragglers: tuple[SlowNode, ...]
    waited: str  # for whom the rounds waited, and how long, in words; empty: for nobody in particular
    unaccounted: float | None
    left_open: int | None  # a round without an end, which is not included


@dataclass(frozen=True, slots=True)
class Changes:
    """What would have made these rounds shorter."""

    clock: str
    window: Window
    before: float | None  # mean seconds of a round as recorded
    what_if: tuple[Gain, ...]  # best gain for the cost first
    remedies: tuple[Gain, ...]


def time_costs(
    reader: Reader, run: str, *, clock: str | None = None, first: int | None = None, last: int | None = None
) -> TimeCosts:
    """Read the profile of the rounds from `first` to `last`, else of the newest."""
    asked = asked_rounds(reader, run, clock, first, last)
    return remembered(reader, "time costs", asked.key, asked.sign, lambda: _time_costs(reader, asked))


def _time_costs(reader: Reader, asked: AskedRounds) -> TimeCosts:
    run, looked = asked.run, timed_rounds(reader, asked)
    times, paths = looked.times, looked.paths
    verdict = judge(times, paths=paths)
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
            for slow in costly(stragglers(times, most=NAMED, paths=paths), times)
        ),
        waited=waiting_of(times, paths).in_words(),
        unaccounted=median(time.unaccounted for time in times) if times else None,
    )


def changes(
    reader: Reader, run: str, *, clock: str | None = None, first: int | None = None, last: int | None = None
) -> Changes:
    """Compute what would have made these rounds shorter."""
    asked = asked_rounds(reader, run, clock, first, last)
    return remembered(reader, "changes", asked.key, asked.sign, lambda: _changes(reader, asked))


def _changes(reader: Reader, asked: AskedRounds) -> Changes:
    looked = timed_rounds(reader, asked)
    transfers = records_in(reader, asked.run, Transfer, looked.window)
    gains = gains_of(queries.get_run(reader, asked.run), looked.clock, looked.times, looked.paths, transfers)
    return Changes(
        looked.clock,
        looked.window,
        max((row.before for row in gains.what_if), default=None),
        tuple(copied(Gain, row, why="", cut=row.cut[:CUT]) for row in gains.worthwhile),
        tuple(copied(Gain, remedy, cut=(), lost=None, lost_of="") for remedy in gains.remedies),
    )


def _spent(parts: Iterable[Mapping[str, float]]) -> tuple[Spent, ...]:
    sums = seconds_by_part(parts)
    whole = sum(sums.values())
    return tuple(Spent(part, seconds, seconds / whole if whole > 0 else 0.0) for part, seconds in sums.items())


def _lines(verdict: RunVerdict | None) -> tuple[RoundLine, ...]:
    rounds = [] if verdict is None else sorted(verdict.by_round, key=lambda judged: -judged.seconds)
    return tuple(copied(RoundLine, judged, headline=judged.text) for judged in rounds)
