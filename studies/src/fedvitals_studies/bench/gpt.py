# SPDX-License-Identifier: Apache-2.0
"""Language models that the benchmarks train: GPTs of chosen width and depth, whole or with low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, TOKENS, RANK = 16384, 512, 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        grown: Tensor = x + self.down(functional.gelu(self.up(self.before_mlp(x))))
        return grown


class GPT(nn.Module):
    """110 M parameters with its defaults; 1.02 B with (2048, 19, 16), 42 M with (512, 8, 8)."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Lora(nn.Module):
    """A frozen linear layer with a low-rank adapter, which begins at zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(0.01 * torch.randn(RANK, frozen.in_features))
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.frozen(x) + x @ self.a.T @ self.b.T
        return adapted


def with_adapters(model: GPT) -> GPT:
    """Freeze the model and give its attention layers adapters."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        block.qkv, block.out = Lora(block.qkv), Lora(block.out)  # type: ignore[assignment]
    return model
