# SPDX-License-Identifier: Apache-2.0
"""The demo's federation: real digits, twenty clients with different data, one of which gets wrong labels on the way.

A plain PyTorch loop, written as a user would write it; the lines that mention `monitor` are all that fedvitals needs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedvitals.errors import ConfigError, MissingExtraError
from fedvitals.monitor import Monitor

ILL_CLIENT, ILL_SINCE = "c7", 5


@dataclass(frozen=True, slots=True)
class Settings:
    clients: int = 20
    rounds: int = 20
    local_epochs: int = 5
    batch: int = 16
    learning_rate: float = 0.05
    skew: float = 1.0  # Dirichlet α of the label distribution: the smaller, the more the clients differ
    seed: int = 7

    def __post_init__(self) -> None:
        if self.clients < 8:
            raise ConfigError(f"The demo needs at least 8 clients, so that '{ILL_CLIENT}' is one; got {self.clients}.")
        if self.rounds < 1:
            raise ConfigError(f"The demo needs at least 1 round, got {self.rounds}.")


def digits() -> tuple[Tensor, Tensor]:
    """1,797 hand-written digits, 8 × 8 pixels, that ship inside scikit-learn."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("scikit-learn", "lab", "The demo's data set (digits)") from error
    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.tensor(found.target, dtype=torch.int64)


def deal(labels: Tensor, clients: int, skew: float, stream: torch.Generator) -> list[Tensor]:
    """Who holds what: each class is dealt to the clients in shares drawn from a Dirichlet distribution.

    Nobody is left with fewer than 16 samples: the largest give to the smallest.
    """
    shares: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in labels.unique():
        members = torch.nonzero(labels == label).flatten()
        members = members[torch.randperm(len(members), generator=stream)]
        weights = torch._standard_gamma(torch.full((clients,), skew), generator=stream)  # noqa: SLF001
        cuts = (weights.cumsum(0) / weights.sum() * len(members)).long()
        for share, part in zip(shares, torch.tensor_split(members, cuts[:-1]), strict=True):
            share.append(part)
    dealt = [torch.cat(share) for share in shares]
    while min(map(len, dealt)) < 16:
        largest, smallest = (max, min)
        giver, taker = (
            largest(range(clients), key=lambda i: len(dealt[i])),
            smallest(range(clients), key=lambda i: len(dealt[i])),
        )
        dealt[taker] = torch.cat([dealt[taker], dealt[giver][-8:]])
        dealt[giver] = dealt[giver][:-8]
    return dealt


def network() -> nn.Module:
    """Two convolutions and a dense layer: 21,386 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def corrupt(labels: Tensor, seed: int) -> Tensor:
    """Every label replaced by a random other one."""
    stream = torch.Generator().manual_seed(seed)
    return (labels + torch.randint(1, 10, labels.shape, generator=stream)) % 10


def train(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], settings: Settings) -> None:
    optimizer = torch.optim.SGD(model.parameters(), settings.learning_rate)
    for _ in range(settings.local_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def federate(settings: Settings, monitor: Monitor) -> Iterator[tuple[int, float]]:
    """Train, round by round; gives each round's number and the global model's accuracy on held-out digits."""
    stream = torch.Generator().manual_seed(settings.seed)
    torch.manual_seed(settings.seed)
    x, y = digits()
    order = torch.randperm(len(y), generator=stream)
    test, rest = order[:360], order[360:]
    parts = [rest[part] for part in deal(y[rest], settings.clients, settings.skew, stream)]
    global_model = network()

    for number in range(settings.rounds):
        locals_: list[nn.Module] = []
        with monitor.round(number, global_model):
            for index, part in enumerate(parts):
                name, labels = f"c{index}", y[part]
                if name == ILL_CLIENT and number >= ILL_SINCE:
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
            average(global_model, locals_, [len(part) for part in parts])
            accuracy = float((global_model(x[test]).argmax(1) == y[test]).float().mean())
            monitor.log(accuracy=accuracy)
        yield number, accuracy


@torch.no_grad()
def average(into: nn.Module, models: list[nn.Module], sizes: list[int]) -> None:
    """FedAvg: the mean of the clients' weights, each counted by its number of samples."""
    total = sum(sizes)
    for target, *sources in zip(into.parameters(), *(m.parameters() for m in models), strict=True):
        target.copy_(sum(s * (n / total) for s, n in zip(sources, sizes, strict=True)))
