# SPDX-License-Identifier: Apache-2.0
"""Reads the times of as many rounds as can be read interactively: the newest, unless others are named.

Every front end computes from these who is waited for, and what would help. `fedvitals profile` reads all rounds of a
run; so does this if a run is not too large, and otherwise reports which ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from fedvitals.analysis.critical_path import CriticalPath, critical_path
from fedvitals.analysis.timeline import RoundTime, main_clock, rounds_of_clock, timeline
from fedvitals.errors import ConfigError
from fedvitals.records import Run, Span, Transfer
from fedvitals.store.read import queries
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import end_of_run
from fedvitals.store.read.spans import count_between, count_spans, records_between
from fedvitals.views.memo import remembered

R = TypeVar("R", Span, Transfer)
SPANS = 4000  # read unless more are requested: a third of a second
MOST_SPANS = 20_000  # the most that are ever read: a second or two
ROUNDS = 50  # read unless more are requested


@dataclass(frozen=True, slots=True)
class Window:
    """Which rounds were read."""

    first: int | None
    last: int | None
    rounds: int
    of: int  # the run's number of rounds
    narrowed: bool  # fewer than requested, since they would be too many Spans


class TimedRounds(NamedTuple):
    """The finished rounds of a window on one clock, with their critical paths."""

    clock: str
    clocks: tuple[str, ...]
    window: Window
    times: list[RoundTime]
    paths: list[CriticalPath]
    left_open: int | None  # a round without an end, which is not included


class AskedRounds(NamedTuple):
    """The requested rounds of a run, and what the answer depends on."""

    run: str
    clock: str | None
    window: Window
    key: Hashable
    sign: object  # changes with the records behind the answer


def asked_rounds(
    reader: Reader, run: str, clock: str | None = None, first: int | None = None, last: int | None = None
) -> AskedRounds:
    """Choose the rounds from `first` to `last`, else the newest."""
    window = window_of(reader, run, first, last)
    spans = count_between(reader, run, Span, window.first, window.last)
    transfers = count_between(reader, run, Transfer, window.first, window.last)
    ended = end_of_run(reader, run)
    return AskedRounds(run, clock, window, (run, clock, first, last), (window, spans, transfers, ended))


def timed_rounds(reader: Reader, asked: AskedRounds) -> TimedRounds:
    """Read the requested rounds; once, for all who request the same."""
    return remembered(reader, "rounds", asked.key, asked.sign, lambda: _read(reader, asked))


def _read(reader: Reader, asked: AskedRounds) -> TimedRounds:
    run, clock, window, _, _ = asked
    everything = timeline(records_in(reader, run, Span, window))
    clocks = tuple(dict.fromkeys(time.clock for time in everything))
    if clock is not None and clocks and clock not in clocks:
        raise ConfigError(f"The run {run} has no {clock} clock in these rounds, only the {clocks[0]} one.")
    chosen = clock or (main_clock(everything) if everything else "real")
    times, left_open = without_open_round(rounds_of_clock(everything, chosen), queries.get_run(reader, run))
    return TimedRounds(chosen, clocks, window, times, [critical_path(time) for time in times], left_open)


def without_open_round(times: list[RoundTime], run: Run) -> tuple[list[RoundTime], int | None]:
    """Return the rounds without an unfinished last one of an open run, and the number of that round."""
    if run.finished is not None or not times or times[-1].complete:
        return times, None
    return times[:-1], times[-1].round


def window_of(reader: Reader, run: str, first: int | None, last: int | None) -> Window:
    """Choose the newest of the requested rounds, as many as can be read in a moment."""
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


def records_in(reader: Reader, run: str, kind: type[R], window: Window) -> Sequence[R]:
    """Return the records of these rounds, in order of arrival."""
    if window.first is None or window.last is None:
        return []
    return records_between(reader, run, kind, window.first, window.last)
