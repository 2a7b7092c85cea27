# SPDX-License-Identifier: Apache-2.0
"""Who does the work: one of three engines, in this process or in several; or whatever else keeps the same promises.

| engine | how | for |
| --- | --- | --- |
| sequential | one client after the other, plain PyTorch | reading; the twin of the others |
| reuse | models and optimisers made once, channels-last, fused; one process per core | convolutional and large models |
| stacked | clients as a batch dimension | small models; CUDA |

The engine «flower» trains on Flower's nodes, as «sequential» would: `hosts/flower/lab/engine.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.engines.devices import check_precision, device_of
from fedvitals.lab.engines.executor import ClientByClient, Desk, Examination
from fedvitals.lab.engines.pool import Pool
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.work import Task, Update
from fedvitals.lab.stacked.steps import Stacked, stack_size, suits
from fedvitals.protocols import NullObserver, Observer

ENGINES = ("sequential", "reuse", "stacked")
FLOWER = "flower"  # known by name, and started by the command line: it needs a Flower run around it
TEST_ROWS = 2048  # of one examination: fixed, so that sums do not depend on the number of processes
LOCAL_TESTS = 8  # clients in one examination
MEASURED_SECONDS = 0.2  # of trying each engine
SMALL, LARGE = 5e6, 20e6  # operations of a client's step: below, stacked is quicker for certain; above, reuse


class AnyEngine(Protocol):
    """What a federation needs of one; closed by leaving its `with`."""

    name: str
    device: torch.device  # where states live: of the server, of tasks and of updates

    def train(
        self, tasks: Sequence[Task], observer: Observer, absorb: Callable[[bytes], None] | None = None
    ) -> Iterator[list[Update]]: ...

    def examine(self, state: Tensor) -> tuple[Tensor, Tensor]: ...

    def examine_locally(self, states: dict[str, Tensor]) -> tuple[Tensor, Tensor]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Engine:
    """Trains and tests for a federation. `workers`: processes; 0 and 1 do the work in this one.

    `precision`: on CUDA, what products are computed in: «float32», or «tf32» or «bfloat16», quicker and coarser.
    """

    def __init__(
        self,
        site: Site,
        name: str = "auto",
        workers: int | None = None,
        device: str = "cpu",
        precision: str = "float32",
    ) -> None:
        if name == FLOWER:
            raise ConfigError(
                "The engine 'flower' is a Flower app of its own: start it with "
                "`fedvitals lab EXPERIMENT.toml --engine flower`."
            )
        if name not in (*ENGINES, "auto"):
            raise ConfigError(unknown("engine", name, (*ENGINES, FLOWER, "auto")))
        device = device_of(device)
        check_precision(precision, device)
        self.fallback: str | None = None  # why it is not done as asked, and how instead
        if device != "cpu" and name in ("auto", "stacked") and not suits(site):
            self.fallback = (
                f"The model '{type(site.experiment.model).__name__}' cannot be stacked (batch norm, a recurrent layer, "
                "or a model of your own that does not say `stackable = True`): its clients are trained one by one on "
                f"the CPU, by the engine 'reuse', instead of on '{device}'."
            )
            name, device, precision = "reuse", "cpu", "float32"
        self.site, self.device, self.precision = site, torch.device(device), precision
        if name == "auto":
            name = "stacked" if device != "cpu" else _quickest(site)
        if device != "cpu" and name != "stacked":
            raise ConfigError(f"The engine '{name}' runs on a CPU only; on '{device}' use the engine 'stacked'.")
        self.name = name
        self.workers = _workers(name, workers, device)
        if site.experiment.local.keep_optimizer and (name != "stacked" or self.workers > 1):
            raise ConfigError(
                "Optimisers that are kept over the rounds stay in one process: keep_optimizer needs engine='stacked' "
                f"and workers=1; got engine='{name}' and workers={self.workers}."
            )
        desk = desk_of(site, name, device, precision)
        self._pool = Pool(desk, site.layout.size, site.experiment.clients, self.workers) if self.workers > 1 else None
        self._desk = desk() if self._pool is None else None

    def train(
        self, tasks: Sequence[Task], observer: Observer, absorb: Callable[[bytes], None] | None = None
    ) -> Iterator[list[Update]]:
        """Updates in the order of the tasks' members, by batch; states are valid until the next batch is taken.

        `absorb` takes what was measured on the way, in the observer's place.
        """
        watcher, absorb = observer.for_worker(), absorb or observer.absorb
        batches = [*self._batches(tasks)]
        if self._pool is not None:
            yield from self._pool.train(batches, watcher, absorb)
            return
        assert self._desk is not None  # noqa: S101 - one of the two is there
        rows = max((sum(len(task.nodes) for task in batch) for batch in batches), default=0)
        out = torch.empty(rows, self.site.layout.size, device=self.device)
        for batch in batches:
            with one_thread():
                updates = self._desk.train(batch, watcher, out[: sum(len(task.nodes) for task in batch)])
            absorb(watcher.payload())
            yield updates

    def examine(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Each test sample's loss under a state, and whether it was classified rightly."""
        total = len(self.site.dataset.test_y)
        size = TEST_ROWS if self.device.type == "cpu" else total  # each examination waits for the device once
        cuts = range(0, total, max(1, size))
        return self._examine([Examination(state, (first, min(total, first + size))) for first in cuts])

    def examine_locally(self, states: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The same on the clients' local tests: each client with the state that it was given."""
        jobs: list[Examination] = []
        for _, members in itertools.groupby(states, key=lambda node: id(states[node])):
            size = LOCAL_TESTS if self.device.type == "cpu" else len(states)
            jobs += [Examination(states[part[0]], None, part) for part in _batched(members, size)]
        return self._examine(jobs)

    def _examine(self, jobs: list[Examination]) -> tuple[Tensor, Tensor]:
        if self._pool is not None:
            found = self._pool.examine(jobs)
        else:
            assert self._desk is not None  # noqa: S101
            with one_thread():
                found = [self._desk.examine(job) for job in jobs]
        return torch.cat([losses for losses, _ in found]), torch.cat([hits for _, hits in found])

    def _batches(self, tasks: Sequence[Task]) -> Iterator[list[Task]]:
        """Client by client one task is a batch; stacked, as many as make a stack. Never by the number of processes."""
        members = sum(len(task.nodes) for task in tasks)
        if self.name != "stacked":
            largest = 1
        else:
            largest = self._desk.largest(members) if isinstance(self._desk, Stacked) else stack_size(members)
        batch: list[Task] = []
        members = 0
        for task in tasks:
            if batch and members + len(task.nodes) > largest:
                yield batch
                batch, members = [], 0
            batch.append(task)
            members += len(task.nodes)
        if batch:
            yield batch

    @property
    def plan(self) -> str | None:
        """How a stack's step is computed: see `stacked_plans`."""
        return self._desk.plan.name if isinstance(self._desk, Stacked) else None

    def optimizers(self) -> dict[str, Tensor]:
        """The clients' own, where the experiment keeps them over the rounds: and of how many steps."""
        kept = self._desk.kept if isinstance(self._desk, Stacked) else {}
        found: dict[str, Tensor] = {}
        for node, (moments, steps) in kept.items():
            found |= {f"{node}/{i}": moment for i, moment in enumerate(moments)}
            found[f"{node}/steps"] = torch.tensor(steps, dtype=torch.float64)
        return found

    def restore_optimizers(self, saved: dict[str, Tensor]) -> None:
        if not isinstance(self._desk, Stacked):
            return
        self._desk.kept = {}
        for node in dict.fromkeys(name.rpartition("/")[0] for name in saved):
            moments = [saved[f"{node}/{i}"] for i in range(sum(name.startswith(f"{node}/") for name in saved) - 1)]
            self._desk.kept[node] = (moments, float(saved[f"{node}/steps"]))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def desk_of(site: Site, name: str, device: str = "cpu", precision: str = "float32") -> Callable[[], Desk]:
    """What makes the desk of one process."""
    if name == "stacked":
        return lambda: Stacked(site, device, precision)
    return lambda: ClientByClient(site, fast=name == "reuse")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: the same sums whatever the machine, and no quarrel between processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _workers(name: str, wanted: int | None, device: str) -> int:
    if device != "cpu" or name == "sequential":
        return 1
    if torch.cuda.is_initialized():  # a process that is forked now could not even ask an optimiser for a step
        return 1
    if wanted is None:
        wanted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(wanted, int) or wanted < 0:
        raise ConfigError(f"The number of workers cannot be {wanted!r}: 1 trains in this process, more in others.")
    return wanted if hasattr(os, "fork") else 1


def _quickest(site: Site) -> str:
    """The engine that trains more client-steps per second here.

    A step of few operations is all overhead, which stacking shares; one of many leaves the caches when it is stacked.
    In between, both are tried for a moment on a few clients.
    """
    if not suits(site):
        return "reuse"
    operations = _operations(site) * site.experiment.local.batch
    if operations < SMALL:
        return "stacked"
    if operations > LARGE:
        return "reuse"
    nodes = site.experiment.nodes[:16]
    state = site.layout.flat(site.module)
    tasks = [Task(0, (node,), state, iterations=2) for node in nodes]
    speed = {}
    for name in ("reuse", "stacked"):
        desk = desk_of(site, name)()
        out = torch.empty(len(tasks), site.layout.size)
        watcher = NullObserver()
        with one_thread():
            desk.train(tasks[:1], watcher, out[:1])
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < MEASURED_SECONDS:
                desk.train(tasks, watcher, out)
                steps += 2 * len(tasks)
        speed[name] = steps / (time.perf_counter() - began)
    return max(speed, key=lambda name: speed[name])


def _operations(site: Site) -> int:
    """About how many one sample takes, forward and back: a glance, where `site.flops` counts (and takes a second)."""
    total = 0

    def count(layer: nn.Module, _inputs: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor) and isinstance(weight := getattr(layer, "weight", None), Tensor):
            total += 6 * weight.numel() * output.numel() // weight.shape[0]

    hooks = [layer.register_forward_hook(count) for layer in site.module.modules()]
    try:
        with torch.no_grad():
            site.module.eval()(site.dataset.inputs(site.dataset.x[:1]))
    finally:
        site.module.train()
        for hook in hooks:
            hook.remove()
    return total


def _batched(members: Iterator[str], size: int) -> Iterator[tuple[str, ...]]:
    while part := tuple(itertools.islice(members, size)):
        yield part
