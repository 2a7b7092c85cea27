# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001, T201 - scripts that talk to the benchmark on standard output
"""The work that every peer is given: data, who holds which of it, the order of mini-batches, the first weights.

`fedvitals bench lab` writes it into a folder and starts a peer in its own environment:

    ENVIRONMENT/bin/python plain_loop.py FOLDER --threads 1

A peer says `@{"ready": true}` when it could begin, does one round for each line `round` that it is sent, and answers
with seconds and losses; `test` is answered with the accuracy of its global model. None of them knows fedvitals.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def commands() -> Iterator[str]:
    for line in sys.stdin:
        if line.strip() == "quit":
            return
        yield line.strip()


def answer(**facts: object) -> None:
    print("@" + json.dumps(facts), flush=True)


class Work:
    """Everything in memory as a user would have it: float32, one pair of tensors for each client."""

    def __init__(self, folder: Path) -> None:
        self.settings = json.loads((folder / "work.json").read_text(encoding="utf-8"))
        with np.load(folder / "work.npz") as arrays:
            self.initial = torch.from_numpy(arrays["initial"])
            self.orders = torch.from_numpy(arrays["orders"])  # [rounds, clients, steps, batch]: places in client's data
            rows = np.split(arrays["rows"], arrays["cuts"])
        # Copy on write: what nobody writes to is in memory once, however many processes have it.
        x, y, test_x, test_y = (
            torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in ("x", "y", "test_x", "test_y")
        )
        self._x, self._y, self._rows, self._test = x, y, [torch.from_numpy(own) for own in rows], (test_x, test_y)
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def clients(self) -> int:
        return len(self._rows)

    @property
    def steps(self) -> int:
        """Mini-batches of all clients in one round."""
        return self.orders[0, :, :, 0].numel()

    def client(self, client: int) -> tuple[Tensor, Tensor]:
        if client not in self._held:
            rows = self._rows[client]
            self._held[client] = self._x[rows], self._y[rows]
        return self._held[client]

    def order(self, number: int, client: int) -> Tensor:
        return self.orders[number % len(self.orders), client]

    def model(self) -> nn.Module:
        """As a user writes it; the weights are those with which everybody begins."""
        if self.settings["model"] == "mlp":
            model = nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        else:
            model = nn.Sequential(
                nn.Conv2d(3, 32, 3), nn.LeakyReLU(0.3), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3), nn.LeakyReLU(0.3), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(2304, 43),
            )  # fmt: skip
        nn.utils.vector_to_parameters(self.initial, model.parameters())
        return model

    def optimizer(self, parameters: object) -> torch.optim.Optimizer:
        if self.settings["optimizer"] == "sgd":
            return torch.optim.SGD(parameters, lr=self.settings["learning_rate"])
        return torch.optim.Adam(parameters, lr=self.settings["learning_rate"], eps=self.settings["epsilon"])

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        x, y = self._test
        hits = [(model(a).argmax(1) == b).sum() for a, b in zip(x.split(256), y.split(256), strict=True)]
        return float(sum(hits)) / len(y)


def train(model: nn.Module, loader: object, optimizer: torch.optim.Optimizer) -> float:
    """The tutorials' local training; gives the last mini-batch's loss."""
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


class Clock:
    """Seconds of a round, told with its losses."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def tell(self, steps: int, losses: list[float]) -> None:
        seconds = time.perf_counter() - self._began
        answer(seconds=seconds, steps=steps, loss=sum(losses) / len(losses))
