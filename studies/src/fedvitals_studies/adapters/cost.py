# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.adapters.cost [--large]`: what the signs of adapters cost, as a share of the round.

The trial: a 0.39 M byte GPT, ten clients, five steps each, ranks 4, 8 and 16. `--large`: a 110 M GPT on a GPU, ten
clients, 50 steps of 8 texts each, adapters of rank 8 on its attention layers.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedvitals.lab.adapters import LoraLinear
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.adapters.watch import AdapterWatch
from fedvitals.probes.token_counts import TokenCounts
from fedvitals_studies.bench.gpt import GPT, Block

TIMED = (
    (AdapterWatch, "begin_round"),
    (AdapterWatch, "end_round"),
    (AdapterWatch, "close_round"),
    (AdapterWatch, "know"),
    (AdapterWatch, "facts_of"),
    (TokenCounts, "__init__"),
    (TokenCounts, "_count"),
    (TokenCounts, "metrics"),
)
CLIENTS, ROUNDS = 10, 4
TRIAL_RANKS = (4, 4, 4, 4, 4, 8, 8, 8, 16, 16)


class Stopwatch:
    """Adds up the seconds of functions by a clock: on a CPU that of the training thread, since others share it."""

    def __init__(self, *, wall: bool) -> None:
        self.clock = time.perf_counter if wall else time.thread_time
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = self.clock()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += self.clock() - began

        return timed


def adapted(model: GPT, rank: int) -> GPT:
    """Return a frozen copy with adapters on the attention and the last layer of each block."""
    own = copy.deepcopy(model).requires_grad_(False)
    for block in own.blocks:
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        device = block.qkv.weight.device
        block.qkv = LoraLinear(block.qkv, rank, 2.0).to(device)  # type: ignore[assignment]
        block.down = LoraLinear(block.down, rank, 2.0).to(device)  # type: ignore[assignment]
    return own


def rounds_and_signs(
    model: GPT, ranks: tuple[int, ...], steps: int, batch: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Train ROUNDS rounds; returns the seconds of all but the first, and those of the signs in these."""
    watch = Stopwatch(wall=next(model.parameters()).is_cuda)
    originals = [(owner, name, getattr(owner, name)) for owner, name in TIMED]
    for owner, name, call in originals:
        setattr(owner, name, watch.around(call))
    whole, began = adapted(model, max(ranks)), 0.0
    clients = {rank: adapted(model, rank) for rank in {*ranks}}
    try:
        with Monitor(None) as monitor:
            for number in range(ROUNDS):
                if number == 1:
                    watch.seconds, began = 0.0, watch.clock()
                with monitor.round(number, whole):
                    states = [
                        _client(monitor, f"c{i}", whole, clients[r], r, steps, batch) for i, r in enumerate(ranks)
                    ]
                    _average(whole, states)
            seconds = watch.clock() - began
    finally:
        for owner, name, call in originals:
            setattr(owner, name, call)
    return seconds, watch.seconds


@torch.no_grad()
def _load(model: nn.Module, whole: dict[str, Tensor], rank: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(whole[name][:rank] if "lora_A" in name else whole[name][:, :rank])


def _client(
    monitor: Monitor,
    name: str,
    whole: nn.Module,
    model: nn.Module,
    rank: int,
    steps: int,
    batch: Callable[[], tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    _load(model, {n: p.detach() for n, p in whole.named_parameters() if p.requires_grad}, rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    with monitor.client(name, model):
        for _ in range(steps):
            x, y = batch()
            optimizer.zero_grad()
            logits = model(x)
            functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).backward()
            optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _average(whole: nn.Module, states: list[dict[str, Tensor]]) -> None:
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            total, count = torch.zeros_like(parameter), torch.zeros_like(parameter)
            for state in states:
                rows, columns = state[name].shape
                total[:rows, :columns] += state[name]
                count[:rows, :columns] += 1
            parameter.copy_(total / count)


def main() -> None:
    """Measure the trial, or the large model, and print the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    large = parser.parse_args().large
    device = "cuda" if large else "cpu"
    vocabulary, tokens = (16384, 512) if large else (256, 64)
    model = (GPT() if large else GPT(96, 3, 4, vocabulary)).to(device)
    generator = torch.Generator(device).manual_seed(0)

    def batch() -> tuple[Tensor, Tensor]:
        text = torch.randint(0, vocabulary, (8, tokens + 1), generator=generator, device=device)
        return text[:, :-1], text[:, 1:]

    ranks = (8,) * CLIENTS if large else TRIAL_RANKS
    seconds, signs = rounds_and_signs(model, ranks, 50 if large else 5, batch)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    sys.stdout.write(f"{size:.2f} M on {device}: {1e3 * signs / (ROUNDS - 1):.1f} ms of a round of ")
    sys.stdout.write(f"{seconds / (ROUNDS - 1):.2f} s: {signs / seconds:.2%}\n")


if __name__ == "__main__":
    main()
