# SPDX-License-Identifier: Apache-2.0
"""The work of one process for an engine: train groups of clients, and evaluate states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedvitals.lab.data.partition import shard_tensors
from fedvitals.lab.engines import training
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Home, Node, Task, Update
from fedvitals.lab.state import StateLayout
from fedvitals.protocols import WorkerObserver

TEST_BATCH = 256


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """A state and the samples to evaluate it on: a range of the test set, or clients' local tests.

    With `attack`, it is a range of the test samples on which the attack at this place among the faults is tried.
    """

    state: Tensor  # [size]
    rows: tuple[int, int] | None = None
    nodes: tuple[Node, ...] = ()
    round: int = 0  # of the local tests, which may change
    attack: int | None = None
    home: Home | None = None  # of the one client whose local test it is


class Executor(Protocol):
    """Trains and evaluates within one process."""

    layout: StateLayout

    def train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        """Train the tasks' members in order and write their states into the rows of `out`."""
        ...

    def evaluate(self, job: EvaluationJob) -> tuple[Tensor, Tensor]:
        """Return each sample's loss and score (see `Loss.score`)."""
        ...


class ClientByClientExecutor:
    """Trains one client after the other, or the members of a group in turns."""

    def __init__(self, site: Site, *, fast: bool) -> None:
        self.site, self.layout = site, site.layout
        self._replicas = training.Replicas(site, fast=fast)
        self._evaluation_replica = training.Replica(site, fast=fast)

    def train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        updates: list[Update] = []
        for task in tasks:
            rows = out[len(updates) : len(updates) + len(task.nodes)]
            updates += training.train_task(task, self._replicas, watcher, rows)
        return updates

    @torch.no_grad()
    def evaluate(self, job: EvaluationJob) -> tuple[Tensor, Tensor]:
        replica = self._evaluation_replica
        replica.load(job.state)
        replica.personalise(job.home, self.site.scale(job.nodes[0] if job.nodes else None, job.round))
        replica.module.eval()
        losses, scores = [], []
        for x, y in zip(*(part.split(TEST_BATCH) for part in evaluation_samples(self.site, job)), strict=True):
            images = x.contiguous(memory_format=torch.channels_last) if replica.fast and x.dim() == 4 else x
            outputs = replica.module(images)
            losses.append(self.site.loss.each(outputs, y))
            scores.append(self.site.loss.score(outputs, y))
        return torch.cat(losses), torch.cat(scores)


def evaluation_samples(site: Site, job: EvaluationJob) -> tuple[Tensor, Tensor]:
    """Return the samples of an evaluation job as model inputs, and their labels."""
    if job.attack is not None and job.rows is not None:
        x, y = site.attacks[job.attack]
        return x[slice(*job.rows)], y[slice(*job.rows)]
    if job.rows is not None:
        chosen = slice(*job.rows)
        return site.dataset.pairs(site.dataset.test_x[chosen], site.dataset.test_y[chosen])
    parts = [shard_tensors(site.dataset, site.shard(node, job.round), "test") for node in job.nodes]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
