# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks train: four models from 2.7 thousand to 11 million parameters, each with a batch and a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    model: Callable[[], nn.Module]
    inputs: tuple[int, ...]  # shape of one sample
    classes: int
    batch: int
    block: int  # steps in one timed block: long enough for the clock, short enough to interleave
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
    """32-64-10: 2,762 parameters."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One of the paper's three: how the convolutions begin, what follows them, and whether gradients are clipped."""

    activation: Callable[[], nn.Module]
    uniform: tuple[float, float] | None  # of the convolutions' weights; None: Glorot
    clip: float | None  # largest norm of each weight tensor's gradient


SCENARIOS = {
    "baseline": Scenario(lambda: nn.LeakyReLU(0.3), None, 1.0),
    "exploding": Scenario(nn.ReLU, (8.0, 10.0), None),
    "vanishing": Scenario(nn.Tanh, (4.0, 7.0), None),
}


def paper_cnn(scenario: str = "baseline") -> nn.Module:
    """The CNN of the gradient-scale paper: 118,507 parameters. Channels, kernel and pooling are our choice."""
    chosen = SCENARIOS[scenario]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), chosen.activation(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), chosen.activation(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2304, 43),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            if isinstance(layer, nn.Linear) or chosen.uniform is None:
                nn.init.xavier_uniform_(layer.weight)
            else:
                nn.init.uniform_(layer.weight, *chosen.uniform)
    return model


def clip_each(model: nn.Module, largest: float) -> None:
    """The paper's cure: each weight tensor's gradient clipped to a norm of its own."""
    for p in model.parameters():
        nn.utils.clip_grad_norm_(p, largest)


class _Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, outside)
        same = stride == 1 and inside == outside
        self.skip = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def resnet() -> nn.Module:
    """ResNet-18 for 32 × 32 images, with group norm: 11.2 million parameters."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    width = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [_Block(width, outside, stride), _Block(outside, outside, 1)]
        width = outside
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 384)
        self.places = nn.Parameter(torch.zeros(64, 384))
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.places).mean(1))  # type: ignore[no-any-return]


WORKLOADS = (
    Workload("mlp", mlp, (32,), 10, 32, block=100, adam=False),
    Workload("paper-cnn", paper_cnn, (3, 32, 32), 43, 16, block=5),
    Workload("resnet-18", resnet, (3, 32, 32), 10, 16, block=1),
    Workload("transformer", _Transformer, (64,), 10, 16, block=1),
)
