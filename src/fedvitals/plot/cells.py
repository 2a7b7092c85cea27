# SPDX-License-Identifier: Apache-2.0
"""Cells of a heat map, drawn as one image so that 10⁴ of them take a few kilobytes, with names and a colour scale.

An absent node is hatched grey, a failed one has a cross, a value that is not finite is black with a mark.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvitals.palette import SIGNED_LIGHT
from fedvitals.plot.canvas import SMALL, Figure, sheet
from fedvitals.plot.scale import power
from fedvitals.plot.style import FAILED, HAIRLINE, INK, NOT_FINITE, NOT_THERE, words
from fedvitals.views import grid
from fedvitals.views.grid import Grid
from fedvitals.views.units import with_unit

Floats = NDArray[np.float64]
NAMED = 60  # rows that are all named; with more, every second, third, ...
MARKS = 400  # single cells that get a mark
STEPS = 64  # of the colour scale
MOST_INCHES = 9.0


def arrays(of: Grid) -> tuple[Floats, NDArray[np.uint8]]:
    """Return a grid's values (NaN where there is none) and states, [rows, columns]."""
    shape = (len(of.rows), len(of.columns))
    values = np.frombuffer(base64.b64decode(of.values), "<f4").reshape(shape).astype(float)
    state = np.frombuffer(base64.b64decode(of.state), np.uint8).reshape(shape)
    return np.where(state == grid.VALUE, values, np.nan), state


class Shades:
    """Maps values to colours: cividis for magnitudes, a diverging map for signed values."""

    def __init__(self, low: float, high: float, *, log: bool = False, signed: bool = False) -> None:
        from matplotlib import colormaps  # noqa: PLC0415 - an extra
        from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415

        self.log, self.signed = log, signed
        if signed:
            high = max(abs(low), abs(high)) or 1.0
            low = -high
        if log:
            low, high = math.log10(low), math.log10(high)
        self.low, self.high = low, high if high > low else low + 1.0
        self.colours = LinearSegmentedColormap.from_list("signed", SIGNED_LIGHT) if signed else colormaps["cividis"]

    def of(self, values: Floats) -> Floats:
        """Return colours [..., 4]; 0 on a log scale gets the lowest."""
        with np.errstate(divide="ignore", invalid="ignore"):
            heights = np.log10(values) if self.log else values
            share = np.clip((heights - self.low) / (self.high - self.low), 0, 1)
        return np.asarray(self.colours(np.nan_to_num(share, nan=0.0)), float)

    def ends(self, unit: str) -> tuple[str, str]:
        if self.log:
            return (_log_end(self.low), _log_end(self.high))
        return with_unit(self.low, unit), with_unit(self.high, unit)


def _log_end(exponent: float) -> str:
    return power(round(exponent)) if abs(exponent - round(exponent)) < 0.05 else f"{10**exponent:.2g}"


def shades_of(of: Grid, *, log: bool | None = None, signed: bool = False) -> Shades:
    """Return a grid's colour scale, from its 2nd to its 98th percentile; log if they differ by a factor of 100."""
    values, _ = arrays(of)
    finite = values[np.isfinite(values)]
    low, high = (0.0, 1.0) if of.low is None or of.high is None else (of.low, of.high)
    positive = finite[finite > 0]
    if log is None:
        log = bool(positive.size and finite.min() >= 0 and high > 100 * max(low, float(positive.min())))
    if log and positive.size:
        low, high = max(low, float(np.percentile(positive, 2))), max(high, float(positive.min()))
        return Shades(low, max(high, low), log=True)
    return Shades(low, high, signed=signed)


def draw_cells(axes: Any, of: Grid, shades: Shades, named: int = NAMED) -> None:
    """Draw the grid on these axes, its first row on top. `named`: the largest number of rows that are all named."""
    values, state = arrays(of)
    colours = shades.of(values)
    colours[state == grid.ABSENT] = (0, 0, 0, 0)
    colours[state == grid.FAILED] = _rgba(FAILED)
    colours[np.isin(state, (grid.NAN, grid.PLUS, grid.MINUS))] = _rgba(NOT_FINITE)
    first, last = of.columns[0] - 0.5, of.last[-1] + 0.5
    axes.set_facecolor(NOT_THERE)
    axes.patch.set(hatch="////", edgecolor="#b5b5b5", linewidth=0)
    pixels = (255 * colours + 0.5).astype(np.uint8)
    rows = len(of.rows)
    axes.imshow(pixels, extent=(first, last, rows, 0), aspect="auto", interpolation="none", zorder=1)
    _marks(axes, of, state)
    step = -(-rows // named)
    places = range(0, rows, step)
    axes.set_yticks([place + 0.5 for place in places], [words(of.rows[place], 22) for place in places], usetex=False)
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    for side in axes.spines.values():
        side.set_visible(False)


def _marks(axes: Any, of: Grid, state: NDArray[np.uint8]) -> None:
    middles = [(first + last) / 2 for first, last in zip(of.columns, of.last, strict=True)]
    odd = {(grid.FAILED,): ("x", INK), (grid.NAN, grid.PLUS, grid.MINUS): ("x", "#ffffff")}
    for kinds, (shape, colour) in odd.items():
        cells = np.argwhere(np.isin(state, kinds))[:MARKS]
        if len(cells):
            across = [middles[column] for _, column in cells]
            axes.plot(across, cells[:, 0] + 0.5, shape, color=colour, markersize=3, markeredgewidth=0.7, zorder=3)


def _rgba(colour: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgba  # noqa: PLC0415 - an extra

    return to_rgba(colour)


def cell_sheet(rows: int, title: str, note: str = "") -> tuple[Figure, Any, Any]:
    """Return a figure for that many rows, the axes for the cells, and those above them for title and scale."""
    tall = min(MOST_INCHES, max(0.9, 0.6 + rows * (0.16 if rows <= NAMED else 0.07)))
    figure, axes = sheet(2, heights=(0.3, tall))
    top, cells = axes[0, 0], axes[1, 0]
    top.set_axis_off()
    top.set(xlim=(0, 1), ylim=(0, 1))
    top.text(0, 0.3, title, ha="left", va="bottom", fontsize=SMALL)
    if note:
        top.text(0.99, 0.3, note, ha="right", va="bottom", fontsize=SMALL, color=HAIRLINE)
    return figure, cells, top


def colour_scale(top: Any, shades: Shades, unit: str) -> None:
    """Draw the colour scale above the cells, with the values of its ends."""
    left, right = 0.52, 0.68
    ramp = np.linspace(shades.low, shades.high, STEPS)
    colours = shades.of(10**ramp if shades.log else ramp)[None]
    pixels = (255 * colours + 0.5).astype(np.uint8)
    top.imshow(pixels, aspect="auto", interpolation="none", extent=(left, right, 0.35, 0.75))
    top.set(xlim=(0, 1), ylim=(0, 1))
    low, high = shades.ends(unit)
    for place, text, side in ((left - 0.01, low, "right"), (right + 0.01, high, "left")):
        top.text(place, 0.55, text, ha=side, va="center", fontsize=SMALL, color=HAIRLINE)
