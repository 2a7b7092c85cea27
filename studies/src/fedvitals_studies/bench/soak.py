# SPDX-License-Identifier: Apache-2.0
"""A training that never ends: does memory stay constant, and is the file no larger than necessary?

Synthetic rounds of ten clients go through the queue into a SQLite file, as fast as the file accepts them. Memory is
measured in this process, after the first thousand rounds and at the end.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.records import Event, Layer, LayerStats, LayerTable, Metric, Record, Run, Span, Where
from fedvitals.resources.memory import resident_bytes
from fedvitals.stats import empty_sums
from fedvitals.store.sqlite import SqliteStore
from fedvitals.transport.queue import Queue

CLIENTS, LAYERS, METRICS = 10, 6, 4
SETTLED = 1000  # rounds after which memory must stay constant
TABLE = LayerTable("parameter", tuple(Layer(f"layer{i}.weight", (8, 8), "float32") for i in range(LAYERS)))
RUN = Run("soak", "soak", tables=(TABLE,), source="soak")
PER_ROUND = CLIENTS * (1 + METRICS) + 2


def _round(number: int, matrices: Any) -> Iterator[Record]:
    sequence = 1 + number * PER_ROUND
    at = 1e9 + number
    for c in range(CLIENTS):
        where = Where("soak", number, f"c{c}")
        yield LayerStats(where, at, "gradient", matrices[c], TABLE.digest, "soak", sequence)
        for m in range(METRICS):
            yield Metric(where, at, f"metric.{m}", number + c / 10, "soak", sequence + 1 + m)
        sequence += 1 + METRICS
    whole = Where("soak", number)
    yield Span(whole, at, "round", 1.0, f"{number:032x}", f"{number:016x}", None, {}, "soak", sequence)
    yield Event(whole, at, "info", "round.end", "", {}, "soak", sequence + 1)


def computed_bytes(folder: Path, rounds: int) -> float:
    """Return the size of a file of `rounds` rounds, if each takes as much as between the first and second thousand."""
    small, large = (soak(folder / f"{size}.db", size)["file"] for size in (SETTLED, 2 * SETTLED))
    return small + (large - small) / SETTLED * (rounds - SETTLED)


def soak(path: Path, rounds: int, tell: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Return bytes of memory after 1,000 rounds and at the end, bytes of the file, seconds, records lost."""
    rng = np.random.default_rng(0)
    matrices = empty_sums(64, CLIENTS, LAYERS) + rng.random((64, CLIENTS, LAYERS, 9))
    queue = Queue(SqliteStore(path))
    began = time.perf_counter()
    settled, largest = 0, 0
    try:
        queue.put(RUN)
        for number in range(rounds):
            queue.put_many(_round(number, matrices[number % 64]))
            if queue.pending > 20_000:
                queue.flush(60)
            if (number + 1) % SETTLED == 0:
                queue.flush(60)
                gc.collect()
                largest = max(largest, resident_bytes() or 0)
                settled = settled or largest
                if (number + 1) % (10 * SETTLED) == 0:
                    tell(f"{number + 1} rounds, {largest / 1e6:.0f} MB")
        queue.flush(60)
        gc.collect()
        last = resident_bytes() or 0
    finally:
        queue.close(60)
    seconds = time.perf_counter() - began
    return {
        "settled": settled, "last": last, "largest": max(largest, last), "file": path.stat().st_size,
        "seconds": seconds, "lost": sum(queue.lost.values()),
    }  # fmt: skip


def bench_soak(*, quick: bool = False, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return rows of what, value, unit, bar, met: 10⁵ rounds, or 3,000 when quick."""
    rounds = 3000 if quick else 100_000
    with tempfile.TemporaryDirectory() as folder:
        computed = computed_bytes(Path(folder), rounds)
        found = soak(Path(folder) / "soak.db", rounds, tell)
    growth = 100 * (found["largest"] / found["settled"] - 1) if found["settled"] else 0.0
    return [
        _row("rounds", rounds, ""),
        _row("rounds/s, all told", rounds / found["seconds"], "rounds/s"),
        _row(f"memory after {SETTLED} rounds", found["settled"] / 1e6, "MB"),
        _row("largest memory after that", found["largest"] / 1e6, "MB"),
        _row("growth", growth, "%", 5),
        _row("file", found["file"] / 1e6, "MB"),
        _row("file, as computed", computed / 1e6, "MB"),
        _row("difference", 100 * abs(found["file"] / computed - 1), "%", 10),
        _row("records lost", found["lost"], "", 0),
    ]


def _row(what: str, value: float, unit: str, bar: float | None = None) -> dict[str, Any]:
    met = None if bar is None else value <= bar
    return {"what": what, "value": round(value, 2), "unit": unit, "bar": bar, "met": met}
