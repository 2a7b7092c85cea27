# SPDX-License-Identifier: Apache-2.0
"""Computes a comparison as a page shows it: changes in words, values over the rounds, differences, settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.plain_json import copied
from fedvitals.store.read.metrics import ValuesByRound
from fedvitals.views.comparison.chance import Change, change, pairing
from fedvitals.views.comparison.runs import ComparisonRow, Side, all_settings, compared
from fedvitals.views.comparison.words import in_words
from fedvitals.views.run_figures import Figures
from fedvitals.views.series import Numbers, bucketed

POINTS = 400  # of a line
LONGEST = 2000  # characters of a setting


@dataclass(frozen=True, slots=True)
class Line:
    """A side's course; with repeats their mean (of GSC the median), and from the lowest to the highest of them."""

    letter: str
    rounds: list[int]
    values: Numbers
    low: Numbers
    high: Numbers
    total: int  # rounds that these points stand for


@dataclass(frozen=True, slots=True)
class Picture:
    """A diagram with a line for each side."""

    name: str
    title: str
    unit: str
    scale: str  # «linear», «log0»
    lines: tuple[Line, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class PageChange:
    """A difference, with its interval where there is one."""

    difference: float | None
    relative: float | None
    low: float | None
    high: float | None
    beyond_chance: bool | None


@dataclass(frozen=True, slots=True)
class PageRow:
    """One number of every side."""

    topic: str
    name: str
    unit: str
    better: str
    values: tuple[float | None, ...]
    changes: tuple[PageChange | None, ...]  # from the baseline to each other side


@dataclass(frozen=True, slots=True)
class PageTrouble:
    """An issue, and in how many runs of each side it was found."""

    issue: str
    title: str
    place: str
    severity: str
    runs: tuple[int, ...]  # of each side, in how many of its runs


@dataclass(frozen=True, slots=True)
class PageParting:
    """Where a side begins to differ from the baseline."""

    letter: str  # the side that parts from the baseline
    equal: bool
    exact: int | None  # the first round that differs at all
    noise: int | None  # beyond floating-point noise
    repeats: int | None  # beyond what repeats differ by
    words: str


@dataclass(frozen=True, slots=True)
class PageSetting:
    """A setting of every side."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


@dataclass(frozen=True, slots=True)
class ComparePage:
    """Everything that the page of a comparison shows."""

    sides: tuple[Side, ...]  # the baseline first
    words: tuple[str, ...]  # what changed, the weightiest first
    chance: str  # what may be concluded
    pictures: tuple[Picture, ...]
    differences: tuple[Picture, ...]  # of each side from the baseline
    rows: tuple[PageRow, ...]
    troubles: tuple[PageTrouble, ...]
    partings: tuple[PageParting, ...]
    settings: tuple[PageSetting, ...]  # those that differ first


def compare_page(sides: Sequence[Sequence[Figures]]) -> ComparePage:
    """Of sides whose first is the baseline."""
    comparison = compared(sides)
    words, partings, chance = in_words(comparison)
    letters = [side.letter for side in comparison.sides]
    virtual = all(f.virtual_seconds for side in sides for f in side)
    return ComparePage(
        sides=comparison.sides,
        words=words,
        chance=chance,
        pictures=tuple(p for p in _pictures(sides, letters, virtual=virtual) if any(line.total for line in p.lines)),
        differences=tuple(
            _differences(name, title, unit, [[getattr(f, name) for f in side] for side in sides], sides, letters)
            for name, title, unit in (("accuracy", "accuracy", ""), ("loss", "loss", ""))
            if any(getattr(f, name) for f in sides[0]) and any(getattr(f, name) for side in sides[1:] for f in side)
        ),
        rows=tuple(_row(row) for row in comparison.rows),
        troubles=tuple(copied(PageTrouble, t, title=_title(t.issue)) for t in comparison.troubles),
        partings=tuple(
            PageParting(
                letter,
                point.equal,
                None if point.exact is None else point.exact.round,
                None if point.beyond_noise is None else point.beyond_noise.round,
                point.beyond_repeats,
                sentence,
            )
            for letter, point, sentence in zip(letters[1:], comparison.partings, partings, strict=True)
        ),
        settings=_settings(sides),
    )


def _pictures(sides: Sequence[Sequence[Figures]], letters: Sequence[str], *, virtual: bool) -> list[Picture]:
    def drawn(
        name: str, title: str, unit: str, scale: str, course: Callable[[Figures], ValuesByRound], note: str = ""
    ) -> Picture:
        middle: Callable[[Sequence[float]], float] = median if scale == "log0" else fmean  # a mean is its largest's
        courses = [[course(f) for f in side] for side in sides]
        lines = [_line(letter, own, middle) for letter, own in zip(letters, courses, strict=True)]
        # A repeat that measured less often leaves its rounds to the others.
        partly = any(own[0].keys() != other.keys() for own in courses for other in own[1:])
        notes = [note, "repeats that measured fewer rounds count where they did" if partly else ""]
        return Picture(name, title, unit, scale, tuple(lines), "; ".join(filter(None, notes)))

    clock = "virtual clock" if virtual else "real clock"
    return [
        drawn("accuracy", "accuracy", "", "linear", lambda f: f.accuracy),
        drawn("loss", "loss", "", "linear", lambda f: f.loss),
        drawn(
            "gsc", "gradient scale coefficient (GSC)", "", "log0", lambda f: f.gsc, "median over the clients, log axis"
        ),
        drawn(
            "seconds", "round time", "seconds", "linear", lambda f: f.virtual_seconds if virtual else f.seconds, clock
        ),
        drawn("bytes", "bytes a round", "bytes", "linear", _bytes),
    ]


def _bytes(figures: Figures) -> ValuesByRound:
    return {traffic.round: float(traffic.bytes) for traffic in figures.traffic.rounds if traffic.round >= 0}


def _line(letter: str, courses: Sequence[ValuesByRound], middle: Callable[[Sequence[float]], float] = fmean) -> Line:
    """One run in buckets that keep their extremes; of repeats, the mean and how far they are apart."""
    rounds = sorted({number for course in courses for number in course})
    if len(courses) == 1:
        values = np.array([courses[0][number] for number in rounds], dtype=float)
        series = bucketed("", None, "", rounds, values, POINTS)
        return Line(letter, series.rounds, series.values, series.low, series.high, series.total)
    every = max(1, math.ceil(len(rounds) / POINTS))
    stretches = [rounds[i : i + every] for i in range(0, len(rounds), every)]
    here = [[c[n] for c in courses for n in stretch if n in c and math.isfinite(c[n])] for stretch in stretches]
    return Line(
        letter,
        [stretch[0] for stretch in stretches],
        [middle(values) if values else None for values in here],
        [min(values, default=None) for values in here],
        [max(values, default=None) for values in here],
        len(rounds),
    )


def _differences(
    name: str,
    title: str,
    unit: str,
    courses: Sequence[Sequence[ValuesByRound]],
    sides: Sequence[Sequence[Figures]],
    letters: Sequence[str],
) -> Picture:
    """Each side less the baseline, round by round; with repeats, the interval that chance leaves."""
    lines, banded = [], False
    for letter, own, side in zip(letters[1:], courses[1:], sides[1:], strict=True):
        pairs = pairing([f.run.seed for f in sides[0]], [f.run.seed for f in side])
        changes: dict[int, Change | None] = {}
        for number in sorted({n for c in courses[0] for n in c} & {n for c in own for n in c}):
            before, after = [c[number] for c in courses[0] if number in c], [c[number] for c in own if number in c]
            whole = len(before) == len(courses[0]) and len(after) == len(own)
            changes[number] = change(before, after, pairs=pairs if whole else None)
        banded = banded or any(c is not None and c.low is not None for c in changes.values())
        lines.append(_difference(letter, changes))
    note = "from the baseline" + ("; band: 95 % interval, each round by itself" if banded else "")
    return Picture(name, f"difference in {title}", unit, "linear", tuple(lines), note)


def _difference(letter: str, changes: dict[int, Change | None]) -> Line:
    every = max(1, math.ceil(len(changes) / POINTS))
    numbers = list(changes)
    stretches = [numbers[i : i + every] for i in range(0, len(numbers), every)]
    values: Numbers = []
    low: Numbers = []
    high: Numbers = []
    for stretch in stretches:
        here = [c for number in stretch if (c := changes[number]) is not None]
        values.append(fmean(c.difference for c in here) if here else None)
        # Where rounds were joined, as far as any of them goes.
        low.append(min((c.difference if c.low is None else c.low for c in here), default=None))
        high.append(max((c.difference if c.high is None else c.high for c in here), default=None))
    return Line(letter, [stretch[0] for stretch in stretches], values, low, high, len(numbers))


def _row(row: ComparisonRow) -> PageRow:
    changes = (None if change is None else copied(PageChange, change) for change in row.changes)
    return copied(PageRow, row, changes=tuple(changes))


def _title(issue: str) -> str:
    known = ISSUES_BY_CODE.get(issue)
    return known.title if known else issue


def _settings(sides: Sequence[Sequence[Figures]]) -> tuple[PageSetting, ...]:
    every = all_settings([[f.run for f in side] for side in sides])
    settings = [PageSetting(setting.name, tuple(map(_text, setting.values)), setting.differs) for setting in every]
    return tuple(sorted(settings, key=lambda setting: not setting.differs))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
