# SPDX-License-Identifier: Apache-2.0
"""One vital sign of all clients over the rounds: the cohort as a band, those under suspicion as lines on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.plot.canvas import drawn, flags, head, line, nothing, numbers, round_axis, sheet, value_axis
from fedvitals.plot.scale import Height, label_ends
from fedvitals.plot.source import Which, check_sign, opened, suspects
from fedvitals.plot.style import BLUE, COLOURS, HAIRLINE, axis_unit, words
from fedvitals.store import Target
from fedvitals.views.cohort import Matrix
from fedvitals.views.matrix import metric_matrix
from fedvitals.views.series import Band, band
from fedvitals.views.troubles import cases_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 240  # buckets of rounds; each keeps its extremes
LINES = 6  # on top of the band; more would be spaghetti
LEGEND = "band: min–max, 5–95 %; line: median client"


@drawn
def cohort(run: Which, sign: str = "loss", *, nodes: Sequence[str] | None = None, store: Target = None) -> Figure:
    """A sign's spread over the clients in each round, with those that findings name (or `nodes`) on top."""
    with opened(run, store) as (reader, chosen):
        check_sign(reader, chosen, sign)
        matrix, cases = metric_matrix(reader, chosen, sign), cases_of(reader, chosen)
    if not matrix.nodes:
        return nothing(f"No client told its {words(sign, 40)}.")
    named = list(nodes) if nodes is not None else suspects(cases, LINES)
    figure, grid = sheet(1, 2.6)
    axes = grid[0, 0]
    head(axes, words(sign, 60), LEGEND)
    draw_cohort(axes, sign, matrix, named[:LINES])
    flags(axes, [case for case in cases if case.node is None or case.node in named])
    round_axis(axes, matrix.rounds)
    return figure


def draw_cohort(axes: Any, sign: str, matrix: Matrix, named: Sequence[str]) -> None:
    """The band and the lines of those that are named, their names at their ends."""
    found = band(sign, matrix, POINTS)
    shown = [(node, *matrix[node]) for node in named]
    seen = np.concatenate([numbers(found.min), numbers(found.max), *(np.array(v, float) for _, _, v in shown)])
    height = Height("log" if _is_wide(seen) else "linear", seen)
    draw_band(axes, found, height)
    ends = []
    for place, (node, rounds, values) in enumerate(shown):
        colour = COLOURS[(place + 1) % len(COLOURS)]  # the first is the cohort's own
        heights = height.of(np.array(values, float))
        if 2 * len(rounds) < len(matrix.rounds):  # told now and then: what lies between is not known
            axes.plot(rounds, heights, "o:", color=colour, linewidth=0.7, markersize=3.5)
        else:
            line(axes, rounds, heights.tolist(), colour)
        finite = np.flatnonzero(np.isfinite(heights))
        if finite.size:
            ends.append((words(node, 16), colour, float(rounds[finite[-1]]), float(heights[finite[-1]])))
    height.dress(axes)
    if height.scale == "linear":
        value_axis(axes, found.unit)
    axes.set_ylabel(f"{words(sign, 30)}{axis_unit(found.unit) if height.scale == 'log' else ''}", labelpad=2)
    label_ends(axes, ends)


def draw_band(axes: Any, found: Band, height: Height, colour: str = BLUE, *, middle: bool = True) -> None:
    """Minimum to maximum, 5 % to 95 %, and the median."""
    low, p5, median, p95, high = (
        height.of(numbers(values)) for values in (found.min, found.p5, found.median, found.p95, found.max)
    )
    axes.fill_between(found.rounds, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.fill_between(found.rounds, p5, p95, color=colour, alpha=0.22, linewidth=0)
    if middle:
        line(axes, found.rounds, median.tolist(), colour, linewidth=1.0)
    odd = [r for r, count in zip(found.rounds, found.clients, strict=True) if not count]
    if odd:
        axes.plot(odd, [axes.get_ylim()[0]] * len(odd), "x", color=HAIRLINE, markersize=4)


def _is_wide(values: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Whether a log axis shows more: nothing negative, and two orders of magnitude above the middle."""
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    return bool(positive.size and finite.min() >= 0 and positive.max() > 100 * np.median(positive))
