# SPDX-License-Identifier: Apache-2.0
"""What a run has sent, by every message once: the one number that list, header, report and comparison show.

A page wants it again and again: only what is new is added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.profiling.traffic import TELEMETRY
from fedvitals.store.reader import Reader
from fedvitals.views.matrix import memory_of


@dataclass(frozen=True, slots=True)
class Total:
    """Bytes on the wire."""

    bytes: int  # of the training
    telemetry: int  # fedvitals' own


def traffic_total(reader: Reader, run: str) -> Total | None:
    """None where no message was told of. The same sums as `Traffic.bytes` and `Traffic.telemetry_bytes`."""
    number = reader.names.number(run)
    if number is None:
        return None
    memory = memory_of(reader)
    since, known = memory.get(("traffic", run), (0, None))
    # The plus keeps the planner from the index on runs: what is new lies at the end.
    where = "arrival > ? AND +run = ?" if since else "arrival > ? AND run = ?"
    found = reader.database.rows(
        f"SELECT kind, MAX(arrival), SUM(CASE WHEN bytes > 0 THEN bytes ELSE 0 END) FROM transfer WHERE {where} "  # noqa: S608 - our own words
        "GROUP BY kind",
        (since, number),
    )
    if found:
        telemetry = reader.names.number(TELEMETRY)
        own = sum(int(size) for kind, _, size in found if kind == telemetry)
        known = known or Total(0, 0)
        known = Total(known.bytes + sum(int(size) for *_, size in found) - own, known.telemetry + own)
        memory["traffic", run] = max(int(last) for _, last, _ in found), known
    return known if isinstance(known, Total) else None
