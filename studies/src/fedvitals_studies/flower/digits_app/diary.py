# SPDX-License-Identifier: Apache-2.0
"""What the server records of a run, identical with and without fedvitals: each round's seconds, the last weights.

Seconds by the clock, and of all processors together: on a busy machine only the latter are comparable.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from . import task

WEIGHTS, ROUNDS = "weights.npz", "rounds.json"


class Diary:
    """Tests the global model, as a server does, and reads the clock each time."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._folder = str(config["results"])
        self._model = task.new_model(str(config["model"]), 0)
        self._x, self._y = task.test_samples(int(config["seed"]))
        self._rounds: list[dict[str, Any]] = []
        self._before = self._cpu_before = 0.0
        self.about: dict[str, Any] = {}  # included in every line

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        self._model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.evaluate(self._model, self._x, self._y)
        now, cpu = time.perf_counter(), processor_seconds()
        if server_round > 0:  # the model is also tested before round 1
            spent = {"seconds": now - self._before, "cpu": cpu - self._cpu_before}
            self._rounds.append({"round": server_round, **spent, "loss": loss, "accuracy": accuracy, **self.about})
        self._before, self._cpu_before = now, cpu
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    def write(self, arrays: ArrayRecord | None) -> None:
        """Write the diary, if requested."""
        if not self._folder:
            return
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        if arrays is not None:
            np.savez(folder / WEIGHTS, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
        (folder / ROUNDS).write_text(json.dumps(self._rounds), encoding="utf-8")


def processor_seconds() -> float:
    """Return the processor seconds of this process and its descendants, including Ray and the clients; 0 if
    unavailable.
    """
    parents, ticks = {}, {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended in the meantime
        parents[int(place.parent.name)] = int(fields[1])
        ticks[int(place.parent.name)] = int(fields[11]) + int(fields[12])
    ours: set[int] = set()
    found = {os.getpid()}
    while found:
        ours |= found
        found = {pid for pid, parent in parents.items() if parent in ours} - ours
    return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")
