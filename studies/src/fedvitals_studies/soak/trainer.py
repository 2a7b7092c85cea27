# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.soak.trainer STORE RUN PER_SECOND`: train at that pace until SIGTERM.

Ten clients learn a fixed linear layer's outputs on random points; the labels of one of them are random, so that the
dashboard has findings to show. Prints a line when the first round is written, and at the end the rounds trained and the
records lost, as JSON.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import time

import click
import torch
from torch import nn

import fedvitals as fv

CLIENTS, STEPS, BATCH = 10, 4, 16
FEATURES, HIDDEN, CLASSES = 32, 32, 8


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


class Federation:
    """A global model, and the models of clients that are averaged into it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._truth = nn.Linear(FEATURES, CLASSES)
        self._model = _model()
        self._local = [_model() for _ in range(CLIENTS)]

    def train(self, monitor: fv.Monitor, round_index: int) -> None:
        """Train one round."""
        with monitor.round(round_index, self._model):
            for index, local in enumerate(self._local):
                local.load_state_dict(self._model.state_dict())
                optimizer = torch.optim.SGD(local.parameters(), 0.05, weight_decay=1e-3)
                with monitor.client(f"c{index}", local, optimizer):
                    for _ in range(STEPS):
                        self._step(monitor, local, optimizer, noisy=index == CLIENTS - 1)
            with torch.no_grad():
                for shared, *own in zip(*(m.parameters() for m in (self._model, *self._local)), strict=True):
                    shared.copy_(torch.stack(own).mean(0))

    def _step(self, monitor: fv.Monitor, model: nn.Module, optimizer: torch.optim.Optimizer, *, noisy: bool) -> None:
        points = torch.randn(BATCH, FEATURES)
        labels = torch.randint(0, CLASSES, (BATCH,)) if noisy else self._truth(points).argmax(1)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=float(loss.detach()))


def main(store: str, run: str, per_second: float) -> None:
    """Train until SIGTERM."""
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    federation, rounds, due = Federation(), 0, time.monotonic()
    with fv.Monitor(store, id=run) as monitor:
        for rounds in itertools.count(1):
            federation.train(monitor, rounds)
            if rounds == 1:
                monitor.flush()
                click.echo("The first round is written.")
            due = max(due + 1 / per_second, time.monotonic())
            if stop.wait(due - time.monotonic()):
                break
    click.echo(json.dumps({"rounds": rounds, "lost": monitor.lost}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
