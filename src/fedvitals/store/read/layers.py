# SPDX-License-Identifier: Apache-2.0
"""Reads blocks of layer statistics: which blocks exist, which layers they describe, and their packed numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.store.read.reader import Reader


@dataclass(frozen=True, slots=True)
class BlockHead:
    """A block of layer statistics without its numbers."""

    arrival: int
    table: int  # number of the layer table
    cells: int  # layers times entries
    first_round: int
    last_round: int


def layer_names(reader: Reader, table: int | None) -> tuple[str, ...]:
    """Return the names of the layers in a layer table, given by its number, in the order of the model."""
    sql = "SELECT s.text FROM layer AS l JOIN symbol AS s ON s.id = l.name WHERE l.layer_table = ? ORDER BY l.position"
    return tuple(name for (name,) in reader.database.rows(sql, (table,)))


def blocks_newest_first(reader: Reader, run: str, family: str) -> list[BlockHead]:
    """Return the blocks of a family whose rounds are known, newest rounds first."""
    blocks = reader.database.rows(
        "SELECT arrival, layer_table, layers * entries, first_round, last_round FROM layer_block WHERE run = ? "
        "AND family = ? AND first_round IS NOT NULL ORDER BY last_round DESC, arrival DESC",
        (reader.names.number(run) or 0, reader.names.number(family) or 0),
    )
    return [BlockHead(*block) for block in blocks]


def read_block(reader: Reader, arrival: int) -> tuple[int, bytes, bytes, list[bytes]] | None:
    """Return the number of entries of a block, its coordinates, its details, and its numbers layer by layer.

    Returns None if the block no longer exists because it was merged with others.
    """
    blocks = reader.database.rows("SELECT entries, coordinates, details FROM layer_block WHERE arrival = ?", (arrival,))
    numbers = reader.database.rows("SELECT numbers FROM layer_matrix WHERE block = ? ORDER BY layer", (arrival,))
    if not blocks or not numbers:
        return None
    count, coordinates, details = blocks[0]
    return count, coordinates, details, [blob for (blob,) in numbers]
