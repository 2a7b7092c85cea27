# SPDX-License-Identifier: Apache-2.0
"""The steps of a stack on CUDA: captured once for a shape, and replayed for every step of every round.

Started one by one, a step's kernels leave the device waiting for Python most of the time. Therefore the memory of a
step (`CudaBuffers`) is kept, and its work is captured as graphs: gradients with losses, then clipping and statistics,
then the optimiser. Everything that differs from step to step is read on the device from tables written before the
round, at the row given by a counter on the device. A client that has fewer steps than the others, or has failed, idles
by its entry in the table, and a stack with fewer clients than the buffers leaves rows idle. So neither needs a graph of
its own.

Faults that act at a step, and observers, run between two graphs. Nothing waits for the device before the end of the
round, except where a client must be stopped at a non-finite loss.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedvitals.kernels.cuda import stacked_optimizer as kernel
from fedvitals.kernels.cuda.graphs import captured
from fedvitals.kernels.cuda.sums import DeviceRing
from fedvitals.lab.engines.tasks import Task
from fedvitals.lab.local import Adam
from fedvitals.lab.stacked.plans import StackPlan, available_plans
from fedvitals.lab.stacked.round import MOST_KEPT, StackedRound, clip_rows, moment_count
from fedvitals.lab.topologies.exchanges import StackExchange, exchange_for_stack
from fedvitals.protocols import WorkerObserver
from fedvitals.stack import Stack
from fedvitals.stats import INFS, NANS, SUM_SQUARES

if TYPE_CHECKING:
    from fedvitals.lab.stacked.executor import StackedExecutor

_LOG = logging.getLogger("fedvitals.lab")
_WARM_UPS = 2  # what is compiled or chosen at a first call is so before the capture
_NEARLY = 1.3
_TIMED = 3  # replays of each plan, of which the quickest counts

MOST_RING = 4 * MOST_KEPT  # numbers of logits of all steps, of which few may be kept
_FEW = 8  # clients whose memory is measured
_SHARE = 0.6  # of the free memory that a stack may take: what watches it needs some, too

# By what they depend on: a process asks once.
_chosen: dict[Hashable, str] = {}  # the quickest plan's name
_most: dict[Hashable, int] = {}  # clients that fit


class Replayed(Protocol):
    def replay(self) -> None: ...


class AtOnce:
    """Runs the work directly, in place of a graph that could not be captured."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def _pool(device: torch.device) -> Any:
    """Return a memory pool for graphs that are never replayed at the same time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class CudaBuffers:
    """Device memory for a number of clients and steps, with one extra row at which every client idles."""

    def __init__(self, executor: StackedExecutor, clients: int, steps: int) -> None:
        layout, device, local = executor.layout, executor.device, executor.site.experiment.local
        self.executor, self.clients, self.steps = executor, clients, steps
        self.states = torch.zeros(clients, layout.size, device=device)
        self.starts: Tensor | None = None  # where there is a pull towards them
        self.shifts: Tensor | None = None  # where something is added to the gradients
        self.gradients = torch.zeros(clients, layout.weights, device=device)
        self.weights, self.layers = layout.views(self.states), layout.views(self.gradients)
        self.moments = [torch.zeros_like(self.gradients) for _ in range(moment_count(local.optimizer))]
        self.rows = torch.zeros(steps + 1, clients, local.step_samples, dtype=torch.int64, device=device)
        self.table = torch.zeros(steps + 1, clients, 3, device=device)
        self.proximal = torch.zeros(clients, 1, device=device)
        self.losses = torch.zeros(steps + 1, clients, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.sizes = [view.numel() // clients for view in self.layers.values()]
        numbers = torch.arange(len(self.sizes), dtype=torch.int32)
        self.layer_of = numbers.repeat_interleave(torch.tensor(self.sizes)).to(device)
        self._rings: dict[str, DeviceRing] = {}
        self.outputs: Tensor | None = None  # logits of every step, where they are kept
        self._graphs: dict[tuple[Hashable, ...], Replayed] = {}
        self._data: tuple[Tensor, Tensor] | None = None
        self._pool = _pool(device)

    def ring(self, name: str, slots: int) -> DeviceRing:
        """Return the ring of gradient statistics of this name, creating it on first use."""
        if name not in self._rings:
            trained = [True] * len(self.sizes)
            self._rings[name] = DeviceRing(self.sizes, trained, self.clients, slots, self.executor.device)
        return self._rings[name]

    def output_ring(self, like: Tensor) -> Tensor:
        """Return the memory for the logits of every step, [steps + 1, clients, ...], creating it on first use.

        The first use is a warm-up, and no capture: the memory is not a graph's own.
        """
        if self.outputs is None:
            self.outputs = torch.zeros(self.steps + 1, *like.shape, dtype=like.dtype, device=like.device)
        return self.outputs

    def graph(self, key: tuple[Hashable, ...], work: Callable[[], None]) -> Replayed:
        """Return the work as a graph, captured on first use after a warm-up at the idle row."""
        if key not in self._graphs:
            now = self.counter.clone()

            def rested() -> None:
                self.counter.fill_(self.steps)
                work()

            try:
                self._graphs[key] = captured(work, [rested] * _WARM_UPS, self._pool)
            except (RuntimeError, Warning) as error:
                _LOG.warning("A step could not be captured as a CUDA graph, and is started call by call: %s", error)
                self._graphs[key] = AtOnce(work)
            self.counter.copy_(now)
        return self._graphs[key]

    def use_data(self, x: Tensor, y: Tensor) -> None:
        """Set the data that graphs read, and discard graphs of other data."""
        if self._data is None or self._data[0] is not x:
            self._graphs.clear()
            self._pool = _pool(x.device)  # one whose graphs are all gone cannot be used again
            self._data = (x, y)


class CudaBufferPool:
    """The buffers of an executor, by number of clients and steps."""

    def __init__(self, executor: StackedExecutor) -> None:
        self.executor = executor
        self.plans = available_plans(executor.module, executor.device, executor.precision, executor.site.loss)
        self.next_batches: tuple[Any, Tensor] | None = None  # the next round's batches, drawn while the device was busy
        self._buffers: list[CudaBuffers] = []

    def stacked_round(self, tasks: Sequence[Task], watcher: WorkerObserver | None) -> CudaStackedRound:
        """Return the round of these tasks."""
        return CudaStackedRound(self.executor, tasks, self, watcher)

    def buffers_for(self, clients: int, steps: int) -> CudaBuffers:
        """Return buffers that fit, creating them where the kept ones are too small or far too large."""
        for buffers in self._buffers:
            if clients <= buffers.clients <= max(8, 2 * clients) and steps <= buffers.steps:
                return buffers
        e = self.executor.site.experiment
        usual = min(max(1, round(e.clients * e.participation)), self.largest(e.clients))
        wide = usual if clients <= usual <= 2 * clients else clients  # a cohort from which some drop out fits, too
        long = max(16, 1 << (steps - 1).bit_length())
        # One that this one can stand in for is given up: else cohorts of ever other sizes would fill the memory.
        self._buffers = [
            old for old in self._buffers if not old.clients <= wide <= max(8, 2 * old.clients) or old.steps > long
        ]
        buffers = CudaBuffers(self.executor, wide, long)
        self._buffers.append(buffers)
        return buffers

    def largest(self, members: int) -> int:
        """Return how many clients fit into the device's memory at once, estimated from a few of them."""
        if self.executor.device.type != "cuda" or members <= _FEW:
            return members
        key = (*self.key, members)
        if key not in _most:
            free = torch.cuda.mem_get_info(self.executor.device)[0]
            _most[key] = max(1, min(members, int(_SHARE * free / self._bytes_each())))
        return _most[key]

    def _bytes_each(self) -> float:
        """Measure the bytes of one client in training: its rows of all buffers, and the temporaries of a step."""
        executor = self.executor
        x, y, firsts, _ = executor.samples.training(executor.site.experiment.nodes, 0)
        torch.cuda.synchronize(executor.device)
        torch.cuda.reset_peak_memory_stats(executor.device)
        before = torch.cuda.memory_allocated(executor.device)
        buffers = CudaBuffers(executor, _FEW, 1)
        rows = firsts[:1].to(x.device).expand(_FEW * buffers.rows.shape[2])
        shape = (_FEW, buffers.rows.shape[2])
        samples = (x.index_select(0, rows).unflatten(0, shape), y.index_select(0, rows).unflatten(0, shape))
        for plan in self.plans:
            try:
                plan.gradients(buffers.weights, buffers.layers, *samples)
            except Exception as error:  # noqa: BLE001 - whatever a compiler says; the simplest plan needs none
                _LOG.warning("The plan «%s» cannot be used here: %s", plan.name, error)
            else:
                break
        torch.cuda.synchronize(executor.device)
        return (torch.cuda.max_memory_allocated(executor.device) - before) / _FEW

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What the speed and memory of a step depend on, except for the number of clients."""
        executor, site = self.executor, self.executor.site
        plans = tuple(plan.name for plan in self.plans)  # fewer with frozen parameters, or with another loss
        samples = site.experiment.local.step_samples
        return (repr(executor.module), repr(site.loss), plans, samples, executor.precision, str(executor.device))


class CudaStackedRound(StackedRound):
    """One round of a stack of clients in device buffers."""

    def __init__(
        self,
        executor: StackedExecutor,
        tasks: Sequence[Task],
        buffer_pool: CudaBufferPool,
        watcher: WorkerObserver | None,
    ) -> None:
        self._buffer_pool, self._watched = buffer_pool, watcher is not None
        self._taken, self._pulled, self._shifted, self._keeps_outputs = 0, False, False, False
        super().__init__(executor, tasks)
        few = (self.buffers.steps + 1) * self.step_logits <= MOST_RING
        self._keeps_outputs = self._watched and any(self.kept_steps) and few
        self._fill_table()
        self.executor.plan = plan = self._fastest_plan()
        # What a captured graph depends on, besides its data.
        switches = (self._watched, self._pulled, self._shifted, self._keeps_outputs)
        self._graph_key = (plan.name, self.local.clip, self._optimizer_settings(), *switches)
        has_gradient_faults = bool(self.gradient_faults) or self.stop_at_nonfinite
        parts = [[self._compute_gradients, self._measure], [self._optimise]]
        if has_gradient_faults:  # which act between the two
            parts = [[self._compute_gradients], [self._measure], [self._optimise]]
        self._graphs = [self._graph(f"{number}{has_gradient_faults}", work) for number, work in enumerate(parts)]
        self._ends = [int(self.steps[members].max()) for members in self.members()]  # the steps of each group
        self._stack_exchanges: dict[int, StackExchange | None] = {}  # by the number of groups that train on
        self.buffers.counter.zero_()

    def allocate(self) -> None:
        clients, steps = len(self.nodes), len(self.losses)
        self.buffers = buffers = self._buffer_pool.buffers_for(clients, steps)
        buffers.states[:clients] = self._starts()
        self._pulled = any(local.proximal for local in self.settings)
        if self._pulled:
            buffers.starts = torch.zeros_like(buffers.states) if buffers.starts is None else buffers.starts
            buffers.starts[:clients] = buffers.states[:clients]
            pulls = [[local.proximal] for local in self.settings]
            buffers.proximal[:clients] = torch.tensor(pulls, device=buffers.states.device)
        shifts = self._shifts()
        self._shifted = shifts is not None
        if shifts is not None:
            buffers.shifts = torch.zeros_like(buffers.gradients) if buffers.shifts is None else buffers.shifts
            buffers.shifts[:clients] = shifts
        self.states, self.gradients = buffers.states[:clients], buffers.gradients[:clients]
        self.losses = buffers.losses[:steps, :clients]
        self.moments = [moment[:clients].zero_() for moment in buffers.moments]
        buffers.use_data(self.x, self.y)
        buffers.rows[:, clients:] = 0
        buffers.rows[:steps, :clients] = self.batches(self.round_index).to(buffers.rows.device, non_blocking=True)

    def batches(self, round_index: int) -> Tensor:
        next_batches, self._buffer_pool.next_batches = self._buffer_pool.next_batches, None
        if next_batches is not None and next_batches[0] == self._batches_key(round_index):
            return next_batches[1]
        return super().batches(round_index)

    def prepare_next_round(self) -> None:
        """Draw the batches of the next round while the device is busy, in case it has the same clients."""
        following = self.round_index + 1
        self._buffer_pool.next_batches = (self._batches_key(following), super().batches(following))

    def _batches_key(self, round_index: int) -> Any:
        """Return everything that the batches depend on."""
        return (
            round_index,
            self.local.step_samples,
            self.nodes,
            *(t.tolist() for t in (self.steps, self.samples, self.firsts)),
        )

    def _starts(self) -> Tensor:
        """Return the members' start states, as one expanded copy where they are equal, as in most topologies."""
        if all(task.start is self.tasks[0].start for task in self.tasks):
            return self.tasks[0].start.to(self.executor.device).expand(len(self.nodes), -1)
        return super()._starts()

    def _fill_table(self) -> None:
        """Write the rates, Adam's corrections and the active clients of each step, computed in float64."""
        steps, clients = self.losses.shape
        optimizer = self.local.optimizer
        rates = torch.tensor([local.optimizer.learning_rate for local in self.settings], dtype=torch.float64)
        table = torch.zeros(steps, clients, 3, dtype=torch.float64)
        table[..., kernel.RATE], table[..., kernel.SCALE] = rates, 1.0
        if isinstance(optimizer, Adam):
            counts = torch.tensor(self.before, dtype=torch.float64) + torch.arange(1, steps + 1)[:, None]
            table[..., kernel.RATE] /= 1 - optimizer.beta1**counts
            table[..., kernel.SCALE] = (1 - optimizer.beta2**counts) ** -0.5
        table[..., kernel.ACTIVE] = torch.arange(steps)[:, None] < self.steps
        self.buffers.table.zero_()
        self.buffers.table[:steps, :clients] = table.float().to(self.buffers.table.device, non_blocking=True)

    def _optimizer_settings(self) -> tuple[str, tuple[float, float], float, float]:
        optimizer = self.local.optimizer
        decay = optimizer.weight_decay
        if isinstance(optimizer, Adam):
            return ("adam", (optimizer.beta1, optimizer.beta2), optimizer.epsilon, decay)
        return ("momentum" if optimizer.momentum else "sgd", (optimizer.momentum, 0.0), 0.0, decay)

    def _graph(self, name: str, work: Sequence[Callable[[], None]]) -> Replayed:
        def all_of_it() -> None:
            for part in work:
                part()

        return self.buffers.graph((name, self._graph_key), all_of_it)

    # -- what is captured ---------------------------------------------------------------------------------------------

    def _compute_gradients(self) -> None:
        buffers = self.buffers
        rows = buffers.rows.index_select(0, buffers.counter)[0]
        x = self.x.index_select(0, rows.view(-1)).unflatten(0, rows.shape)
        y = self.y.index_select(0, rows.view(-1)).unflatten(0, rows.shape)
        losses, outputs = self.executor.plan.gradients(buffers.weights, buffers.layers, x, y)
        buffers.losses.index_copy_(0, buffers.counter, losses[None])
        if self._keeps_outputs:
            buffers.output_ring(outputs).index_copy_(0, buffers.counter, outputs[None])
        if self._shifted and buffers.shifts is not None:
            buffers.gradients.add_(buffers.shifts)

    def _measure(self) -> None:
        buffers = self.buffers
        if self._pulled and buffers.starts is not None:
            buffers.gradients.addcmul_(buffers.states - buffers.starts, buffers.proximal)
        if self.local.clip is not None:
            self._clip()
        if self._watched:
            buffers.ring("statistics", buffers.steps + 1).record(buffers.gradients, buffers.counter)

    def _clip(self) -> None:
        settings, buffers = self.local.clip, self.buffers
        assert settings is not None  # noqa: S101 - asked by the caller
        if settings.by == "value":
            clip_rows(buffers.gradients, buffers.layers, settings)
            return
        sums = buffers.ring("clipping", 1)
        sums.record(buffers.gradients, buffers.counter)
        layer_sums = sums.ring[0]
        if settings.by == "whole":
            layer_sums = layer_sums.sum(1, keepdim=True)
        norms = layer_sums[..., SUM_SQUARES].sqrt()
        # The sums leave out what is not finite; a norm does not.
        norms = norms.masked_fill(layer_sums[..., INFS] > 0, torch.inf)
        norms = norms.masked_fill(layer_sums[..., NANS] > 0, torch.nan)
        factors = (settings.limit / norms).clamp(max=1.0).float().expand(-1, len(buffers.sizes)).contiguous()
        kernel.scale(buffers.gradients, factors, buffers.layer_of)

    def _optimise(self) -> None:
        buffers, (kind, betas, epsilon, decay) = self.buffers, self._optimizer_settings()
        matrices = (buffers.states, buffers.gradients, buffers.moments, buffers.table, buffers.counter)
        kernel.step(kind, *matrices, betas, epsilon, decay)
        buffers.counter.add_(1)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, step: int, watcher: WorkerObserver | None) -> None:
        *before, optimise = self._graphs
        before[0].replay()
        if self.stop_at_nonfinite:
            self.stop_where_not_finite(self.losses[step], step)
        known = len(self.failed)
        if self.gradient_faults or self.stepping:
            self.before_step(step)
        if len(self.failed) > known or self.stop_at_nonfinite:
            for row, node in enumerate(self.nodes):
                if node in self.failed:
                    self.buffers.table[step:, row, kernel.ACTIVE] = 0
        for graph in before[1:]:
            graph.replay()
        if watcher is not None:
            watcher.stack_step(step, self.gradients, self.losses[step])
        optimise.replay()
        self._taken = step + 1

    def stack(self) -> Stack:
        layout, plan = self.executor.layout, self.executor.plan
        ring = self.buffers.ring("statistics", self.buffers.steps + 1).ring
        return dataclasses.replace(
            super().stack(),
            forward=lambda states, x: plan.outputs(layout.views(states), x),
            sums=lambda: ring[: self._taken, : len(self.nodes)],
            outputs=self._kept_outputs if self._keeps_outputs else None,
        )

    def _kept_outputs(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return logits and labels of the steps that are kept, and taken."""
        clients, logits = len(self.nodes), self.buffers.outputs
        steps = [step for step in range(self._taken) if self.kept_steps[step]]
        rows = self.buffers.rows[: self._taken, :clients]
        return {step: (logits[step, :clients], self.y[rows[step]]) for step in steps} if logits is not None else {}

    def _find_stack_exchange(self, step: int) -> StackExchange | None:
        kinds = {(task.exchange, task.every) for task in self.tasks}
        if len(kinds) > 1 or self.tasks[0].exchange is None:
            return None
        ((exchange, _),) = kinds
        assert exchange is not None  # noqa: S101 - asked above
        groups = [members for members, end in zip(self.members(), self._ends, strict=True) if step < end - 1]
        return exchange_for_stack(exchange, groups, self.samples, self.executor.device)

    def exchange(self, step: int) -> None:
        every = {task.every for task in self.tasks}
        if len(every) == 1 and (step + 1) % every.pop():
            return
        training = sum(step < end - 1 for end in self._ends)
        if training not in self._stack_exchanges:
            self._stack_exchanges[training] = self._find_stack_exchange(step)
        stack_exchange = self._stack_exchanges[training]
        if stack_exchange is not None:
            stack_exchange(self.states)
        elif any(task.exchange is not None for task in self.tasks):
            super().exchange(step)

    # -- the quickest plan --------------------------------------------------------------------------------------------

    def _fastest_plan(self) -> StackPlan:
        """Return the fastest plan, measured once per process for a network and shape with captured graphs."""
        executor, buffers, plans = self.executor, self.buffers, self._buffer_pool.plans
        key = (*self._buffer_pool.key, buffers.clients)
        if key not in _chosen:
            times = {}
            buffers.counter.fill_(buffers.steps)  # the line where everybody rests
            for plan in plans if len(plans) > 1 else ():
                executor.plan = plan
                try:
                    work = self._compute_gradients
                    times[plan.name] = _seconds(captured(work, [work] * _WARM_UPS, _pool(executor.device)))
                except Exception as error:  # noqa: BLE001 - no memory, no graph of it, or Triton cannot compile it
                    _LOG.info("The plan '%s' cannot be used here: %s", plan.name, error)
            _chosen[key] = _clearly_fastest(times) if times else plans[-1].name
        return next(plan for plan in plans if plan.name == _chosen[key])


def _clearly_fastest(times: Mapping[str, float]) -> str:
    """Return the first plan that is nearly as fast as the fastest, so that every process makes the same choice."""
    return next(name for name in times if times[name] <= _NEARLY * min(times.values()))


def _seconds(graph: Replayed) -> float:
    """Return the seconds of one replay."""
    times = []
    for _ in range(_TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
