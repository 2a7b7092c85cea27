# SPDX-License-Identifier: Apache-2.0
"""What a run takes in its store: told before it is deleted."""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.store import Target
from fedvitals.store.read.reader import Reader
from fedvitals.store.tapes import tape_bytes

# Bytes that a row takes with its part of the indexes, as measured in stores of real runs; what is packed is counted.
_ROWS = {"metric": 75, "event": 400, "span": 390, "transfer": 75, "sketch": 150, "finding": 1400, "action": 500}
_PACKED = (
    'SELECT SUM(LENGTH("values")) FROM sketch WHERE run = ?',
    "SELECT SUM(LENGTH(coordinates) + LENGTH(details) + 100) FROM layer_block WHERE run = ?",
    "SELECT SUM(LENGTH(m.numbers)) FROM layer_matrix AS m JOIN layer_block AS b ON b.arrival = m.block WHERE b.run = ?",
)


@dataclass(frozen=True, slots=True)
class Contents:
    id: str
    name: str
    rounds: int
    records: int
    bytes: int  # about
    tape_bytes: int = 0  # of its tape, which goes with it


def contents_of(reader: Reader, run: str, store: Target = None) -> Contents:
    number = reader.names.number(run) or 0
    ask = reader.database.rows
    name, *_ = (row[0] for row in ask("SELECT name FROM run WHERE id = ?", (number,)))
    counts = {table: int(ask(f"SELECT COUNT(*) FROM {table} WHERE run = ?", (number,))[0][0]) for table in _ROWS}  # noqa: S608
    packed = sum(int(ask(sql, (number,))[0][0] or 0) for sql in _PACKED)
    ((matrices,),) = ask("SELECT SUM(entries) FROM layer_block WHERE run = ?", (number,))
    return Contents(
        id=run,
        name=name,
        rounds=len(reader.history(run).rounds()),
        records=sum(counts.values()) + int(matrices or 0),
        bytes=packed + sum(_ROWS[table] * count for table, count in counts.items()),
        tape_bytes=0 if store is None else tape_bytes(store, run),
    )
