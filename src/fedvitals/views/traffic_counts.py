# SPDX-License-Identifier: Apache-2.0
"""Sums what a run has sent, every message once, reading only rows that are new since the last call.

A page needs it again and again, so only new rows are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedvitals.analysis.traffic import TELEMETRY
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.transfers import bytes_since
from fedvitals.views.matrix import memory_of


@dataclass(frozen=True, slots=True)
class Total:
    """Total bytes transferred."""

    bytes: int  # of the training
    telemetry: int  # fedvitals' own


def traffic_total(reader: Reader, run: str) -> Total | None:
    """Return the totals; None if no message was recorded. As `Traffic.bytes` and `Traffic.telemetry_bytes`."""
    memory = memory_of(reader)
    since, known = memory.get(("traffic", run), (0, None))
    news = bytes_since(reader, run, TELEMETRY, since)
    if news is not None:
        newest, whole, telemetry = news
        known = known or Total(0, 0)
        known = Total(known.bytes + whole - telemetry, known.telemetry + telemetry)
        memory["traffic", run] = newest, known
    return known if isinstance(known, Total) else None
