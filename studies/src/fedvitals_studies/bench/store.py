# SPDX-License-Identifier: Apache-2.0
"""How fast a store accepts records and answers: the figures behind its layout, and the bars that it must meet.

1000 rounds × 100 clients × 20 layers × 9 sums, which are 72 MB of float32, written in one batch and one commit per
round: as measurements of a stack of clients, and as single records. On a shared machine, processor time is more
reliable than the clock.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals.measurements import MeasuredLayers, Measurements, Telemetry
from fedvitals.records import Layer, LayerStats, LayerTable, Metric, Record, Run, Where
from fedvitals.stats import empty_sums
from fedvitals.store import PostgresStore, open_reader
from fedvitals.store.in_memory import MemoryStore
from fedvitals.store.read import queries
from fedvitals.store.sqlite import SqliteStore
from fedvitals.store.upkeep import retention

CLIENTS, LAYERS = 100, 20
METRICS = 30  # scalars of a client-round, about as many as with the preset «standard»
TABLE = LayerTable("parameter", tuple(Layer(f"layer{i}.weight", (64, 64), "float32") for i in range(LAYERS)))
RUN = Run("bench", "bench", tables=(TABLE,), source="bench")


def _matrices(rng: np.random.Generator) -> Any:
    """Return nine sums as of noise with a random scale: like real ones, they do not compress."""
    matrices = empty_sums(CLIENTS, LAYERS)
    scale = rng.lognormal(size=(CLIENTS, LAYERS))
    matrices[..., 0] = 4096
    matrices[..., 1] = rng.normal(size=scale.shape) * scale
    matrices[..., 2] = 4096 * scale**2
    matrices[..., 3] = 3268 * scale
    matrices[..., 4], matrices[..., 5] = -3.5 * scale, 3.5 * scale
    return matrices


def _rounds(rounds: int) -> Iterator[list[Record]]:
    rng = np.random.default_rng(0)
    for r in range(rounds):
        matrices = _matrices(rng)
        yield [
            LayerStats(Where("bench", r, f"c{c}"), r + c / 1000, "gradient", matrices[c], TABLE.digest, "bench", n)
            for c, n in enumerate(range(r * CLIENTS + 1, (r + 1) * CLIENTS + 1))
        ]


def _measured_rounds(rounds: int) -> Iterator[list[Telemetry]]:
    """Yield the same numbers as `_rounds`, each round as one block of measurements."""
    rng, rows = np.random.default_rng(0), tuple(range(CLIENTS))
    nodes, nothing = tuple(f"c{c}" for c in rows), np.zeros((CLIENTS, 0))
    for r in range(rounds):
        layers = MeasuredLayers("gradient", TABLE.digest, None, rows, _matrices(rng))
        place = ("bench", r, float(r), nodes, (None,) * CLIENTS, (), nothing, nothing.astype(np.bool_), None)
        yield [Measurements(*place, (layers,), source="bench", sequence=r * CLIENTS + 1)]


def _scalars(rounds: int) -> Iterator[list[Record]]:
    rng = np.random.default_rng(0)
    size = CLIENTS * METRICS
    for r in range(rounds):
        values = rng.normal(size=size).tolist()
        yield [
            Metric(Where("bench", r, f"c{i // METRICS}"), r + i / size, f"metric.{i % METRICS}", value, "scalars", n)
            for i, (n, value) in enumerate(zip(range(r * size, (r + 1) * size), values, strict=True))
        ]


def _seconds(work: Callable[[], Any], times: int) -> float:
    """Return the median; each call opens its own reader."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _ingest(
    store: SqliteStore | PostgresStore | MemoryStore,
    batches: Sequence[Sequence[Telemetry]],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return batches per second."""
    store.write([RUN])
    begin = clock()
    for batch in batches:
        store.write(batch)
    return len(batches) / (clock() - begin)


def _row(what: str, value: float, unit: str, bar: float | None = None, *, at_least: bool = False) -> dict[str, Any]:
    met = None if bar is None else bool(value >= bar if at_least else value <= bar)
    return {"what": what, "value": round(value, 2), "unit": unit, "bar": bar, "met": met}


def _reads(path: Path | str, rounds: int, times: int) -> Iterator[dict[str, Any]]:
    def matrix() -> None:
        with open_reader(path) as reader:
            queries.layer_matrix(reader, "bench", "gradient", "l2", "layer7.weight")

    def round_of(number: int) -> Callable[[], None]:
        def read() -> None:
            with open_reader(path) as reader:
                queries.layer_round(reader, "bench", "gradient", number)

        return read

    yield _row("one layer, clients × rounds", 1e3 * _seconds(matrix, times), "ms", 20)
    yield _row("newest round, all layers", 1e3 * _seconds(round_of(rounds - 1), times), "ms", 5)
    yield _row("a round long ago, all layers", 1e3 * _seconds(round_of(rounds // 3), times), "ms")


def _scalar_reads(path: Path | str, rounds: int, times: int) -> Iterator[dict[str, Any]]:
    def ask(question: Callable[[Any], Any]) -> Callable[[], None]:
        def read() -> None:
            with open_reader(path) as reader:
                question(reader)

        return read

    questions: dict[str, Callable[[Any], Any]] = {
        "one round's table": lambda reader: queries.round_table(reader, "bench", rounds - 1),
        "one metric of one client": lambda reader: reader.history("bench").series("metric.3", "c7"),
        "all metrics of one client": lambda reader: queries.node_history(reader, "bench", "c7"),
        "list of runs": queries.list_runs,
    }
    for what, question in questions.items():
        yield _row(what, 1e3 * _seconds(ask(question), times), "ms")


def bench_store(quick: bool = False) -> list[dict[str, Any]]:
    """Return rows of what, value, unit, and if there is one the bar and whether it is met; a tenth of it when quick."""
    rounds, times = (100, 3) if quick else (1000, 9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.db"
        batches = list(_rounds(rounds))
        found = []
        measured = list(_measured_rounds(rounds))
        what = "layer statistics as measurements, a commit a round"
        with SqliteStore(path) as store:
            found.append(_row(what, _ingest(store, measured), "rounds/s", 1500, at_least=True))
        with SqliteStore(Path(folder) / "processor.db") as store:
            rate = _ingest(store, measured, time.process_time)
            found.append(_row("the same", rate, "rounds/s of processor time", 1500, at_least=True))
        del measured
        with SqliteStore(Path(folder) / "records.db") as store:
            found.append(_row("the same as single records", _ingest(store, batches), "rounds/s"))
        raw = rounds * CLIENTS * LAYERS * 9 * 4 / 1e6
        found.append(_row(f"file, for {raw:.0f} MB of numbers", path.stat().st_size / 1e6, "MB", 1.15 * raw))
        found += _reads(path, rounds, times)
        with SqliteStore(Path(folder) / "single.db") as store:
            single = [[record] for batch in batches[: rounds // 10] for record in batch]
            rate = _ingest(store, single) / CLIENTS
            found.append(_row("the same, a commit a client", rate, "rounds/s"))
        found.append(_row("the same, into memory", _ingest(MemoryStore(), batches), "rounds/s"))
        del batches
        scalars = list(_scalars(rounds // 10))
        path = Path(folder) / "scalars.db"
        with SqliteStore(path) as store:
            rate = _ingest(store, scalars) * CLIENTS * METRICS
            found.append(_row(f"metrics, a commit each {CLIENTS * METRICS}", rate / 1e3, "k rows/s", 50, at_least=True))
        found.append(_row("file, bytes a metric", path.stat().st_size / (len(scalars) * CLIENTS * METRICS), "bytes"))
        found += _scalar_reads(path, rounds // 10, times)
    server = os.environ.get("FEDVITALS_BENCH_POSTGRES")
    return [*found, *_postgres(server, rounds, times)] if server else found


def _postgres(url: str, rounds: int, times: int) -> list[dict[str, Any]]:
    """Return the same without bars, in the given database; its run «bench» is deleted before and after."""
    found = []
    with PostgresStore(url) as store:
        store.write([RUN])
    for batches, what in ((list(_rounds(rounds)), "statistics"), (list(_scalars(rounds // 10)), "metrics")):
        retention.delete(url, ["bench"])
        with PostgresStore(url) as store:
            rate = _ingest(store, batches)
        if what == "statistics":
            found.append(_row("PostgreSQL: layer statistics, a commit a round", rate, "rounds/s"))
            found += _reads(url, rounds, times)
        else:
            found.append(_row("metrics, a commit a round", rate * CLIENTS * METRICS / 1e3, "k rows/s"))
            found += _scalar_reads(url, rounds // 10, times)
    retention.delete(url, ["bench"])
    return [{**row, "what": f"PostgreSQL: {row['what'].removeprefix('PostgreSQL: ')}", "bar": None, "met": None}
            for row in found]  # fmt: skip
