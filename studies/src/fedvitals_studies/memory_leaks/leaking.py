# SPDX-License-Identifier: Apache-2.0
"""A federation in one process, or with clients in separate processes, that leaks in one of several places."""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import nn

import fedvitals as fv
from fedvitals.monitor import rounds
from fedvitals.resources import client_memory

LIMIT = "LEAKS_LIMIT"  # the variable with the number of bytes that a process may use
if LIMIT in os.environ:
    for module in (rounds, client_memory):
        vars(module)["limit_bytes"] = lambda: int(os.environ[LIMIT])
CLIENTS = 3
ROUNDS = 400  # never reached
KEPT: list[Any] = []


def keep(megabytes: float, *, tensors: bool = False) -> None:
    """Keep this much more memory, as bytes or as tensors that no hook sees."""
    count = int(megabytes * 2**20)
    KEPT.append(torch.ones(count // 4) if tensors else np.ones(count, np.uint8))


class Federation:
    """A leaking federation. `kind`: where it leaks; `megabytes`: per round."""

    def __init__(self, kind: str, megabytes: float, seed: int) -> None:
        self.kind, self.megabytes, self.rng = kind, megabytes, random.Random(seed)  # noqa: S311 - no secret
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def amount(self) -> float:
        """Return the megabytes of this round, which vary by a fifth."""
        return self.megabytes * self.rng.uniform(0.8, 1.2)

    def train(self, monitor: Any, node: int) -> None:
        """Train one client for a few steps, and leak if it is its turn."""
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with monitor.client(f"c{node}", model):
            for _ in range(4):
                inputs = torch.randn(32, 64)
                optimizer.zero_grad()
                outputs = model(inputs)
                loss = nn.functional.cross_entropy(outputs, torch.randint(10, (32,)))
                loss.backward()
                optimizer.step()
            if self.kind == "outputs":  # of a batch that increases the graph's share: large outputs with their graph
                wide = torch.randn(int(self.amount() / CLIENTS * 2**20 / 4 / 330), 64)
                KEPT.append(model(wide))
            elif self.kind in ("every client", "tensors"):
                keep(self.amount() / CLIENTS, tensors=self.kind == "tensors")
            elif self.kind == "one client" and node == 1:
                keep(self.amount())

    def after(self, monitor: Any) -> None:
        """Aggregate and evaluate, each of which may leak."""
        with monitor.part("aggregate"):
            if self.kind == "aggregate":
                keep(self.amount())
        with monitor.part("evaluate"):
            batch = torch.randn(20_000, 256)  # temporarily
            del batch
            if self.kind in ("evaluate", "growing evaluation"):
                keep(self.amount())
            if self.kind == "growing evaluation":
                torch.ones(int(150 * 2**20 / 4)).sum()  # temporarily needed, each time
        if self.kind == "history":
            keep(self.amount())


def train_elsewhere(kind: str, worker: Any, node: int, megabytes: float) -> bytes:
    """Train a client in a separate process, which leaks if it is its turn."""
    federation = Federation("none", megabytes, node)
    federation.train(worker, node)
    if kind == "process" and node == 1:
        keep(megabytes)
    payload: bytes = worker.payload()
    return payload


def run(store: str, kind: str, megabytes: float, seed: int) -> None:
    """Train until memory runs out; prints a line for each completed round."""
    federation = Federation(kind, megabytes, seed)
    with fv.Monitor(store, run=kind) as monitor:
        if kind != "process":
            for number in range(ROUNDS):
                with monitor.round(number, federation.model):
                    for node in range(CLIENTS):
                        federation.train(monitor, node)
                    federation.after(monitor)
                _say(monitor, number)
            return
        pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(CLIENTS)]
        for number in range(ROUNDS):
            with monitor.round(number, federation.model):
                worker = monitor.host.for_worker()
                monitor.host.expect(*(f"c{node}" for node in range(CLIENTS)))
                answers = [
                    pool.submit(train_elsewhere, kind, worker, node, federation.amount())
                    for node, pool in enumerate(pools)
                ]
                for answer in answers:
                    monitor.host.absorb(answer.result())
            _say(monitor, number)


def _say(monitor: fv.Monitor, number: int) -> None:
    monitor.flush()
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
