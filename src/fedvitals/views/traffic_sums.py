# SPDX-License-Identifier: Apache-2.0
"""Reads a run's traffic by round, added up by the database.

The same sums as `analysis.traffic.traffic_of` makes from the messages themselves; no clients, no layers, no times.
"""

from __future__ import annotations

from collections import Counter

from fedvitals.analysis.traffic import TELEMETRY, Flow, RoundTraffic, Traffic
from fedvitals.store.read.reader import Reader
from fedvitals.store.read.transfers import flows_by_round


def traffic_sums(reader: Reader, run: str) -> Traffic:
    """Read the traffic of a run by round; without clients, layers and times."""
    # Up, down, between, telemetry, each by round.
    books: tuple[dict[int, list[list[float]]], ...] = ({}, {}, {}, {})
    once: Counter[int] = Counter()
    for when, telemetry, sends, receives, *flow in flows_by_round(reader, run, TELEMETRY):
        where = [3] if telemetry else [i for i, there in enumerate((sends, receives)) if there] or [2]
        place = -1 if when is None else int(when)
        once[place] += 0 if telemetry else int(flow[0] or 0)
        for i in where:
            books[i].setdefault(place, []).append([*(float(amount or 0) for amount in flow), 0.0, 0.0])
    rounds = sorted({number for book in books for number in book})
    by_round = [[Flow.of(book.get(number, ())) for book in books] for number in rounds]
    flows = [Flow.of(flow for own in book.values() for flow in own) for book in books]
    return Traffic(
        flows[0],
        flows[1],
        flows[2],
        flows[3].bytes,
        None,
        (),
        tuple(
            RoundTraffic(number, up, down, between, telemetry.bytes, None, {}, once[number])
            for number, (up, down, between, telemetry) in zip(rounds, by_round, strict=True)
        ),
        (),
    )
