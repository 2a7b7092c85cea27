# SPDX-License-Identifier: Apache-2.0
"""What monitoring adds to a federation of language models in a plain PyTorch loop on one GPU.

A GPT of 110 M parameters (bfloat16 autocast), the same with adapters, and a GPT of 1 B parameters whose weights are
bfloat16; fused AdamW, random tokens. For comparison, common alternatives: `wandb.watch` and hooks like Cockpit's.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedvitals_studies.bench.gpt import GPT, VOCABULARY, with_adapters
from fedvitals_studies.bench.other_watchers import CockpitHooks, WandbWatch
from fedvitals_studies.bench.plain_loop import Loop, Size, Spent, in_turns, row_of

Row = dict[str, Any]
Tell = Callable[[str], None]

PAIRS = 25
BARS = {"light": 2.0, "standard": 4.0}  # per cent
BAR_MEMORY = 1.1  # times the bytes of what is trained


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what a round of it trains, and what monitors it."""

    name: str
    make: Callable[[], GPT]
    size: Size
    presets: Sequence[str]
    autocast: bool = True
    rounds: int = 3  # per block; for the slow alternatives, one
    others: bool = False  # whether `wandb.watch` and hooks like Cockpit's are measured, too


SMALL, LARGE = Size(4, 10, 8, 512, VOCABULARY), Size(2, 5, 8, 512, VOCABULARY)
CASES = (
    Case("GPT", GPT, SMALL, ("light", "standard"), others=True),
    Case("GPT with LoRA", lambda: with_adapters(GPT()), SMALL, ("light", "standard")),
    Case("GPT in bfloat16", lambda: GPT(2048, 19, 16).bfloat16(), LARGE, ("standard",), autocast=False, rounds=4),
)


def llm_rows(quick: bool, tell: Tell, cases: Sequence[Case] = CASES, device: str = "cuda") -> list[Row]:
    """Return rows for each model: an unwatched round, what each preset and alternative adds, memory on the device."""
    torch.manual_seed(0)
    rows: list[Row] = []
    for case in cases:
        rows += _case_rows(case, 3 if quick else PAIRS, device, tell)
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def _case_rows(case: Case, pairs: int, device: str, tell: Tell) -> list[Row]:
    with torch.device(device):
        model = case.make()
    loop = Loop(model, case.size, device, autocast=case.autocast)
    parameters = sum(p.numel() for p in loop.model.parameters()) / 1e6
    what = (
        f"{case.name}, {parameters:,.0f} M parameters, {sum(p.numel() for p in loop.trained[0]) / 1e6:,.3g} M trained"
    )
    tell(f"{what}, {case.size}")
    unwatched_peak = _peak_bytes(loop, device)
    with monitors(case.presets) as watchers:
        spent = in_turns(loop, watchers, pairs, tell, case.rounds)
        watched_peak = _peak_bytes(loop, device, since_start=True)
    seconds = statistics.median(s.trained for s in spent["off"]) / case.rounds
    rows = [{"what": f"{what}, unwatched", "bar": "", "measured": f"{seconds:.2f} s a round", "verdict": ""}]
    rows += [row_of(f"{what}, {name}", spent[name], spent["off"], BARS[name]) for name in case.presets]
    if device == "cuda" and len(watchers) == 1:  # with several, only the sum would be known
        rows.append(_memory_row(what, loop, watched_peak - unwatched_peak))
    return rows + (other_rows(what, loop, pairs, tell) if case.others else [])


def _peak_bytes(loop: Loop, device: str, *, since_start: bool = False) -> int:
    """Return the peak of the device's memory: of two unwatched rounds from here, or since it was last read."""
    if device != "cuda":
        return 0
    if not since_start:
        torch.cuda.reset_peak_memory_stats()
        loop.block([0, 0], None)
    return int(torch.cuda.max_memory_allocated())


def _memory_row(what: str, loop: Loop, extra: int) -> Row:
    """Return a row on a monitor's memory at the peak, beyond that of rounds before it existed."""
    trained = sum(p.numel() * p.element_size() for p in loop.trained[0])
    return {
        "what": f"{what}, extra memory on the device at the peak", "bar": f"≤ {BAR_MEMORY:g} × what trains",
        "measured": f"{extra / 2**20:,.0f} MiB, {extra / trained:.2f} × the {trained / 2**20:,.0f} MiB that train",
        "verdict": "met" if extra <= BAR_MEMORY * trained else "missed", "bytes": extra, "trained_bytes": trained,
    }  # fmt: skip


@contextlib.contextmanager
def monitors(presets: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield a monitor for each preset, with a separate store file."""
    from fedvitals.monitor.monitor import Monitor  # noqa: PLC0415 - only those who watch need it

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Monitor(Path(folder, f"{name}.db"), probes=name)) for name in presets}


def other_rows(what: str, loop: Loop, pairs: int, tell: Tell) -> list[Row]:
    """Return a row for `wandb.watch` and one for hooks like Cockpit's; one that cannot be measured says why."""
    rows, watchers = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        watchers["hooks like Cockpit's"] = CockpitHooks()
        name = 'wandb.watch(log="gradients", log_freq=1), offline'
        try:
            watchers[name] = stack.enter_context(contextlib.closing(WandbWatch(Path(folder))))
        except ImportError as error:
            rows = [{"what": f"{what}, {name}", "bar": "", "measured": f"not measured: {error}", "verdict": ""}]
        spent: dict[str, list[Spent]] = in_turns(loop, watchers, pairs, tell)
    return [row_of(f"{what}, {other}", spent[other], spent["off"], None) for other in watchers] + rows
