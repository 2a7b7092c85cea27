# SPDX-License-Identifier: Apache-2.0
"""What a run has sent, by every message once: the one number that list, header, report and comparison show.

A page wants it again and again: only what is new is added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.analysis.traffic import TELEMETRY
from fedvitals.store.read.reader import Reader
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
    # The plus keeps the planner from the other way: what is new lies at the end, everything under the run.
    where = "arrival > ? AND +run = ?" if since else "+arrival > ? AND run = ?"
    sizes = "CASE WHEN bytes > 0 THEN bytes ELSE 0 END"
    ((newest, whole, own),) = reader.database.rows(
        # Not grouped by kind, which would sort a million messages.
        f"SELECT MAX(arrival), SUM({sizes}), SUM(CASE WHEN kind = ? THEN {sizes} ELSE 0 END) FROM transfer "  # noqa: S608 - our own words
        f"WHERE {where}",
        (reader.names.number(TELEMETRY) or 0, since, number),
    )
    if newest is not None:
        known = known or Total(0, 0)
        known = Total(known.bytes + int(whole - own), known.telemetry + int(own))
        memory["traffic", run] = int(newest), known
    return known if isinstance(known, Total) else None
