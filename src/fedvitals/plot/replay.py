# SPDX-License-Identifier: Apache-2.0
"""Draws what a replay session shows: a tensor as a histogram, a series as lines, a table as bars, text as text.

    from fedvitals.plot.replay import draw
    with fv.open_replay("RUN") as r:
        draw(r.show("gradient conv1"), "gradient.svg")

A file is PNG, SVG, PDF, or HTML: a page with the picture and, folded below it, its numbers. It contains no script and
loads nothing from elsewhere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.errors import ConfigError
from fedvitals.palette import LIGHT
from fedvitals.plot.canvas import SMALL, Figure, drawn, head, in_style, line, nothing, numbers, panel
from fedvitals.plot.scale import End, end_of, label_ends
from fedvitals.plot.style import COLOURS, HAIRLINE, words
from fedvitals.plot.svg import svg_of
from fedvitals.replay.debugger.debugger_output import SERIES, TABLE, TENSOR, DebuggerOutput, format_cell, printable
from fedvitals.views.units import number

FILES = ("png", "svg", "pdf", "html")
BARS = 40  # rows of a table that are drawn
LINES = 8  # with more, the others are drawn as one band
LISTED = 1000  # rows below the picture of a page


def draw(shown: DebuggerOutput, path: str | Path | None = None) -> Figure:
    """Return a picture of the output, and write it to `path` if given; its suffix determines the format."""
    kind = "" if path is None else Path(path).suffix.removeprefix(".").lower()
    if path is not None and kind not in FILES:
        raise ConfigError(f"A picture is a file that ends in {', '.join(FILES)}; got '{path}'.")
    picture = _drawn(shown)
    if path is not None:
        _write(picture, shown, Path(path), kind)
    return picture


@drawn
def _drawn(shown: DebuggerOutput) -> Figure:
    if shown.kind == TENSOR:
        return _histogram(shown)
    if shown.kind == SERIES:
        return _lines(shown)
    if shown.kind == TABLE:
        return _bars(shown)
    return nothing(words(shown.title, 100), words(shown.text or shown.note, 400))


def _histogram(shown: DebuggerOutput) -> Figure:
    known = shown.summary
    if known is None or not known.counts:
        return nothing(words(shown.title, 100), "There is no finite value in it.")
    picture, axes = panel(2.3)
    if len(known.counts) == 1:  # a single value
        axes.bar([known.edges[0]], known.counts, color=COLOURS[0], width=max(abs(known.edges[0]) * 0.02, 1e-3))
    else:
        axes.bar(known.edges[:-1], known.counts, np.diff(known.edges), align="edge", color=COLOURS[0], linewidth=0)
    axes.axvline(0, color=HAIRLINE, linewidth=0.7)
    axes.axvline(known.mean, color=COLOURS[1], linewidth=1.0)
    shape = " × ".join(map(str, known.shape)) if len(known.shape) > 1 else f"{known.count} values"
    odd = [f"{count} {name}" for name, count in (("NaN", known.nan), ("infinite", known.inf)) if count]
    odd += [f"{100 * known.zeros / known.count:.0f} % zero"] if known.zeros else []
    head(axes, words(shown.title, 60), ", ".join([shape, f"norm {format_cell(known.norm)}", *odd]))
    axes.set_xlabel(f"value; orange: the mean, {format_cell(known.mean).replace('-', '−')}", labelpad=1)
    axes.set_ylabel("how many", labelpad=2)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    return picture


def _lines(shown: DebuggerOutput) -> Figure:
    there = {name: numbers(values) for name, values in shown.lines.items() if len(values) == len(shown.x)}
    if not shown.x or not any(np.isfinite(values).any() for values in there.values()):
        return nothing(words(shown.title, 100), "There is nothing finite to draw.")
    picture, axes = panel(2.3)
    ends: list[End] = []
    single = [*there][: min(len(there), LINES)]
    others = [there[name] for name in there if name not in single]
    if others:
        block = np.where(np.isfinite(others), others, np.nan)
        some = np.isfinite(block).any(axis=0)
        low = np.where(some, np.where(np.isfinite(block), block, np.inf).min(axis=0), np.nan)
        high = np.where(some, np.where(np.isfinite(block), block, -np.inf).max(axis=0), np.nan)
        axes.fill_between(shown.x, low, high, color=HAIRLINE, alpha=0.25, linewidth=0)
    for place, name in enumerate(single):
        colour = COLOURS[place % len(COLOURS)]
        style = "-" if place < len(COLOURS) else "--"
        line(axes, shown.x, there[name].tolist(), colour, linestyle=style)  # type: ignore[arg-type]
        ends += end_of(words(name, 20), colour, shown.x, there[name])
    note = f"grey: {len(others)} more" if others else words(shown.note, 70)
    head(axes, words(shown.title, 60), note)
    _whole_steps(axes, shown.x)
    axes.set_xlabel(words(shown.x_name), labelpad=1)
    axes.set_ylabel(words(shown.y_name), labelpad=2)
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    label_ends(axes, ends)
    return picture


def _whole_steps(axes: Any, places: Sequence[float]) -> None:
    """Show integer ticks only, for rounds and steps."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an extra

    if all(float(place).is_integer() for place in places):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))


def _bars(shown: DebuggerOutput) -> Figure:
    column = _number_column(shown)
    if column is None:
        return nothing(words(shown.title, 100), words(f"No column of it has numbers. {shown.note}".strip(), 300))
    rows = shown.rows[:BARS]
    values = numbers([_number(row[column]) for row in rows])
    picture, axes = panel(0.7 + 0.18 * len(rows))
    places = np.arange(len(rows))
    axes.barh(places, np.nan_to_num(values, posinf=0, neginf=0), 0.7, color=COLOURS[0], linewidth=0)
    axes.axvline(0, color=HAIRLINE, linewidth=0.7)
    reach = max(float(np.nanmax(np.abs(np.where(np.isfinite(values), values, 0)), initial=0)), 1e-12)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        end = value if math.isfinite(value) else 0.0
        label = words(format_cell(row[column]), 20)
        side = "right" if end < 0 else "left"
        axes.text(end + math.copysign(0.01 * reach, end), place, label, va="center", ha=side, fontsize=SMALL)
    axes.set_yticks(places, [words(_named(row, column), 28) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    more = f"{len(rows)} of {len(shown.rows)} rows" if len(shown.rows) > len(rows) else words(shown.note, 70)
    head(axes, words(f"{shown.title}: {shown.columns[column]}", 60), more)
    return picture


def _number_column(shown: DebuggerOutput) -> int | None:
    """Return the first column of numbers that is not the row number; of integers only if there is nothing else."""
    columns = [
        i
        for i in range(len(shown.columns))
        if any(_number(row[i]) is not None for row in shown.rows)
        and all(row[i] is None or _number(row[i]) is not None for row in shown.rows)
    ]
    real = [i for i in columns if any(isinstance(row[i], float) for row in shown.rows)]
    return next(iter([*real, *(i for i in columns if i), *columns]), None)


def _number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, int | float) and not isinstance(cell, bool) else None


def _named(row: Sequence[object], column: int) -> str:
    texts = [str(cell) for i, cell in enumerate(row) if i != column and isinstance(cell, str)]
    return texts[0] if texts else str(row[0])


# -- files ------------------------------------------------------------------------------------------------------------


def _write(picture: Figure, shown: DebuggerOutput, path: Path, kind: str) -> None:
    if kind == "svg":
        path.write_text(svg_of(picture, printable(shown.title), "replay"), encoding="utf-8")
    elif kind == "html":
        path.write_text(page_of(picture, shown), encoding="utf-8")
    else:
        with in_style():
            picture.savefig(path, dpi=144)


def page_of(picture: Figure, shown: DebuggerOutput) -> str:
    """Return an HTML page with the picture, and its numbers in a table that can be searched and copied."""
    title = html.escape(printable(shown.title))
    columns, rows = _listed(shown)
    cells = "".join(f"<th>{html.escape(printable(name))}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(printable(format_cell(cell)))}</td>' for cell in row)}</tr>"
        for row in rows[:LISTED]
    )
    more = f"<p>{LISTED} of {len(rows)} rows.</p>" if len(rows) > LISTED else ""
    note = f"<p>{html.escape(printable(shown.note))}</p>" if shown.note else ""
    table = f"<details open><summary>numbers</summary><table><tr>{cells}</tr>{body}</table>{more}</details>"
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n<style>{STYLE}</style>\n'
        f"<h1>{title}</h1>\n{svg_of(picture, printable(shown.title), 'replay')}\n{note}{table if rows else ''}</html>\n"
    )


STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;margin:24px;max-width:960px;color:#222;background:#fff}h1{font-size:18px}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin-top:8px}"
    "th,td{text-align:left;padding:3px 16px 3px 0;font-variant-numeric:tabular-nums;"
    f"border-bottom:1px solid {LIGHT['line']}}}tr:hover td{{background:{LIGHT['paper-2']}}}"
)


def _listed(shown: DebuggerOutput) -> tuple[list[str], list[Sequence[Any]]]:
    if shown.kind == TABLE:
        return [*shown.columns], [*shown.rows]
    if shown.kind == SERIES:
        lines = [values for values in shown.lines.values() if len(values) == len(shown.x)]
        names = [name for name, values in shown.lines.items() if len(values) == len(shown.x)]
        return [shown.x_name or "x", *names], [*zip(shown.x, *lines, strict=True)]
    if shown.kind == TENSOR and shown.summary is not None and shown.summary.counts:
        edges = shown.summary.edges
        return ["from", "to", "how many"], [*zip(edges[:-1], edges[1:], shown.summary.counts, strict=False)]
    return [], []
