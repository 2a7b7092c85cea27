# SPDX-License-Identifier: Apache-2.0
"""Computes a comparison as a page shows it: changes in sentences, values over the rounds, differences, settings."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.plain_json import copied
from fedvitals.store.read.metrics import ValuesByRound
from fedvitals.views.comparison.chance import Change, change, pairing
from fedvitals.views.comparison.divergence_point import NOISE, Differing, DivergencePoint
from fedvitals.views.comparison.runs import Comparison, ComparisonRow, Side, all_settings, compared
from fedvitals.views.run_figures import Figures
from fedvitals.views.series import Numbers, bucketed
from fedvitals.views.units import percent

POINTS = 400  # per line
LONGEST = 2000  # characters of a setting


@dataclass(frozen=True, slots=True)
class Line:
    """A side's values over the rounds; with repeats their mean (of GSC the median), and their minimum and maximum."""

    letter: str
    rounds: list[int]
    values: Numbers
    low: Numbers
    high: Numbers
    total: int  # rounds that these points represent
    odd: list[int] = field(default_factory=list)  # rounds whose value was NaN or infinite


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
    """A difference, with its interval if there is one."""

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
    odd: tuple[int, ...]  # sides, by index, whose value is NaN


@dataclass(frozen=True, slots=True)
class PageTrouble:
    """An issue, and in how many runs of each side it was found."""

    issue: str
    title: str
    place: str
    severity: str
    runs: tuple[int, ...]  # for each side, in how many of its runs


@dataclass(frozen=True, slots=True)
class PageParting:
    """Where a side begins to differ from the baseline."""

    letter: str  # the side that diverges from the baseline
    equal: bool
    exact: int | None  # the first round that differs at all
    noise: int | None  # beyond floating-point noise
    repeats: int | None  # beyond the spread of repeats
    words: str


@dataclass(frozen=True, slots=True)
class PageSetting:
    """A setting of every side."""

    name: str
    values: tuple[str | None, ...]
    differs: bool
    defaults: tuple[bool, ...]  # for each side, whether it is the lab's default; empty: unknown


@dataclass(frozen=True, slots=True)
class ComparePage:
    """Everything that a comparison's page shows."""

    sides: tuple[Side, ...]  # the baseline first
    words: tuple[str, ...]  # what changed in learning and findings, a sentence for each side
    costs: tuple[str, ...]  # what changed in time, bytes and memory, and which settings differ
    chance: str  # what may be concluded
    pictures: tuple[Picture, ...]
    differences: tuple[Picture, ...]  # of each side from the baseline
    rows: tuple[PageRow, ...]
    troubles: tuple[PageTrouble, ...]
    partings: tuple[PageParting, ...]
    settings: tuple[PageSetting, ...]  # those that differ first


def compare_page(sides: Sequence[Sequence[Figures]]) -> ComparePage:
    """Return the page for these sides, the first of which is the baseline."""
    comparison = compared(sides)
    words, costs, partings, chance = in_words(comparison)
    letters = [side.letter for side in comparison.sides]
    virtual = all(f.virtual_seconds for side in sides for f in side)
    return ComparePage(
        sides=comparison.sides,
        words=words,
        costs=costs,
        chance=chance,
        pictures=tuple(p for p in _pictures(sides, letters, virtual=virtual) if any(line.total for line in p.lines)),
        differences=tuple(
            _differences(name, sides, letters)
            for name in ("accuracy", "loss")
            if any(getattr(f, name) for f in sides[0]) and any(getattr(f, name) for side in sides[1:] for f in side)
        ),
        rows=tuple(_row(row) for row in comparison.rows),
        troubles=tuple(
            copied(PageTrouble, t, title=ISSUES_BY_CODE[t.issue].title if t.issue in ISSUES_BY_CODE else t.issue)
            for t in comparison.troubles
        ),
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


def _layer_pair(pair: str, figures: Figures) -> ValuesByRound:
    """Return the gradient scale between two layers by round; empty if it was not measured."""
    return figures.layer_pairs.get(pair, {})


def _pictures(sides: Sequence[Sequence[Figures]], letters: Sequence[str], *, virtual: bool) -> list[Picture]:
    def drawn(
        name: str, title: str, unit: str, scale: str, values_of: Callable[[Figures], ValuesByRound], note: str = ""
    ) -> Picture:
        # A mean would be dominated by its largest value
        middle: Callable[[Sequence[float]], float] = median if scale == "log0" else fmean
        series = [[values_of(f) for f in side] for side in sides]
        lines = [_line(letter, own, middle) for letter, own in zip(letters, series, strict=True)]
        # For rounds that a repeat did not measure, the others are used.
        partly = any(own[0].keys() != other.keys() for own in series for other in own[1:])
        notes = [note, "repeats that measured fewer rounds count where they did" if partly else ""]
        return Picture(name, title, unit, scale, tuple(lines), "; ".join(filter(None, notes)))

    clock = "virtual clock" if virtual else "real clock"
    return [
        drawn("accuracy", "accuracy", "share", "linear", lambda f: f.accuracy),
        drawn("loss", "loss", "", "linear", lambda f: f.loss),
        drawn(
            "gsc", "gradient scale coefficient (GSC)", "", "log0", lambda f: f.gsc, "median over the clients, log axis"
        ),
        *(
            drawn(f"gsc {pair}", f"GSC of {pair}", "", "log0", functools.partial(_layer_pair, pair))
            for pair in sorted({pair for side in sides for figures in side for pair in figures.layer_pairs})
        ),
        drawn(
            "seconds", "round time", "seconds", "linear", lambda f: f.virtual_seconds if virtual else f.seconds, clock
        ),
        drawn("bytes", "bytes a round", "bytes", "linear", _bytes),
    ]


def _bytes(figures: Figures) -> ValuesByRound:
    return {traffic.round: float(traffic.bytes) for traffic in figures.traffic.rounds if traffic.round >= 0}


def _line(letter: str, repeats: Sequence[ValuesByRound], middle: Callable[[Sequence[float]], float] = fmean) -> Line:
    """Return one run in buckets that keep their extremes; for repeats, the mean and the spread."""
    rounds = sorted({number for own in repeats for number in own})
    if len(repeats) == 1:
        values = np.array([repeats[0][number] for number in rounds], dtype=float)
        series = bucketed("", None, "", rounds, values, POINTS)
        return Line(letter, series.rounds, series.values, series.low, series.high, series.total, series.odd)
    every = max(1, math.ceil(len(rounds) / POINTS))
    stretches = [rounds[i : i + every] for i in range(0, len(rounds), every)]
    here = [[c[n] for c in repeats for n in stretch if n in c and math.isfinite(c[n])] for stretch in stretches]
    return Line(
        letter,
        [stretch[0] for stretch in stretches],
        [middle(values) if values else None for values in here],
        [min(values, default=None) for values in here],
        [max(values, default=None) for values in here],
        len(rounds),
    )


def _differences(name: str, sides: Sequence[Sequence[Figures]], letters: Sequence[str]) -> Picture:
    """Return each side minus the baseline, round by round; with repeats, the confidence interval."""
    series: list[list[ValuesByRound]] = [[getattr(f, name) for f in side] for side in sides]
    in_points = name == "accuracy"  # per cent of per cent would be read as relative
    lines, banded = [], False
    for letter, own, side in zip(letters[1:], series[1:], sides[1:], strict=True):
        pairs = pairing([f.run.seed for f in sides[0]], [f.run.seed for f in side])
        changes: dict[int, Change | None] = {}
        for number in sorted({n for c in series[0] for n in c} & {n for c in own for n in c}):
            before, after = [c[number] for c in series[0] if number in c], [c[number] for c in own if number in c]
            whole = len(before) == len(series[0]) and len(after) == len(own)
            changes[number] = change(before, after, pairs=pairs if whole else None)
        banded = banded or any(c is not None and c.low is not None for c in changes.values())
        lines.append(_difference(letter, changes, 100.0 if in_points else 1.0))
    note = "from the baseline" + ("; band: 95 % interval, each round by itself" if banded else "")
    return Picture(name, f"difference in {name}", "points" if in_points else "", "linear", tuple(lines), note)


def _difference(letter: str, changes: dict[int, Change | None], factor: float) -> Line:
    every = max(1, math.ceil(len(changes) / POINTS))
    numbers = list(changes)
    stretches = [numbers[i : i + every] for i in range(0, len(numbers), every)]
    values: Numbers = []
    low: Numbers = []
    high: Numbers = []
    for stretch in stretches:
        here = [c for number in stretch if (c := changes[number]) is not None]
        values.append(factor * fmean(c.difference for c in here) if here else None)
        # If rounds were joined, the extremes of all of them.
        low.append(min((factor * (c.difference if c.low is None else c.low) for c in here), default=None))
        high.append(max((factor * (c.difference if c.high is None else c.high) for c in here), default=None))
    return Line(letter, [stretch[0] for stretch in stretches], values, low, high, len(numbers))


def _row(row: ComparisonRow) -> PageRow:
    changes = (None if change is None else copied(PageChange, change) for change in row.changes)
    odd = tuple(i for i, value in enumerate(row.values) if value is not None and math.isnan(value))
    return copied(PageRow, row, changes=tuple(changes), odd=odd)


def _settings(sides: Sequence[Sequence[Figures]]) -> tuple[PageSetting, ...]:
    every = all_settings([[f.run for f in side] for side in sides])
    settings = [PageSetting(s.name, tuple(map(_text, s.values)), s.differs, s.defaults) for s in every]
    return tuple(sorted(settings, key=lambda setting: not setting.differs))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


NAMED = 3  # settings and clients in a sentence


def in_words(comparison: Comparison) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str]:
    """Return sentences on what each side learnt, costs and different settings, where it diverges, and chance."""
    base = comparison.sides[0]
    sides = list(enumerate(comparison.sides[1:]))
    sentences = [_what_changed(comparison, place, side) for place, side in sides]
    costs = [sentence for place, side in sides if (sentence := _costs(comparison, place, side))]
    cause = _cause(comparison)
    points = zip(comparison.sides[1:], comparison.partings, strict=True)
    partings = [_parting(base, side, point) for side, point in points]
    return tuple(sentences), (*costs, *([cause] if cause else [])), tuple(partings), _chance(comparison)


def called(side: Side) -> str:
    """Return a side's name, «B (slow)»: two sides may have the same name."""
    repeats = f", {len(side.runs)} runs" if len(side.runs) > 1 else ""
    return f"{side.letter} ({side.name}{repeats})"


def _what_changed(comparison: Comparison, place: int, side: Side) -> str:
    rows = {row.name: row for row in comparison.rows}
    learning = next((rows[name] for name in ("accuracy, last", "loss, last") if name in rows), None)
    parts = [_of_learning(learning, place)] if learning else []
    issues = rows.get("issues")
    if issues is not None and (change := issues.changes[place]) is not None and change.difference:
        count = abs(change.difference)
        more = "more" if change.difference > 0 else "fewer"
        parts.append(f"{count:.3g} finding{'s' * (count != 1)} {more}")
    sure = [
        row.name
        for row in comparison.rows
        if (c := row.changes[place]) is not None and c.beyond_chance and c.difference
    ]
    changes = "; ".join(part for part in parts if part) or "nothing that can be compared was measured"
    beyond = f" Beyond chance: {'; '.join(sure)}." if sure else ""
    return f"{called(side)} against {called(comparison.sides[0])}: {changes}.{beyond}"


def _costs(comparison: Comparison, place: int, side: Side) -> str:
    """Return «B: round time × 0.66; memory × 1.4.»; empty if nothing changed by more than a tenth."""
    rows = {row.name: row for row in comparison.rows}
    round_time = next((row for row in comparison.rows if row.topic == "time"), None)
    named = (
        (round_time, "round time"),
        (rows.get("peak memory"), "memory"),
        (rows.get("all in all, without telemetry"), "bytes"),
    )
    clauses = [clause for row, noun in named if row is not None and (clause := _of_amount(row, place, noun))]
    return f"{side.letter}: {'; '.join(clauses)}." if clauses else ""


def _of_learning(row: ComparisonRow, place: int) -> str:
    change, name = row.changes[place], row.name.partition(",")[0]
    if change is None:
        value = row.values[place + 1]
        return f"{name} NaN" if value is not None and math.isnan(value) else f"no {name} to compare"
    if not change.difference:
        return f"the same {name}"
    if name == "accuracy":
        size = f"{abs(100 * change.difference):.3g} points {'higher' if change.difference > 0 else 'lower'}"
    else:
        size = f"{abs(change.difference):.3g} {'higher' if change.difference > 0 else 'lower'}"
    return f"{name} {size} ({_sure(change)})"


def _of_amount(row: ComparisonRow, place: int, noun: str) -> str:
    """Return a clause on an amount, only if it changed by more than a tenth."""
    change = row.changes[place]
    if change is None or change.relative is None or abs(change.relative) < 0.1:
        return ""
    if change.beyond_chance is False:
        return ""
    factor = 1 + change.relative
    return f"{noun} × {factor:.3g}"


def _sure(change: Change) -> str:
    if change.beyond_chance is None:
        return "chance not ruled out: too few repeats"
    return "more than chance explains" if change.beyond_chance else "chance may explain it"


def _cause(comparison: Comparison) -> str:
    settings = [s for s in comparison.settings if s.name != "name" and not s.name.startswith("versions.")]
    if not settings:
        differs = [setting.name for setting in comparison.settings if setting.name.startswith("versions.")]
        if differs:
            return f"No setting differs, but versions do: {', '.join(differs[:NAMED])}."
        return "No setting, seed or version differs: what differs lies outside of them."
    named = [f"{setting.name} {_values(comparison.sides, setting.values)}" for setting in settings[:NAMED]]
    more = f" and {len(settings) - NAMED} more" if len(settings) > NAMED else ""
    return f"Settings that differ: {'; '.join(named)}{more}."


def _values(sides: Sequence[Side], values: Sequence[object]) -> str:
    """Return «0.1 → 0.2» for two sides; for more, each value with its side."""
    if len(values) == 2:
        return " → ".join(map(_short, values))
    return ", ".join(f"{_short(value)} ({side.letter})" for side, value in zip(sides, values, strict=True))


def _short(value: object) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _parting(base: Side, side: Side, point: DivergencePoint) -> str:
    pair = f"{base.letter} and {side.letter}"
    if point.exact is None:
        lengths = "" if point.rounds[0] == point.rounds[1] else f", as far as both go ({min(point.rounds)} rounds)"
        return f"{pair} do not diverge: accuracy, loss and update norms are bit for bit the same{lengths}."
    text = f"{pair} diverge at round {point.exact.round}: {_differing(point.exact)}."
    if point.beyond_noise is None:
        text += f" Nowhere by more than {NOISE:g} of the value: floating-point noise."
    elif point.beyond_noise.round != point.exact.round:
        text += (
            f" Beyond floating-point noise first in round {point.beyond_noise.round}: {_differing(point.beyond_noise)}."
        )
    if min(point.repeats) > 1:
        where = f"first in round {point.beyond_repeats}, by {point.beyond_repeats_by}"
        text += f" Beyond what repeats differ by: {where if point.beyond_repeats is not None else 'in no round'}."
    return text


def _differing(what: Differing) -> str:
    words = [f"{name} {_shown(name, a)} against {_shown(name, b)}" for name, (a, b) in what.metrics.items()]
    nodes = list(what.nodes.items())
    if nodes and what.same_nodes:
        named = ", ".join(f"{node} ({_number(a)} against {_number(b)})" for node, (a, b) in nodes[:NAMED])
        more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
        words.append(f"update norms of {named}{more}; no difference in those of the other {what.same_nodes} clients")
    elif nodes:
        words.append(f"the update norms of all {what.node_count} clients")
    return ", ".join(words)


def _shown(name: str, value: float | None) -> str:
    return percent(value) if name == "accuracy" and value is not None else _number(value)


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.3g}"


def _chance(comparison: Comparison) -> str:
    """Return the comparison's own sentence, with this page's way to repeats instead of the command line's."""
    counts: Sequence[int] = [len(side.runs) for side in comparison.sides]
    if max(counts) == 1:
        return (
            "One run each: no difference here can be distinguished from chance. Repeat them with other seeds, and take "
            "all repeats of each into the comparison."
        )
    return comparison.confidence
