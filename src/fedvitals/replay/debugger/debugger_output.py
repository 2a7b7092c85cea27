# SPDX-License-Identifier: Apache-2.0
"""The output of a debugger: one type for everything, so that whatever can be printed can be plotted, exported, or sent.

| kind | has |
| --- | --- |
| tensor | `summary`: its size, moments, odd values and a histogram |
| table | `columns` and `rows` |
| series | `x`, and `lines`: values by name |
| text | `text` |
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedvitals.replay.shares import Points, Share

BARS = " ▁▂▃▄▅▆▇█"
SPARKS = 40  # characters of a line of bars
BINS = 24
TENSOR, TABLE, SERIES, TEXT = "tensor", "table", "series", "text"
Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor in a few numbers. Moments and extremes are of the finite values; the norm is of all."""

    shape: tuple[int, ...]
    count: int
    norm: float
    mean: float
    std: float
    min: float
    max: float
    nan: int
    inf: int
    zeros: int
    counts: tuple[int, ...] = ()  # of the histogram
    edges: tuple[float, ...] = ()  # one more than counts


@dataclass(frozen=True)
class DebuggerOutput:
    """One output. `note`: what one has to know to read it."""

    title: str
    kind: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    x: tuple[float, ...] = ()
    lines: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    x_name: str = ""
    y_name: str = ""
    summary: TensorSummary | None = None
    text: str = ""
    note: str = ""
    tensor: Any = field(default=None, compare=False, repr=False)  # the values themselves, of a tensor

    def __str__(self) -> str:
        bodies = {TENSOR: _tensor_text, TABLE: _table_text, SERIES: _series_text}
        body = bodies[self.kind](self) if self.kind in bodies else self.text
        parts = [printable(self.title), printable(body), printable(self.note)]
        return "\n".join(part for part in parts if part)

    def as_json(self) -> dict[str, Any]:
        """Return the output as a JSON document; non-finite numbers are left to the writer."""
        document: dict[str, Any] = {"title": self.title, "kind": self.kind}
        if self.kind == TENSOR and self.summary is not None:
            document["summary"] = asdict(self.summary)
        elif self.kind == TABLE:
            document |= {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}
        elif self.kind == SERIES:
            document |= {"x_name": self.x_name, "y_name": self.y_name, "x": list(self.x)}
            document["lines"] = {name: list(values) for name, values in self.lines.items()}
        else:
            document["text"] = self.text
        return document | ({"note": self.note} if self.note else {})

    def as_csv(self) -> str:
        """Return rows under a header: for a tensor one row of its numbers, for a series one column per line."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        if self.kind == SERIES:
            writer.writerow([self.x_name or "x", *self.lines])
            writer.writerows(zip(self.x, *self.lines.values(), strict=True))
        elif self.kind == TENSOR and self.summary is not None:
            fields = {key: value for key, value in asdict(self.summary).items() if key not in ("counts", "edges")}
            fields["shape"] = "×".join(map(str, self.summary.shape))
            writer.writerow(fields)
            writer.writerow(fields.values())
        else:
            writer.writerow(self.columns or ("text",))
            plain = ((float(cell) if isinstance(cell, float) else cell for cell in row) for row in self.rows)
            writer.writerows(plain if self.rows else [(self.text,)])
        return out.getvalue()


def text_output(title: str, text: str = "", note: str = "") -> DebuggerOutput:
    """Return an output of text."""
    return DebuggerOutput(title, TEXT, text=text, note=note)


def table_output(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], note: str = "") -> DebuggerOutput:
    """Return an output of a table."""
    return DebuggerOutput(title, TABLE, tuple(columns), tuple(tuple(row) for row in rows), note=note)


def series_output(
    title: str,
    x: Iterable[float],
    lines: Mapping[str, Iterable[float | None]],
    *,
    x_name: str = "round",
    y_name: str = "",
    note: str = "",
) -> DebuggerOutput:
    """Return an output of one or more lines over `x`."""
    held = {name: tuple(values) for name, values in lines.items()}
    return DebuggerOutput(title, SERIES, x=tuple(x), lines=held, x_name=x_name, y_name=y_name, note=note)


def tensor_output(title: str, values: Any, note: str = "") -> DebuggerOutput:
    """Return an output of a tensor and its summary."""
    return DebuggerOutput(title, TENSOR, summary=summarize(values), note=note, tensor=values)


def summarize(values: Any, bins: int = BINS) -> TensorSummary:
    """Return the summary of a tensor of torch or NumPy."""
    held = values.detach().cpu() if hasattr(values, "detach") else values
    held = held.float() if "bfloat16" in str(getattr(held, "dtype", "")) else held  # numpy has none
    flat = np.asarray(held).reshape(-1).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(flat)) if flat.size else 0.0
    mean = std = low = high = math.nan
    counts, edges = np.zeros(0, np.int64), np.zeros(0)
    if finite.size:
        mean, std, low, high = (float(f(finite)) for f in (np.mean, np.std, np.min, np.max))
        counts, edges = _histogram(finite, bins)
    nans, infs, zeros = (int(mask.sum()) for mask in (np.isnan(flat), np.isinf(flat), flat == 0))
    histogram = tuple(counts.tolist()), tuple(edges.tolist())
    shape = tuple(np.shape(held))
    return TensorSummary(shape, flat.size, norm, mean, std, low, high, nans, infs, zeros, *histogram)


def _histogram(finite: Any, bins: int) -> tuple[Any, Any]:
    low, high = float(finite.min()), float(finite.max())
    if not math.isfinite(high - low) or high - low <= max(abs(low), abs(high)) * 1e-12:  # one value, or too far apart
        return np.array([finite.size]), np.array([low, high])
    return np.histogram(finite, bins)


def histogram_bars(counts: Sequence[int]) -> str:
    """Return a histogram in one line; every count above 0 is visible."""
    most = max(counts, default=0)
    return "".join(BARS[0 if n == 0 else max(1, round(n / most * (len(BARS) - 1)))] for n in counts)


def format_cell(value: Cell) -> str:
    """Return a number with four digits, a share as per cent; everything else as it is."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not isinstance(value, Share | Points):
        return "0" if value == 0 else f"{value:.4g}"
    return str(value)


def printable(text: str) -> str:
    """Return the text without control characters: names come from tapes and stores, and must not move a cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _tensor_text(output: DebuggerOutput) -> str:
    summary = output.summary
    if summary is None:
        return ""
    shape = " × ".join(map(str, summary.shape)) or "a number"
    share = f" ({summary.zeros / summary.count:.0%})" if summary.count else ""
    lines = [
        f"  shape {shape} ({summary.count} values)   norm {format_cell(summary.norm)}",
        "  " + "   ".join(f"{name} {format_cell(getattr(summary, name))}" for name in ("mean", "std", "min", "max")),
        f"  NaN {summary.nan}, Inf {summary.inf}, zeros {summary.zeros}{share}",
    ]
    if summary.counts:
        lines.append(
            f"  {format_cell(summary.edges[0])} ▕{histogram_bars(summary.counts)}▏ {format_cell(summary.edges[-1])}"
        )
    return "\n".join(lines)


def _table_text(output: DebuggerOutput) -> str:
    cells = [[format_cell(cell).replace("\n", " ") for cell in row] for row in output.rows]
    if not cells:
        return "  (nothing)"
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(output.columns)]
    right = [all(isinstance(row[i], int | float | None) for row in output.rows) for i in range(len(output.columns))]

    def line(row: Sequence[str]) -> str:
        parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  " + "  ".join(parts).rstrip()

    return "\n".join([line(output.columns), *(line(row) for row in cells)])


def _series_text(output: DebuggerOutput) -> str:
    lines = []
    width = max((len(name) for name in output.lines), default=0)
    for name, values in output.lines.items():
        known = [v for v in values if v is not None and math.isfinite(v)]
        if not known:
            lines.append(f"  {name.ljust(width)}  nothing finite")
            continue
        ends = [v for v in values if v is not None]
        lines.append(
            f"  {name.ljust(width)}  {_sparkline(values)}  {format_cell(ends[0])} → {format_cell(ends[-1])}"
            f"  (min {format_cell(min(known))}, max {format_cell(max(known))})"
        )
    if output.x:
        lines.append(f"  {output.x_name} {format_cell(output.x[0])} to {format_cell(output.x[-1])}")
    return "\n".join(lines) or "  (nothing)"


def _sparkline(values: Sequence[float | None]) -> str:
    """Return the values as a line of bars; a missing or non-finite value is a dot."""
    if len(values) > SPARKS:
        values = [values[(i + 1) * len(values) // SPARKS - 1] for i in range(SPARKS)]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BARS) - 2) / (high - low) if high > low else 0.0
    return "".join("·" if v is None or not math.isfinite(v) else BARS[1 + round((v - low) * scale)] for v in values)
