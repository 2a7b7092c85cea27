# SPDX-License-Identifier: Apache-2.0
"""Clients as a batch dimension: one call trains a step of all of them.

The states of all clients are one matrix [clients, size]; `torch.func.vmap` turns the model into one that takes a whole
row of models. Worth it where a client's step is too small to keep the machine busy: small models on a CPU, and
everything on a GPU. Chains of dense layers are differentiated by hand (`dense`). The mathematics is that of `training`,
row by row; the clients' sums are in another order.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from fedvitals.errors import ConfigError
from fedvitals.lab import faults as ill
from fedvitals.lab.dense import Dense
from fedvitals.lab.desk import Examination, examined
from fedvitals.lab.local import SGD, Adam, Clip
from fedvitals.lab.site import Site
from fedvitals.lab.training import stop_if_not_finite
from fedvitals.lab.work import Node, Task, Update
from fedvitals.protocols import Stack, WorkerObserver

TEST_BATCH = {"cpu": 256, "cuda": 4096}


def suits(site: Site) -> bool:
    """Whether the model can be stacked: no state that a forward pass changes, nothing that vmap refuses."""
    return bool(getattr(site.experiment.model, "stackable", False)) and site.layout.weights == site.layout.size


def exact() -> contextlib.AbstractContextManager[None]:
    """On CUDA: the same numbers each time, and float32 that is float32 (cuDNN's convolutions would round to TF32)."""
    flags: contextlib.AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    return flags


class Stacked:
    """The desk of the stacked engine, on any device."""

    def __init__(self, site: Site, device: str = "cpu") -> None:
        if not suits(site):
            raise ConfigError(
                f"The model '{type(site.experiment.model).__name__}' cannot be stacked (batch norm, a recurrent layer, "
                "or a model of your own that does not say `stackable = True`). Use the engine 'reuse'."
            )
        self.site, self.layout, self.device = site, site.layout, torch.device(device)
        self.module = copy.deepcopy(site.module).to(self.device)
        self.kept: dict[Node, tuple[list[Tensor], float]] = {}  # optimisers' states, where the experiment keeps them
        self._stack: tuple[Any, Tensor, Tensor, Tensor] | None = None

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.module, parameters, (x,)), y)

        self._gradients: Callable[..., Any] = vmap(grad_and_value(loss))
        self._dense = Dense.of(self.module)

    def train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        with exact():
            return self._train(tasks, watcher, out)

    def _train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        crew = _Crew(self, tasks)
        watched = crew.stack()
        if watched is not None:
            watcher.stack_begin(watched)
        began = time.perf_counter()
        steps = int(crew.steps.max())
        losses = torch.zeros(steps, len(crew.nodes), device=self.device)
        for step in range(steps):
            losses[step] = self._step(crew, step, watcher if watched is not None else None)
            if step < steps - 1:
                crew.exchange()
        out.copy_(crew.states)
        if self.site.experiment.local.keep_optimizer:
            crew.keep()
        if watched is not None:
            watcher.stack_end(crew.failed)
        seconds = (time.perf_counter() - began) / len(crew.nodes)
        return crew.updates(out, losses.cpu(), seconds)

    def _step(self, crew: _Crew, step: int, watcher: WorkerObserver | None) -> Tensor:
        x, y = crew.batch(step)
        flat = crew.gradients
        if self._dense is not None:
            losses = self._dense.gradients(crew.weights, crew.layers, x, y)
        else:
            gradients, losses = self._gradients(crew.weights, x, y)
            torch.cat([g.flatten(1) for g in gradients.values()], 1, out=flat)
        if crew.stop_at_nonfinite:
            crew.stop_where_not_finite(losses, step)
        active = crew.before_step(step, flat)
        if crew.proximal is not None:
            flat.addcmul_(crew.states - crew.starts, crew.proximal)
        if crew.local.clip is not None:
            clip(flat, crew.layers, crew.local.clip)
        if watcher is not None:
            watcher.stack_step(step, flat, losses)
        crew.optimize(flat, step, active)
        return losses

    def data(self, nodes: Sequence[Node], number: int) -> tuple[Tensor, Tensor, Tensor]:
        """All clients' samples in one tensor, and where each one's begin; kept for as long as they stay the same."""
        e = self.site.experiment
        key = (
            tuple(nodes),
            tuple(fault for fault in e.faults for n in nodes if ill.any_at("data", (fault,), number, n)),
        )
        if self._stack is None or self._stack[0] != key:
            parts = [self.site.tensors(node, number) for node in nodes]
            x, y = torch.cat([x for x, _ in parts]).to(self.device), torch.cat([y for _, y in parts]).to(self.device)
            offsets = torch.tensor([0, *(len(y) for _, y in parts)]).cumsum(0)
            self._stack = (key, x, y, offsets)
        return self._stack[1:]

    def examine(self, examination: Examination) -> tuple[Tensor, Tensor]:
        with exact(), torch.no_grad():
            return self._examine(examination)

    def _examine(self, examination: Examination) -> tuple[Tensor, Tensor]:
        parameters = self.layout.views(examination.state.to(self.device))
        losses, hits = [], []
        x, y = examined(self.site, examination)
        size = TEST_BATCH[self.device.type]
        for inputs, labels in zip(x.to(self.device).split(size), y.to(self.device).split(size), strict=True):
            logits = functional_call(self.module, dict(parameters), (inputs,))
            losses.append(F.cross_entropy(logits, labels, reduction="none"))
            hits.append(logits.argmax(1) == labels)
        return torch.cat(losses).cpu(), torch.cat(hits).cpu()


class _Crew:
    """The clients of one stack while they train."""

    def __init__(self, desk: Stacked, tasks: Sequence[Task]) -> None:
        e, device = desk.site.experiment, desk.device
        self.desk, self.tasks, self.number = desk, tasks, tasks[0].round
        self.nodes = [node for task in tasks for node in task.nodes]
        self.groups = [task.group for task in tasks for _ in task.nodes]
        self.starts = torch.stack([task.start for task in tasks for _ in task.nodes]).to(device)
        self.states = self.starts.clone()
        self.gradients = torch.empty_like(self.states)
        self.weights, self.layers = desk.layout.views(self.states), desk.layout.views(self.gradients)
        for row, node in enumerate(self.nodes):
            ill.apply_state(e.faults, self.number, node, desk.layout.views(self.states[row]), e.seed)
        self.local = tasks[0].local or e.local
        self.stop_at_nonfinite = tasks[0].stop_at_nonfinite
        self.settings = [ill.apply_local(e.faults, self.number, node, self.local) for node in self.nodes]
        self.x, self.y, self.offsets = desk.data(self.nodes, self.number)
        self.samples = self.offsets.diff()
        iterations = [task.iterations for task in tasks for _ in task.nodes]
        counts = zip(self.settings, self.samples.tolist(), iterations, strict=True)
        self.steps = torch.tensor([given or local.steps(samples) for local, samples, given in counts])
        self.rows = self._rows(e.local.batch).to(device)
        self.spoilers = {
            row: spoil
            for row, node in enumerate(self.nodes)
            if (spoil := ill.gradient_spoiler(e.faults, self.number, node, e.seed)) is not None
        }
        self.stepping = [row for row, node in enumerate(self.nodes) if ill.any_at("step", e.faults, self.number, node)]
        self.proximal = None
        if any(local.proximal for local in self.settings):
            self.proximal = torch.tensor([[local.proximal] for local in self.settings], device=device)
        self.failed: dict[Node, BaseException] = {}
        self.rates = torch.tensor([[local.optimizer.learning_rate] for local in self.settings], device=device)
        self.moments = [torch.zeros_like(self.states) for _ in range(_moments(e.local.optimizer))]
        self.before = torch.zeros(len(self.nodes), 1, device=device)  # steps that the optimiser has taken already
        if e.local.keep_optimizer:
            for row, node in enumerate(self.nodes):
                if node in desk.kept:
                    kept, self.before[row] = desk.kept[node]
                    for moment, old in zip(self.moments, kept, strict=True):
                        moment[row] = old

    def _rows(self, batch: int) -> Tensor:
        """Where each mini-batch lies, [steps, clients, batch]; a client that is done early gets its last one again."""
        steps = int(self.steps.max())
        found = torch.empty(steps, len(self.nodes), batch, dtype=torch.int64)
        for column, node in enumerate(self.nodes):
            own, samples = int(self.steps[column]), int(self.samples[column])
            order = self.desk.site.order(node, self.number, own, batch, samples) + self.offsets[column]
            found[:own, column], found[own:, column] = order, order[-1]
        return found

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[step]
        return self.x[rows], self.y[rows]

    def stack(self) -> Stack:
        def samples(count: int) -> tuple[Tensor, Tensor]:
            # Spread evenly, others in each round; who has fewer samples gives some of them twice.
            places = self.number * count + torch.arange(count) * (self.samples[:, None] / count)
            rows = (places.long() % self.samples[:, None] + self.offsets[:-1, None]).to(self.x.device)
            return self.x[rows], self.y[rows]

        cuts = self.offsets.tolist()
        labels = [self.y[first:last] for first, last in itertools.pairwise(cuts)]
        faults = self.desk.site.experiment.faults
        silent = [node for node in self.nodes if ill.silenced(faults, self.number, node)]
        steps = None if bool((self.steps == self.steps[0]).all()) else self.steps.tolist()
        own = (self.desk.module, self.states, samples, F.cross_entropy, labels)
        return Stack(self.nodes, self.groups, *own, silent, steps)

    def stop_where_not_finite(self, losses: Tensor, step: int) -> None:
        for row in (~losses.isfinite()).nonzero().flatten().tolist():
            if step < int(self.steps[row]) and self.nodes[row] not in self.failed:
                try:
                    stop_if_not_finite(losses[row], step)
                except FloatingPointError as error:
                    self.failed[self.nodes[row]] = error

    def before_step(self, step: int, gradients: Tensor) -> Tensor | None:
        """Faults that act at a step; gives who takes part in it, or None for all."""
        e = self.desk.site.experiment
        for row, spoil in self.spoilers.items():
            spoil(self.desk.layout.views(gradients[row]), step)
        for row in self.stepping:
            try:
                if self.nodes[row] not in self.failed:
                    ill.apply_step(e.faults, self.number, self.nodes[row], step)
            except Exception as error:  # noqa: BLE001 - a client that fails is the experiment's result, not its end
                self.failed[self.nodes[row]] = error
        active = self.steps > step
        for row, node in enumerate(self.nodes):
            if node in self.failed:
                active[row] = False
        return None if bool(active.all()) else active.to(self.states.device)

    def optimize(self, gradients: Tensor, step: int, active: Tensor | None) -> None:
        """The optimiser's formula on the whole matrix; rows that rest are put back."""
        before = None if active is None else self.states.clone()
        optimizer = self.desk.site.experiment.local.optimizer
        if isinstance(optimizer, SGD):
            direction = gradients
            if optimizer.momentum:
                direction = self.moments[0].mul_(optimizer.momentum).add_(gradients)
            self.states.sub_(self.rates * direction)
        else:
            self._adam(optimizer, gradients, step + 1)
        if before is not None and active is not None:
            torch.where(active[:, None], self.states, before, out=self.states)

    def _adam(self, settings: Adam, gradients: Tensor, count: int) -> None:
        first, second = self.moments
        first.lerp_(gradients, 1 - settings.beta1)
        second.mul_(settings.beta2).addcmul_(gradients, gradients, value=1 - settings.beta2)
        counts = self.before + count
        size = second.sqrt().div_((1 - settings.beta2**counts).sqrt()).add_(settings.epsilon)
        self.states.addcmul_(first.div(size), self.rates / (1 - settings.beta1**counts), value=-1)

    def keep(self) -> None:
        """The optimisers' states, for the clients' next round."""
        for row, node in enumerate(self.nodes):
            moments = [moment[row].clone() for moment in self.moments]
            self.desk.kept[node] = (moments, float(self.before[row, 0]) + float(self.steps[row]))

    def exchange(self) -> None:
        row = 0
        for task in self.tasks:
            members = slice(row, row + len(task.nodes))
            if task.exchange is not None:
                samples = self.samples[members].to(self.states)
                self.states[members] = task.exchange(self.states[members], samples)
            row += len(task.nodes)

    def updates(self, out: Tensor, losses: Tensor, seconds: float) -> list[Update]:
        found = []
        for row, node in enumerate(self.nodes):
            error = self.failed.get(node)
            steps = int(self.steps[row])
            task_start = self.starts[row].cpu()
            if error is not None:
                out[row].copy_(task_start)
            update = Update(
                node,
                out[row],
                task_start,
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


def _moments(optimizer: Adam | SGD) -> int:
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    return 2
