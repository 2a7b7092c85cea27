# SPDX-License-Identifier: Apache-2.0
"""Merges blocks of older rounds of layer statistics so that one layer can be read without the others.

No layout is fast both to write and to read: a round arrives as one row for all layers, and some rounds later it is
merged with its neighbours into one row per layer. The newest rounds stay as they arrived, since they are read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedvitals.stats import Array
from fedvitals.store.dialect import Database
from fedvitals.store.packing import (
    NONE,
    Entries,
    Whole,
    coordinates_of,
    entries_of,
    joined,
    merged,
    numbers_of,
)

NEWEST_ROUNDS = 10  # stay as they arrived
CHUNK_ROUNDS = 64  # older ones are merged when there are this many
CHUNK_BYTES = 8_000_000  # or this much, which bounds the memory that merging takes
CHUNK_BLOCKS = 5000  # or this many, which bounds the parameters of one statement


@dataclass(slots=True)
class Pending:
    """Unmerged blocks of one run, family and list of layers: arrival, round and size."""

    blocks: list[tuple[int, int | None, int]] = field(default_factory=list)
    newest: int | None = None
    unchecked: int = 0
    bytes: int = 0  # total of all blocks

    def add(self, arrival: int, round_index: int | None, size: int) -> bool:
        """Add a block. Returns whether it is time to look for old ones."""
        self.blocks.append((arrival, round_index, size))
        self.bytes += size
        self.unchecked += 1
        advanced = round_index is not None and (self.newest is None or round_index > self.newest)
        if advanced:
            self.newest = round_index
        # With one block per client, checking after every block would cost more than writing it.
        return advanced or self.unchecked >= 256

    def take(self) -> list[int]:
        """Return the blocks to merge now, oldest first; [] if it is too early."""
        self.unchecked = 0
        if len(self.blocks) < CHUNK_ROUNDS and self.bytes < CHUNK_BYTES:
            return []
        limit = None if self.newest is None else self.newest - NEWEST_ROUNDS
        old = [block for block in self.blocks if block[1] is None or (limit is not None and block[1] <= limit)]
        if len(old) < 2 or (
            len({block[1] for block in old}) < CHUNK_ROUNDS
            and sum(block[2] for block in old) < CHUNK_BYTES
            and len(old) < CHUNK_BLOCKS
        ):
            return []
        taken: list[int] = []
        size = 0
        for arrival, _, weight in old:
            size += weight
            if len(taken) >= 2 and (size > CHUNK_BYTES or len(taken) >= CHUNK_BLOCKS):
                break
            taken.append(arrival)
        gone = set(taken)
        self.blocks = [block for block in self.blocks if block[0] not in gone]
        self.bytes = sum(block[2] for block in self.blocks)
        return taken


def load_pending(database: Database, key: Sequence[int]) -> Pending:
    """Return the work that an earlier writer left; the key is run, family, layer table, number of layers, and whether
    it is about the whole. Blocks for which that is unknown are merged with those about nodes.
    """
    pending = Pending()
    blocks = database.rows(
        "SELECT b.arrival, b.first_round, LENGTH(m.numbers) FROM layer_block AS b "
        "JOIN layer_matrix AS m ON m.block = b.arrival AND m.layer = -1 "
        "WHERE b.run = ? AND b.family = ? AND b.layer_table = ? AND b.layers = ? AND COALESCE(b.whole, 0) = ? "
        "ORDER BY b.arrival",
        key,
    )
    for arrival, first, size in blocks:
        pending.add(arrival, first, size)
    return pending


def rounds_of(entries: Entries) -> tuple[int | None, int | None]:
    """Return the smallest and the largest round; None for both if an entry has no round."""
    low, high = int(entries.rounds.min()), int(entries.rounds.max())
    return (None, None) if low == NONE else (low, high)


def insert_block(database: Database, head: Sequence[int | None], entries: Entries) -> None:
    """Insert the block's row; `head` has its columns up to the rounds."""
    about_whole = entries.nodes == 0
    whole = int(about_whole[0]) if (about_whole == about_whole[0]).all() else None
    database.execute(
        "INSERT INTO layer_block (arrival, run, family, layer_table, layers, entries, first_round, last_round, "
        "coordinates, details, whole) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*head, entries.coordinates(), entries.details(), whole),
    )


def compact(database: Database, family: str, arrivals: list[int]) -> None:
    """Merge the blocks, given in order of arrival, into one with a row per layer; call this inside a transaction.

    The result replaces the last of them. They stay as they are if merging would change an answer: see `_overtakes`.
    """
    holes = ", ".join("?" * len(arrivals))
    blocks = database.rows(
        "SELECT b.run, b.family, b.layer_table, b.layers, b.entries, b.coordinates, b.details, m.numbers "  # noqa: S608
        f"FROM layer_block AS b JOIN layer_matrix AS m ON m.block = b.arrival WHERE b.arrival IN ({holes}) "
        "ORDER BY b.arrival",
        arrivals,
    )
    if len(blocks) < len(arrivals):
        return  # another writer of this run was faster; the next process to open the store sees the remaining work
    parts = [entries_of(row[5], row[6], row[4]) for row in blocks]
    if _overtakes(database, blocks[0][:4], arrivals, parts):
        return
    entries = joined(parts)
    blobs = merged([numbers_of(family, row[7], row[4]) for row in blocks])
    database.execute(f"DELETE FROM layer_matrix WHERE block IN ({holes})", arrivals)  # noqa: S608
    database.execute(f"DELETE FROM layer_block WHERE arrival IN ({holes})", arrivals)  # noqa: S608
    first, last = rounds_of(entries)
    insert_block(database, (arrivals[-1], *blocks[0][:4], len(entries.at), first, last), entries)
    database.many(
        "INSERT INTO layer_matrix (block, layer, numbers) VALUES (?, ?, ?)",
        [(arrivals[-1], layer, blob) for layer, blob in enumerate(blobs)],
    )


def _overtakes(database: Database, head: Sequence[int], arrivals: list[int], parts: Sequence[Entries]) -> bool:
    """Return whether an entry of the blocks would end up behind a newer one of another layer table.

    Of two entries for the same place and time, the one that arrived later counts. `head` is the blocks' run, family,
    layer table and number of layers.
    """
    others = database.rows(
        "SELECT arrival, coordinates, entries FROM layer_block WHERE run = ? AND family = ? "
        "AND (layer_table <> ? OR layers <> ?) AND arrival > ? AND arrival < ?",
        (*head, arrivals[0], arrivals[-1]),
    )
    if not others:
        return False
    first: dict[tuple[int, float, int], int] = {}  # where these blocks have an entry, and when the first one arrived
    for arrival, part in zip(arrivals, parts, strict=True):
        for place in _places(part.rounds, part.at, part.nodes):
            first.setdefault(place, arrival)
    return any(
        first.get(place, arrival) < arrival
        for arrival, coordinates, count in others
        for place in _places(*coordinates_of(coordinates, count))
    )


def _places(rounds: Whole, at: Array, nodes: npt.NDArray[np.int32]) -> Iterator[tuple[int, float, int]]:
    return zip(rounds.tolist(), at.tolist(), nodes.tolist(), strict=True)
