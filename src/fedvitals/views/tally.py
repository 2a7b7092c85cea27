# SPDX-License-Identifier: Apache-2.0
"""Sums over all records of a run that a page wants again and again: only what is new is added up."""

from __future__ import annotations

from fedvitals.store.reader import Reader
from fedvitals.views.matrix import memory_of


def bytes_sent(reader: Reader, run: str) -> float | None:
    """Bytes on the wire, all messages together; None where none was told of."""
    number = reader.names.number(run)
    if number is None:
        return None
    memory = memory_of(reader)
    since, known = memory.get(("bytes", run), (0, None))
    ((newest, total),) = reader.database.rows(
        # The plus keeps the planner from the index on runs: what is new lies at the end.
        "SELECT MAX(arrival), SUM(bytes) FROM transfer WHERE arrival > ? AND +run = ?",
        (since, number),
    )
    if newest is not None:
        since, known = int(newest), float(total) + (known or 0.0)
        memory["bytes", run] = since, known
    return None if known is None else float(known)
