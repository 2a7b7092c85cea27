# SPDX-License-Identifier: Apache-2.0
"""The demo's federation: real digits, twenty clients with different data, one of which gets wrong labels midway.

A plain PyTorch loop, written as a user would write it; fedvitals needs only the lines that mention `monitor`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedvitals.errors import ConfigError
from fedvitals.lab.data import datasets
from fedvitals.lab.data.partition import Dirichlet, deal
from fedvitals.lab.models.images import CNN
from fedvitals.monitor.monitor import Monitor

ILL_CLIENT, ILL_SINCE = "c7", 5


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The settings of the demo's federation."""

    clients: int = 20
    rounds: int = 20
    local_epochs: int = 5
    batch: int = 16
    learning_rate: float = 0.05
    skew: float = 1.0  # Dirichlet α of the label distribution: the smaller, the more the clients differ
    seed: int = 7
    faulty: bool = True  # whether the client ILL_CLIENT gets wrong labels from round ILL_SINCE on

    def __post_init__(self) -> None:
        if self.clients < 8:
            raise ConfigError(f"The demo needs at least 8 clients, so that '{ILL_CLIENT}' is one; got {self.clients}.")
        if self.rounds < 1:
            raise ConfigError(f"The demo needs at least 1 round, got {self.rounds}.")


def corrupt(labels: Tensor, seed: int) -> Tensor:
    """Replace every label by a random other one."""
    stream = torch.Generator().manual_seed(seed)
    return (labels + torch.randint(1, 10, labels.shape, generator=stream)) % 10


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], settings: DemoSettings) -> None:
    optimizer = torch.optim.SGD(model.parameters(), settings.learning_rate)
    for _ in range(settings.local_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def federate(settings: DemoSettings, monitor: Monitor) -> Iterator[tuple[int, float]]:
    """Train round by round; yields each round's number and the global model's accuracy on held-out digits."""
    stream = torch.Generator().manual_seed(settings.seed)
    digits = datasets.load("digits")
    shards = deal(Dirichlet(settings.skew), digits, settings.clients, stream, test_share=0, least=16)
    x, y, parts = digits.x, digits.y, [shard.train for shard in shards]
    global_model = CNN().build(digits.shape, digits.classes, stream)

    for number in range(settings.rounds):
        locals_: list[nn.Module] = []
        with monitor.round(number, global_model):
            for index, part in enumerate(parts):
                name, labels = f"c{index}", y[part]
                if settings.faulty and name == ILL_CLIENT and number >= ILL_SINCE:
                    labels = corrupt(labels, settings.seed)
                shuffle = torch.Generator().manual_seed(hash((settings.seed, number, index)))
                loader = DataLoader(TensorDataset(x[part], labels), settings.batch, shuffle=True, generator=shuffle)
                local = copy.deepcopy(global_model)
                with monitor.client(name, local, data=loader, loss=F.cross_entropy):
                    train(local, loader, settings)
                locals_.append(local)
                size = sum(p.numel() * p.element_size() for p in local.parameters())
                monitor.transfer("server", name, size, kind="model")
                monitor.transfer(name, "server", size)
            with monitor.part("aggregate"):
                average(global_model, locals_, [len(part) for part in parts])
            with monitor.part("evaluate"):
                accuracy = float((global_model(digits.test_x).argmax(1) == digits.test_y).float().mean())
            monitor.log(accuracy=accuracy)
        yield number, accuracy


@torch.no_grad()
def average(into: nn.Module, models: list[nn.Module], sizes: list[int]) -> None:
    """FedAvg: set `into` to the mean of the clients' weights, weighted by their numbers of samples."""
    total = sum(sizes)
    for target, *sources in zip(into.parameters(), *(m.parameters() for m in models), strict=True):
        target.copy_(sum(s * (n / total) for s, n in zip(sources, sizes, strict=True)))
