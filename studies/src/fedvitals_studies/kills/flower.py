# SPDX-License-Identifier: Apache-2.0
"""Kills the servers of Flower runs. A round counts as acknowledged once a reader of the store has seen it complete."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from fedvitals.errors import FedvitalsError
from fedvitals.records import Metric
from fedvitals.store import open_reader
from fedvitals.store.read import queries
from fedvitals_studies.flower.app_folder import write_app
from fedvitals_studies.flower.simulation import FlowerError, SuperLink
from fedvitals_studies.kills.study import PATIENCE, Kill, problems

NODES = 3
SERVER = "flwr-simulation"  # the program that runs a simulation's server
ROUNDS_BEFORE = 4
SETTINGS = {"num-server-rounds": 1000, "model": "cnn", "local-epochs": 1}


def kill_flower(seed: int, folder: Path, link: SuperLink) -> Kill:
    """Kill the server of a Flower run after a few rounds."""
    chance = random.Random(f"flower {seed}")  # noqa: S311 - no secrets here
    store = folder / f"flower-{seed}.db"
    app = write_app(folder / f"app-{seed}", "two-lines")
    before = _servers()
    run = threading.Thread(target=_simulate, args=(link, app, store), daemon=True)
    run.start()
    wanted, seen, end = chance.randint(1, ROUNDS_BEFORE), dict[int, int](), time.monotonic() + PATIENCE
    while len(seen) < wanted:
        if time.monotonic() > end:
            raise TimeoutError(f"The Flower run of {store} completed {len(seen)} rounds in {PATIENCE:.0f} s.")
        time.sleep(0.02)
        seen = complete_rounds(store)
    for process in _servers() - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    run.join(PATIENCE)
    after = complete_rounds(store)
    lost = [f"{count} metrics of round {number}" for number, count in seen.items() if after.get(number, 0) < count]
    return Kill("Flower server", seed, len(seen), tuple(lost + problems(str(store))))


def _simulate(link: SuperLink, app: Path, store: Path) -> None:
    with contextlib.suppress(FlowerError):  # it is killed
        link.simulate(app, {**SETTINGS, "store": store}, nodes=NODES)


def _servers() -> set[int]:
    """Return the processes that run the servers of simulations."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(Path(word).name == SERVER for word in words[:2]):
            found.add(process.pid)
    return found


def complete_rounds(store: Path) -> dict[int, int]:
    """Return the number of metrics of each complete round."""
    counts: dict[int, int] = {}
    try:
        with open_reader(store) as reader:
            for run in queries.list_runs(reader):
                metrics = queries.records(reader, run.id, Metric)
                complete = {m.where.round for m in metrics if m.name == "time.round"}
                for metric in metrics:
                    if metric.where.round is not None and metric.where.round in complete:
                        counts[metric.where.round] = counts.get(metric.where.round, 0) + 1
    except FedvitalsError:
        return {}
    return counts
