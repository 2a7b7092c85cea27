# SPDX-License-Identifier: Apache-2.0
"""Panels of lines as SVG: mean with the repeats' range as a band, labels at the line ends, 0 as its own level.

The same panels give the same bytes, so that git shows only what changed. Text stays text, and small.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvitals.errors import MissingExtraError

Floats = NDArray[np.float64]

# Okabe and Ito's colours that can be seen on white and on black.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)
INK, HAIRLINE = "#222222", "#767676"  # on a page, INK becomes the text's own colour
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
POINTS = 240  # drawn of a line at most: the lowest and the highest of each bucket
LABEL_GAP = 0.085  # of a panel's height, between two labels


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
    runs: bool = False  # each repeat as a thin line, too

    @property
    def chosen_scale(self) -> str:
        """A linear one that spans more than three orders of magnitude is read better as a log one."""
        if self.scale != "auto":
            return self.scale
        values = np.concatenate([line.runs.ravel() for line in self.lines]) if self.lines else np.zeros(1)
        values = values[np.isfinite(values)]
        wide = values.size > 0 and values.min() > 0 and values.max() > 1e3 * np.median(values[values > 0])
        return "log" if wide or (values.size > 0 and values.min() >= 0 and values.max() > 1e4) else "linear"


@dataclass(frozen=True, slots=True)
class _Course:
    """What is drawn of a line."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def svg_of(panels: Sequence[Panel], title: str, columns: int = 2) -> str:
    """One picture of all panels, on white."""
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
        width = 3.8 * max(2, columns)  # a panel alone is wide: text keeps its size on the page
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
    return _tidied(buffer.getvalue(), title)


def data_of(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """The numbers that the picture shows."""
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


def for_page(svg: str) -> str:
    """The same picture for a page of any background: no white behind it, ink in the text's colour."""
    return re.sub(r'<rect class="paper"[^>]*/>', "", svg).replace(INK, "currentColor")


def _course(runs: Floats) -> _Course:
    """Mean and range over the repeats; of a long line, each bucket's lowest and highest point, and its whole range."""
    gone = np.all(np.isnan(runs), axis=0)
    filled = np.where(gone, 0.0, runs)
    mean, low, high = (np.where(gone, np.nan, f(filled, axis=0)) for f in (np.nanmean, np.nanmin, np.nanmax))
    points = runs.shape[1]
    x = np.arange(1.0, points + 1)
    if points <= POINTS:
        return _Course(x, mean, low, high)
    kept: list[int] = []
    for bucket in np.array_split(np.arange(points), POINTS // 2):
        values = mean[bucket]
        if np.isnan(values).all():
            kept.append(int(bucket[0]))
            continue
        low[bucket], high[bucket] = np.nanmin(low[bucket]), np.nanmax(high[bucket])
        kept += sorted({int(bucket[np.nanargmin(values)]), int(bucket[np.nanargmax(values)])})
    return _Course(x[kept], mean[kept], low[kept], high[kept])


def _draw(axes: Any, panel: Panel) -> None:
    scale = panel.chosen_scale
    courses = [_course(line.runs) for line in panel.lines]
    seen = [np.concatenate([c.low, c.high]) for c in courses] or [np.zeros(1)]
    height = _Height(scale, np.concatenate(seen))
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
        alone = there[1:-1] & ~there[:-2] & ~there[2:]  # a line needs two points; one measured now and then is a dot
        axes.plot(course.x[alone], mean[alone], ".", color=line.colour, markersize=3)
        finite = np.flatnonzero(np.isfinite(mean))
        if finite.size:
            ends.append((line, float(course.x[finite[-1]]), float(mean[finite[-1]])))
    axes.set_title(panel.title, pad=5)
    axes.set_xlabel(panel.x, labelpad=1)
    axes.set_ylabel(panel.y, labelpad=2)
    height.dress(axes)
    _label(axes, ends)
    if not panel.lines:
        axes.text(0.5, 0.5, "nothing measured", transform=axes.transAxes, ha="center", color=HAIRLINE)


class _Height:
    """From values to heights on a linear axis, with the ticks that say so."""

    def __init__(self, scale: str, values: Floats) -> None:
        self.scale = scale
        finite = values[np.isfinite(values)]
        self.top = float(finite.max()) if finite.size else 1.0
        positive = np.log10(finite[finite > 0])
        self.decades = (float(positive.min()), float(positive.max())) if positive.size else (0.0, 0.0)
        self.zeros = bool(np.any(finite == 0))
        span = max(1.0, self.decades[1] - self.decades[0])
        self.zero = math.floor(self.decades[0]) - max(0.5, 0.12 * span)

    def of(self, values: Floats) -> Floats:
        if self.scale != "log":
            return np.where(np.isfinite(values), values, np.nan)
        positive = np.isfinite(values) & (values > 0)
        heights = np.log10(np.where(positive, values, 1.0))
        return np.where(positive, heights, np.where(values == 0, self.zero, np.nan))

    def dress(self, axes: Any) -> None:
        if self.scale == "share":
            top = 1.0 if self.top > 0.2 else max(0.01, 1.25 * self.top)
            axes.set_ylim(0, top)
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        elif self.scale == "log":
            self._dress_log(axes)
        else:
            axes.margins(y=0.08)
            axes.yaxis.set_major_formatter(lambda value, _: _tick(value))

    def _dress_log(self, axes: Any) -> None:
        low, high = math.floor(self.decades[0]), math.ceil(self.decades[1])
        high = max(high, low + 1)
        step = -(-(high - low) // 5)
        ticks: list[float] = [*range(low, high + 1, step)]
        labels = [f"10{str(tick).translate(SUPERSCRIPTS)}" for tick in range(low, high + 1, step)]
        bottom: float = low
        if self.zeros:
            ticks, labels, bottom = [self.zero, *ticks], ["0", *labels], self.zero
            axes.axhline((self.zero + low) / 2, color=HAIRLINE, linewidth=0.5, linestyle=(0, (1, 2)))
        axes.set_yticks(ticks, labels)
        margin = 0.05 * (high - bottom)
        axes.set_ylim(bottom - margin, high + margin)


def _tick(value: float) -> str:
    """Three digits; very small and very large ones as 2·10⁻⁸, so that no factor has to be read elsewhere."""
    text = f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{float(mantissa):g}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return text.replace("-", "−")


def _label(axes: Any, ends: list[tuple[Line, float, float]]) -> None:
    """Each line's name at its end, moved apart where they would overlap, with a hairline to where the line ends."""
    low, high = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end[2])
    wanted = [min(1.0, max(0.0, (y - low) / (high - low))) for _, _, y in ordered]
    placed = _apart(wanted)
    for (line, x, y), at in zip(ordered, placed, strict=True):
        axes.annotate(
            line.label, (x, min(high, max(low, y))), (1.05, at), "data", "axes fraction", va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "linewidth": 0.6, "color": line.colour, "relpos": (0, 0.5), "shrinkA": 2,
                "shrinkB": 0,
            },
        )  # fmt: skip


def _apart(wanted: list[float]) -> list[float]:
    """The same heights, in order, at least a label's height apart, moved as little as two passes can."""
    placed = list(wanted)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + LABEL_GAP)
    excess = max(0.0, placed[-1] - 1.0) if placed else 0.0
    for i in range(len(placed) - 1, -1, -1):
        ceiling = placed[i + 1] - LABEL_GAP if i + 1 < len(placed) else placed[-1] - excess
        placed[i] = min(placed[i], ceiling)
    return placed


def _tidied(svg: str, title: str) -> str:
    """Without what a page does not need: header, metadata, ids that nothing refers to, decimals that nobody sees."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", svg)
    svg = re.sub(r' (?:d|x|y|transform)="[^"]+"', lambda found: re.sub(r"-?\d+\.\d\d+", _tenths, found[0]), svg)
    svg = re.sub(r' d="[^"]+"', lambda found: re.sub(r"\s*([MLz])\s*", r"\1", found[0]), svg)
    svg = re.sub(r"(font: (?:\d+ )?[\d.]+px) [^;\"]+", r"\1 system-ui, sans-serif", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    head = svg.index(">") + 1
    words = title.replace("&", "&amp;").replace("<", "&lt;")
    opening = svg[:head].replace("<svg", '<svg role="img"', 1)
    paper = '<rect class="paper" width="100%" height="100%" fill="#fff"/>'
    return f"{opening}\n<title>{words}</title>\n{paper}{svg[head:]}"


def _tenths(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")
