# SPDX-License-Identifier: Apache-2.0
"""What monitoring costs: process CPU time with the monitor over without, interleaved in one run, as a ratio.

CPU time, because the machine is shared and being descheduled is not our cost; it includes the worker thread that writes
the store. Interleaved and paired, because the machine's speed drifts. Each figure is the median over the pairs, with a
95 % bootstrap interval of that median.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.utils.data import DataLoader, TensorDataset

from fedvitals.kernels import GradientRecorder
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.data_watch import DataWatch
from fedvitals.probes.hooks import StepHooks
from fedvitals.probes.presets import LOSS_ROUNDS, SCALE_ROUNDS, Preset, preset
from fedvitals.probes.scale import scale
from fedvitals.probes.view import View
from fedvitals_studies.bench.gpt import GPT, VOCABULARY
from fedvitals_studies.bench.other_watchers import CockpitHooks, WandbWatch
from fedvitals_studies.bench.plain_loop import Loop, Size, in_turns, percent_over
from fedvitals_studies.bench.workloads import WORKLOADS, Workload, small_cnn, step

Row = dict[str, Any]
Tell = Callable[[str], None]

SIZE = Size(clients=2, steps=3, batch=4, tokens=128, vocabulary=VOCABULARY)  # of the language model's rounds


PARTS = ("steps", "rounds", "data", "gsc", "llm", "others")
SCALE_ALONE = "gradient scale in every round"
SCALE_CALLS = "its measuring calls alone"
DATA_SIGNS = "tap and data channel"
GPT_NAME = "gpt"  # the language model, in rows
SCALED = "standard with scale"
BARS = {  # per cent, by what is measured, model and watcher
    ("steps", "mlp", "one fused pass"): 5.0,
    ("steps", "paper-cnn", "one fused pass"): 1.5,
    ("steps", "resnet-18", "one fused pass"): 1.5,
    ("steps", "transformer", "one fused pass"): 1.5,
    ("rounds", "paper-cnn", "light"): 1.0,
    ("rounds", "paper-cnn", "standard"): 3.0,
    ("rounds", "demo", "light"): 2.0,
    ("rounds", "demo", SCALED): 6.0,  # gradient scale of some clients in every round
    ("data", "paper-cnn", DATA_SIGNS): 2.0,
    ("data", "demo", DATA_SIGNS): 2.0,
    ("gsc", "paper-cnn", SCALE_ALONE): 3.0,
    ("gsc", "demo", SCALE_ALONE): 3.0,
    ("llm", GPT_NAME, "standard"): 4.0,
}


def bench_overhead(*, quick: bool = False, tell: Tell = lambda _text: None, only: Collection[str] = ()) -> list[Row]:
    """Return rows for the table. `only`: some of PARTS.

    `steps`: statistics per step on four models. `rounds`: the whole monitor per round on two federations. `data`: what
    training losses by class and the description of data add to such a round. `gsc`: what the gradient scale adds.
    `llm`: the whole monitor on a language model, at `standard` without gradient scale. `others`: common alternatives,
    on the same model.
    """
    parts = [part for part in PARTS if not only or part in only]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[Row] = []
    try:
        for workload in (WORKLOADS[:2] if quick else WORKLOADS) if "steps" in parts else ():
            tell(f"nine statistics at each step: {workload.name}")
            rows += _judged("steps", _per_step(workload, pairs=9 if quick else 31))
        for workload in (WORKLOADS[1], _DEMO) if "rounds" in parts else ():
            tell(f"whole monitor per round: {workload.name}")
            rows += _judged("rounds", _per_round(workload, pairs=7 if quick else 41))
        for workload in (WORKLOADS[1], _DEMO) if "data" in parts else ():
            tell(f"tap and data channel per round: {workload.name}")
            rows += _judged("data", _data_signs(workload, cycles=1 if quick else 12))
        for workload in (_DEMO, WORKLOADS[1]) if "gsc" in parts else ():
            tell(f"gradient scale per round: {workload.name}")
            rows += _judged("gsc", _gradient_scale(workload, cycles=1 if quick else 12))
        for part in [name for name in ("llm", "others") if name in parts]:
            tell(f"whole monitor per round: GPT of 42 M parameters, {part}")
            rows += _judged(part, language_model_rows(part, 2 if quick else 25, tell))
    finally:
        torch.set_num_threads(threads)
    return rows


def _judged(part: str, rows: list[Row]) -> list[Row]:
    """Return the rows with their bars and verdicts: open if the interval includes the bar."""
    for row in rows:
        bar = BARS.get((part, row["model"], row["by"]))
        if bar is not None:
            verdict = "met" if row["high"] <= bar else "missed" if row["low"] > bar else "open"
            row |= {"bar_percent": bar, "verdict": verdict}
    return rows


_DEMO = Workload("demo", small_cnn, (1, 8, 8), 10, 16, block=25, adam=False)


# -- nine statistics of every layer at every step ---------------------------------------------------------------------


def _per_step(workload: Workload, pairs: int) -> list[Row]:
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    x, y = workload.data(workload.batch)
    parameters = list(model.parameters())
    recorder = GradientRecorder(parameters)

    def fused(_optimizer: Any, _owned: Any, number: int, _skipped: Any) -> None:
        recorder.record(number)

    def naive(_optimizer: Any, owned: Any, _step: int, _skipped: Any) -> None:
        for p in owned:
            nine_calls(p.grad)

    def block(measure: Any) -> float:
        nonlocal recorder
        recorder = GradientRecorder(parameters)
        hooks = None if measure is None else StepHooks(parameters, measure)
        started = time.process_time()
        for _ in range(workload.block):
            step(model, optimizer, x, y)
        spent = time.process_time() - started
        if hooks is not None:
            hooks.remove()
        return spent / workload.block

    for measure in (None, fused, naive):
        block(measure)
    times = _interleaved(
        {"bare": lambda: block(None), "fused": lambda: block(fused), "naive": lambda: block(naive)}, pairs
    )
    count = sum(p.numel() for p in parameters)
    common = {"what": "nine statistics per step", "model": workload.name, "parameters": count, "pairs": pairs}
    fused_row = {**common, "by": "one fused pass", **_overhead(times["bare"], times["fused"])}
    naive_row = {**common, "by": "nine torch calls per tensor", **_overhead(times["bare"], times["naive"])}
    return [fused_row, naive_row, {**common, "by": "the fused call alone", **_call_alone(workload, times["bare"])}]


def nine_calls(gradient: torch.Tensor) -> tuple[float, ...]:
    """Compute one torch call per statistic, as in tutorials."""
    return (
        gradient.mean().item(), gradient.std().item(), gradient.norm().item(), gradient.min().item(),
        gradient.max().item(), gradient.abs().max().item(), torch.isnan(gradient).sum().item(),
        torch.isinf(gradient).sum().item(), (gradient == 0).float().mean().item(),
    )  # fmt: skip


def _call_alone(workload: Workload, bare: list[float]) -> Row:
    """Return the measuring call's own share of the step, timed inside real steps: free of pairing noise."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    x, y = workload.data(workload.batch)
    fused, naive = [], []
    recorder = GradientRecorder(list(model.parameters()))

    def measure(_optimizer: Any, owned: Any, number: int, _skipped: Any) -> None:
        started = time.perf_counter()
        if number % 2:
            recorder.record(number)
            fused.append(time.perf_counter() - started)
        else:
            for p in owned:
                nine_calls(p.grad)
            naive.append(time.perf_counter() - started)

    hooks = StepHooks(list(model.parameters()), measure)
    for _ in range(12 if workload.block == 1 else 200):
        step(model, optimizer, x, y)
    hooks.remove()
    call, other, bare_step = (float(np.median(v)) for v in (fused, naive, bare))
    return {
        "overhead_percent": 100 * call / bare_step,
        "microseconds": 1e6 * call,
        "step_milliseconds": 1e3 * bare_step,
        "cheaper_than_naive": other / call,
    }


# -- the whole monitor, per round -------------------------------------------------------------------------------------


def _per_round(workload: Workload, pairs: int) -> list[Row]:
    """Measure a small federation's round, bare and under two presets; every arm trains identically."""
    start, loaders = _federation(workload)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        arms: dict[str, Callable[[], float]] = {"bare": lambda: _round(workload, start, loaders, None, 0)}
        presets = {"light": preset("light"), "standard": without_scale(), SCALED: preset("standard")}
        for name, chosen in presets.items():
            monitor = stack.enter_context(Monitor(Path(folder) / f"{name}.db", probes=chosen, strict=True))
            arms[name] = _counted(workload, start, loaders, monitor)
        for arm in arms.values():
            arm()
        times = _interleaved(arms, pairs)
    common = {"what": "whole monitor per round", "model": workload.name, "pairs": pairs}
    return [{**common, "by": name, **_overhead(times["bare"], times[name])} for name in presets]


def _federation(workload: Workload) -> tuple[Any, list[DataLoader[Any]]]:
    """Return the initial model of the rounds, and each client's data."""
    clients, steps = (3, 20) if workload.name == "paper-cnn" else (20, 25)
    torch.manual_seed(0)
    start = workload.model()
    loaders = []
    for c in range(clients):
        x, y = workload.data(steps * workload.batch, seed=c)
        loaders.append(DataLoader(TensorDataset(x, y), workload.batch))
    return start, loaders


def _data_signs(workload: Workload, cycles: int) -> list[Row]:
    """Measure what training losses by class and the data channel add to a round, as a share of the bare round.

    Unchanged data are described in the first round, which is not counted; that one-time cost is a separate row.
    """

    def without(folder: Path) -> Monitor:
        monitor = Monitor(folder / "without.db", probes=replace(without_scale(), training_losses=0), strict=True)
        monitor.host.monitored.kit.data = _NoData()  # type: ignore[union-attr]
        return monitor

    bare, added = _added(workload, without_scale(), without, cycles, LOSS_ROUNDS)
    usual = float(np.median(bare))
    loaders, began = _federation(workload)[1], time.process_time()
    for index, loader in enumerate(loaders):
        DataWatch().look(f"c{index}", loader)
    described = 100 * (time.process_time() - began) * LOSS_ROUNDS / usual
    common = {"what": "tap and data channel per round", "model": workload.name, "pairs": cycles}
    once = {**common, "by": "description of new data, once", "overhead_percent": described}
    return [{**common, "by": DATA_SIGNS, **added}, once]


def _gradient_scale(workload: Workload, cycles: int) -> list[Row]:
    """Measure what the gradient scale in every round, each client's once in SCALE_ROUNDS, adds to a round at
    `standard`.

    Measured by rounds with and without it in turns, which is imprecise on a busy machine; and by the thread's time in
    the measuring calls of the same rounds, which excludes selecting, storing and judging the results.
    """
    calls: dict[int, float] = {}
    whole = preset("standard")
    timed = [replace(p, probe=_Timed(p.probe, calls)) if isinstance(p.probe, scale) else p for p in whole.probes]
    bare, added = _added(
        workload,
        replace(whole, probes=tuple(timed)),
        lambda folder: Monitor(folder / "without.db", probes=without_scale(), strict=True),
        cycles,
        SCALE_ROUNDS,
    )
    first = max(calls) + 1 - cycles * SCALE_ROUNDS  # the rounds before were warm-up
    inside = np.reshape([calls.get(first + r, 0.0) for r in range(cycles * SCALE_ROUNDS)], (cycles, SCALE_ROUNDS))
    alone = [100 * seconds / float(np.median(bare)) for seconds in inside.sum(axis=1)]
    common = {"what": "gradient scale per round", "model": workload.name, "pairs": cycles}
    low, middle, high = (float(each) for each in np.percentile(alone, (2.5, 50, 97.5)))
    share = {"overhead_percent": middle, "low": low, "high": high, "rounds_measured": float((inside > 0).mean())}
    return [{**common, "by": SCALE_ALONE, **added}, {**common, "by": SCALE_CALLS, **share}]


class _Timed(scale):
    """The gradient scale's probe, recording the thread's seconds in its calls by round."""

    _seconds: dict[int, float]

    def __init__(self, probe: scale, seconds: dict[int, float]) -> None:
        super().__init__(probe.images, probe.exact)
        object.__setattr__(self, "_seconds", seconds)

    def __call__(self, view: View) -> Mapping[str, Any]:
        began = time.thread_time()
        measured = super().__call__(view)
        number = view.round or 0
        self._seconds[number] = self._seconds.get(number, 0.0) + time.thread_time() - began
        return measured


def _added(
    workload: Workload, whole: Preset, without: Callable[[Path], Monitor], cycles: int, block: int
) -> tuple[list[float], Row]:
    """Return the bare times of blocks of rounds, and what one monitor takes beyond another as a share of it.

    The two take turns, round by round. A cost in only one round of a block shows in the block's sum, but not in a
    median over single rounds.
    """
    start, loaders = _federation(workload)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        monitors = {
            "with": Monitor(Path(folder) / "with.db", probes=whole, strict=True),
            "without": without(Path(folder)),
        }
        arms: dict[str, Callable[[], float]] = {"bare": lambda: _round(workload, start, loaders, None, 0)}
        for name, monitor in monitors.items():
            arms[name] = _counted(workload, start, loaders, stack.enter_context(monitor))
        for arm in [*arms.values()] * 2:
            arm()
        rounds = _interleaved(arms, cycles * block)
    times = {name: np.reshape(own, (cycles, block)).sum(axis=1).tolist() for name, own in rounds.items()}
    added = [b + w - o for b, w, o in zip(times["bare"], times["with"], times["without"], strict=True)]
    quickest = {name: float(np.percentile(own, 10)) for name, own in times.items()}
    quiet = 100 * (quickest["with"] - quickest["without"]) / quickest["bare"]
    return times["bare"], {**_overhead(times["bare"], added), "quiet_percent": quiet}


class _NoData(DataWatch):
    """A data channel that examines nothing."""

    def look(self, node: str, data: Any) -> None:
        """Return that nothing is new."""


def without_scale() -> Preset:
    """Return `standard` without the gradient scale, whose cost is reported separately."""
    whole = preset("standard")
    return replace(whole, probes=tuple(p for p in whole.probes if not isinstance(p.probe, scale)))


def _counted(workload: Workload, start: Any, loaders: Any, monitor: Monitor) -> Callable[[], float]:
    rounds = iter(range(1_000_000))
    return lambda: _round(workload, start, loaders, monitor, next(rounds))


def _round(workload: Workload, start: Any, loaders: Any, monitor: Monitor | None, number: int) -> float:
    started = time.process_time()
    with _maybe(monitor and monitor.round(number, start)):
        for index, loader in enumerate(loaders):
            local = copy.deepcopy(start)
            optimizer = workload.optimizer(local)
            with _maybe(monitor and monitor.client(f"c{index}", local, optimizer, data=loader, loss=F.cross_entropy)):
                for x, y in loader:
                    step(local, optimizer, x, y)
    if monitor is not None:
        monitor.flush()  # writing this round is part of its cost
    return time.process_time() - started


@contextlib.contextmanager
def _maybe(context: Any) -> Iterator[None]:
    if context is None:
        yield
    else:
        with context:
            yield


# -- the whole monitor on a language model, and others beside it ------------------------------------------------------


def language_model_rows(part: str, pairs: int, tell: Tell, model: Any = None, size: Size = SIZE) -> list[Row]:
    """Return rows for a GPT of 42 M parameters in a plain loop: `standard` ("llm"), or hooks like Cockpit's and
    `wandb.watch` ("others").
    """
    torch.manual_seed(0)
    loop = Loop(GPT(512, 8, 8) if model is None else model, size, "cpu", autocast=False)
    count = sum(p.numel() for p in loop.trained[0])
    common = {"what": f"whole monitor per round, {size}", "model": GPT_NAME, "parameters": count}
    rows: list[Row] = []
    watchers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if part == "llm":
            watchers["standard"] = stack.enter_context(Monitor(Path(folder) / "runs.db", probes=without_scale()))
        else:
            watchers["hooks like Cockpit's"] = CockpitHooks()
            try:
                watchers["wandb.watch"] = stack.enter_context(contextlib.closing(WandbWatch(Path(folder))))
            except ImportError as error:
                rows.append({**common, "by": f"wandb.watch: not measured, {error}"})
        spent = in_turns(loop, watchers, pairs, tell)
    seconds = {name: [s.written for s in own] for name, own in spent.items()}
    measured = [{**common, "by": name, "pairs": pairs, **_overhead(seconds["off"], seconds[name])} for name in watchers]
    return measured + rows


# -- pairs and their spread -------------------------------------------------------------------------------------------


def _interleaved(arms: dict[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """Return each arm's times, taken in turn; the order rotates, so that no arm always follows the same other."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    gc.collect()
    gc.disable()
    try:
        for turn in range(pairs):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(arms[name]())
            gc.collect()
    finally:
        gc.enable()
    return times


def _overhead(bare: list[float], watched: list[float]) -> Row:
    low, middle, high = percent_over(watched, bare)
    return {
        "overhead_percent": middle,
        "low": low,
        "high": high,
        # The same for the fastest tenth of each arm: when the machine's other users are quiet.
        "quiet_percent": 100 * (float(np.percentile(watched, 10) / np.percentile(bare, 10)) - 1),
    }
