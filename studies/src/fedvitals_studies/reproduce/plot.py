# SPDX-License-Identifier: Apache-2.0
"""Panels of lines as SVG: mean with the repeats' range as a band, labels at the line ends, 0 as its own level.

The same panels give the same bytes, so that git shows only what changed. Text stays text, and small.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvitals.errors import MissingExtraError
from fedvitals.plot.scale import Height, label_ends
from fedvitals.plot.style import HAIRLINE, INK
from fedvitals.plot.svg import tidied

Floats = NDArray[np.float64]

POINTS = 240  # the most points drawn of a line: the lowest and the highest of each bucket


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    runs: Floats  # [repeats, points]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    y: str
    x: str = "round"
    scale: str = "linear"  # or "share", from 0 to 100 %; "log", with 0 as its own level
    runs: bool = False  # whether each repeat is also a thin line

    @property
    def chosen_scale(self) -> str:
        """Return the scale: a linear one that spans more than three orders of magnitude is easier to read as log."""
        if self.scale != "auto":
            return self.scale
        values = np.concatenate([line.runs.ravel() for line in self.lines]) if self.lines else np.zeros(1)
        values = values[np.isfinite(values)]
        wide = values.size > 0 and values.min() > 0 and values.max() > 1e3 * np.median(values[values > 0])
        return "log" if wide or (values.size > 0 and values.min() >= 0 and values.max() > 1e4) else "linear"


@dataclass(frozen=True, slots=True)
class _Band:
    """What is drawn of a line."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def svg_of(panels: Sequence[Panel], title: str, columns: int = 2) -> str:
    """Return one plot of all panels, on white."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to load
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "plots", "Drawing the figures") from error
    style = {
        "svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8, "text.color": INK, "axes.edgecolor": HAIRLINE,
        "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.5, "axes.titlesize": 8,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
        "xtick.major.width": 0.5, "ytick.major.width": 0.5, "axes.unicode_minus": True, "path.simplify": False,
    }  # fmt: skip
    rows = -(-len(panels) // columns)
    with mpl.rc_context(style):  # type: ignore[arg-type]  # its stubs know the names only as literals
        width = 3.8 * max(2, columns)  # a single panel is wide: text keeps its size on the page
        figure = Figure(figsize=(width, 2.35 * rows), facecolor="none")
        grid = figure.subplots(rows, columns, squeeze=False)
        figure.subplots_adjust(
            left=0.8 / width, right=1 - 0.95 / width, wspace=0.74,
            bottom=0.48 / (2.35 * rows), top=1 - 0.28 / (2.35 * rows), hspace=0.48,
        )  # fmt: skip
        for place, axes in enumerate(grid.flat):
            if place < len(panels):
                _draw(axes, panels[place])
            else:
                axes.set_axis_off()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return tidied(buffer.getvalue(), title)


def data_of(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return the numbers in the plot."""
    found = []
    for panel in panels:
        lines = []
        for line in panel.lines:
            course = _course(line.runs)
            entry: dict[str, Any] = {
                "label": line.label, "repeats": len(line.runs), "points": line.runs.shape[1], "x": course.x.astype(int),
                "mean": course.mean,
            }  # fmt: skip
            if len(line.runs) > 1:
                entry |= {"low": course.low, "high": course.high}
            lines.append(entry)
        found.append({"title": panel.title, "x": panel.x, "y": panel.y, "scale": panel.chosen_scale, "lines": lines})
    return found


def _course(runs: Floats) -> _Band:
    """Return mean and range over the repeats; of a long line, each bucket's lowest and highest point, and range."""
    gone = np.all(np.isnan(runs), axis=0)
    filled = np.where(gone, 0.0, runs)
    mean, low, high = (np.where(gone, np.nan, f(filled, axis=0)) for f in (np.nanmean, np.nanmin, np.nanmax))
    points = runs.shape[1]
    x = np.arange(1.0, points + 1)
    if points <= POINTS:
        return _Band(x, mean, low, high)
    kept: list[int] = []
    for bucket in np.array_split(np.arange(points), POINTS // 2):
        values = mean[bucket]
        if np.isnan(values).all():
            kept.append(int(bucket[0]))
            continue
        low[bucket], high[bucket] = np.nanmin(low[bucket]), np.nanmax(high[bucket])
        kept += sorted({int(bucket[np.nanargmin(values)]), int(bucket[np.nanargmax(values)])})
    return _Band(x[kept], mean[kept], low[kept], high[kept])


def _draw(axes: Any, panel: Panel) -> None:
    scale = panel.chosen_scale
    courses = [_course(line.runs) for line in panel.lines]
    seen = [np.concatenate([c.low, c.high]) for c in courses] or [np.zeros(1)]
    height = Height(scale, np.concatenate(seen))
    ends = []
    for line, course in zip(panel.lines, courses, strict=True):
        dashes = (0, (3, 1.5)) if line.dashed else "solid"
        mean = height.of(course.mean)
        if len(line.runs) > 1:
            low, high = height.of(course.low), height.of(course.high)
            axes.fill_between(course.x, low, high, color=line.colour, alpha=0.18, linewidth=0)
            if panel.runs:
                for run in line.runs:
                    single = _course(run[None])
                    axes.plot(single.x, height.of(single.mean), color=line.colour, linewidth=0.5, alpha=0.6)
        width = 1.4 if line.runs.shape[1] <= POINTS else 0.8
        axes.plot(course.x, mean, color=line.colour, linestyle=dashes, linewidth=width)
        there = np.concatenate([[False], np.isfinite(mean), [False]])
        alone = there[1:-1] & ~there[:-2] & ~there[2:]  # a line needs two points; an isolated one is drawn as a dot
        axes.plot(course.x[alone], mean[alone], ".", color=line.colour, markersize=3)
        finite = np.flatnonzero(np.isfinite(mean))
        if finite.size:
            ends.append((line, float(course.x[finite[-1]]), float(mean[finite[-1]])))
    axes.set_title(panel.title, pad=5)
    axes.set_xlabel(panel.x, labelpad=1)
    axes.set_ylabel(panel.y, labelpad=2)
    height.dress(axes)
    label_ends(axes, [(line.label, line.colour, x, y) for line, x, y in ends])
    if not panel.lines:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color=HAIRLINE)
