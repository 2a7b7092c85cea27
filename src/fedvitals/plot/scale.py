# SPDX-License-Identifier: Apache-2.0
"""Maps values to heights on an axis (0 on a log axis has its own level), and puts names at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvitals.plot.style import HAIRLINE, SUPERSCRIPTS
from fedvitals.views.units import number

Floats = NDArray[np.float64]
End = tuple[str, str, float, float]
"""A line's name, its colour, and where it stops."""
LABEL_INCHES = 0.13  # between the middles of two labels


class Height:
    """Maps values to heights on a linear axis, and provides the matching ticks."""

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
            axes.yaxis.set_major_formatter(lambda value, _: number(value))

    def _dress_log(self, axes: Any) -> None:
        low, high = math.floor(self.decades[0]), math.ceil(self.decades[1])
        high = max(high, low + 1)
        step = -(-(high - low) // 5)
        ticks: list[float] = [*range(low, high + 1, step)]
        labels = [power(exponent) for exponent in range(low, high + 1, step)]
        bottom: float = low
        if self.zeros:
            ticks, labels, bottom = [self.zero, *ticks], ["0", *labels], self.zero
            axes.axhline((self.zero + low) / 2, color=HAIRLINE, linewidth=0.5, linestyle=(0, (1, 2)))
        axes.set_yticks(ticks, labels)
        margin = 0.05 * (high - bottom)
        axes.set_ylim(bottom - margin, high + margin)


def power(exponent: int) -> str:
    return f"10{str(exponent).translate(SUPERSCRIPTS)}"


def end_of(name: str, colour: str, places: Sequence[float], heights: Floats) -> list[End]:
    """Return where a line ends, for its name; empty without a line."""
    finite = np.flatnonzero(np.isfinite(heights))
    return [(name, colour, float(places[finite[-1]]), float(heights[finite[-1]]))] if finite.size else []


def label_ends(axes: Any, ends: Sequence[End]) -> None:
    """Write each line's name at its end, moved apart where names would overlap, with a hairline to the line.

    The name of a line that ends early is at its end.
    """
    low, high = axes.get_ylim()
    ordered = sorted(ends, key=lambda end: end[3])
    wanted = [min(1.0, max(0.0, (y - low) / (high - low))) for _, _, _, y in ordered]
    inches = axes.get_position().height * axes.figure.get_figheight()
    placed = _apart(wanted, LABEL_INCHES / max(inches, LABEL_INCHES))
    left, right = axes.get_xlim()
    for (name, colour, x, y), at in zip(ordered, placed, strict=True):
        early = x < right - max(1.0, 0.05 * (right - left))  # a leader across empty rounds would look like values
        axes.annotate(
            name, (x, min(high, max(low, y))), (x + 0.3, at) if early else (1.05, at), "data",
            ("data", "axes fraction") if early else "axes fraction", va="center", annotation_clip=False,
            arrowprops=None if early else {
                "arrowstyle": "-", "linewidth": 0.6, "color": colour, "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 0,
            },
        )  # fmt: skip


def _apart(wanted: list[float], gap: float) -> list[float]:
    """Return the heights in order, at least `gap` apart, moved as little as two passes can."""
    placed = list(wanted)
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    excess = max(0.0, placed[-1] - 1.0) if placed else 0.0
    for i in range(len(placed) - 1, -1, -1):
        ceiling = placed[i + 1] - gap if i + 1 < len(placed) else placed[-1] - excess
        placed[i] = min(placed[i], ceiling)
    return placed
