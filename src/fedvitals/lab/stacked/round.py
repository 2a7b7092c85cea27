# SPDX-License-Identifier: Apache-2.0
"""One round of a stack of clients: their tasks, start states, batches and optimiser steps.

On a CPU everything is here; on CUDA `cuda_round.py` performs the same steps with captured graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.engines.training import stop_if_not_finite
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.local import Adam, Clip, Local, Optimizer, PlainSGD
from fedvitals.lab.losses import CrossEntropy
from fedvitals.protocols import WorkerObserver
from fedvitals.stack import Stack

if TYPE_CHECKING:
    from fedvitals.lab.stacked.executor import StackedExecutor


MOST_KEPT = 1 << 26  # numbers of logits that are kept for an observer


class StackedRound:
    """One round of a stack: `step` for each local iteration, `exchange` between two, `updates` at the end."""

    def __init__(self, executor: StackedExecutor, tasks: Sequence[Task]) -> None:
        e = executor.site.experiment
        self.executor, self.tasks, self.round_index = executor, tasks, tasks[0].round
        self.nodes = [node for task in tasks for node in task.nodes]
        self.groups = [task.group for task in tasks for _ in task.nodes]
        self.local = tasks[0].local or e.local
        self.stop_at_nonfinite = tasks[0].stop_at_nonfinite
        self.settings = [fault_table.apply_local(e.faults, self.round_index, node, self.local) for node in self.nodes]
        self.x, self.y, self.firsts, self.samples = executor.samples.training(self.nodes, self.round_index)
        iterations = [task.iterations for task in tasks for _ in task.nodes]
        counts = zip(self.settings, self.samples.tolist(), iterations, strict=True)
        self.steps = torch.tensor([iterations_set or local.steps(samples) for local, samples, iterations_set in counts])
        self.taken = self.steps.clone()  # as long as nobody fails
        self.failed: dict[Node, BaseException] = {}
        self.gradient_faults = {
            row: gradient_fault
            for row, node in enumerate(self.nodes)
            if (gradient_fault := fault_table.gradient_fault(e.faults, self.round_index, node, e.seed)) is not None
        }
        self.stepping = self._rows_with_fault("step")
        self.before = [0.0] * len(self.nodes)  # steps that each optimiser has taken already
        self.losses = torch.zeros(int(self.steps.max()), len(self.nodes), device=executor.device)
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # logits and labels of kept steps
        self.kept_steps = self._steps_to_keep()
        self.allocate()
        for row in self._rows_with_fault("state"):
            views = executor.layout.views(self.states[row])
            fault_table.apply_state(e.faults, self.round_index, self.nodes[row], views, e.seed)
        if e.local.keep_optimizer:
            self._restore_moments()

    def _steps_to_keep(self) -> list[bool]:
        """Return of each step whether its logits are kept for an observer: if it belongs to any client's first or last
        pass over its samples. None is kept where the loss is no cross-entropy of single labels, or they are too many.
        """
        site, batch, loss = self.executor.site, self.local.step_samples, self.executor.site.loss
        first = torch.arange(len(self.losses))[:, None] * batch
        kept = (first < self.samples) | (first + batch > self.steps * batch - self.samples)
        steps = kept.any(1).tolist()
        self.step_logits = math.prod((len(self.nodes), batch, *site.dataset.y.shape[1:], *site.dataset.outputs[:1]))
        single = isinstance(loss, CrossEntropy) and not loss.smoothing and not loss.mixup
        return steps if single and sum(steps) * self.step_logits <= MOST_KEPT else [False] * len(steps)

    def _rows_with_fault(self, hook: str) -> list[int]:
        """Return the rows of the clients on which a fault acts at this hook."""
        faults = self.executor.site.experiment.faults
        nodes = enumerate(self.nodes)
        return [row for row, node in nodes if fault_table.any_active(hook, faults, self.round_index, node)]

    def allocate(self) -> None:
        """Allocate the clients' states and gradients, and the optimiser's tensors."""
        device = self.executor.device
        self.starts = self._starts()
        self.states = self.starts.clone()
        self.gradients = torch.empty_like(self.states)
        self.weights, self.layers = self.executor.layout.views(self.states), self.executor.layout.views(self.gradients)
        self.moments = [torch.zeros_like(self.states) for _ in range(moment_count(self.local.optimizer))]
        self.rows = self.batches(self.round_index)
        self.rates = torch.tensor([[local.optimizer.learning_rate] for local in self.settings], device=device)
        self.proximal = None
        if any(local.proximal for local in self.settings):
            self.proximal = torch.tensor([[local.proximal] for local in self.settings], device=device)
        self.shifts = self._shifts()

    def _shifts(self) -> Tensor | None:
        """Return what is added to each client's gradients, [clients, weights]; None if nothing is."""
        if self.tasks[0].shift is None:
            return None
        shifts = [task.shift for task in self.tasks for _ in task.nodes if task.shift is not None]
        return torch.stack(shifts).to(self.executor.device)

    def _starts(self) -> Tensor:
        return torch.stack([task.start for task in self.tasks for _ in task.nodes]).to(self.executor.device)

    def _restore_moments(self) -> None:
        for row, node in enumerate(self.nodes):
            if node in self.executor.kept:
                kept, self.before[row] = self.executor.kept[node]
                for moment, old in zip(self.moments, kept, strict=True):
                    moment[row] = old

    def batches(self, round_index: int) -> Tensor:
        """Return the rows of each mini-batch, [steps, clients, batch]; a client that finishes early repeats its last
        one.
        """
        batch = self.local.step_samples
        rows = torch.empty(int(self.steps.max()), len(self.nodes), batch, dtype=torch.int64)
        own = zip(self.nodes, self.steps.tolist(), self.samples.tolist(), self.firsts.tolist(), strict=True)
        for column, (node, steps, samples, first) in enumerate(own):
            order = self.executor.site.order(node, round_index, steps, batch, samples)
            torch.add(order, first, out=rows[:steps, column])
            if steps < len(rows):
                rows[steps:, column] = rows[steps - 1, column]
        return rows

    def stack(self) -> Stack:
        """Return the stack as an observer sees it."""

        def samples(count: int) -> tuple[Tensor, Tensor]:
            # Spread evenly, others in each round; who has fewer samples gives some of them twice.
            places = self.round_index * count + torch.arange(count) * (self.samples[:, None] / count)
            rows = (places.long() % self.samples[:, None] + self.firsts[:, None]).to(self.x.device)
            return self.x[rows], self.y[rows]

        own = [*zip(self.firsts.tolist(), self.samples.tolist(), strict=True)]
        labels, inputs = ([part[first : first + count] for first, count in own] for part in (self.y, self.x))
        faults = self.executor.site.experiment.faults
        silent = [node for node in self.nodes if fault_table.telemetry_is_lost(faults, self.round_index, node)]
        steps = None if bool((self.steps == self.steps[0]).all()) else self.steps.tolist()
        model_and_data = (self.executor.module, self.states, samples, self.executor.site.loss, labels)
        return Stack(
            *(self.nodes, self.groups, *model_and_data, silent, steps),
            inputs=inputs,
            held=self.executor.layout.names,
            outputs=(lambda: self._outputs) if any(self.kept_steps) else None,
            settings=optimizer_metrics(self.settings),
        )

    def step(self, step: int, watcher: WorkerObserver | None) -> None:
        """Perform one local iteration of all clients that take part in it."""
        rows = self.rows[step]
        labels = self.y[rows]
        losses, outputs = self.executor.plan.gradients(self.weights, self.layers, self.x[rows], labels)
        self.losses[step] = losses
        if watcher is not None and self.kept_steps[step]:
            self._outputs[step] = (outputs, labels)
        if self.stop_at_nonfinite:
            self.stop_where_not_finite(losses, step)
        if self.shifts is not None:
            self.gradients.add_(self.shifts)
        resting = self.before_step(step)
        if self.proximal is not None:
            self.gradients.addcmul_(self.states - self.starts, self.proximal)
        if self.local.clip is not None:
            clip_rows(self.gradients, self.layers, self.local.clip)
        if watcher is not None:
            watcher.stack_step(step, self.gradients, losses)
        self._optimize(step, resting)

    def stop_where_not_finite(self, losses: Tensor, step: int) -> None:
        for row in (~losses.isfinite()).nonzero().flatten().tolist():
            if step < int(self.steps[row]) and self.nodes[row] not in self.failed:
                try:
                    stop_if_not_finite(losses[row], step)
                except FloatingPointError as error:
                    self._fail(row, step, error)

    def _fail(self, row: int, step: int, error: BaseException) -> None:
        self.failed[self.nodes[row]], self.taken[row] = error, step

    def before_step(self, step: int) -> Tensor:
        """Apply the faults of this step; returns the mask of clients that do not take part: finished or failed."""
        e = self.executor.site.experiment
        for row, gradient_fault in self.gradient_faults.items():
            gradient_fault(self.executor.layout.views(self.gradients[row]), step)
        for row in self.stepping:
            try:
                if self.nodes[row] not in self.failed:
                    fault_table.apply_step(e.faults, self.round_index, self.nodes[row], step)
            except Exception as error:  # noqa: BLE001 - a client that fails is the experiment's result, not its end
                self._fail(row, step, error)
        return (self.taken <= step).nonzero().flatten().to(self.states.device)

    def _optimize(self, step: int, resting: Tensor) -> None:
        """Apply the optimiser to the whole matrix, and restore the rows and moments of idle clients."""
        changed = [self.states, *self.moments]
        before = [matrix[resting] for matrix in changed] if len(resting) else []
        optimizer = self.local.optimizer
        if optimizer.weight_decay:
            self.gradients.add_(self.states, alpha=optimizer.weight_decay)
        if isinstance(optimizer, Adam):
            self._adam(optimizer, step + 1)
        else:
            direction = self.gradients
            if optimizer.momentum:
                direction = self.moments[0].mul_(optimizer.momentum).add_(self.gradients)
            self.states.sub_(self.rates * direction)
        for matrix, rows in zip(changed, before, strict=False):
            matrix[resting] = rows

    def _adam(self, settings: Adam, count: int) -> None:
        first, second = self.moments
        first.lerp_(self.gradients, 1 - settings.beta1)
        second.mul_(settings.beta2).addcmul_(self.gradients, self.gradients, value=1 - settings.beta2)
        counts = torch.tensor(self.before, device=first.device)[:, None] + count
        size = second.sqrt().div_((1 - settings.beta2**counts).sqrt()).add_(settings.epsilon)
        self.states.addcmul_(first.div(size), self.rates / (1 - settings.beta1**counts), value=-1)

    def keep(self) -> None:
        """Keep the optimiser states for the clients' next round."""
        for row, node in enumerate(self.nodes):
            moments = [moment[row].clone() for moment in self.moments]
            self.executor.kept[node] = (moments, self.before[row] + float(self.taken[row]))

    def exchange(self, step: int) -> None:
        """Exchange models after an iteration within the groups that do so, and of which somebody trains on."""
        for task, members in zip(self.tasks, self.members(), strict=True):
            if task.exchange is None or (step + 1) % task.every:
                continue
            if step < int(self.steps[members].max()) - 1:
                samples = self.samples[members].to(self.states)
                self.states[members] = task.exchange(self.states[members], samples)

    def prepare_next_round(self) -> None:
        """Prepare the next round while the device works on this one; does nothing on a CPU."""

    def members(self) -> list[slice]:
        """Return the rows of each task."""
        slices, row = [], 0
        for task in self.tasks:
            slices.append(slice(row, row + len(task.nodes)))
            row += len(task.nodes)
        return slices

    def updates(self, out: Tensor, losses: Tensor, seconds: float) -> list[Update]:
        """Return the clients' updates, whose states are the rows of `out`."""
        starts = [task.start for task in self.tasks for _ in task.nodes]
        updates = []
        for row, node in enumerate(self.nodes):
            error = self.failed.get(node)
            steps = int(self.steps[row])
            samples, group = int(self.samples[row]), self.groups[row]
            update = Update(node, out[row], starts[row], samples, group, losses[:steps, row], steps, seconds)
            if error is not None:
                out[row].copy_(starts[row])
                update.fail(error)
            updates.append(update)
        return updates


def clip_rows(flat: Tensor, layers: Any, settings: Clip) -> None:
    """Clip the gradients of each client of a matrix [clients, weights] in place, like `training.clip_gradients`."""
    if settings.by == "value":
        flat.clamp_(-settings.limit, settings.limit)
        return
    if settings.by == "whole":
        flat.mul_((settings.limit / torch.linalg.vector_norm(flat, dim=1, keepdim=True)).clamp(max=1.0))
        return
    for layer in layers.values():
        rows = layer.flatten(1)
        rows.mul_((settings.limit / torch.linalg.vector_norm(rows, dim=1, keepdim=True)).clamp(max=1.0))


def moment_count(optimizer: Optimizer) -> int:
    """Return the number of moment matrices that the optimiser keeps."""
    if isinstance(optimizer, Adam):
        return 2
    return 1 if optimizer.momentum else 0


def optimizer_metrics(settings: Sequence[Local]) -> dict[str, list[float]]:
    """Return the clients' local settings by metric, as a probe reads them from an optimiser of torch."""
    metrics = {"batch.size": [float(local.step_samples // local.accumulate) for local in settings]}
    optimizers = [local.optimizer for local in settings]
    if not any(isinstance(optimizer, PlainSGD) for optimizer in optimizers):
        metrics["optimizer.learning_rate"] = [optimizer.learning_rate for optimizer in optimizers]
        metrics["optimizer.momentum"] = [o.beta1 if isinstance(o, Adam) else o.momentum for o in optimizers]
        metrics["optimizer.weight_decay"] = [optimizer.weight_decay for optimizer in optimizers]
    return metrics
