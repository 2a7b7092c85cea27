# SPDX-License-Identifier: Apache-2.0
"""The clients of one stack while they train: who they are, what they begin from, and their optimisers' formulas.

On a CPU everything is here; on CUDA `stacked_cuda.py` takes the same steps by captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from fedvitals.lab.engines.training import stop_if_not_finite
from fedvitals.lab.engines.work import Node, Task, Update
from fedvitals.lab.faults import table as ill
from fedvitals.lab.local import SGD, Adam, Clip
from fedvitals.protocols import Stack, WorkerObserver

if TYPE_CHECKING:
    from fedvitals.lab.stacked.steps import Stacked


class Crew:
    """One round of a stack: `step` for each local iteration, `exchange` between two, `updates` at the end."""

    def __init__(self, desk: Stacked, tasks: Sequence[Task]) -> None:
        e = desk.site.experiment
        self.desk, self.tasks, self.number = desk, tasks, tasks[0].round
        self.nodes = [node for task in tasks for node in task.nodes]
        self.groups = [task.group for task in tasks for _ in task.nodes]
        self.local = tasks[0].local or e.local
        self.stop_at_nonfinite = tasks[0].stop_at_nonfinite
        self.settings = [ill.apply_local(e.faults, self.number, node, self.local) for node in self.nodes]
        self.x, self.y, self.firsts, self.samples = desk.samples.training(self.nodes, self.number)
        iterations = [task.iterations for task in tasks for _ in task.nodes]
        counts = zip(self.settings, self.samples.tolist(), iterations, strict=True)
        self.steps = torch.tensor([given or local.steps(samples) for local, samples, given in counts])
        self.taken = self.steps.clone()  # as long as nobody fails
        self.failed: dict[Node, BaseException] = {}
        self.spoilers = {
            row: spoil
            for row, node in enumerate(self.nodes)
            if (spoil := ill.gradient_spoiler(e.faults, self.number, node, e.seed)) is not None
        }
        self.stepping = [row for row, node in enumerate(self.nodes) if ill.any_at("step", e.faults, self.number, node)]
        self.before = [0.0] * len(self.nodes)  # steps that each optimiser has taken already
        self.losses = torch.zeros(int(self.steps.max()), len(self.nodes), device=desk.device)
        self.make_room()
        for row, node in enumerate(self.nodes):
            if ill.any_at("state", e.faults, self.number, node):
                ill.apply_state(e.faults, self.number, node, desk.layout.views(self.states[row]), e.seed)
        if e.local.keep_optimizer:
            self._recall()

    def make_room(self) -> None:
        """Where the clients' states and gradients lie, and what the optimiser needs."""
        device = self.desk.device
        self.starts = self._starts()
        self.states = self.starts.clone()
        self.gradients = torch.empty_like(self.states)
        self.weights, self.layers = self.desk.layout.views(self.states), self.desk.layout.views(self.gradients)
        self.moments = [torch.zeros_like(self.states) for _ in range(moments_of(self.local.optimizer))]
        self.rows = self.batches(self.number)
        self.rates = torch.tensor([[local.optimizer.learning_rate] for local in self.settings], device=device)
        self.proximal = None
        if any(local.proximal for local in self.settings):
            self.proximal = torch.tensor([[local.proximal] for local in self.settings], device=device)

    def _starts(self) -> Tensor:
        return torch.stack([task.start for task in self.tasks for _ in task.nodes]).to(self.desk.device)

    def _recall(self) -> None:
        for row, node in enumerate(self.nodes):
            if node in self.desk.kept:
                kept, self.before[row] = self.desk.kept[node]
                for moment, old in zip(self.moments, kept, strict=True):
                    moment[row] = old

    def batches(self, number: int) -> Tensor:
        """Where each mini-batch lies, [steps, clients, batch]; a client that is done early gets its last one again."""
        batch = self.local.batch
        found = torch.empty(int(self.steps.max()), len(self.nodes), batch, dtype=torch.int64)
        own = zip(self.nodes, self.steps.tolist(), self.samples.tolist(), self.firsts.tolist(), strict=True)
        for column, (node, steps, samples, first) in enumerate(own):
            order = self.desk.site.order(node, number, steps, batch, samples)
            torch.add(order, first, out=found[:steps, column])
            if steps < len(found):
                found[steps:, column] = found[steps - 1, column]
        return found

    def stack(self) -> Stack:
        """The stack as an observer sees it."""

        def samples(count: int) -> tuple[Tensor, Tensor]:
            # Spread evenly, others in each round; who has fewer samples gives some of them twice.
            places = self.number * count + torch.arange(count) * (self.samples[:, None] / count)
            rows = (places.long() % self.samples[:, None] + self.firsts[:, None]).to(self.x.device)
            return self.x[rows], self.y[rows]

        own = zip(self.firsts.tolist(), self.samples.tolist(), strict=True)
        labels = [self.y[first : first + count] for first, count in own]
        faults = self.desk.site.experiment.faults
        silent = [node for node in self.nodes if ill.silenced(faults, self.number, node)]
        steps = None if bool((self.steps == self.steps[0]).all()) else self.steps.tolist()
        said = (self.desk.module, self.states, samples, F.cross_entropy, labels)
        return Stack(self.nodes, self.groups, *said, silent, steps)

    def step(self, step: int, watcher: WorkerObserver | None) -> None:
        """One local iteration of everybody who takes part in it."""
        rows = self.rows[step]
        losses = self.desk.plan.gradients(self.weights, self.layers, self.x[rows], self.y[rows])
        self.losses[step] = losses
        if self.stop_at_nonfinite:
            self.stop_where_not_finite(losses, step)
        resting = self.before_step(step)
        if self.proximal is not None:
            self.gradients.addcmul_(self.states - self.starts, self.proximal)
        if self.local.clip is not None:
            clip(self.gradients, self.layers, self.local.clip)
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
        """Faults that act at a step; gives the rows of those who do not take part in it: done already, or failed."""
        e = self.desk.site.experiment
        for row, spoil in self.spoilers.items():
            spoil(self.desk.layout.views(self.gradients[row]), step)
        for row in self.stepping:
            try:
                if self.nodes[row] not in self.failed:
                    ill.apply_step(e.faults, self.number, self.nodes[row], step)
            except Exception as error:  # noqa: BLE001 - a client that fails is the experiment's result, not its end
                self._fail(row, step, error)
        return (self.taken <= step).nonzero().flatten().to(self.states.device)

    def _optimize(self, step: int, resting: Tensor) -> None:
        """The optimiser's formula on the whole matrix; rows that rest are put back, and what they remember, too."""
        changed = [self.states, *self.moments]
        before = [matrix[resting] for matrix in changed] if len(resting) else []
        optimizer = self.local.optimizer
        if isinstance(optimizer, SGD):
            direction = self.gradients
            if optimizer.momentum:
                direction = self.moments[0].mul_(optimizer.momentum).add_(self.gradients)
            self.states.sub_(self.rates * direction)
        else:
            self._adam(optimizer, step + 1)
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
        """The optimisers' states, for the clients' next round."""
        for row, node in enumerate(self.nodes):
            moments = [moment[row].clone() for moment in self.moments]
            self.desk.kept[node] = (moments, self.before[row] + float(self.taken[row]))

    def exchange(self) -> None:
        for task, members in zip(self.tasks, self.members(), strict=True):
            if task.exchange is not None:
                samples = self.samples[members].to(self.states)
                self.states[members] = task.exchange(self.states[members], samples)

    def look_ahead(self) -> None:
        """What can be done for the next round while a device works on this one: on a CPU nothing."""

    def members(self) -> list[slice]:
        """The rows of each task."""
        found, row = [], 0
        for task in self.tasks:
            found.append(slice(row, row + len(task.nodes)))
            row += len(task.nodes)
        return found

    def updates(self, out: Tensor, losses: Tensor, seconds: float) -> list[Update]:
        starts = [task.start for task in self.tasks for _ in task.nodes]
        found = []
        for row, node in enumerate(self.nodes):
            error = self.failed.get(node)
            steps = int(self.steps[row])
            if error is not None:
                out[row].copy_(starts[row])
            update = Update(
                node,
                out[row],
                starts[row],
                int(self.samples[row]),
                self.groups[row],
                losses[:steps, row],
                steps,
                seconds,
            )
            if error is not None:
                update.error, update.error_type = f"{type(error).__name__}: {error}", type(error).__name__
            found.append(update)
        return found


def clip(flat: Tensor, layers: Any, settings: Clip) -> None:
    """As `training.clip`, for each client of a matrix [clients, weights]."""
    if settings.by == "value":
        flat.clamp_(-settings.limit, settings.limit)
        return
    if settings.by == "whole":
        flat.mul_((settings.limit / torch.linalg.vector_norm(flat, dim=1, keepdim=True)).clamp(max=1.0))
        return
    for layer in layers.values():
        rows = layer.flatten(1)
        rows.mul_((settings.limit / torch.linalg.vector_norm(rows, dim=1, keepdim=True)).clamp(max=1.0))


def moments_of(optimizer: Adam | SGD) -> int:
    """How many matrices it remembers."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    return 2
