# SPDX-License-Identifier: Apache-2.0
"""What the server writes down of a run, the same with and without fedvitals: each round's seconds, the last weights."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord

from . import task

WEIGHTS, ROUNDS = "weights.npz", "rounds.json"


class Diary:
    """Tests the global model, as a server does, and looks at the clock each time."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._folder = str(config["results"])
        self._model = task.new_model(str(config["model"]), 0)
        self._x, self._y = task.test_samples(int(config["seed"]))
        self._rounds: list[dict[str, Any]] = []
        self._before = 0.0
        self.about: dict[str, Any] = {}  # goes into every line

    def evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        self._model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = task.evaluate(self._model, self._x, self._y)
        now = time.perf_counter()
        if server_round > 0:  # before round 1, too, the model is tested
            line = {"round": server_round, "seconds": now - self._before, "loss": loss, "accuracy": accuracy}
            self._rounds.append(line | self.about)
        self._before = now
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    def write(self, arrays: ArrayRecord | None) -> None:
        """Nothing where nobody asked for it."""
        if not self._folder:
            return
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        if arrays is not None:
            np.savez(folder / WEIGHTS, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
        (folder / ROUNDS).write_text(json.dumps(self._rounds), encoding="utf-8")
