# SPDX-License-Identifier: Apache-2.0
"""Reads the measurements of earlier runs of the same model, to compare a new run with them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from fedvitals.records import Run, is_client
from fedvitals.store.read.metrics import values_of_everybody
from fedvitals.store.read.reader import Reader

LEVEL_ROUNDS = 200  # of a run, at most, since an event carries them


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """An earlier run, and its clients' median of a metric in each round."""

    id: str
    name: str
    levels: dict[int, float]


def earlier_runs(reader: Reader, run: Run, metric: str, most: int) -> list[EarlierRun]:
    """Return the newest runs that began before this one, have the same layers and shapes, and measured the metric."""
    table = next((table.digest for table in run.tables if table.rows == "parameter"), None)
    if table is None:
        return []
    rows = reader.database.rows(
        "SELECT id, name FROM runs WHERE id <> ? AND started <= ? AND tables LIKE ? "
        "ORDER BY started DESC, id DESC LIMIT ?",
        (run.id, run.started, f'%"{table}"%', 4 * most),
    )
    runs: list[EarlierRun] = []
    for identity, name in rows:
        by_round: dict[int, list[float]] = {}
        for node, values in values_of_everybody(reader, identity, metric).items():
            for number, value in values.items() if node is not None and is_client(node) else ():
                if number < LEVEL_ROUNDS and value == value:  # noqa: PLR0124 - not NaN
                    by_round.setdefault(number, []).append(value)
        if by_round and len(runs) < most:
            levels = {number: statistics.median(values) for number, values in sorted(by_round.items())}
            runs.append(EarlierRun(identity, name, levels))
    return runs
