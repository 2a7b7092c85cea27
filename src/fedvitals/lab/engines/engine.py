# SPDX-License-Identifier: Apache-2.0
"""The three engines that train and evaluate for a federation, in this process or in several.

| engine | how | for |
| --- | --- | --- |
| sequential | one client after the other, plain PyTorch | reading; the reference for the others |
| reuse | models created once, channels-last, fused; one process per core | convolutional and large models |
| stacked | clients as a batch dimension | small models; CUDA |

The engine «flower» trains on Flower's nodes, as «sequential» would: `hosts/flower/lab/engine.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.aggregators.drift import DriftCorrection
from fedvitals.lab.engines.devices import check_precision, resolve_device
from fedvitals.lab.engines.executor import ClientByClientExecutor, EvaluationJob, Executor
from fedvitals.lab.engines.pool import WorkerPool
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.slots import StateLease, StateSlots
from fedvitals.lab.engines.tasks import Home, Task, Update
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.stacked.executor import STACK, StackedExecutor, stack_size, stacking_obstacle
from fedvitals.protocols import NullObserver, Observer

ENGINES = ("sequential", "reuse", "stacked")
FLOWER = "flower"  # known by name, and started by the command line: it needs a Flower run around it
TEST_ROWS = 2048  # of one job: fixed, so that sums do not depend on the number of processes
LOCAL_TESTS = 8  # clients in one job
MEASURED_SECONDS = 0.2  # of trying each engine
SMALL, LARGE = 5e6, 20e6  # operations of a client's step: below, stacked is quicker for certain; above, reuse


class AnyEngine(Protocol):
    """The interface of an engine; leaving its `with` block closes it."""

    name: str
    device: torch.device  # where states live: of the server, of tasks and of updates

    def train(
        self, tasks: Sequence[Task], observer: Observer, absorb: Callable[[bytes], None] | None = None
    ) -> Iterator[list[Update]]: ...

    def evaluate(self, state: Tensor, attack: int | None = None) -> tuple[Tensor, Tensor]: ...

    def evaluate_locally(
        self, states: dict[str, Tensor], round_index: int, homes: Mapping[str, Home] | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Engine:
    """Trains and evaluates for a federation. With 0 or 1 `workers` the work is done in this process.

    `precision` is what CUDA computes products in: «float32», or the faster and coarser «tf32» or «bfloat16».
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
        device = resolve_device(device)
        check_precision(precision, device)
        self.fallback: str | None = None  # why it is not done as asked, and how instead
        obstacle = stacking_obstacle(site)
        if device != "cpu" and name in ("auto", "stacked") and obstacle is not None:
            self.fallback = (
                f"{obstacle}: its clients are trained one by one on the CPU, by the engine 'reuse', instead of on "
                f"'{device}'."
            )
            name, device, precision = "reuse", "cpu", "float32"
        self.site, self.device, self.precision = site, torch.device(device), precision
        if name == "auto":
            name = "stacked" if device != "cpu" else _fastest_engine(site)
        if device != "cpu" and name != "stacked":
            raise ConfigError(f"The engine '{name}' runs on a CPU only; on '{device}' use the engine 'stacked'.")
        if name == "stacked" and obstacle is not None:  # now, rather than in the processes
            raise ConfigError(f"{obstacle}. Use the engine 'reuse'.")
        self.name = name
        self.workers = _worker_count(name, workers, device)
        if site.experiment.local.keep_optimizer and (name != "stacked" or self.workers > 1):
            raise ConfigError(
                "Optimisers that are kept over the rounds stay in one process: keep_optimizer needs engine='stacked' "
                f"and workers=1; got engine='{name}' and workers={self.workers}."
            )
        executor = executor_factory(site, name, device, precision)
        self._pool: WorkerPool | None = None
        self._executor: Executor | None = None
        if self.workers > 1:
            shifted = isinstance(site.experiment.aggregator, DriftCorrection)
            cohort = _largest_cohort(site.experiment)
            self._pool = WorkerPool(executor, site.layout.size, cohort, self.workers, shifted=shifted)
        else:
            self._executor = executor()

    def train(
        self, tasks: Sequence[Task], observer: Observer, absorb: Callable[[bytes], None] | None = None
    ) -> Iterator[list[Update]]:
        """Yield the updates by batch, in the order of the tasks' members; states are valid until the next batch is
        taken.

        `absorb` receives the encoded measurements of the workers, in place of the observer.
        """
        watcher, absorb = observer.for_worker(), absorb or observer.absorb
        batches, keep = [*self._batches(tasks)], observer.recorder is not None
        if self._pool is not None:
            yield from self._pool.train(batches, watcher, absorb, keep=keep)
            return
        assert self._executor is not None  # noqa: S101 - one of the two is there
        counts = [sum(len(task.nodes) for task in batch) for batch in batches]
        out = torch.empty(max(counts, default=0), self.site.layout.size, device=self.device)
        for batch, count in zip(batches, counts, strict=True):
            lease = self._lease(count) if keep else None
            rows = out[:count] if lease is None else self._slots.rows(lease.first, count)
            with single_threaded():
                updates = self._executor.train(batch, watcher, rows)
            for update in updates if lease is not None else ():
                update.arrived = (update.state, lease)
            absorb(watcher.payload())
            yield updates

    def _lease(self, count: int) -> StateLease | None:
        """Lease memory for the states of a batch; None on a device, from which a tape copies them anyway."""
        return None if self.device.type != "cpu" else self._slots.lease(count)

    @functools.cached_property
    def _slots(self) -> StateSlots:
        return StateSlots(0, _largest_cohort(self.site.experiment), self.site.layout.size)

    def evaluate(self, state: Tensor, attack: int | None = None) -> tuple[Tensor, Tensor]:
        """Return each test sample's loss and score under a state (see `Loss.score`).

        With `attack`, the same for the test samples of that attack (`Site.attacks`) and the labels that it wants.
        """
        total = len(self.site.dataset.test_y if attack is None else self.site.attacks[attack][1])
        size = TEST_ROWS if self.device.type == "cpu" else total  # each job waits for the device once
        ranges = [(first, min(total, first + size)) for first in range(0, total, max(1, size))]
        return self._evaluate([EvaluationJob(state, rows, attack=attack) for rows in ranges])

    def evaluate_locally(
        self, states: dict[str, Tensor], round_index: int, homes: Mapping[str, Home] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the same for the clients' local tests in a round, each client with its own state, and what it has at
        home.
        """
        if self.site.clients_differ:
            kept = homes or {}
            own = [
                EvaluationJob(state, None, (node,), round_index, home=kept.get(node)) for node, state in states.items()
            ]
            return self._evaluate(own)
        jobs: list[EvaluationJob] = []
        for _, members in itertools.groupby(states, key=lambda node: id(states[node])):
            size = LOCAL_TESTS if self.device.type == "cpu" else len(states)
            jobs += [EvaluationJob(states[part[0]], None, part, round_index) for part in _batched(members, size)]
        return self._evaluate(jobs)

    def _evaluate(self, jobs: list[EvaluationJob]) -> tuple[Tensor, Tensor]:
        if self._pool is not None:
            outcomes = self._pool.evaluate(jobs)
        else:
            assert self._executor is not None  # noqa: S101
            with single_threaded():
                outcomes = [self._executor.evaluate(job) for job in jobs]
        return torch.cat([losses for losses, _ in outcomes]), torch.cat([scores for _, scores in outcomes])

    def _batches(self, tasks: Sequence[Task]) -> Iterator[list[Task]]:
        """Split the tasks into batches: one task each, or one stack. The number of processes has no influence."""
        members, largest = sum(len(task.nodes) for task in tasks), 1
        if isinstance(self._executor, StackedExecutor):
            largest = self._executor.largest(members)
        elif self.name == "stacked":
            largest = stack_size(members)
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
        """The name of the plan that computes a stack's steps (`stacked/plans.py`), or None."""
        return self._executor.plan.name if isinstance(self._executor, StackedExecutor) else None

    def optimizers(self) -> dict[str, Tensor]:
        """Return the clients' optimiser states and step counts by name, where the experiment keeps them between
        rounds.
        """
        kept = self._executor.kept if isinstance(self._executor, StackedExecutor) else {}
        tensors: dict[str, Tensor] = {}
        for node, (moments, steps) in kept.items():
            tensors |= {f"{node}/{i}": moment for i, moment in enumerate(moments)}
            tensors[f"{node}/steps"] = torch.tensor(steps, dtype=torch.float64)
        return tensors

    def restore_optimizers(self, saved: dict[str, Tensor]) -> None:
        if not isinstance(self._executor, StackedExecutor):
            return
        self._executor.kept = {}
        for node in dict.fromkeys(name.rpartition("/")[0] for name in saved):
            moments = [saved[f"{node}/{i}"] for i in range(sum(name.startswith(f"{node}/") for name in saved) - 1)]
            self._executor.kept[node] = (moments, float(saved[f"{node}/steps"]))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def executor_factory(site: Site, name: str, device: str = "cpu", precision: str = "float32") -> Callable[[], Executor]:
    """Return the function that creates the executor of one process."""
    if name == "stacked":
        return lambda: StackedExecutor(site, device, precision)
    return lambda: ClientByClientExecutor(site, fast=name == "reuse")


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Limit torch to one thread: the same sums on every machine, and no contention between processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _worker_count(name: str, wanted: int | None, device: str) -> int:
    if device != "cpu" or name == "sequential":
        return 1
    if torch.cuda.is_initialized():  # a process that is forked now could not even ask an optimiser for a step
        return 1
    if wanted is None:
        wanted = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(wanted, int) or wanted < 0:
        raise ConfigError(f"The number of workers cannot be {wanted!r}: 1 trains in this process, more in others.")
    return wanted if hasattr(os, "fork") else 1


def _largest_cohort(experiment: Experiment) -> int:
    """Return a number of clients that no batch of tasks exceeds; a topology of the user's own may train all clients."""
    if not type(experiment.topology).__module__.startswith("fedvitals.lab."):
        return experiment.clients
    needed = max(1, round(experiment.clients * experiment.participation))
    network = experiment.network
    cohort = needed if network is None else network.selected(needed, experiment.clients)
    return min(experiment.clients, max(STACK, cohort))


def _fastest_engine(site: Site) -> str:
    """Return the engine that trains more client-steps per second here.

    A step of few operations is mostly overhead, which stacking shares; one of many operations overflows the caches when
    stacked. In between, both engines are timed briefly on a few clients.
    """
    if stacking_obstacle(site) is not None:
        return "reuse"
    operations = _estimate_operations(site) * site.experiment.local.step_samples
    if operations < SMALL:
        return "stacked"
    if operations > LARGE:
        return "reuse"
    nodes = site.experiment.nodes[:16]
    state = site.layout.flat(site.module)
    tasks = [Task(0, (node,), state, iterations=2) for node in nodes]
    speed = {}
    for name in ("reuse", "stacked"):
        executor = executor_factory(site, name)()
        out = torch.empty(len(tasks), site.layout.size)
        watcher = NullObserver()
        with single_threaded():
            executor.train(tasks[:1], watcher, out[:1])
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < MEASURED_SECONDS:
                executor.train(tasks, watcher, out)
                steps += 2 * len(tasks)
        speed[name] = steps / (time.perf_counter() - began)
    return max(speed, key=lambda name: speed[name])


def _estimate_operations(site: Site) -> int:
    """Estimate the operations per sample, forward and backward. Fast, whereas `site.flops` counts them and takes a
    second.
    """
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
