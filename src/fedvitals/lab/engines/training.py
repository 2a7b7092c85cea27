# SPDX-License-Identifier: Apache-2.0
"""Local training client by client: the readable reference for the stacked engine, and with `fast` the reuse engine.

With `fast`, modules and optimisers are created once per process instead of per client, images are channels-last and
optimisers are fused. The mathematics is the same; sums are in another order, so results agree to rounding.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedvitals.lab import streams
from fedvitals.lab.adapters import set_scale
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Home, Node, Task, Update
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.local import Adam, Clip, Local, Optimizer, PlainSGD
from fedvitals.lab.losses import Model
from fedvitals.protocols import WorkerObserver

GradientFault = Callable[[Mapping[str, Tensor], int], None]


class Replica:
    """A model in training, with its optimiser."""

    def __init__(self, site: Site, *, fast: bool) -> None:
        self.site, self.fast = site, fast
        self.module = copy.deepcopy(site.module)
        if fast and len(site.dataset.x.shape) == 4:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module.train()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.state = site.layout.tensors(self.module)
        # The model as it came from the server, for losses that compare with it.
        self.received = copy.deepcopy(self.module).eval() if site.loss.needs_received_model else None
        self.optimizer: torch.optim.Optimizer | None = None  # none with plain_sgd
        self._made_for: Optimizer | None = None

    def begin(
        self,
        start: Tensor,
        settings: Local,
        shift: Tensor | None = None,
        home: Home | None = None,
        scale: float | None = None,
    ) -> None:
        """Load the state that the client received and what it has at home, and create a fresh optimiser. `shift` is
        added to all gradients.
        """
        self.load(start)
        self.personalise(home, scale)
        self.settings = settings
        if self.received is not None:
            self.site.layout.load(self.received, start)
        self.shift = None if shift is None else [*self.site.layout.views(shift).values()]
        self.start = [p.detach().clone() for p in self.parameters] if settings.proximal else None
        if self._made_for != settings.optimizer:
            self.optimizer = make_optimizer(settings.optimizer, self.parameters, fast=self.fast)
            self._made_for = settings.optimizer
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def personalise(self, home: Home | None, scale: float | None) -> None:
        """Make the model a client's own: with what it has at home, and its adapters' α/r."""
        for module in (self.module, self.received):
            if module is not None and home is not None and self.site.home is not None:
                self.site.home.load(module, torch.from_numpy(home))
            if module is not None and scale is not None:
                set_scale(module, scale)

    def load(self, state: Tensor) -> None:
        self.site.layout.load(self.module, state)

    def save(self, into: Tensor) -> None:
        """Copy the state into an existing flat vector."""
        with torch.no_grad():
            for target, source in zip(self.site.layout.views(into).values(), self.state, strict=True):
                target.copy_(source)

    def step(self, x: Tensor, y: Tensor, step: int = 0, gradient_fault: GradientFault | None = None) -> Tensor:
        """Train on the samples of one iteration and return their loss. `gradient_fault` may alter the gradients
        first.
        """
        (self.module if self.optimizer is None else self.optimizer).zero_grad()
        loss = self._backward(x, y)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.shift is not None:
            for p, shift in zip(self.state, self.shift, strict=False):  # of the weights, which come first
                if p.grad is not None:
                    p.grad.add_(shift)
        if gradient_fault is not None:
            gradient_fault({name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}, step)
        if self.start is not None:
            with torch.no_grad():
                for p, before in zip(self.parameters, self.start, strict=True):
                    if p.grad is not None:
                        p.grad.add_(p - before, alpha=self.settings.proximal)
        if self.settings.clip is not None:
            clip_gradients(gradients, self.settings.clip)
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            descend(self.parameters, self.settings.optimizer.learning_rate)
        return loss

    def _backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradients of the mean loss over all accumulated mini-batches, and return it."""
        count = self.settings.accumulate
        if count == 1:
            loss = self._loss(x, y)
            loss.backward()
            return loss.detach()
        mean = torch.zeros(())
        for micro_x, micro_y in zip(x.chunk(count), y.chunk(count), strict=True):
            share = self._loss(micro_x, micro_y) / count
            share.backward()
            mean += share.detach()
        return mean

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        model: Model = self.module if self.settings.precision == "float32" else self._in_bfloat16
        return self.site.loss.of_batch(model, x, y, self.received)

    def _in_bfloat16(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.module(x)
        return tuple(part.float() for part in outputs) if isinstance(outputs, tuple) else outputs.float()


def make_optimizer(
    settings: Optimizer, parameters: Sequence[nn.Parameter], *, fast: bool
) -> torch.optim.Optimizer | None:
    """Return PyTorch's optimiser for the settings; None for plain_sgd."""
    if isinstance(settings, PlainSGD):
        return None
    decay = settings.weight_decay
    if isinstance(settings, Adam):
        betas = (settings.beta1, settings.beta2)
        return torch.optim.Adam(parameters, settings.learning_rate, betas, settings.epsilon, decay, fused=fast)
    rate, momentum = settings.learning_rate, settings.momentum
    return torch.optim.SGD(parameters, rate, momentum, weight_decay=decay, fused=fast)


@torch.no_grad()
def descend(parameters: Sequence[nn.Parameter], rate: float) -> None:
    """Take one step of plain gradient descent."""
    for p in parameters:
        if p.grad is not None:
            p.sub_(p.grad, alpha=rate)


def clip_gradients(gradients: list[Tensor], settings: Clip) -> None:
    """Clip gradients in place. Non-finite ones are left alone, so that detectors see them."""
    if settings.by == "value":
        torch._foreach_clamp_min_(gradients, -settings.limit)
        torch._foreach_clamp_max_(gradients, settings.limit)
        return
    norms = torch.stack(torch._foreach_norm(gradients))  # noqa: SLF001
    if settings.by == "whole":
        norms = torch.linalg.vector_norm(norms).expand(len(gradients))
    factors = (settings.limit / norms).clamp(max=1.0)
    torch._foreach_mul_(gradients, [*factors.unbind()])


def stop_if_not_finite(loss: Tensor, step: int) -> None:
    if not bool(loss.isfinite()):
        raise FloatingPointError(f"The loss of local step {step} is not finite: training was stopped there.")


class _Member:
    """One client of a group while it trains."""

    def __init__(self, site: Site, task: Task, node: Node, replica: Replica) -> None:
        e = site.experiment
        self.node, self.replica, self.number = node, replica, task.round
        self.site, self.stop_at_nonfinite = site, task.stop_at_nonfinite
        self.settings = fault_table.apply_local(e.faults, task.round, node, task.local or e.local)
        self.x, self.y = site.tensors(node, task.round)
        if replica.fast and self.x.dim() == 4:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.steps = task.iterations or self.settings.steps(len(self.y))
        self.order = site.order(node, task.round, self.steps, self.settings.step_samples, len(self.y))
        self.losses = torch.zeros(self.steps)
        self.error: BaseException | None = None
        self.seconds = 0.0
        home = None if task.homes is None else task.homes[node]
        replica.begin(task.start, self.settings, task.shift, home, site.scale(node, task.round))
        self.gradient_fault = fault_table.gradient_fault(e.faults, task.round, node, e.seed)
        if fault_table.any_active("state", e.faults, task.round, node):
            state = task.start.clone()
            fault_table.apply_state(e.faults, task.round, node, site.layout.views(state), e.seed)
            replica.load(state)

    def step(self, step: int) -> None:
        began = time.perf_counter()
        try:
            fault_table.apply_step(self.site.experiment.faults, self.number, self.node, step)
            rows = self.order[step]
            self.losses[step] = self.replica.step(self.x[rows], self.y[rows], step, self.gradient_fault)
            if self.stop_at_nonfinite:
                stop_if_not_finite(self.losses[step], step)
        except Exception as error:  # noqa: BLE001 - a client that fails is the experiment's result, not its end
            self.error = error
        self.seconds += time.perf_counter() - began

    def update(self, task: Task, row: Tensor) -> Update:
        """Return the client's update, whose state is `row`."""
        update = Update(self.node, row, task.start, len(self.y), task.group, self.losses, self.steps, self.seconds)
        if self.error is not None:
            update.fail(self.error)
        elif self.site.home is not None:
            update.home = self.site.home.flat(self.replica.module).numpy()
        return update


class Replicas:
    """The replicas of one process, created on demand: as many as the largest group has members."""

    def __init__(self, site: Site, *, fast: bool) -> None:
        self.site, self.fast = site, fast
        self._replicas: list[Replica] = []

    def __getitem__(self, index: int) -> Replica:
        if not self.fast:
            return Replica(self.site, fast=False)
        while len(self._replicas) <= index:
            self._replicas.append(Replica(self.site, fast=True))
        return self._replicas[index]


def train_task(task: Task, replicas: Replicas, watcher: WorkerObserver, out: Tensor) -> list[Update]:
    """Train one group locally and write the members' states into the rows of `out`; returns their updates."""
    with streams.seeded_torch(replicas.site.experiment.seed, "training", task.round, *task.nodes):
        return _train_members(task, replicas, watcher, out)


def _train_members(task: Task, replicas: Replicas, watcher: WorkerObserver, out: Tensor) -> list[Update]:
    site = replicas.site
    members = [_Member(site, task, node, replicas[i]) for i, node in enumerate(task.nodes)]
    watched = [m for m in members if not fault_table.telemetry_is_lost(site.experiment.faults, task.round, m.node)]
    for m in watched:
        model = (m.replica.module, m.replica.optimizer)
        watcher.client_begin(m.node, *model, (m.x, m.y), task.group, loss=site.loss)
    last = max(m.steps for m in members) - 1
    for step in range(last + 1):
        for m in members:
            if step < m.steps and m.error is None:
                m.step(step)
        if task.exchange is not None and step < last and (step + 1) % task.every == 0:
            _exchange(task, members, out)
    for m, row in zip(members, out, strict=True):
        if m.error is None:
            m.replica.save(row)
        else:
            row.copy_(task.start)
    for m in reversed(watched):
        watcher.client_end(m.node, m.error)
    return [m.update(task, row) for m, row in zip(members, out, strict=True)]


def _exchange(task: Task, members: list[_Member], out: Tensor) -> None:
    assert task.exchange is not None  # noqa: S101 - asked by the caller
    for m, row in zip(members, out, strict=True):
        m.replica.save(row)
    samples = torch.tensor([float(len(m.y)) for m in members])
    for m, row in zip(members, task.exchange(out, samples), strict=True):
        m.replica.load(row)
