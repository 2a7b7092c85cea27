# SPDX-License-Identifier: Apache-2.0
"""Sums what a run has sent, every message once, reading only rows that are new since the last call.

A page needs it again and again, so only new rows are added.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from fedvitals.analysis.traffic import TELEMETRY
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.transfers import bytes_since
from fedvitals.views.matrix import memory_of


@dataclass(frozen=True, slots=True)
class Total:
    """Total bytes transferred."""

    bytes: int  # of the training
    telemetry: int  # fedvitals' own


@dataclass(slots=True)
class _Counted:
    """What has been counted of a run so far: once, for all who ask at the same time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    until: int = 0  # arrival of the newest message
    total: Total | None = None


def traffic_total(reader: Reader, run: str) -> Total | None:
    """Return the totals; None if no message was recorded. As `Traffic.bytes` and `Traffic.telemetry_bytes`."""
    counted: _Counted = memory_of(reader).setdefault(("traffic", run), _Counted())
    with counted.lock:
        news = bytes_since(reader, run, TELEMETRY, counted.until)
        if news is not None:
            counted.until, whole, telemetry = news
            known = counted.total or Total(0, 0)
            counted.total = Total(known.bytes + whole - telemetry, known.telemetry + telemetry)
        return counted.total
