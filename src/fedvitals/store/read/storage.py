# SPDX-License-Identifier: Apache-2.0
"""Reads how much of a store one run occupies."""

from __future__ import annotations

from collections.abc import Iterable

from fedvitals.store.read.reader import Reader

_PACKED = (
    'SELECT SUM(LENGTH("values")) FROM sketch WHERE run = ?',
    "SELECT SUM(LENGTH(coordinates) + LENGTH(details) + 100) FROM layer_block WHERE run = ?",
    "SELECT SUM(LENGTH(m.numbers)) FROM layer_matrix AS m JOIN layer_block AS b ON b.arrival = m.block WHERE b.run = ?",
)


def count_rows(reader: Reader, run: str, tables: Iterable[str]) -> dict[str, int]:
    """Count the run's rows in each of these tables."""
    number, ask = reader.names.number(run) or 0, reader.database.rows
    return {table: int(ask(f"SELECT COUNT(*) FROM {table} WHERE run = ?", (number,))[0][0]) for table in tables}  # noqa: S608 - our own words


def packed_bytes(reader: Reader, run: str) -> int:
    """Return the total bytes of the run's sketches and layer statistics."""
    number = reader.names.number(run) or 0
    return sum(int(reader.database.rows(sql, (number,))[0][0] or 0) for sql in _PACKED)


def count_layer_matrices(reader: Reader, run: str) -> int:
    """Count the run's matrices of layer statistics."""
    ((count,),) = reader.database.rows(
        "SELECT SUM(entries) FROM layer_block WHERE run = ?", (reader.names.number(run) or 0,)
    )
    return int(count or 0)
