# SPDX-License-Identifier: Apache-2.0
"""The building blocks of the larger models: residual blocks, attention, recurrence.

Written with plain products and sums, so that they can be computed for many clients at once (`torch.func.vmap`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    activation: Callable[[Tensor], Tensor] = staticmethod(F.relu)

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = norm(outside)
        same = stride == 1 and inside == outside
        self.skip = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.activation(self.norm1(self.conv1(x)))))
        return self.activation(y + self.skip(x))


class Attention(nn.Module):
    """Multi-head self-attention; if `causal`, a step sees only itself and those before it."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, steps, width = x.shape
        query, key, value = self.mix(x).view(samples, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        if self.causal:
            scores = scores + torch.full((steps, steps), -torch.inf, device=x.device).triu(1)
        weight = torch.softmax(scores, -1)
        return self.out((weight @ value).transpose(1, 2).reshape(samples, steps, width))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """One transformer layer: attention, then two dense layers, each with a skip connection."""

    activation: Callable[[Tensor], Tensor] = staticmethod(F.gelu)

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.dense1 = nn.Linear(width, 4 * width)
        self.dense2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dense2(self.activation(self.dense1(self.norm2(x))))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Turn an image into a sequence of patches: [N, C, H, W] → [N, patches, width]."""

    def __init__(self, channels: int, width: int, side: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, side, side)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class PositionEmbedding(nn.Module):
    """Add a learnt embedding of each position in the sequence."""

    def __init__(self, steps: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(steps, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class ClassToken(nn.Module):
    """Put a learnt step in front of a sequence: [N, steps, width] → [N, 1 + steps, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.weight.expand(len(x), 1, -1), x], 1)


class FirstStep(nn.Module):
    """Take the first step of a sequence: [N, steps, width] → [N, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Heads(nn.Module):
    """Divide a network's outputs among several tasks: [N, sum of sizes] → a tuple of [N, size]."""

    def __init__(self, trunk: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.trunk, self.sizes = trunk, list(sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.trunk(x), self.sizes, dim=-1)


class MeanOverSteps(nn.Module):
    """Average over the steps of a sequence: [N, steps, width] → [N, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class ImageRows(nn.Module):
    """Turn an image into the sequence of its rows, from the top: [N, C, H, W] → [N, H, C · W]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    """An LSTM's last hidden state, [N, steps, features] → [N, hidden], or with `per_step` all: [N, steps, hidden]."""

    def __init__(self, features: int, hidden: int, layers: int, *, per_step: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)
        self.per_step = per_step

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(x)[0]
        return states if self.per_step else states[:, -1]  # type: ignore[no-any-return]


class GatedRecurrent(nn.Module):
    """A GRU's last hidden state, [N, steps, features] → [N, hidden], or with `per_step` all: [N, steps, hidden]."""

    def __init__(self, features: int, hidden: int, layers: int, *, per_step: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, layers, batch_first=True)
        self.per_step = per_step

    def forward(self, x: Tensor) -> Tensor:
        states = self.gru(x)[0]
        return states if self.per_step else states[:, -1]  # type: ignore[no-any-return]
