# SPDX-License-Identifier: Apache-2.0
"""The cost of all detectors per round, and how it grows: 100 clients × 20 layers, after 5, 50 and 200 rounds.

A real, healthy training of the lab, monitored as a user's would be. The detectors examine each round in turn, as they
do live; only the processor time of their own thread counts. For comparison, the paper's round: 100 clients, 20
mini-batches of its CNN each, from the time of one step here and now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedvitals import lab
from fedvitals.diagnosis.examine import DETECTORS, DetectorExamination
from fedvitals.diagnosis.live_detectors import ROUND_COMPLETE
from fedvitals.monitor.monitor import Monitor
from fedvitals.protocols import Detector
from fedvitals.records import Metric, Record
from fedvitals.store.in_memory import MemoryStore
from fedvitals_studies.bench.workloads import WORKLOADS, step
from fedvitals_studies.reproduce.conditions import PAPER_CLIENTS, PAPER_ITERATIONS

CLIENTS, LAYERS = 100, 20
AFTER = (5, 50, 200)
AROUND = 25  # rounds around each, whose median time is reported
BAR_MILLISECONDS = 15.0


class _Timed:
    """A sink like the live detectors that reads the clock of its own thread."""

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.milliseconds: dict[int, float] = {}
        self.findings = 0
        self._detectors, self._memory = detectors, MemoryStore()
        self._examination: DetectorExamination | None = None

    def write(self, records: Sequence[Record], /) -> None:
        self._memory.write(records)
        for record in records:
            if isinstance(record, Metric) and record.name == ROUND_COMPLETE and record.where.round is not None:
                if self._examination is None:
                    self._examination = DetectorExamination(
                        self._memory.history(record.where.run), self._detectors, None
                    )
                began = time.thread_time()
                self.findings += len(list(self._examination.findings_of(record.where.round)))
                self.milliseconds[record.where.round] = 1000 * (time.thread_time() - began)


class _Patient:
    """The monitor, waiting at the end of each round until the detectors are done: none may miss a record."""

    def __init__(self, monitor: Monitor, tell: Callable[[str], None]) -> None:
        self._monitor, self._tell = monitor, tell

    def round_end(self, round_index: int, global_state: Any = None, metrics: Mapping[str, float] | None = None) -> None:
        self._monitor.host.round_end(round_index, global_state, metrics)
        self._monitor.flush()
        if round_index and round_index % 50 == 0:
            self._tell(f"{round_index} rounds")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor.host, name)


def round_times(
    rounds: int, detectors: Sequence[Detector] = DETECTORS, tell: Callable[[str], None] = lambda _: None
) -> dict[int, float]:
    """Return the detectors' milliseconds in each round of a federation that learns: ten dense layers, 20 tensors."""
    experiment = lab.Experiment(
        dataset=lab.Synthetic(samples=40 * CLIENTS, features=24, classes=10, separation=4.0),
        model=lab.mlp(hidden=[16] * (LAYERS // 2 - 1)),
        clients=CLIENTS,
        rounds=rounds,
        partition=lab.dirichlet(1.0),
        local=lab.Local(iterations=3, optimizer=lab.adam(learning_rate=2e-3)),
        evaluation=lab.Evaluation(local=False),
    )
    timed = _Timed(detectors)
    with Monitor(None, host="lab", sinks=[timed], detectors=()) as monitor:
        lab.run(experiment, _Patient(monitor, tell), engine="stacked", workers=1)
    return timed.milliseconds


def paper_round_seconds(repeats: int) -> float:
    """Return the seconds of the paper's round, one client after the other, as on one core."""
    workload = next(each for each in WORKLOADS if each.name == "paper-cnn")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = workload.model()
        optimizer, (x, y) = workload.optimizer(model), workload.data(workload.batch)
        times = []
        for _ in range(repeats + 2):  # the first ones warm up
            began = time.thread_time()
            step(model, optimizer, x, y)
            times.append(time.thread_time() - began)
    finally:
        torch.set_num_threads(threads)
    return float(np.median(times[2:])) * PAPER_CLIENTS * PAPER_ITERATIONS


def bench_diagnosis(*, quick: bool = False, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return a row for each length of the history, with the share of the paper's round."""
    after = AFTER[:1] if quick else AFTER
    found = round_times(max(after) + AROUND, tell=tell)
    paper = paper_round_seconds(5 if quick else 40)
    rows = []
    for rounds in after:
        near = [found[number] for number in range(rounds, rounds + AROUND) if number in found]
        milliseconds = float(np.median(near))
        share = milliseconds / 1000 / paper
        rows.append(
            {
                "after_rounds": rounds,
                "detectors": len(DETECTORS),
                "milliseconds": milliseconds,
                "largest": max(near),
                "bar_milliseconds": BAR_MILLISECONDS,
                "paper_round_seconds": paper,
                "percent_of_paper_round": 100 * share,
                "verdict": "met" if milliseconds <= BAR_MILLISECONDS else "missed",
            }
        )
    return rows
