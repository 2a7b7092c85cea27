# SPDX-License-Identifier: Apache-2.0
"""Bars, strips and plots for a terminal: every part has a letter and a colour, so that they can be read without
colours.

The colours are the dashboard's for dark mode (fedvitals/palette.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

from fedvitals.palette import CLIENT, DARK_PARTS, SERIES_DARK
from fedvitals.time_parts import WORK

_LETTERS = {
    "download": "D", "data": "L", "compute": "C", "forward": "F", "backward": "B", "optimizer": "O", "measure": "M",
    "upload": "U", "receive": "R", "aggregate": "A", "evaluate": "E", "examine": "X", "queue": "q", "start": "s",
    "reply": "r", "wait": "·", "idle": "i", "away": "-", "unaccounted": "?",
}  # fmt: skip
_INKLESS = ("wait", "idle", "away")  # in the terminal's own colour
PARTS: Mapping[str, tuple[str, str]] = {
    part: (letter, "" if part in _INKLESS else DARK_PARTS[part]) for part, letter in _LETTERS.items()
}
GREY = "#8a8a8a"
KINDS: Mapping[str, tuple[str, str]] = {  # what a round is bound by
    **{kind: (letter, DARK_PARTS[kind]) for kind, letter in (
        ("compute", "C"), ("upload", "U"), ("download", "D"), ("data loading", "L"), ("aggregation", "A"),
        ("server", "R"),
    )},
    "straggler": ("S", CLIENT),
    "waiting": ("·", GREY),
    "nothing": ("-", GREY),
    "unaccounted": ("?", GREY),
}  # fmt: skip
RUNS = SERIES_DARK
BLOCKS = "▁▂▃▄▅▆▇█"
SEVERAL = "+"
STRETCH = 4  # the most cells between two rounds


def letter_of(part: str) -> str:
    return PARTS.get(part, ("?", ""))[0]


def style_of(part: str) -> str:
    """Return dark letters on the part's colour; parts in which no work is done have no colour."""
    colour = PARTS.get(part, ("?", ""))[1]
    return f"black on {colour}" if colour else "dim"


def stacked(parts: Mapping[str, float], width: int) -> Text:
    """Return one bar of `width` cells, in which each part's share is filled with its letter."""
    bar = Text()
    for part, cells in shares_of(parts, width).items():
        bar.append(letter_of(part) * cells, style_of(part))
    return bar


def shares_of(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """Return whole cells for each part, `width` in all; cells lost in rounding go to the largest remainders."""
    total = math.fsum(parts.values())
    if not total > 0 or width < 1:
        return {}
    exact = {part: width * value / total for part, value in parts.items()}
    cells = {part: int(value) for part, value in exact.items()}
    rest = sorted(exact, key=lambda part: cells[part] - exact[part])
    for part in rest[: width - sum(cells.values())]:
        cells[part] += 1
    return cells


def percents(parts: Mapping[str, float]) -> list[Text]:
    """Return the bar's legend: each part's letter, name and share, the largest first."""
    whole = math.fsum(parts.values())
    shares = sorted(((value / whole, part) for part, value in parts.items() if value > 0), reverse=True)
    return [Text.assemble((letter_of(part), style_of(part)), f" {part} {percent(share)}") for share, part in shares]


def in_lines(title: str, items: Sequence[Text | str], width: int) -> list[Text]:
    """Return a title and items after it, two spaces apart, on as many lines as they need; no item is broken."""
    lines = [Text(title)]
    for item in items:
        own = Text(item) if isinstance(item, str) else item
        if lines[-1].cell_len + own.cell_len > width and lines[-1].cell_len > len(title):
            lines.append(Text(" " * len(title)))
        lines[-1].append_text(own).append("  ")
    for line in lines:
        line.rstrip()
    return lines


def percent(share: float) -> str:
    return "0 %" if share == 0 else f"{100 * share:.0f} %" if share >= 0.005 else "< 1 %"


def along(intervals: Sequence[tuple[str, float, float]], began: float, seconds: float, width: int) -> Text:
    """Draw (part, began, seconds) intervals on a time axis of `width` cells; each cell shows its longest part.

    Work takes precedence over rest, unless rest took most of the cell: short work is what a reader looks for.
    """
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    for part, at, lasted in intervals:
        first, end = ((moment - began) / seconds * width for moment in (at, at + lasted)) if seconds > 0 else (0.0, 0.0)
        for i in range(max(0, int(first)), min(width, math.ceil(end))):
            covered = min(end, i + 1) - max(first, i)
            if covered > 0:
                cells[i][part] = cells[i].get(part, 0.0) + covered
    line = Text()
    for cell in cells:
        part = _in_cell(cell)
        line.append(letter_of(part) if part else " ", style_of(part) if part else "")
    return line


def _in_cell(cell: Mapping[str, float]) -> str:
    work = {part: share for part, share in cell.items() if part in WORK}
    chosen = work if 2 * sum(work.values()) >= sum(cell.values()) else cell
    return max(chosen, key=lambda part: chosen[part]) if sum(cell.values()) > 0.5 else ""


def strip(seconds: Sequence[float], kinds: Sequence[str], width: int) -> tuple[Text, Text]:
    """Return the rounds from left to right: their lengths as blocks, and below, as letters, what bound them.

    If there are more rounds than cells, a cell shows its longest round, and what bound most of its rounds.
    """
    count = min(width, len(seconds))
    edges = [i * len(seconds) // count for i in range(count + 1)] if count else []
    groups = [(seconds[a:b], kinds[a:b]) for a, b in pairwise(edges)]
    highest = max(seconds, default=0.0) or 1.0
    above, below = Text(), Text()
    for lasted, bound in groups:
        kind = Counter(bound).most_common(1)[0][0]
        letter, colour = KINDS.get(kind, ("?", GREY))
        above.append(BLOCKS[min(len(BLOCKS) - 1, int(max(lasted) / highest * len(BLOCKS)))], colour)
        below.append(letter, f"black on {colour}" if kind not in ("waiting", "nothing") else "dim")
    return above, below


def log_plot(series: Sequence[Mapping[int, float]], letters: str, width: int, height: int = 10) -> list[Text]:
    """Plot values over the rounds on one log axis, with a level for 0 and one for values that are not finite.

    One letter per run; where several coincide, `SEVERAL`.
    """
    rounds = sorted({number for own in series for number in own})
    values = [value for own in series for value in own.values()]
    positive = [math.log10(value) for value in values if math.isfinite(value) and value > 0]
    if not rounds:
        return []
    low, high = (math.floor(min(positive)), math.ceil(max(positive))) if positive else (0, 1)
    high = max(high, low + 1)
    height = min(height, max(4, 3 * (high - low)))
    # A few rounds are drawn apart, many share cells.
    count = min(width, (len(rounds) - 1) * STRETCH + 1) if len(rounds) > 1 else 1
    place = {number: i * (count - 1) // max(1, len(rounds) - 1) for i, number in enumerate(rounds)}
    levels = ["∞"] * any(not math.isfinite(value) for value in values) + [*range(height - 1, -1, -1)]
    levels += ["0"] * any(value <= 0 for value in values)
    cells: dict[tuple[object, int], set[str]] = {}
    for letter, own in zip(letters, series, strict=False):
        for number, value in own.items():
            level: object = "∞" if not math.isfinite(value) else "0" if value <= 0 else None
            if level is None:
                level = round((math.log10(value) - low) / (high - low) * (height - 1))
            cells.setdefault((level, place[number]), set()).add(letter)
    labels = _labels(low, high, height)
    lines = []
    for level in levels:
        line = Text(f"{'not finite' if level == '∞' else labels.get(level, '') if level != '0' else '0':>10} ")
        line.append("┤" if level in labels or level in ("∞", "0") else "│", "dim")
        for i in range(count):
            here = cells.get((level, i), set())
            mark = SEVERAL if len(here) > 1 else next(iter(here), " ")
            line.append(mark, f"bold {RUNS[letters.index(mark) % len(RUNS)]}" if mark in letters else "")
        lines.append(line)
    last = f"{rounds[-1]}"
    lines.append(Text(f"{'round':>10}  {rounds[0]}{last:>{max(len(last) + 1, count - len(str(rounds[0])))}}", "dim"))
    return lines


def _labels(low: int, high: int, height: int) -> dict[object, str]:
    """Return powers of ten at the levels nearest to them; every other one if they are too close."""
    every = max(1, math.ceil((high - low) / max(1, (height - 1) // 2)))
    powers = range(low, high + 1, every)
    return {round((power - low) / (high - low) * (height - 1)): _power(power) for power in powers}


def _power(power: int) -> str:
    if -3 <= power <= 3:
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
