# SPDX-License-Identifier: Apache-2.0
"""The task: the digits, two models, and how a client trains; every random number comes from the run's seed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST_SAMPLES = 297  # of 1,797
CLASSES = 10


def new_model(kind: str, seed: int) -> nn.Module:
    """Return «cnn» (21 thousand parameters) or «large» (11 million), the same for the same seed."""
    torch.manual_seed(seed)
    if kind == "large":
        wide = (nn.Linear(64, 3000), nn.ReLU(), nn.Linear(3000, 3600), nn.ReLU(), nn.Linear(3600, CLASSES))
        return nn.Sequential(nn.Flatten(), *wide)
    if kind == "cnn":
        convolutions = (nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1))
        head = (nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        return nn.Sequential(*convolutions, nn.ReLU(), *head)
    raise ValueError(f"There is no model '{kind}'. Known: cnn, large.")


@functools.cache  # reading them takes longer than a small client's epoch
def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Return all samples, shuffled: images of 1 x 8 x 8 between 0 and 1, and their labels."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(labels, dtype=torch.int64)[order]


def test_samples(seed: int) -> tuple[Tensor, Tensor]:
    x, y = digits(seed)
    return x[:TEST_SAMPLES], y[:TEST_SAMPLES]


def samples_of(partition: int, partitions: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one client's own samples; the partitions are similar, and disjoint."""
    x, y = digits(seed)
    return x[TEST_SAMPLES + partition :: partitions], y[TEST_SAMPLES + partition :: partitions]


def batches(x: Tensor, y: Tensor, size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), size, shuffle=True, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def train(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    steps: int,
    learning_rate: float,
    halfway: Callable[[], None] = lambda: None,
) -> float:
    """Return the mean loss over `steps` steps of SGD; `halfway` is called in the middle."""
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    total = 0.0
    with nullcontext():
        for number, (x, y) in zip(range(steps), _endless(loader), strict=False):
            if number == steps // 2:
                halfway()
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / max(1, steps)


def _endless(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    while True:
        yield from loader


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return loss and accuracy."""
    output = model(x)
    return loss_of(output, y).item(), (output.argmax(1) == y).float().mean().item()
