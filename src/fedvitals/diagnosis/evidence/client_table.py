# SPDX-License-Identifier: Apache-2.0
"""Per-client numbers kept from round to round, as arrays with one row per client.

At most `MOST_CLIENTS` clients are remembered, or as many as take part in one round if that is more. Beyond that, the
clients absent longest are forgotten, and count as new when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.protocols import Node

MOST_CLIENTS = 1 << 14
_FEWEST_ROWS = 16

Rows = npt.NDArray[np.intp]


class ClientColumn:
    """One quantity of all clients of a table: `values[row]` is a client's, an array of `shape`."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, fill: float) -> None:
        self.fill = fill
        self.values: npt.NDArray[Any] = np.full((0, *shape), fill, dtype)

    def resize(self, rows: int) -> None:
        """Make room for this many clients."""
        values = np.full((rows, *self.values.shape[1:]), self.fill, self.values.dtype)
        values[: len(self.values)] = self.values
        self.values = values


class ClientTable:
    """Maps clients to rows. Columns are added before the first client."""

    def __init__(self, most: int = MOST_CLIENTS) -> None:
        self._most = most
        self._rows: dict[Node, int] = {}  # longest absent client first
        self._columns: list[ClientColumn] = []
        self._capacity = self._used = 0  # number of rows, and how many have ever been used
        self._free: list[int] = []  # used rows whose clients were forgotten
        self.forgotten: list[Node] = []  # clients that lost their rows in the last call of `rows_of`

    def column(self, shape: tuple[int, ...] = (), dtype: npt.DTypeLike = np.float64, fill: float = 0.0) -> ClientColumn:
        """Add a quantity, whose value for a new client is `fill`."""
        self._columns.append(ClientColumn(shape, dtype, fill))
        return self._columns[-1]

    def rows_of(self, nodes: Sequence[Node]) -> Rows:
        """Return the rows of the clients that take part in a round. New clients get rows with the value `fill`."""
        rows = np.array([self._rows.pop(node, -1) for node in nodes], dtype=np.intp)
        self.forgotten = []
        while self._rows and len(self._rows) + len(nodes) > self._most:
            oldest = next(iter(self._rows))
            self._free.append(self._rows.pop(oldest))
            self.forgotten.append(oldest)
        new = rows < 0
        if new.any():
            rows[new] = fresh = self._unused_rows(int(new.sum()))
            for column in self._columns:
                column.values[fresh] = column.fill
        self._rows.update(zip(nodes, rows.tolist(), strict=True))
        return rows

    def _unused_rows(self, count: int) -> list[int]:
        rows = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first, self._used = self._used, self._used + count - len(rows)
        if self._used > self._capacity:
            self._capacity = max(_FEWEST_ROWS, self._used, min(2 * self._capacity, self._most))
            for column in self._columns:
                column.resize(self._capacity)
        return [*rows, *range(first, self._used)]

    def row_of(self, node: Node) -> int | None:
        """Return the row of a client; None if it is unknown."""
        return self._rows.get(node)

    @property
    def capacity(self) -> int:
        """The number of rows allocated."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._rows)

    def __contains__(self, node: object) -> bool:
        return node in self._rows
