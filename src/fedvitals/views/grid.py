# SPDX-License-Identifier: Apache-2.0
"""Encodes heat maps as base64 arrays, so that 10⁵ cells are sent and read in milliseconds."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvitals.views.cohort import Floats, Matrix

VALUE, ABSENT, FAILED, NAN, PLUS, MINUS = range(6)  # values of `Grid.state`


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows × columns. A column joins the rounds from `columns` to `last`; a cell shows the worst of them."""

    rows: tuple[str, ...]
    columns: tuple[int, ...]
    last: tuple[int, ...]
    values: str  # base64 of float32, little endian, row by row
    state: str  # base64 of uint8
    low: float | None  # 2nd and 98th percentile of all finite values, even if the rows are only one page
    high: float | None
    smallest: float | None
    largest: float | None
    total_rows: int
    total_columns: int
    unit: str
    title: str


def make_grid(
    matrix: Matrix,
    *,
    rows: Sequence[str] | None = None,
    sort: str = "worst",
    offset: int = 0,
    limit: int | None = None,
    first: int | None = None,
    last: int | None = None,
    columns: int = 400,
    failed: Collection[tuple[str, int]] = (),
    unit: str = "",
    title: str = "",
) -> Grid:
    """Return a page of rows (those named, else all, by `sort`: «worst», «name», «given») for these rounds."""
    seen = matrix.take(None, first, last)
    order = _order(seen, rows, sort)
    page = order[offset : None if limit is None else offset + limit]
    joined = seen.bucket(columns)
    values, there = joined.worst[page], joined.there[page]
    smallest, low, high, largest = seen.extent() or (None, None, None, None)
    names = tuple(seen.nodes[i] for i in page)
    return Grid(
        rows=names,
        columns=joined.first,
        last=joined.last,
        values=packed(np.where(np.isfinite(values), values, np.float32(0))),
        state=packed(_state(values, there, _struck(names, joined.last, joined.first, failed))),
        low=low,
        high=high,
        smallest=smallest,
        largest=largest,
        total_rows=len(order),
        total_columns=len(seen.rounds),
        unit=unit,
        title=title,
    )


def _order(matrix: Matrix, rows: Sequence[str] | None, sort: str) -> list[int]:
    if rows is None:
        chosen = list(range(len(matrix.nodes)))
    else:
        places = {name: row for row, name in enumerate(matrix.nodes)}
        chosen = [places[name] for name in rows if name in places]
    if sort == "worst":
        wanted = set(chosen)
        return [int(row) for row in matrix.worst_first() if int(row) in wanted]
    return sorted(chosen) if sort == "name" else chosen


def _struck(
    names: Sequence[str], last: Sequence[int], first: Sequence[int], failed: Collection[tuple[str, int]]
) -> npt.NDArray[np.bool_]:
    """Return which cells have a failure."""
    struck = np.zeros((len(names), len(last)), bool)
    places = {name: i for i, name in enumerate(names)}
    ends = np.asarray(last)
    for node, number in failed:
        row = places.get(node)
        if row is not None and first and first[0] <= number <= last[-1]:
            struck[row, int(np.searchsorted(ends, number))] = True
    return struck


def _state(values: Floats, there: npt.NDArray[np.bool_], struck: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return the worst state that a cell joins: a non-finite number, a failure, a value, nothing."""
    state = np.full(values.shape, ABSENT, np.uint8)
    state[there] = VALUE
    state[struck] = FAILED
    state[there & np.isnan(values)] = NAN
    state[there & (values == np.inf)] = PLUS
    state[there & (values == -np.inf)] = MINUS
    return state


def packed(numbers: npt.NDArray[np.generic]) -> str:
    """Return an array as base64, little endian."""
    return base64.b64encode(np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<")).tobytes()).decode()
