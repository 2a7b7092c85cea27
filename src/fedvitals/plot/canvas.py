# SPDX-License-Identifier: Apache-2.0
"""Empty figures in the house style, the elements most of them share, and a figure that says there is nothing to draw.

Figures are objects: pyplot's global state is neither read nor changed, and no backend is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from fedvitals.diagnosis.cases import Case
from fedvitals.errors import MissingExtraError
from fedvitals.plot.style import HAIRLINE, INK, SEVERITY, words
from fedvitals.views.axis_ends import honest_ends
from fedvitals.views.cases import since_of
from fedvitals.views.units import number, seconds, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure  # noqa: PLC0414 - re-exported for the other modules
else:
    Figure = Any  # for annotations: matplotlib is an extra, and slow to load

P = ParamSpec("P")
R = TypeVar("R")
WIDTH = 6.8  # inches: narrower than a sheet of paper, so that text is never smaller there than here
SMALL = 8  # points: all text
NAMED_FLAGS = 4  # findings named on an axis; the others only have their shape

STYLE: dict[str, Any] = {
    "font.size": SMALL, "text.color": INK, "text.usetex": False, "axes.edgecolor": HAIRLINE, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.5, "axes.titlesize": SMALL,
    "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.width": 0.5, "ytick.major.width": 0.5,
    "axes.unicode_minus": True, "axes.facecolor": "none", "figure.facecolor": "white", "hatch.linewidth": 0.4,
    "path.simplify": False, "svg.fonttype": "none",
}  # fmt: skip


def drawn(function: Callable[P, R]) -> Callable[P, R]:
    """Run the function in the house style, whatever the user's own style is.

    Raises MissingExtraError without matplotlib.
    """

    @functools.wraps(function)
    def inside(*arguments: P.args, **settings: P.kwargs) -> R:
        with in_style():
            return function(*arguments, **settings)

    return inside


def in_style() -> Any:
    """Return a context in which matplotlib has its defaults and our settings."""
    try:
        from matplotlib import style  # noqa: PLC0415 - an extra, and slow to load
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "plots", "Drawing pictures") from error
    return style.context(["default", STYLE])


def sheet(
    rows: int = 1, height: float = 2.3, columns: int = 1, *, share_x: bool = False, heights: Sequence[float] = ()
) -> tuple[Figure, Any]:
    """Return a figure and its axes, [rows, columns]. `height`: of one row, in inches, unless `heights` are set."""
    from fedvitals.plot.notebook import NotebookFigure  # noqa: PLC0415 - needs matplotlib

    tall = list(heights) or [height] * rows
    figure = NotebookFigure(figsize=(WIDTH, sum(tall)), layout="constrained")
    grid = figure.subplots(
        rows, columns, squeeze=False, sharex="all" if share_x else False, gridspec_kw={"height_ratios": tall}
    )
    for axes in grid.flat:
        dress(axes)
    return figure, grid


def wide_sheet(heights: Sequence[float]) -> Figure:
    """Return a figure with one wide panel above two others; `figure.axes` has them in this order."""
    figure, grid = sheet(2, columns=2, heights=heights)
    for axes in grid[0]:
        axes.remove()
    dress(figure.add_subplot(grid[0, 0].get_gridspec()[0, :]))
    for axes in grid[1]:  # so that the wide one is the first
        figure.delaxes(axes)
        figure.add_axes(axes)
    return figure


def panel(height: float) -> tuple[Figure, Any]:
    """Return a figure of that many inches, and its only axes."""
    figure, grid = sheet(1, height)
    return figure, grid[0, 0]


def dress(axes: Any) -> None:
    """Style the ticks now, since a notebook with another style may draw them later."""
    axes.tick_params(which="both", colors=INK, labelsize=SMALL, width=0.5, length=3)
    axes.tick_params(which="minor", length=0)


def head(axes: Any, title: str, note: str = "") -> None:
    """Write a title, and beside it in grey a note on how to read the picture."""
    axes.set_title(title, loc="left", fontsize=SMALL, color=INK, pad=7)
    if note:
        axes.set_title(note, loc="right", fontsize=SMALL, color=HAIRLINE, pad=7)


def round_axis(axes: Any, rounds: Iterable[int], *, label: bool = True) -> None:
    """Show whole rounds only, from the first to the last."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an extra

    known = list(rounds)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    if known:
        axes.set_xlim(min(known) - 0.5, max(known) + 0.5)
    if label:
        axes.set_xlabel("round", labelpad=1)


def value_axis(axes: Any, unit: str, which: str = "y") -> None:
    """Show ticks with the unit's own prefixes: 250 ms, 1.5 MB, 80 %."""
    formats: dict[str, Callable[[float], str]] = {
        "seconds": lambda value: "0" if value == 0 else f"−{seconds(-value)}" if value < 0 else seconds(value),
        "bytes": lambda value: "0" if value == 0 else size(value).replace("-", "−"),
        "points": lambda value: f"{value:.3g} points".replace("-", "−"),
        "share": lambda value: f"{100 * value:.3g} %".replace("-", "−"),
    }
    form = formats.get(unit, number)
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(lambda value, _: form(value))
    if which == "y":
        low, high = axes.dataLim.intervaly
        if np.isfinite([low, high]).all():
            axes.set_ylim(*honest_ends(low, high, unit))


def legend(axes: Any, *entries: Any, **how: Any) -> None:
    """Put the legend to the right of the axes."""
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(*entries, **place, frameon=False, fontsize=SMALL, handlelength=1, **how)


def flags(axes: Any, cases: Sequence[Case], *, named: bool = False) -> None:
    """Mark findings on the round axis: a hairline where each began, with the shape of its severity on top."""
    from matplotlib.transforms import blended_transform_factory  # noqa: PLC0415 - an extra

    across = blended_transform_factory(axes.transData, axes.transAxes)
    seen: dict[int, list[Case]] = {}
    for case in cases:  # worst first
        if (began := since_of(case)) is not None:
            seen.setdefault(began, []).append(case)
    for place, (round_index, same) in enumerate(seen.items()):
        colour, shape = SEVERITY.get(same[0].severity, SEVERITY["note"])
        axes.axvline(round_index, color=colour, linewidth=0.7, alpha=0.6, zorder=1)
        axes.plot([round_index], [1.02], shape, color=colour, markersize=4.5, transform=across, clip_on=False, zorder=5)
        if named and place < NAMED_FLAGS:
            name = words(same[0].node or same[0].group or same[0].layer or same[0].issue, 14)
            more = f" +{len(same) - 1}" if len(same) > 1 else ""
            axes.annotate(
                f"{name}{more}", (round_index, 1.0), (3, -3), across, "offset points", fontsize=SMALL, va="top",
                color=HAIRLINE,
            )  # fmt: skip


def nothing(what: str, why: str = "") -> Figure:
    """Return a small figure that says what is missing and what would provide it."""
    figure, axes = panel(1.1)
    axes.set_axis_off()
    text = f"{what}\n{why}" if why else what
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=HAIRLINE, wrap=True)
    return figure


def empty(axes: Any, text: str) -> None:
    """Write a text into one empty panel of several."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=HAIRLINE)
    axes.set_yticks([])


def line(axes: Any, rounds: Sequence[int], values: Sequence[float | None], colour: str, **how: Any) -> None:
    """Draw a series, with a gap where nothing was measured and a dot for an isolated value."""
    heights = numbers(values)
    axes.plot(rounds, heights, color=colour, **{"linewidth": 1.4, **how})
    lone = alone(heights)
    if lone.any():
        axes.plot(np.asarray(rounds)[lone], heights[lone], ".", color=colour, markersize=3.5)


def mark_not_finite(axes: Any, rounds: Sequence[int]) -> None:
    """Mark rounds whose value is NaN or infinite by a black cross at the top: at the bottom it would be read as 0."""
    if rounds:
        axes.plot(rounds, [0.97] * len(rounds), "x", color=INK, markersize=4, transform=axes.get_xaxis_transform())


def alone(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which values have no finite neighbour."""
    there = np.concatenate([[False], np.isfinite(values), [False]])
    return np.asarray(there[1:-1] & ~there[:-2] & ~there[2:])


def numbers(values: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return values as an array, NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)
