# SPDX-License-Identifier: Apache-2.0
"""The lab and the monitor on one GPU against their bars: the paper's round, its statistics, many clients, the kernel.

Images are random bytes: the cost of a step does not depend on them, and no data set is needed. Everything that is
compared takes turns in one process. Times are of the host's clock, from a round's first call to its new model, unless
stated to be the device's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals import lab
from fedvitals.lab.aggregators.averages import FedAvg
from fedvitals.lab.engines.devices import require_cuda
from fedvitals.lab.engines.engine import Engine
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Task
from fedvitals.lab.models import catalog
from fedvitals.protocols import NullObserver, Observer
from fedvitals.stack import Stack
from fedvitals_studies.bench.gpu.kernel import kernel_rows
from fedvitals_studies.bench.gpu.llm import llm_rows
from fedvitals_studies.bench.gpu.precision import precision_rows
from fedvitals_studies.bench.gpu.study import study_rows
from fedvitals_studies.bench.plain_loop import percent_over

Row = dict[str, Any]
Tell = Callable[[str], None]

PARTS = ("round", "statistics", "kernel", "clients", "monitored", "llm", "precision", "study")
CLIENTS, ITERATIONS, BATCH, SAMPLES = 100, 20, 16, 313
BAR_ROUND = {"tf32": 40.0, "float32": 70.0}  # milliseconds
BAR_LOOP = {"tf32": 100.0, "float32": 60.0}  # times the per-client loop
BAR_STATISTICS = 3.0  # per cent
BAR_MONITORED, BLOCK_ROUNDS = 1.25, 5  # times an unwatched block of this many rounds


def bench_gpu(*, quick: bool = False, tell: Tell = lambda _: None, only: Collection[str] = ()) -> list[Row]:
    """Return a row for each bar. `only`: some of PARTS."""
    require_cuda("`fedvitals bench gpu` needs a CUDA device")
    repeats = 5 if quick else 25
    parts = [part for part in PARTS if not only or part in only]
    rows: list[Row] = [_row("device", "", torch.cuda.get_device_name(), "")]
    if "round" in parts:
        rows += _rounds(repeats, tell)
    if "statistics" in parts:
        rows += _watched(repeats, tell)
    if "kernel" in parts:
        rows += kernel_rows(quick, tell)
    if "clients" in parts:
        rows += _many(repeats, tell)
    if "monitored" in parts:
        rows += _monitored(repeats, tell)
    if "llm" in parts:
        rows += llm_rows(quick, tell)
    if "precision" in parts:
        tell("a step against float64")
        rows += precision_rows(Site.of(experiment(4)))
    if "study" in parts:
        rows += study_rows()
    return rows


def _row(what: str, bar: str, measured: str, verdict: str, **numbers: float) -> Row:
    return {"what": what, "bar": bar, "measured": measured, "verdict": verdict, **numbers}


def verdict(met: bool) -> str:
    return "met" if met else "missed"


class Taking(NullObserver):
    """Requests the nine sums of every layer, client and step, and fetches them at the end of the round."""

    def stack_begin(self, stack: Stack) -> None:
        self._stack = stack

    def stack_end(self, *_: Any) -> None:
        assert self._stack.sums is not None  # noqa: S101 - the engine on CUDA has them
        self.taken = self._stack.sums().cpu()

    def for_worker(self) -> Any:
        return self


class Federated:
    """The paper's federation on the device, one round at a time; no faults, no evaluation."""

    def __init__(self, clients: int = CLIENTS, precision: str = "float32", seed: int = 0) -> None:
        self.site = Site.of(experiment(clients, seed))
        self.engine = Engine(self.site, "stacked", device="cuda", precision=precision)
        self.model = self.site.layout.flat(self.site.module).to(self.engine.device)
        self._number = 0

    def round(self, observer: Observer) -> float:
        """Run a round and return its seconds: local training of all clients until the new model is complete."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        tasks = [Task(self._number, (node,), self.model) for node in self.site.experiment.nodes]
        total = FedAvg().begin(self.model, {}, self.site.layout.weights)
        for batch in self.engine.train(tasks, observer):
            for update in batch:
                total.add(update.state, float(update.samples), update.node)
        self.model = total.finish()
        torch.cuda.synchronize()
        self._number += 1
        return time.perf_counter() - began


def experiment(clients: int, seed: int = 0, rounds: int = 1) -> lab.Experiment:
    stream = torch.Generator().manual_seed(seed)
    total = clients * SAMPLES
    x = torch.randint(256, (total, 3, 32, 32), generator=stream, dtype=torch.uint8)
    y = torch.randint(43, (total,), generator=stream)
    return lab.Experiment(
        dataset=lab.Arrays(x, y, x[:64], y[:64]),
        test_share=0.0,
        model=lab.paper_cnn(),
        local=lab.Local(iterations=ITERATIONS, batch=BATCH, optimizer=lab.adam(), clip=lab.Clip(1.0)),
        clients=clients,
        rounds=rounds,
    )


# -- the paper's round ------------------------------------------------------------------------------------------------


def _rounds(repeats: int, tell: Tell) -> list[Row]:
    stacks = {precision: Federated(precision=precision) for precision in BAR_ROUND}
    loops = {precision: Loop(stacks["float32"].site, tf32=precision == "tf32") for precision in BAR_ROUND}
    taking = Taking()
    for precision, stack in stacks.items():
        tell(f"warming up {precision}")
        for _ in range(3):
            stack.round(taking)
        loops[precision].rate(1)
    times: dict[str, list[float]] = {precision: [] for precision in stacks}
    ratios: dict[str, list[float]] = {precision: [] for precision in stacks}
    for number in range(repeats):
        tell(f"the paper's round, {number + 1} of {repeats}")
        for precision, stack in stacks.items():
            times[precision].append(1000 * stack.round(taking))
            ours = CLIENTS * ITERATIONS / (times[precision][-1] / 1000)
            ratios[precision].append(ours / loops[precision].rate(2))
    found = []
    for precision, stack in stacks.items():
        low, middle, high = spread(times[precision])
        what = f"the paper's round with all statistics, {precision}"
        told = f"{middle:.1f} ms ({low:.1f} to {high:.1f}), plan «{stack.engine.plan}»"
        met = verdict(middle <= BAR_ROUND[precision])
        found.append(_row(what, f"≤ {BAR_ROUND[precision]:g} ms", told, met, milliseconds=middle))
        low, middle, high = spread(ratios[precision])
        told = f"{middle:.0f} × ({low:.0f} to {high:.0f})"
        met = verdict(middle >= BAR_LOOP[precision])
        found.append(_row(f"against the per-client loop, {precision}", f"≥ {BAR_LOOP[precision]:g} ×", told, met))
    return found


class Loop:
    """The obvious implementation: one client after the other on the same GPU, with an optimiser each; unwatched."""

    def __init__(self, site: Site, *, tf32: bool) -> None:
        self._site, self._tf32 = site, tf32
        nodes = site.experiment.nodes[:4]
        self._data = [tuple(part.cuda() for part in site.tensors(node, 0)) for node in nodes]
        self._module: nn.Module = catalog.build(site.experiment.model, site.dataset, torch.Generator()).cuda()
        self._start = [p.detach().clone() for p in self._module.parameters()]

    def rate(self, clients: int) -> float:
        """Return client-steps per second."""
        before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self._tf32
        torch.cuda.synchronize()
        began = time.perf_counter()
        for client in range(clients):
            self._train(*self._data[client])
        torch.cuda.synchronize()
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
        return clients * ITERATIONS / (time.perf_counter() - began)

    def _train(self, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            for p, start in zip(self._module.parameters(), self._start, strict=True):
                p.copy_(start)
        optimizer = torch.optim.Adam(self._module.parameters(), lr=1e-3, eps=1e-7)
        for step in range(ITERATIONS):
            rows = slice(step * BATCH % (len(y) - BATCH), step * BATCH % (len(y) - BATCH) + BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._module(x[rows]), y[rows]).backward()
            for p in self._module.parameters():
                nn.utils.clip_grad_norm_([p], 1.0)
            optimizer.step()


# -- what monitoring adds --------------------------------------------------------------------------------------------


def _watched(repeats: int, tell: Tell) -> list[Row]:
    """Measure whole rounds with and without statistics, in turns, including the transfer and the host's part."""
    found = []
    for precision in BAR_ROUND:
        stack, observers = Federated(precision=precision), (Taking(), NullObserver())
        for observer in observers:
            for _ in range(3):
                stack.round(observer)
        added = []
        for number in range(repeats):
            tell(f"statistics on and off, {precision}, {number + 1} of {repeats}")
            on, off = (stack.round(observer) for observer in (observers if number % 2 else observers[::-1]))
            on, off = (on, off) if number % 2 else (off, on)
            added.append(100 * (on / off - 1))
        low, middle, high = spread(added)
        told = f"{middle:.1f} % ({low:.1f} to {high:.1f})"
        met = verdict(middle <= BAR_STATISTICS)
        found.append(_row(f"statistics on over off, {precision}", f"≤ {BAR_STATISTICS:g} %", told, met, percent=middle))
    return found


# -- many clients -----------------------------------------------------------------------------------------------------


def _many(repeats: int, tell: Tell) -> list[Row]:
    stacks = {clients: Federated(clients) for clients in (CLIENTS, 10 * CLIENTS)}
    taking = Taking()
    rates: Mapping[int, list[float]] = {clients: [] for clients in stacks}
    for clients, stack in stacks.items():
        tell(f"warming up {clients} clients")
        for _ in range(2):
            stack.round(taking)
    for number in range(max(3, repeats // 3)):
        tell(f"{10 * CLIENTS} clients, {number + 1} of {max(3, repeats // 3)}")
        for clients, stack in stacks.items():
            rates[clients].append(clients * ITERATIONS / stack.round(taking))
    few, many = (statistics.median(rates[clients]) for clients in stacks)
    told = f"{many:,.0f} client-steps/s, {many / few:.2f} × the {few:,.0f} of {CLIENTS}"
    return [
        _row("1,000 clients, float32", f"≥ the throughput of {CLIENTS}", told, verdict(many >= few), ratio=many / few)
    ]


# -- with the whole monitor -------------------------------------------------------------------------------------------


def _monitored(repeats: int, tell: Tell) -> list[Row]:
    """Measure what a user waits for: blocks of rounds of `lab.run`, unwatched and with a monitor and a store, in turns.

    A block's time ends when everything in it is written.
    """
    from fedvitals.monitor.monitor import Monitor  # noqa: PLC0415 - only this part needs it

    with tempfile.TemporaryDirectory() as folder, Monitor(Path(folder, "runs.db"), host="lab") as monitor:
        whole = experiment(CLIENTS, rounds=BLOCK_ROUNDS * (repeats + 2))
        arms: dict[str, tuple[Iterator[Any], Callable[[], Any]]] = {
            "unwatched": (lab.rounds(whole, None, engine="stacked", device="cuda"), lambda: None),
            "watched": (lab.rounds(whole, monitor, engine="stacked", device="cuda"), monitor.flush),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(repeats + 1):
            tell(f"lab.run, block {number} of {repeats}")
            for name in arms if number % 2 else reversed(arms):
                rounds, flush = arms[name]
                began = time.perf_counter()
                for _ in range(BLOCK_ROUNDS):
                    next(rounds)
                flush()
                seconds[name].append(time.perf_counter() - began)
        off, on = (seconds[name][1:] for name in arms)  # the first block compiles and captures
        low, middle, high = (1 + percent / 100 for percent in percent_over(on, off))
    milliseconds = [1000 * statistics.median(own) / BLOCK_ROUNDS for own in (off, on)]
    measured = f"{middle:.2f} × ({low:.2f} to {high:.2f}): {milliseconds[1]:.0f} ms over {milliseconds[0]:.0f} ms"
    judged = "met" if high <= BAR_MONITORED else "missed" if low > BAR_MONITORED else "open"
    what = f"a round of lab.run, {CLIENTS} clients, float32: monitor with the preset «standard» over unwatched"
    return [_row(what, f"≤ {BAR_MONITORED:g} ×", measured, judged, ratio=middle, low=low, high=high)]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the minimum, the median and the maximum."""
    return min(values), statistics.median(values), max(values)
