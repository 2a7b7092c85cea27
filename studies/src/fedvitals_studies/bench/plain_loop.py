# SPDX-License-Identifier: Apache-2.0
"""A plain federated loop over a language model, and what watchers add to it: rounds of all of them take turns.

Blocks of rounds are compared. A block's time ends when everything in it is written (`flush`), so that no block pays for
the previous one; within a block, as in a run, a round is written while the next one trains.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Row = dict[str, Any]
Tell = Callable[[str], None]

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """What a round trains."""

    clients: int
    steps: int
    batch: int
    tokens: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.clients} clients × {self.steps} steps of {self.batch} × {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a block of rounds: until the next one could begin, and until everything measured is written."""

    trained: float
    written: float


class Loop:
    """Copies of one model train on random tokens with AdamW and are averaged; `autocast` computes in bfloat16."""

    def __init__(self, model: nn.Module, size: Size, device: str, *, autocast: bool) -> None:
        self.model = model.to(device)
        self._clients = [copy.deepcopy(self.model) for _ in range(size.clients)]
        models = (self.model, *self._clients)
        self.trained: list[list[Tensor]] = [[p for p in m.parameters() if p.requires_grad] for m in models]
        shape = (size.clients, size.steps, size.batch, size.tokens)
        self._tokens = torch.randint(0, size.vocabulary, shape, device=device)
        self._cuda, self._autocast = device.startswith("cuda"), autocast

    def block(self, numbers: Iterable[int], watcher: Any) -> Spent:
        """Train rounds with a monitor, or a watcher with the same scopes, or None.

        Times are the host's clock if a GPU trains, else this process's processor time.
        """
        began = self._now()
        for number in numbers:
            self._round(number, watcher)
        trained = self._now()
        if watcher:
            watcher.flush()
        return Spent(trained - began, self._now() - began)

    def _round(self, number: int, watcher: Any) -> None:
        shared, *local = self.trained
        with watcher.round(number, self.model) if watcher else contextlib.nullcontext():
            for index, model in enumerate(self._clients):
                with torch.no_grad():
                    torch._foreach_copy_(local[index], shared)
                optimizer = torch.optim.AdamW(local[index], 1e-4, fused=True)
                with watcher.client(f"c{index}", model, optimizer) if watcher else contextlib.nullcontext():
                    for tokens in self._tokens[index]:
                        self._step(model, optimizer, tokens)
            with torch.no_grad():
                for parameter, *own in zip(shared, *local, strict=True):
                    parameter.copy_(torch.stack([p.detach() for p in own]).mean(0))

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._autocast):
            logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def _now(self) -> float:
        if not self._cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def in_turns(
    loop: Loop, watchers: Mapping[str, Any], pairs: int, tell: Tell, rounds: int = 1
) -> dict[str, list[Spent]]:
    """Train blocks of rounds without ("off") and with each watcher, reversing the order after each pair."""
    arms = {"off": None, **watchers}
    spent: dict[str, list[Spent]] = {name: [] for name in arms}
    for name, watcher in arms.items():
        tell(f"warming up, {name}")
        loop.block([0], watcher)
    for number in range(1, pairs + 1):
        tell(f"block {number} of {pairs}")
        numbers = range((number - 1) * rounds + 1, number * rounds + 1)
        for name in arms if number % 2 else reversed(arms):
            spent[name].append(loop.block(numbers, arms[name]))
    return spent


def percent_over(watched: Sequence[float], off: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the pairs' ratios, in per cent above 1, with a bootstrapped 95 % interval around it."""
    ratios = np.array(watched) / np.array(off)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return tuple(100 * (float(ratio) - 1) for ratio in (low, np.median(ratios), high))  # type: ignore[return-value]


def row_of(what: str, spent: Sequence[Spent], off: Sequence[Spent], bar: float | None) -> Row:
    """Return the row of one watcher: what it adds to a round, judged by its interval if there is a bar (%)."""
    low, middle, high = percent_over([s.written for s in spent], [s.written for s in off])
    unwritten = percent_over([s.trained for s in spent], [s.trained for s in off])[1]
    verdict = "" if bar is None else "met" if high <= bar else "missed" if low > bar else "open"
    return {
        "what": what, "bar": "" if bar is None else f"≤ {bar:g} %", "verdict": verdict, "percent": middle,
        "measured": f"{middle:+.1f} % ({low:+.1f} to {high:+.1f}), {unwritten:+.1f} % before all is written",
        "low": low, "high": high, "percent_before_written": unwritten, "pairs": len(spent),
    }  # fmt: skip
