# SPDX-License-Identifier: Apache-2.0
"""Several runs on one axis: accuracy and loss, gradient scale, length of rounds, and where they diverge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedvitals.errors import ConfigError
from fedvitals.plot.canvas import (
    SMALL,
    Figure,
    drawn,
    head,
    line,
    mark_not_finite,
    nothing,
    numbers,
    round_axis,
    sheet,
    value_axis,
)
from fedvitals.plot.scale import End, Height, end_of, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, HAIRLINE, words
from fedvitals.store import Target
from fedvitals.views.comparison.page import ComparePage, Picture, compare_page
from fedvitals.views.comparison.runs import grouped
from fedvitals.views.run_figures import Figures, figures_of

MOST = 6  # runs on one axis; more would be unreadable
TITLE_CHARACTERS = 36  # characters over a panel of half the width


@drawn
def compare(runs: Sequence[Which], *, store: Target = None) -> Figure:
    """Overlay two to six runs. Runs that differ only by their seed are one line, with a band over the repeats.

    Args:
        runs: The runs.
        store: The store of the run; by default FEDVITALS_STORE, else runs.db here.

    Returns:
        A matplotlib figure, which a notebook displays.
    """
    if isinstance(runs, str) or len(runs) < 2:
        raise ConfigError("compare() needs a list of at least two runs: fv.plot.compare(['before', 'after']).")
    figures: dict[str, Figures] = {}
    for run in runs:
        with opened(run, store) as (reader, chosen):
            if chosen not in figures:
                figures[chosen] = figures_of(reader, chosen)
    groups = grouped([run_figures.run for run_figures in figures.values()])
    if len(groups) < 2:
        raise ConfigError(f"A comparison needs two runs, got {len(groups)}. Name others: `fedvitals runs`.")
    return draw_comparison(compare_page([[figures[run.id] for run in group] for group in groups]))


@drawn
def draw_comparison(page: ComparePage) -> Figure:
    if len(page.sides) > MOST:
        raise ConfigError(f"At most {MOST} runs can be told apart on one axis, got {len(page.sides)}.")
    if not page.pictures:
        return nothing("Nothing that could be compared was measured in these runs.")
    figure, grid = sheet(-(-len(page.pictures) // 2), 2.1, 2)
    rounds = [number for picture in page.pictures for curve in picture.lines for number in curve.rounds]
    part = page.partings[0].noise if len(page.partings) == 1 else None
    names = {side.letter: f"{side.letter} {words(side.name, 12)}" for side in page.sides}
    for place, (axes, picture) in enumerate(zip(grid.flat, page.pictures, strict=False)):
        _draw(axes, picture, names)
        head(axes, picture.title, picture.note if len(picture.title) + len(picture.note) < TITLE_CHARACTERS else "")
        if part is not None:
            axes.axvline(part, color=HAIRLINE, linewidth=0.8, linestyle=(0, (1, 2)))
            if place == 0:
                axes.annotate(
                    "they diverge", (part, 0.02), (2, 0), ("data", "axes fraction"), "offset points", fontsize=SMALL,
                    color=HAIRLINE,
                )  # fmt: skip
        round_axis(axes, rounds)
    for axes in grid.flat[len(page.pictures) :]:
        axes.set_axis_off()
    return figure


def _draw(axes: Any, picture: Picture, names: dict[str, str]) -> None:
    seen = [numbers(values) for curve in picture.lines for values in (curve.low, curve.high)]
    height = Height("linear" if picture.scale == "linear" else "log", np.concatenate([*seen, np.zeros(0)]))
    ends: list[End] = []
    for curve in picture.lines:
        place = list(names).index(curve.letter)
        colour = COLOURS[place % len(COLOURS)]
        heights = height.of(numbers(curve.values))
        if curve.low != curve.values or curve.high != curve.values:
            low, high = height.of(numbers(curve.low)), height.of(numbers(curve.high))
            axes.fill_between(curve.rounds, low, high, color=colour, alpha=0.18, linewidth=0)
        line(axes, curve.rounds, heights.tolist(), colour)
        mark_not_finite(axes, curve.odd)
        ends += end_of(names[curve.letter], colour, curve.rounds, heights)
    height.dress(axes)
    if height.scale == "linear":
        value_axis(axes, picture.unit)
    label_ends(axes, ends)
