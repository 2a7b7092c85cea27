# SPDX-License-Identifier: Apache-2.0
"""`python -m fedvitals_studies.adapters.cost [--large] [--minutes N]`: what the signs of adapters and tokens cost.

The trial: a 0.4 M byte GPT on a CPU, ten clients, five steps each, ranks 4, 8 and 16; the signs' own time on the
training thread over all that thread's time, since a machine that others use cannot tell one percent from a difference
of rounds. `--large`: a 110 M GPT with adapters of rank 8 on its attention layers, on a GPU, four clients of ten steps
with 8 texts of 512 tokens each; rounds with and without the signs, and some unwatched, take turns. Beside their ratio,
which scatters with the machine, the signs' own time on the host is told.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.lab.adapters import LoraLinear
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes import session
from fedvitals.probes.adapters.watch import AdapterWatch
from fedvitals.probes.token_counts import CountedTokens, TokenCounts
from fedvitals_studies.bench.gpt import GPT, VOCABULARY, Block, with_adapters
from fedvitals_studies.bench.plain_loop import RESAMPLES, Loop, Size, percent_over

TIMED = (
    (AdapterWatch, "begin_round"),
    (AdapterWatch, "end_round"),
    (AdapterWatch, "close_round"),
    (AdapterWatch, "know"),
    (AdapterWatch, "facts_of"),
    (TokenCounts, "__init__"),
    (TokenCounts, "_count"),
    (TokenCounts, "counted"),
    (CountedTokens, "metrics"),
)
ROUNDS, WARMING_UP = 40, 2
TRIAL_RANKS, STEPS, BATCH, TOKENS = (4, 4, 4, 4, 4, 8, 8, 8, 16, 16), 5, 8, 64
LARGE = Size(4, 10, 8, 512, VOCABULARY)
SIGN = "adapter.product_error"
BARS = {"trial": 1.0, "large": 2.0}  # per cent


class Stopwatch:
    """Adds up the seconds in functions, by a clock."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.seconds, self._clock = 0.0, clock
        self.by_name: dict[str, float] = {}  # of all functions, over everything that was timed

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            began = self._clock()
            try:
                return call(*arguments, **named)
            finally:
                took = self._clock() - began
                self.seconds += took
                self.by_name[call.__qualname__] = self.by_name.get(call.__qualname__, 0.0) + took

        return timed

    def watching(self) -> contextlib.ExitStack:
        """Return a context that times everything that measures signs of adapters and tokens."""
        stack = contextlib.ExitStack()
        for owner, name in TIMED:
            stack.enter_context(mock.patch.object(owner, name, self.around(getattr(owner, name))))
        return stack


# -- the trial --------------------------------------------------------------------------------------------------------


def adapted(model: GPT, rank: int) -> GPT:
    """Return a frozen copy with adapters on the attention and the last layer of each block."""
    own = copy.deepcopy(model).requires_grad_(False)
    for block in own.blocks:
        assert isinstance(block, Block)  # noqa: S101 - for the type checker
        block.qkv = LoraLinear(block.qkv, rank, 2.0)  # type: ignore[assignment]
        block.down = LoraLinear(block.down, rank, 2.0)  # type: ignore[assignment]
    return own


def trial_shares(model: GPT, rounds: int) -> tuple[list[float], list[float]]:
    """Train rounds; returns the seconds of each, and those of the signs in it."""
    watch, generator = Stopwatch(), torch.Generator().manual_seed(0)
    whole = adapted(model, max(TRIAL_RANKS))
    clients = {rank: adapted(model, rank) for rank in {*TRIAL_RANKS}}
    seconds, signs = [], []
    with watch.watching(), Monitor(None) as monitor:
        for number in range(WARMING_UP + rounds):
            began, watch.seconds = time.thread_time(), 0.0
            with monitor.round(number, whole):
                _average(
                    whole, [_client(monitor, i, whole, clients[r], r, generator) for i, r in enumerate(TRIAL_RANKS)]
                )
            seconds.append(time.thread_time() - began)
            signs.append(watch.seconds)
    return seconds[WARMING_UP:], signs[WARMING_UP:]


@torch.no_grad()
def _load(model: nn.Module, whole: dict[str, Tensor], rank: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(whole[name][:rank] if "lora_A" in name else whole[name][:, :rank])


def _client(
    monitor: Monitor, place: int, whole: nn.Module, model: nn.Module, rank: int, generator: torch.Generator
) -> dict[str, Tensor]:
    _load(model, {n: p.detach() for n, p in whole.named_parameters() if p.requires_grad}, rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    with monitor.client(f"c{place}", model):
        for _ in range(STEPS):
            text = torch.randint(0, 256, (BATCH, TOKENS + 1), generator=generator)
            optimizer.zero_grad()
            logits = model(text[:, :-1])
            functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), text[:, 1:].reshape(-1)).backward()
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


def share_of(signs: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """Return the signs' share of the rounds in per cent, between the ends of its bootstrapped 95 % interval."""
    draws = np.random.default_rng(0).integers(len(signs), size=(RESAMPLES, len(signs)))
    own, whole = np.array(signs), np.array(seconds)
    low, high = np.quantile(own[draws].sum(1) / whole[draws].sum(1), [0.025, 0.975])
    return 100 * float(low), 100 * float(own.sum() / whole.sum()), 100 * float(high)


# -- the large model --------------------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """Replacement for `count_tokens`."""


def _no_pairs(*_: Any) -> tuple[()]:
    """Replacement for `AdapterWatch.pairs_of`: a watch that knows no adapters measures none."""
    return ()


class WithoutSigns:
    """A monitor's scopes, without the signs of adapters and tokens."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.client, self.flush = monitor.client, monitor.flush

    @contextlib.contextmanager
    def round(self, number: int, model: nn.Module) -> Iterator[None]:
        """Open a round in which nothing of adapters or tokens is measured."""
        silent = mock.patch.object(AdapterWatch, "pairs_of", _no_pairs)
        with silent, mock.patch.object(session, "count_tokens", _nothing), self._monitor.round(number, model):
            yield


@dataclass(frozen=True, slots=True)
class LargeCosts:
    """Seconds of rounds by arm, each until everything is written; and those of the signs in rounds with them."""

    rounds: dict[str, list[float]]
    signs: list[float]
    by_name: dict[str, float]  # seconds by function, over all rounds


def large_costs(model: GPT, size: Size, device: str, minutes: float) -> LargeCosts:
    """Train rounds with the signs, without them and, every fourth time, unwatched, in turns, for `minutes`."""
    loop, watch = Loop(model, size, device, autocast=device == "cuda"), Stopwatch(time.perf_counter)
    costs = LargeCosts({"unwatched": [], "without": [], "with": []}, [], watch.by_name)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        files = [Path(folder, f"{name}.db") for name in ("without", "with")]
        plain, whole = (stack.enter_context(Monitor(file, strict=True)) for file in files)
        arms: dict[str, Any] = {"unwatched": None, "without": WithoutSigns(plain), "with": whole}
        for watcher in arms.values():
            loop.block(range(WARMING_UP), watcher)
        began, number = time.perf_counter(), WARMING_UP
        while time.perf_counter() - began < 60 * minutes:
            for name in arms if number % 2 else reversed(arms):
                if name != "unwatched" or number % 4 == 0:
                    watch.seconds = 0.0
                    with watch.watching() if name == "with" else contextlib.nullcontext():
                        costs.rounds[name].append(loop.block([number], arms[name]).written)
                    costs.signs.extend([watch.seconds] if name == "with" else [])
            number += 1
        for monitor in (plain, whole):
            monitor.close()
        names = [fv.open(file).newest.metric_names() for file in files]
        if SIGN in names[0] or SIGN not in names[1]:
            raise RuntimeError(f"{SIGN} is to be measured by one of the monitors, and not by the other.")
    return costs


def _written(what: str, low: float, middle: float, high: float, bar: float | None) -> str:
    verdict = "" if bar is None else "met" if high <= bar else "missed" if low > bar else "open"
    limit = "" if bar is None else f"; bar {bar:g} %: {verdict}"
    return f"{what}: {middle:.2f} % ({low:.2f} to {high:.2f}{limit})\n"


def main() -> None:
    """Measure the trial, or the large model, and print the share with its interval."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--device", default="cuda", help="of the large model")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of --large")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the large model's blocks")
    chosen = parser.parse_args()
    if not chosen.large:
        torch.set_num_threads(1)  # of several, the training thread's time would count only its own part
        model = GPT(96, 3, 4, 256)
        seconds, signs = trial_shares(model, ROUNDS)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        sys.stdout.write(
            f"{size:.2f} M, {len(signs)} rounds of {np.mean(seconds):.2f} s, signs {1e3 * np.mean(signs):.1f} ms\n"
        )
        sys.stdout.write(_written("signs, of the training thread's time", *share_of(signs, seconds), BARS["trial"]))
        return
    with torch.device(chosen.device):
        torch.manual_seed(0)
        model = with_adapters(GPT(64, 2, 4, 256) if chosen.tiny else GPT())
    shape = Size(4, 2, 2, 32, 256) if chosen.tiny else LARGE
    costs = large_costs(model, shape, chosen.device, chosen.minutes)
    rounds, pairs = costs.rounds, len(costs.signs)
    sys.stdout.write(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M, {shape}, {pairs} pairs of rounds, ")
    sys.stdout.write(f"unwatched {np.median(rounds['unwatched']):.3f} s, signs {1e3 * np.mean(costs.signs):.1f} ms\n")
    for name, total in sorted(costs.by_name.items(), key=lambda entry: -entry[1]):
        sys.stdout.write(f"  {name}: {1e3 * total / pairs:.2f} ms a round\n")
    own = share_of(costs.signs, rounds["without"])
    sys.stdout.write(_written("signs' own time on the host, of a round without them", *own, BARS["large"]))
    ratio = percent_over(rounds["with"], rounds["without"])
    sys.stdout.write(_written("rounds with the signs over rounds without them", *ratio, BARS["large"]))


if __name__ == "__main__":
    main()
