# SPDX-License-Identifier: Apache-2.0
"""What watching adds to a federation of language models in a plain PyTorch loop on one GPU.

A round trains 4 clients for 10 steps each (bfloat16 autocast, fused AdamW, random tokens) and averages them. Rounds
without a monitor, with `light` and with `standard` take turns; each ratio compares neighbours.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Row = dict[str, Any]
Tell = Callable[[str], None]

CLIENTS, STEPS, BATCH, TOKENS, VOCABULARY = 4, 10, 8, 512, 16384
RANK = 8
BAR = 10.0  # per cent
RESAMPLES = 10_000


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
    """110 M parameters with its defaults."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

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
    """The model frozen, with adapters at its attention layers."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        block.qkv, block.out = Lora(block.qkv), Lora(block.out)  # type: ignore[assignment]
    return model


class Loop:
    """A plain federated loop over copies of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.cuda()
        self._clients = [copy.deepcopy(self.model) for _ in range(CLIENTS)]
        models = (self.model, *self._clients)
        self.trained: list[list[Tensor]] = [[p for p in m.parameters() if p.requires_grad] for m in models]
        self._tokens = torch.randint(0, VOCABULARY, (CLIENTS, STEPS, BATCH, TOKENS), device="cuda")

    def round(self, number: int, monitor: Any) -> float:
        """Seconds of one round."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        shared, *local = self.trained
        with monitor.round(number, self.model) if monitor else contextlib.nullcontext():
            for index, model in enumerate(self._clients):
                with torch.no_grad():
                    torch._foreach_copy_(local[index], shared)
                optimizer = torch.optim.AdamW(local[index], 1e-4, fused=True)
                with monitor.client(f"c{index}", model) if monitor else contextlib.nullcontext():
                    for tokens in self._tokens[index]:
                        _step(model, optimizer, tokens)
            with torch.no_grad():
                for parameter, *own in zip(shared, *local, strict=True):
                    parameter.copy_(torch.stack([p.detach() for p in own]).mean(0))
        torch.cuda.synchronize()
        return time.perf_counter() - began


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def llm_rows(quick: bool, tell: Tell) -> list[Row]:
    """A row for each model and preset: seconds over those of the unwatched rounds beside them."""
    torch.manual_seed(0)
    models: Mapping[str, Callable[[], GPT]] = {"GPT": GPT, "GPT with LoRA": lambda: with_adapters(GPT())}
    rows: list[Row] = []
    for name, make in models.items():
        loop = Loop(make())
        parameters = sum(p.numel() for p in loop.model.parameters()) / 1e6
        trained = sum(p.numel() for p in loop.trained[0]) / 1e6
        what = f"{name}, {parameters:.0f} M parameters, {trained:.3g} M trained"
        tell(what)
        seconds = _in_turns(loop, 3 if quick else 12, tell)
        base = float(np.median(seconds["off"]))
        rows.append({"what": f"{what}, unwatched", "bar": "", "measured": f"{base:.2f} s a round", "verdict": ""})
        for preset in ("light", "standard"):
            low, middle, high = _interval(np.array(seconds[preset]) / np.array(seconds["off"]))
            measured = f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"
            met = "met" if middle <= BAR else "missed"
            rows.append(
                {"what": f"{what}, {preset}", "bar": f"≤ {BAR:g} %", "measured": measured, "verdict": met,
                 "percent": middle, "low": low, "high": high}
            )  # fmt: skip
        del loop
        torch.cuda.empty_cache()
    return rows


def _in_turns(loop: Loop, repeats: int, tell: Tell) -> dict[str, list[float]]:
    from fedvitals.monitor.monitor import Monitor  # noqa: PLC0415 - only this part needs it

    seconds: dict[str, list[float]] = {"off": [], "light": [], "standard": []}
    with tempfile.TemporaryDirectory() as folder:
        monitors: dict[str, Any] = {
            name: None if name == "off" else Monitor(Path(folder, f"{name}.db"), probes=name) for name in seconds
        }
        for name, monitor in monitors.items():
            tell(f"warming up, {name}")
            loop.round(0, monitor)
        for number in range(1, repeats + 1):
            tell(f"round {number} of {repeats}")
            for name in monitors if number % 2 else reversed(monitors):
                seconds[name].append(loop.round(number, monitors[name]))
        for monitor in monitors.values():
            if monitor is not None:
                monitor.close()
    return seconds


def _interval(ratios: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """The median in per cent above 1, with a bootstrapped 95 % interval: low, middle, high."""
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return tuple(100 * (float(value) - 1) for value in (low, np.median(ratios), high))  # type: ignore[return-value]
