# SPDX-License-Identifier: Apache-2.0
"""What the oracle tests measure: three tiny models, data for them, a plain training loop, and slow, obvious twins."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.testing import MemorySink

CLASSES = 3


class Transformer(nn.Module):
    """Three tokens, one block of attention with dropout, and a head on their mean."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.block(self.embed(x.view(len(x), 3, 4)))).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, CLASSES))


def cnn():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": Transformer}


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def make_data(samples: int = 48, seed: int = 0):
    """Inputs of twelve features in three classes, from a stream of their own."""
    stream = torch.Generator().manual_seed(1000 + seed)
    y = torch.randint(0, CLASSES, (samples,), generator=stream)
    centres = torch.randn(CLASSES, 12, generator=stream)
    return centres[y] + torch.randn(samples, 12, generator=stream), y


def batches(data, steps: int, size: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = data
    for step in range(steps):
        start = step * size % len(y)
        yield x[start : start + size], y[start : start + size]


def train(model, optimizer, data, steps: int, before_step: Callable[[int], None] = lambda step: None) -> None:
    """The plainest loop; `before_step` is called with gradients in place."""
    for step, (x, y) in enumerate(batches(data, steps)):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        before_step(step)
        optimizer.step()


def watched(probes="standard", **settings) -> tuple[fv.Monitor, MemorySink]:
    """A strict monitor that writes into memory."""
    sink = MemorySink()
    return fv.Monitor(None, sinks=[sink], probes=probes, **{"strict": True, **settings}), sink


class Catcher:
    """Copies of a model's gradients, in float64, each time it is called: the twin of the gradient probe."""

    def __init__(self, model) -> None:
        self.model = model
        self.steps: list[list[torch.Tensor | None]] = []

    def __call__(self, _step: int = 0, scale: float = 1.0) -> None:
        grads = [p.grad for p in self.model.parameters()]
        self.steps.append([None if g is None else g.detach().double() / scale for g in grads])

    def rows(self, step: int) -> np.ndarray:
        return np.array([twin_sums(g) for g in self.steps[step]])

    def norms(self) -> np.ndarray:
        """‖g‖ of each step, over all layers."""
        return np.array([sum(float((g**2).sum()) for g in s if g is not None) ** 0.5 for s in self.steps])

    def merged(self) -> np.ndarray:
        """Nine sums per layer over the values of all steps at once."""
        layers = zip(*self.steps, strict=True)
        return np.array([twin_sums(_joined([g for g in layer if g is not None])) for layer in layers])


def _joined(tensors):
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else None


def twin_sums(tensor) -> list[float]:
    """The nine statistics, one torch call each, in float64."""
    if tensor is None or tensor.numel() == 0:
        return [0, 0, 0, 0, np.inf, -np.inf, 0, 0, 0]
    values = tensor.detach().double().reshape(-1)
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    finite = values[values.isfinite()]
    if not len(finite):
        return [len(values), 0, 0, 0, np.inf, -np.inf, 0, nans, infs]
    ends = [float(finite.min()), float(finite.max())]
    totals = [float(finite.sum()), float((finite**2).sum()), float(finite.abs().sum())]
    return [len(values), *totals, *ends, int((finite == 0).sum()), nans, infs]


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def close(computed, wanted, tolerance: float = 1e-5) -> None:
    """Equal within the tolerance of float32 sums, which cancel to about 1e-7 instead of 0."""
    np.testing.assert_allclose(computed, wanted, rtol=tolerance, atol=max(1e-6, tolerance / 10))
