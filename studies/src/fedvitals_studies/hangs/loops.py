# SPDX-License-Identifier: Apache-2.0
"""A federation as a plain loop, with its clients in the loop's process or in separate ones."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fedvitals as fv
from fedvitals_studies.hangs.plant import CLIENTS, HUNG_ROUND, Plant


def train(plant: Plant, worker: Any, node: int, round_index: int) -> bytes:
    """Train one client in a separate process. Returns its telemetry."""
    with worker.client(f"c{node}"):
        plant.work("train", round_index, node)
    payload: bytes = worker.payload()
    return payload


def run(plant: Plant) -> None:
    """Train until the hung round is over, and one more."""
    with fv.Monitor(Path(plant.folder, "runs.db"), run=f"{plant.host} {plant.kind}") as monitor:
        if plant.host == "loop":
            _run(plant, monitor, None)
        else:
            with ProcessPoolExecutor(CLIENTS, mp_context=get_context("spawn")) as pool:
                _run(plant, monitor, pool)


def _run(plant: Plant, monitor: fv.Monitor, pool: ProcessPoolExecutor | None) -> None:
    for round_index in range(HUNG_ROUND + 2):
        with monitor.round(round_index):
            if pool is None:
                for node in range(CLIENTS):
                    with monitor.client(f"c{node}"):
                        plant.work("train", round_index, node)
            else:
                monitor.host.expect(*(f"c{node}" for node in range(CLIENTS)))
                worker = monitor.host.for_worker()
                answers = [pool.submit(train, plant, worker, node, round_index) for node in range(CLIENTS)]
                for answer in as_completed(answers):
                    monitor.host.absorb(answer.result())
            with monitor.part("aggregate"):
                plant.work("aggregate", round_index)
            with monitor.part("evaluate"):
                plant.work("evaluate", round_index)


if __name__ == "__main__":
    run(Plant.read(sys.argv[1]))
