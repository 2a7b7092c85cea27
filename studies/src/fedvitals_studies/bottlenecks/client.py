# SPDX-License-Identifier: Apache-2.0
"""A client of the small real federation: a process that trains on digits, one thread, and answers over a socket.

`python -m fedvitals_studies.bottlenecks.client PLACE PORT`; the parent writes the token of the federation, then the
observer and the habits of each case, to its standard input.
"""

from __future__ import annotations

import pickle
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fedvitals.lab.data import datasets
from fedvitals_studies.bottlenecks.wire import receive, send

BATCH, SAMPLES = 64, 256  # per step; per client


@dataclass(frozen=True, slots=True)
class Habits:
    """What a client does in each round, and what is slow about it."""

    epochs: int = 1
    loading_seconds: float = 0.0  # per sample
    upload_bytes_per_second: float | None = None
    clock_ahead: float = 0.0  # seconds by which its clock is wrong


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Digits of one client; each takes a while to read, as from a slow disk."""

    def __init__(self, x: Tensor, y: Tensor, seconds: float) -> None:
        self._x, self._y, self._seconds = x, y, seconds

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        if self._seconds:
            time.sleep(self._seconds)
        return self._x[place], self._y[place]


def new_model(seed: int = 0) -> nn.Module:
    """Return the common initial model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


def state_of(model: nn.Module) -> bytes:
    return bytes(nn.utils.parameters_to_vector(model.parameters()).detach().numpy().astype("<f4").tobytes())


def load_state(model: nn.Module, state: bytes) -> None:
    values = torch.from_numpy(np.frombuffer(state, "<f4").astype(np.float32))
    nn.utils.vector_to_parameters(values, model.parameters())


def serve(place: int, port: int, control: IO[bytes]) -> None:
    """Run the client: it trains whenever it is asked, until the server hangs up."""
    clock = _Clock()  # created before the monitor is imported, which comes with the first observer
    token = control.readline().decode().strip()
    torch.set_num_threads(1)
    digits = datasets.load("digits")
    chosen = torch.randperm(len(digits.y), generator=torch.Generator().manual_seed(place))[:SAMPLES]
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(line, {"place": place, "token": token})
        current, watch, habits = -1, None, Habits()
        while True:
            try:
                asked, state = receive(line)
            except (EOFError, OSError):
                return
            if asked["case"] != current:
                # From our parent, through its own pipe: data from the network are never unpickled.
                current, (watch, habits) = asked["case"], pickle.load(control)  # noqa: S301
                clock.set(habits.clock_ahead)
            received = clock.now()
            samples = Samples(digits.x[chosen], digits.y[chosen], habits.loading_seconds)
            state, telemetry = _train(f"c{place}", asked["round"], state, samples, habits, watch)
            told = {"received": received, "replied": clock.now(), "state": len(state)}
            send(line, told, state + telemetry, habits.upload_bytes_per_second)


def _train(node: str, number: int, state: bytes, samples: Samples, habits: Habits, watch: Any) -> tuple[bytes, bytes]:
    """Return the state after local training, and the measurements of it."""
    model = new_model()
    load_state(model, state)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shuffle = torch.Generator().manual_seed(number)
    loader = DataLoader(samples, BATCH, shuffle=True, generator=shuffle)
    with watch.client(node, model, optimizer, round_index=number):
        for _ in range(habits.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return state_of(model), watch.payload()


class _Clock:
    """The process's own clock, which may be wrong: everything here sees it, including the monitor."""

    def __init__(self) -> None:
        self._true: Callable[[], float] = time.time
        self._ahead = 0.0
        time.time = self.now

    def now(self) -> float:
        return self._true() + self._ahead

    def set(self, ahead: float) -> None:
        self._ahead = ahead


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer)
