# SPDX-License-Identifier: Apache-2.0
"""Measures what a run takes in its store, to be shown before it is deleted."""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.store import Target
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.runs import run_name
from fedvitals.store.read.storage import count_layer_matrices, count_rows, packed_bytes
from fedvitals.store.tapes import tape_bytes

# Bytes that a row takes with its part of the indexes, as measured in stores of real runs; what is packed is counted.
_ROWS = {"metric": 75, "event": 400, "span": 390, "transfer": 75, "sketch": 150, "finding": 1400, "action": 500}


@dataclass(frozen=True, slots=True)
class Contents:
    """What would go if the run were deleted."""

    id: str
    name: str
    rounds: int
    records: int
    bytes: int  # about
    tape_bytes: int = 0  # of its tape, which goes with it


def contents_of(reader: Reader, run: str, store: Target = None) -> Contents:
    """Count what deleting a run would remove; `store`: where its tape lies, if that counts too."""
    counts = count_rows(reader, run, _ROWS)
    return Contents(
        id=run,
        name=run_name(reader, run),
        rounds=len(reader.history(run).rounds()),
        records=sum(counts.values()) + count_layer_matrices(reader, run),
        bytes=packed_bytes(reader, run) + sum(_ROWS[table] * count for table, count in counts.items()),
        tape_bytes=0 if store is None else tape_bytes(store, run),
    )
