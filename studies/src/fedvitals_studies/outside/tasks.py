# SPDX-License-Identifier: Apache-2.0
"""Data sets and models that are not the lab's: tables, words, sequences, images of two sizes, numbers to predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from fedvitals.lab.data.datasets import load
from fedvitals.lab.data.image_archives import FashionMNIST


@dataclass(frozen=True)
class Task:
    """What a federation learns: inputs, targets, how to build the model, and learning rates for SGD and for Adam."""

    x: Tensor
    y: Tensor
    model: Callable[[], nn.Module]
    sgd: float
    adam: float
    classes: int  # 0: numbers are predicted


class Residual(nn.Module):
    """A block of two convolutions with group norm."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(4, after),
        )  # fmt: skip
        self.skip = nn.Conv2d(before, after, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Recurrent(nn.Module):
    """Tokens through an LSTM to classes."""

    def __init__(self, tokens: int, classes: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(tokens, 16), nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embedding(x))[0].mean(1))
        return scores


class SmallViT(nn.Module):
    """Patches of 7 × 7 pixels through two transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.place = nn.Conv2d(1, 32, 7, 7), nn.Parameter(torch.zeros(1, 16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.patches(x).flatten(2).transpose(1, 2) + self.place).mean(1))
        return scores


def digits_batch_norm(rng: np.random.Generator) -> Task:
    x, y = _shuffled(datasets.load_digits(return_X_y=True), rng)
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    return Task(x / 16, y, layers, 0.05, 0.003, 10)


def digits_logistic(rng: np.random.Generator) -> Task:
    x, y = _shuffled(datasets.load_digits(return_X_y=True), rng)
    return Task(_standardised(x), y, lambda: nn.Linear(64, 10), 0.05, 0.005, 10)


def cancer(rng: np.random.Generator) -> Task:
    x, y = _shuffled(datasets.load_breast_cancer(return_X_y=True), rng)
    return Task(
        _standardised(x), y, lambda: nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2)), 0.1, 0.005, 2
    )


def houses(rng: np.random.Generator) -> Task:
    x = np.column_stack([rng.lognormal(0, 0.5, (1400, 3)), rng.normal(0, 1, (1400, 5))])
    price = np.log(x[:, 0]) + 0.5 * x[:, 1] * (x[:, 3] > 0) + np.sin(x[:, 4]) + rng.normal(0, 0.2, 1400)
    inputs, targets = (_standardised(torch.as_tensor(part, dtype=torch.float32)) for part in (x, price[:, None]))
    layers = lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))  # noqa: E731
    return Task(inputs, targets, layers, 0.05, 0.005, 0)


def shapes(rng: np.random.Generator) -> Task:
    """Twenty classes of images of 3 × 12 × 12: a smooth pattern each, shifted, with noise."""
    coarse = torch.as_tensor(rng.normal(0, 1, (20, 3, 5, 5)), dtype=torch.float32)
    patterns = nn.functional.interpolate(coarse, size=12, mode="bicubic")
    y = torch.as_tensor(rng.integers(0, 20, 1300))
    moves = rng.integers(-2, 3, (1300, 2))
    rolled = [torch.roll(patterns[c], tuple(m), (1, 2)) for c, m in zip(y, moves.tolist(), strict=True)]
    x = torch.stack(rolled) + torch.as_tensor(rng.normal(0, 0.5, (1300, 3, 12, 12)), dtype=torch.float32)
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 8, 3, 1, 1), nn.GroupNorm(4, 8), nn.ReLU(), Residual(8, 24), nn.AdaptiveAvgPool2d(3), nn.Flatten(),
        nn.Linear(216, 20),
    )  # fmt: skip
    return Task(x, y, layers, 0.1, 0.003, 20)


def fashion(rng: np.random.Generator) -> Task:
    """1,300 images of Fashion-MNIST, which is looked for where the lab looks (FEDVITALS_DATA, ../shared/data)."""
    whole = load(FashionMNIST(test_samples=1))
    chosen = torch.from_numpy(rng.choice(60000, 1300, replace=False))
    return Task(whole.x[chosen].reshape(-1, 1, 28, 28).float() / 255 - 0.5, whole.y[chosen], SmallViT, 0.1, 0.002, 10)


def words(rng: np.random.Generator) -> Task:
    """Bags of words: eight subjects with words of their own, of a vocabulary of 300 after Zipf's law."""
    y, chances = rng.integers(0, 8, 1500), 1 / np.arange(1, 301)
    subjects = [np.where(rng.random(300) < 0.1, 12, 1) * chances for _ in range(8)]
    counts = np.stack([rng.multinomial(60, subjects[c] / subjects[c].sum()) for c in y])
    x = torch.as_tensor(np.log1p(counts), dtype=torch.float32)
    return Task(
        x, torch.as_tensor(y), lambda: nn.Sequential(nn.Linear(300, 32), nn.ReLU(), nn.Linear(32, 8)), 0.1, 0.003, 8
    )


def sequences(rng: np.random.Generator) -> Task:
    """Sequences of 14 tokens from six Markov chains."""
    chains, y = rng.dirichlet(np.full(40, 0.2), (6, 40)).cumsum(-1), rng.integers(0, 6, 1300)
    x = rng.integers(1, 40, (1300, 14))
    for place in range(1, 14):
        x[:, place] = (chains[y, x[:, place - 1]] < rng.random((1300, 1))).sum(1).clip(1, 39)
    return Task(torch.as_tensor(x), torch.as_tensor(y), lambda: Recurrent(40, 6), 0.5, 0.01, 6)


# Divided before anything was looked at: detectors may be mended by what the first half shows; the second half judges.
HALVES: dict[str, tuple[Callable[[np.random.Generator], Task], ...]] = {
    "mend": (digits_batch_norm, shapes, sequences, cancer),
    "judge": (digits_logistic, fashion, words, houses),
}


def _shuffled(data: Any, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    x, y = data
    order = rng.permutation(len(x))
    return torch.as_tensor(x[order], dtype=torch.float32), torch.as_tensor(y[order])


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-6)
