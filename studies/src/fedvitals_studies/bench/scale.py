# SPDX-License-Identifier: Apache-2.0
"""What monitoring many small clients costs: throughput, records lost, and whether time and memory stay constant.

The lab trains MLPs of 2.7 k weights, where a client-round takes a millisecond and all work per client shows. Runs
without a monitor, with one without gradient scale, and with one that measures everything of «standard» take turns, a
block of rounds each; pending writes of a block belong to its time.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedvitals import lab
from fedvitals.diagnosis.live_detectors import LiveDetectors
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.presets import Preset, preset
from fedvitals.probes.scale import scale
from fedvitals.resources.memory import resident_bytes
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals.views.overview import overview
from fedvitals_studies.bench.lab.work import Subject

Tell = Callable[[str], None]
Row = dict[str, Any]

WARM_UP = 3  # rounds
MANY, AT_ONCE = 10_000, 200  # clients, and the number of them that take part in a round
SAMPLES = 20  # of each of these clients


class _Federation:
    """A lab run that trains a block of rounds on request."""

    def __init__(self, experiment: lab.Experiment, monitor: Monitor | None) -> None:
        self._rounds, self._monitor = lab.rounds(experiment, monitor), monitor
        self.train(WARM_UP)

    def train(self, rounds: int) -> float:
        """Train `rounds` rounds and return the seconds that they took, until everything in them is written."""
        began = time.perf_counter()
        for _ in range(rounds):
            next(self._rounds)
        if self._monitor is not None:
            self._monitor.flush()
        return time.perf_counter() - began

    def close(self) -> None:
        self._rounds.close()  # type: ignore[attr-defined]  # a generator: its processes end here


@contextlib.contextmanager
def _federation(experiment: lab.Experiment, monitor: Monitor | None) -> Iterator[_Federation]:
    federation = _Federation(experiment, monitor)
    try:
        yield federation
    finally:
        federation.close()
        if monitor is not None:
            monitor.close()


def bench_scale(*, quick: bool = False, tell: Tell = lambda _: None, only: Sequence[str] = ()) -> list[Row]:
    """Return rows for 100 and 1,000 clients that all take part («throughput»), and for 10,000 of which 200 do
    («growth»).
    """
    pairs = 3 if quick else 25
    rows: list[Row] = []
    if not only or "throughput" in only:
        rows += _with_and_without(100, pairs, 5 if quick else 20, ">= 0.6", 0.6, tell)
        rows += _with_and_without(200 if quick else 1000, pairs, 2, "<= 2x", 0.5, tell)
    if not only or "growth" in only:
        rows += _growth(1_000 if quick else MANY, 50 if quick else AT_ONCE, 60 if quick else 2_000, tell)
    return rows


def _without_gradient_scale() -> Preset:
    """Return the preset «standard» without gradient scale, whose cost is reported separately."""
    standard = preset("standard")
    return replace(standard, probes=tuple(p for p in standard.probes if not isinstance(p.probe, scale)))


def _with_and_without(clients: int, pairs: int, rounds: int, bar: str, least: float, tell: Tell) -> list[Row]:
    """Return monitored against unmonitored throughput, in turns of a block each, without and with gradient scale; and
    the records that were lost.
    """
    experiment = Subject("mlp", clients).experiment()
    ratios: dict[str, list[float]] = {"without gradient scale": [], "with gradient scale": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        plain = stack.enter_context(_federation(experiment, None))
        monitors = [
            Monitor(Path(folder) / f"{probes.name}-{i}.db", "scale", host="lab", probes=probes)
            for i, probes in enumerate((_without_gradient_scale(), preset("standard")))
        ]
        watched = [stack.enter_context(_federation(experiment, monitor)) for monitor in monitors]
        for number in range(pairs):
            unwatched = plain.train(rounds)
            for federation, own in zip(watched, ratios.values(), strict=True):
                own.append(unwatched / federation.train(rounds))
            text = ", ".join(f"{own[-1]:.2f} {what}" for what, own in ratios.items())
            tell(f"{clients} clients, pair {number + 1} of {pairs}: {text}")
        lost = sum(monitor.lost for monitor in monitors)
    rows: list[Row] = []
    for number, (what, own) in enumerate(ratios.items()):
        (low, high), share = _interval(own), statistics.median(own)
        rows.append({
            "what": f"lab, MLP of 2.7 k weights, {clients} clients: watched over unwatched throughput, {what}",
            "bar": "" if number else bar,
            "measured": f"{share:.2f} ({low:.2f} to {high:.2f}), that is {1 / share:.1f}x the time",
            "verdict": "" if number else _verdict(low >= least, high < least),
        })  # fmt: skip
    rows.append({"what": f"the same: records lost of {clients} clients", "bar": "0", "measured": lost,
                 "verdict": _verdict(lost == 0, lost > 0)})  # fmt: skip
    return rows


def _growth(clients: int, at_once: int, rounds: int, tell: Tell) -> list[Row]:
    """Return a long monitored run's cost per round at its end, and its growth: the medians of the blocks in the last
    and in the third quarter of the run. All times are of processors, since others may use the machine.
    """
    experiment = lab.Experiment(
        name="bench scale",
        dataset=lab.synthetic(samples=clients * SAMPLES * 5 // 4),
        model=lab.mlp(hidden=(64,)),
        local=lab.Local(iterations=5, batch=16, optimizer=lab.sgd(learning_rate=0.05)),
        clients=clients,
        participation=at_once / clients,
        rounds=rounds + WARM_UP,
        evaluation=lab.Evaluation(every=rounds * 2),
        seed=2024,
    )
    seconds, of_detectors, memory = [], [], []
    block = max(1, rounds // 80)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        monitor = Monitor(store, "scale", host="lab")
        with _federation(experiment, monitor) as watched:
            for number in range(rounds // block):
                began, detectors_began = time.process_time(), _detector_seconds()
                watched.train(block)
                seconds.append((time.process_time() - began) / block)
                of_detectors.append((_detector_seconds() - detectors_began) / block)
                memory.append(float(resident_bytes() or 0))
                text = f"{1000 * seconds[-1]:.0f} ms of processor time a round, of these {1000 * of_detectors[-1]:.0f} "
                tell(
                    f"{clients} clients, round {(number + 1) * block} of {rounds}: {text}in the detectors; "
                    f"{memory[-1] / 2**20:.0f} MB, {monitor.lost} records lost"
                )
        lost = monitor.lost
        with open_reader(store) as reader:
            began = time.process_time()
            overview(reader, monitor.run.id)
            overview_seconds = time.process_time() - began
            _, thinned = queries.left_out(reader, monitor.run.id)
    what = f"lab, {clients} clients, {at_once} a round, {rounds} rounds"
    judging = statistics.median(of_detectors[len(of_detectors) * 3 // 4 :])
    return [
        _growth_row(f"{what}: growth of a round's processor time over the last half", seconds, 1e3, "ms"),
        _growth_row(f"{what}: growth of memory over the last half", memory, 2**-20, "MB"),
        {"what": f"{what}: detectors, processor time a round", "bar": "<= 100 ms",
         "measured": f"{1000 * judging:.0f} ms", "verdict": _verdict(judging <= 0.1, judging > 0.1)},
        {"what": f"{what}: overview of the store, read for the first time", "bar": "<= 1.5 s",
         "measured": f"{overview_seconds:.2f} s", "verdict": _verdict(overview_seconds <= 1.5, overview_seconds > 1.5)},
        {"what": f"{what}: records lost", "bar": "0", "measured": lost, "verdict": _verdict(lost == 0, lost > 0)},
        {"what": f"{what}: client-rounds thinned", "bar": "0", "measured": thinned,
         "verdict": _verdict(thinned == 0, thinned > 0)},
    ]  # fmt: skip


def _growth_row(what: str, blocks: list[float], unit: float, name: str) -> Row:
    """Return the last quarter of the blocks over the quarter before it, with the 95 % bootstrap interval."""
    half, three_quarters = len(blocks) // 2, len(blocks) * 3 // 4
    before, after = blocks[half:three_quarters], blocks[three_quarters:]
    chance = np.random.default_rng(0)
    medians = [np.median(chance.choice(part, (2000, len(part))), axis=1) for part in (before, after)]
    low, high = np.quantile(medians[1] / medians[0] - 1, [0.025, 0.975]).tolist()
    levels = [statistics.median(part) for part in (before, after)]
    growth = levels[1] / levels[0] - 1
    measured = f"{100 * growth:.1f} % ({100 * low:.1f} to {100 * high:.1f}), to {levels[1] * unit:.0f} {name}"
    return {"what": what, "bar": "<= 5 %", "measured": measured, "verdict": _verdict(high <= 0.05, low > 0.05)}


def _detector_seconds() -> float:
    """Return the processor time of the detectors' thread so far; 0 if the system does not report it."""
    spent = 0.0
    for thread in threading.enumerate():
        if thread.name == f"fedvitals-{LiveDetectors.name}":
            with contextlib.suppress(OSError):
                spent += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return spent


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap."""
    chance = np.random.default_rng(0)
    medians = np.median(chance.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975]).tolist()
    return low, high


def _verdict(met: bool, missed: bool) -> str:
    return "met" if met else "missed" if missed else "open"
