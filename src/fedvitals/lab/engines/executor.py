# SPDX-License-Identifier: Apache-2.0
"""What one process does for an engine: train groups of clients, and test states. No word about processes in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from fedvitals.lab.data.partition import shard_tensors
from fedvitals.lab.engines import training
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.work import Node, Task, Update
from fedvitals.lab.state import Layout
from fedvitals.protocols import WorkerObserver

TEST_BATCH = 256


@dataclass(frozen=True, slots=True)
class Examination:
    """Samples on which a state is tested: a stretch of the test set, or clients' local tests."""

    state: Tensor  # [size]
    rows: tuple[int, int] | None = None
    nodes: tuple[Node, ...] = ()


class Desk(Protocol):
    layout: Layout

    def train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        """The tasks' members in their order; their states are the rows of `out`."""
        ...

    def examine(self, examination: Examination) -> tuple[Tensor, Tensor]:
        """Each sample's loss, and whether it was classified rightly."""
        ...


class ClientByClient:
    """Trains one client after the other, or a group in turns."""

    def __init__(self, site: Site, *, fast: bool) -> None:
        self.site, self.layout = site, site.layout
        self._replicas = training.Replicas(site, fast=fast)
        self._examined = training.Replica(site, fast=fast)

    def train(self, tasks: Sequence[Task], watcher: WorkerObserver, out: Tensor) -> list[Update]:
        updates: list[Update] = []
        for task in tasks:
            rows = out[len(updates) : len(updates) + len(task.nodes)]
            updates += training.train(task, self._replicas, watcher, rows)
        return updates

    @torch.no_grad()
    def examine(self, examination: Examination) -> tuple[Tensor, Tensor]:
        replica = self._examined
        replica.load(examination.state)
        replica.module.eval()
        losses, hits = [], []
        for x, y in zip(*(part.split(TEST_BATCH) for part in examined(self.site, examination)), strict=True):
            images = x.contiguous(memory_format=torch.channels_last) if replica.fast and x.dim() == 4 else x
            logits = replica.module(images)
            losses.append(F.cross_entropy(logits, y, reduction="none"))
            hits.append(logits.argmax(1) == y)
        return torch.cat(losses), torch.cat(hits)


def examined(site: Site, examination: Examination) -> tuple[Tensor, Tensor]:
    """The samples of an examination, as floats, and their labels."""
    if examination.rows is not None:
        chosen = slice(*examination.rows)
        return site.dataset.inputs(site.dataset.test_x[chosen]), site.dataset.test_y[chosen]
    parts = [shard_tensors(site.dataset, site.shards[node], "test") for node in examination.nodes]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
