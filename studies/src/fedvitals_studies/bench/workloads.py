# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks train: four models from 2.7 thousand to 11 million parameters, each with a batch and a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from fedvitals.lab.models.images import CNN, PaperCNN, Resnet18
from fedvitals.lab.models.sequences import Transformer
from fedvitals.lab.models.vectors import MLP


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]  # shape of one sample
    classes: int
    batch: int
    block: int  # steps in one timed block: long enough to be timed, short enough to interleave
    adam: bool = True

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7)
        return torch.optim.SGD(model.parameters(), 0.05)

    def data(self, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        stream = torch.Generator().manual_seed(seed)
        if self.name == "transformer":
            x = torch.randint(0, VOCABULARY, (samples, *self.inputs), generator=stream)
        else:
            x = torch.randn(samples, *self.inputs, generator=stream)
        return x, torch.randint(0, self.classes, (samples,), generator=stream)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


VOCABULARY = 1000


def mlp() -> nn.Module:
    """Return 32-64-10: 2,762 parameters."""
    return MLP(hidden=(64,)).build((32,), 10, torch.default_generator)


def small_cnn() -> nn.Module:
    """Return the demo's CNN: 21,386 parameters."""
    return CNN().build((1, 8, 8), 10, torch.default_generator)


def paper_cnn(scenario: Literal["baseline", "exploding", "vanishing"] = "baseline") -> nn.Module:
    """Return the CNN of the gradient-scale paper, in the textbook order of its layers: 118,507 parameters."""
    return PaperCNN(scenario, pool_first=False).build((3, 32, 32), 43, torch.default_generator)


def resnet() -> nn.Module:
    """Return ResNet-18 for 32 × 32 images, with group norm: 11.2 million parameters."""
    return Resnet18().build((3, 32, 32), 10, torch.default_generator)


def transformer() -> nn.Module:
    """Return six layers, 384 wide, on 64 tokens: 11.1 million parameters."""
    return Transformer(width=384, heads=6, layers=6).build((64,), 10, torch.default_generator, VOCABULARY)


WORKLOADS = (
    Workload("mlp", mlp, (32,), 10, 32, block=100, adam=False),
    Workload("paper-cnn", paper_cnn, (3, 32, 32), 43, 16, block=5),
    Workload("resnet-18", resnet, (3, 32, 32), 10, 16, block=1),
    Workload("transformer", transformer, (64,), 10, 16, block=1),
)
