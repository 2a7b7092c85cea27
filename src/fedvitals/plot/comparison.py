# SPDX-License-Identifier: Apache-2.0
"""Runs on one axis: how well they learn, how large their gradients get, how long their rounds take, where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedvitals.errors import ConfigError
from fedvitals.plot.canvas import drawn, empty, head, line, round_axis, sheet, value_axis
from fedvitals.plot.scale import Height, label_ends
from fedvitals.plot.source import Which, opened
from fedvitals.plot.style import COLOURS, HAIRLINE, words
from fedvitals.store import Target, queries
from fedvitals.store.reader import Reader
from fedvitals.views.compare import LETTERS, grouped
from fedvitals.views.figures import Figures, figures_of
from fedvitals.views.parting import parting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Side = Sequence[Figures]
MOST = 6  # runs beside each other; more would be spaghetti
PANELS = (  # title, what of a run's figures, unit, scale
    ("accuracy", "accuracy", "share", "linear"),
    ("loss", "loss", "nats", "linear"),
    ("scale.gsc, median client", "gsc", "1", "log"),
    ("time of a round", "seconds", "seconds", "linear"),
)


@drawn
def compare(runs: Sequence[Which], *, store: Target = None) -> Figure:
    """Two to six runs overlaid. Runs that differ by their seed only are one line, their mean, with a band from the
    lowest to the highest."""
    if isinstance(runs, str) or not 2 <= len(runs) <= 26:
        raise ConfigError("compare() needs a list of at least two runs: fv.plot.compare(['before', 'after']).")
    found: dict[str, Figures] = {}
    for run in runs:
        with opened(run, store) as (reader, chosen):
            if chosen not in found:
                found[chosen] = figures_of(reader, chosen)
    return draw_comparison(sides_of(found))


def sides_of(found: Mapping[str, Figures]) -> list[Side]:
    """Repeats of one run together."""
    return [[found[run.id] for run in group] for group in grouped([one.run for one in found.values()])]


def figures_by_run(reader: Reader, runs: Sequence[str]) -> dict[str, Figures]:
    return {run: figures_of(reader, run) for run in (queries.find_run(reader, text) for text in runs)}


@drawn
def draw_comparison(sides: Sequence[Side]) -> Figure:
    if len(sides) < 2:
        raise ConfigError(f"A comparison needs two runs, got {len(sides)}.")
    if len(sides) > MOST:
        raise ConfigError(f"At most {MOST} runs can be told apart on one axis, got {len(sides)}.")
    virtual = all(one.virtual_seconds for side in sides for one in side)
    apart = parting(sides[0], sides[1]) if len(sides) == 2 else None
    rounds = [number for side in sides for one in side for number in (*one.accuracy, *one.loss, *one.seconds)]
    figure, grid = sheet(2, 2.1, 2)
    for place, (axes, (title, field, unit, scale)) in enumerate(zip(grid.flat, PANELS, strict=True)):
        name = "virtual_seconds" if field == "seconds" and virtual else field
        _draw(axes, sides, name, unit, scale)
        head(axes, title)
        if apart is not None and apart.beyond_noise is not None:
            axes.axvline(apart.beyond_noise.round, color=HAIRLINE, linewidth=0.8, linestyle=(0, (1, 2)))
            if place == 0:
                axes.annotate(
                    "part here", (apart.beyond_noise.round, 0.02), (2, 0), ("data", "axes fraction"), "offset points",
                    fontsize=7, color=HAIRLINE,
                )  # fmt: skip
        round_axis(axes, rounds, label=place > 1)
    return figure


def _draw(axes: Any, sides: Sequence[Side], field: str, unit: str, scale: str) -> None:
    courses = [_together([getattr(one, field) for one in side]) for side in sides]
    seen = [values for _, low, _, high in courses for values in (low, high)]
    height = Height(scale, np.concatenate([*seen, np.zeros(0)]))
    ends = []
    for place, (side, (rounds, low, mean, high)) in enumerate(zip(sides, courses, strict=True)):
        if not len(rounds):
            continue
        colour = COLOURS[place % len(COLOURS)]
        if len(side) > 1:
            axes.fill_between(rounds, height.of(low), height.of(high), color=colour, alpha=0.18, linewidth=0)
        heights = height.of(mean)
        line(axes, rounds.tolist(), heights.tolist(), colour)
        finite = np.flatnonzero(np.isfinite(heights))
        if finite.size:
            name = f"{LETTERS[place]} {words(side[0].run.name, 12)}"
            ends.append((name, colour, float(rounds[finite[-1]]), float(heights[finite[-1]])))
    if not ends:
        empty(axes, "not measured")
        return
    height.dress(axes)
    if scale != "log":
        value_axis(axes, unit)
    label_ends(axes, ends)


Floats = np.ndarray[Any, np.dtype[np.float64]]


def _together(courses: Sequence[Mapping[int, float]]) -> tuple[np.ndarray[Any, Any], Floats, Floats, Floats]:
    """Rounds, lowest, mean and highest over the repeats that have each round."""
    rounds = sorted({number for course in courses for number in course})
    values = np.array([[course.get(number, np.nan) for number in rounds] for course in courses], float)
    values = np.where(np.isfinite(values), values, np.nan)
    gone = np.isnan(values).all(axis=0) if values.size else np.zeros(0, bool)
    filled = np.where(gone, 0.0, values)
    low, mean, high = (np.where(gone, np.nan, f(filled, axis=0)) for f in (np.nanmin, np.nanmean, np.nanmax))
    return np.array(rounds), low, mean, high
