# SPDX-License-Identifier: Apache-2.0
"""Rows to insert, given as columns: many rows in one statement, with shared values passed only once.

Binding a value takes a third of the time of inserting a row, and needs the interpreter lock, which training threads
want too; SQLite releases the lock while it executes a statement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ROWS_AT_ONCE = (256, 64, 16, 4, 1)


@dataclass(frozen=True, slots=True)
class Constant:
    """A column with the same value in every row."""

    content: Any


Column = Sequence[Any] | Constant
"""What rows have in one column. Of a `range`, only the beginning is handed over."""


def rows_of(columns: Sequence[Column]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows one by one; at least one column must not be a Constant."""
    return zip(*(itertools.repeat(c.content) if isinstance(c, Constant) else c for c in columns), strict=False)


def insertions(into: str, columns: Sequence[Column], limit: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield statements that insert the rows in order, each with at most `limit` values, together with these values.

    `into` is the statement up to VALUES; at least one column must not be a Constant.
    """
    forms = "".join(map(_form, columns))
    shared = [column for column, form in zip(columns, forms, strict=True) if form in "SC"]
    varying = [column for column, form in zip(columns, forms, strict=True) if form == "V"]
    cells = [*itertools.chain.from_iterable(rows_of(varying))] if varying else []
    count = next(len(column) for column in columns if not isinstance(column, Constant))
    width, first = len(varying), 0
    for rows in ROWS_AT_ONCE:
        while first + rows <= count and (rows == 1 or len(shared) + rows * width <= limit):
            bound = [column.content if isinstance(column, Constant) else column[first] for column in shared]
            yield _statement(into, forms, rows), bound + cells[first * width : (first + rows) * width]
            first += rows


def _form(column: Column) -> str:
    """Return the kind of a column: N always NULL, S shared, C counting up, V varying."""
    if isinstance(column, Constant):
        return "N" if column.content is None else "S"
    return "C" if isinstance(column, range) else "V"


@lru_cache(maxsize=256)
def _statement(into: str, forms: str, rows: int) -> str:
    """Return the statement for this number of rows; the shared values come first among its parameters.

    A transaction fails as a whole, so SQLite does not need to be able to undo a single statement (OR FAIL), which costs
    more.
    """
    shared = [i for i, form in enumerate(forms) if form in "SC"]
    numbers = itertools.count(len(shared) + 1)

    def cell(row: int, i: int) -> str:
        if forms[i] == "N":
            return "NULL"
        if forms[i] == "V":
            return f"?{next(numbers)}"
        return f"?{shared.index(i) + 1}" + (f" + {row}" if forms[i] == "C" else "")

    lines = (f"({', '.join(cell(row, i) for i in range(len(forms)))})" for row in range(rows))
    return f"{into.replace('INSERT INTO', 'INSERT OR FAIL INTO', 1)} VALUES {', '.join(lines)}"  # noqa: S608 - our own words
