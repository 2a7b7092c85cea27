# SPDX-License-Identifier: Apache-2.0
"""The executor of the stacked engine: clients as a batch dimension, so that one call trains a step of all of them.

The states of all clients are one matrix [clients, size]; a plan (`plans.py`) computes the model for all of its rows.
This pays off where a client's step is too small to keep the machine busy: small models on a CPU, and everything on a
GPU. The mathematics is that of `training`, row by row; sums over clients are in another order.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedvitals.errors import ConfigError, unknown
from fedvitals.lab.adapters import EXACT
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.executor import EvaluationJob
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.stacked.plans import PRECISIONS, StackPlan, available_plans
from fedvitals.lab.stacked.round import StackedRound
from fedvitals.lab.stacked.samples import StackSamples
from fedvitals.protocols import NullObserver, WorkerObserver

STACK = 64  # clients in one stack on a CPU: more than this leaves the caches without saving calls
TEST_BATCH = {"cpu": 256, "cuda": 4096}


def stacking_obstacle(site: Site) -> str | None:
    """Return why the clients cannot be stacked, as the beginning of a sentence; None if they can."""
    e, loss = site.experiment, site.loss
    model, kind = f"The model '{type(e.model).__name__}'", kind_of(type(loss).__name__)
    own_part = _own_part(site)
    stackable = getattr(e.model, "stackable", False) and site.layout.weights == site.layout.size
    draws = any("Dropout" in type(layer).__name__ and getattr(layer, "p", 0) > 0 for layer in site.module.modules())
    weighted = getattr(loss, "class_weights", None) is not None or site.dataset.targets == "tokens"
    obstacles = {
        f"{model} cannot be stacked {own_part}": own_part is not None,
        f"{model} cannot be stacked (batch norm, a recurrent layer, or a model of your own that does not say "
        "`stackable = True`)": not stackable,
        f"{model} cannot be stacked (dropout draws random numbers for each client)": draws,
        f"The loss '{kind}' cannot be stacked (it compares samples or models, or the model answers a tuple)": (
            not loss.stackable
        ),
        "Mixup cannot be stacked (it draws random numbers for each client)": bool(getattr(loss, "mixup", 0)),
        "Accumulated batches of tokens or with class weights cannot be stacked (each has a mean of its own)": (
            e.local.accumulate > 1 and weighted
        ),
    }
    return next((text for text, is_one in obstacles.items() if is_one), None)


def _own_part(site: Site) -> str | None:
    """Return what clients have of their own that stands against stacking, or None."""
    if site.home is not None:
        return "where parts of it stay at home"
    if site.lora is not None and site.lora.aggregation == EXACT:
        return "with the residuals of exact aggregation"
    return "with an α/r for each client" if site.scales_differ else None


def stack_size(members: int) -> int:
    """Return the size of a stack on a CPU, such that all stacks of this many clients are of equal size."""
    return math.ceil(members / math.ceil(members / STACK)) if members else 1


@contextlib.contextmanager
def reproducible_precision(precision: str) -> Iterator[None]:
    """On CUDA, compute deterministically and in true float32, unless a faster precision was asked for."""
    before = torch.backends.cuda.matmul.allow_tf32
    quick = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = quick
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=quick):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class StackedExecutor:
    """The executor of the stacked engine, on any device."""

    def __init__(self, site: Site, device: str = "cpu", precision: str = "float32") -> None:
        if (obstacle := stacking_obstacle(site)) is not None:
            raise ConfigError(f"{obstacle}. Use the engine 'reuse'.")
        if precision not in PRECISIONS:
            raise ConfigError(unknown("precision", precision, PRECISIONS))
        if site.experiment.local.precision == "bfloat16":
            precision = "bfloat16"
        self.site, self.layout = site, site.layout
        self.device, self.precision = torch.device(device), precision
        self.module = copy.deepcopy(site.module).to(self.device)
        self.kept: dict[Node, tuple[list[Tensor], float]] = {}  # optimisers' states, where the experiment keeps them
        # On CUDA the first try; the quickest later.
        self.plan: StackPlan = available_plans(self.module, self.device, precision, site.loss)[0]
        self.samples = StackSamples(site, self.device)
        self.buffer_pool = _cuda_buffer_pool(self) if self.device.type == "cuda" else None

    def train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        observer = None if type(watcher) is NullObserver else watcher
        with self._there(), reproducible_precision(self.precision):
            if self.buffer_pool is None:
                return self._train(StackedRound(self, tasks), observer, out)
            return self._train(self.buffer_pool.stacked_round(tasks, observer), observer, out)

    def _train(self, stacked_round: StackedRound, observer: WorkerObserver | None, out: Tensor) -> list[Update]:
        if observer is not None:
            observer.stack_begin(stacked_round.stack())
        began = time.perf_counter()
        steps = len(stacked_round.losses)
        for step in range(steps):
            stacked_round.step(step, observer)
            if step < steps - 1:
                stacked_round.exchange(step)
        out.copy_(stacked_round.states)
        if self.site.experiment.local.keep_optimizer:
            stacked_round.keep()
        stacked_round.prepare_next_round()
        if observer is not None:
            observer.stack_end(stacked_round.failed)
        losses = stacked_round.losses.cpu()  # a device is waited for here
        seconds = (time.perf_counter() - began) / len(stacked_round.nodes)
        return stacked_round.updates(out, losses, seconds)

    def largest(self, members: int) -> int:
        """Return how many of so many clients make one stack."""
        if self.buffer_pool is not None:
            with self._there():
                return int(self.buffer_pool.largest(members))
        return stack_size(members) if self.device.type == "cpu" else members

    def _there(self) -> contextlib.AbstractContextManager[Any]:
        """Make this device the current one, which Triton and captured graphs use."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    @torch.no_grad()
    def evaluate(self, job: EvaluationJob) -> tuple[Tensor, Tensor]:
        losses, scores = [], []
        size = TEST_BATCH[self.device.type]
        with reproducible_precision("float32"):
            parameters = dict(self.layout.views(job.state.to(self.device)))
            for inputs, targets in zip(*(part.split(size) for part in self.samples.evaluation(job)), strict=True):
                outputs = functional_call(self.module, parameters, (inputs,))
                losses.append(self.site.loss.each(outputs, targets))
                scores.append(self.site.loss.score(outputs, targets))
        return torch.cat(losses).cpu(), torch.cat(scores).cpu()


def _cuda_buffer_pool(executor: StackedExecutor) -> Any:
    """Return the buffers for captured graphs, or None without Triton (as in CPU builds): then steps run directly."""
    try:
        from fedvitals.lab.stacked.cuda_round import CudaBufferPool  # noqa: PLC0415 - imports Triton
    except ImportError:
        return None
    return CudaBufferPool(executor)
