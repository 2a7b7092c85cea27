# SPDX-License-Identifier: Apache-2.0
"""The samples of a stack on its device: its clients' training samples in one tensor, and those for evaluation.

On a GPU they are taken from a data set that stays there (`lab/data/cache.py`), and all clients' samples are kept, so a
different cohort in each round costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedvitals.lab.data.cache import resident
from fedvitals.lab.data.partition import Shard
from fedvitals.lab.engines.executor import EvaluationJob, evaluation_samples
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.faults import table as fault_table


class StackSamples:
    """The training and evaluation samples of a stack on its device."""

    def __init__(self, site: Site, device: torch.device) -> None:
        self._site, self._device = site, device
        self._kept: tuple[Any, Tensor, Tensor, Tensor] | None = None

    def training(self, nodes: Sequence[Node], round_index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the clients' samples and labels in one tensor each, each client's first row, and its number of
        samples.

        They are kept for as long as they stay the same.
        """
        e = self._site.experiment
        held = nodes if self._device.type == "cpu" else e.nodes
        struck = {node: fault_table.active_faults("data", e.faults, round_index, node) for node in held}
        faulty = {node: faults for node, faults in struck.items() if faults}
        phases = None if e.population is None else e.population.phases(round_index)
        key = (tuple(held), faulty, phases)
        if self._kept is None or self._kept[0] != key:
            parts = self._parts(held, round_index, {*faulty})
            counts = torch.tensor([0, *(len(y) for _, y in parts)]).cumsum(0)
            self._kept = (key, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), counts)
        _, x, y, offsets = self._kept
        firsts, samples = offsets[:-1], offsets.diff()
        if held is not nodes:
            order = {node: place for place, node in enumerate(held)}
            chosen = torch.tensor([order[node] for node in nodes])
            firsts, samples = firsts[chosen], samples[chosen]
        return x, y, firsts, samples

    def _parts(self, nodes: Sequence[Node], round_index: int, faulty: set[Node]) -> list[tuple[Tensor, Tensor]]:
        if self._device.type == "cpu":
            return [self._site.tensors(node, round_index) for node in nodes]
        parts = []
        for node in nodes:
            shard = self._site.shard(node, round_index)
            if node in faulty or not _is_plain(shard):
                x, y = self._site.tensors(node, round_index)
                parts.append((x.to(self._device), y.to(self._device)))
            else:
                parts.append(self._of(shard.train))
        return parts

    def _of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        there = resident(self._site.dataset, self._device)
        rows = rows.to(self._device)
        return self._site.dataset.pairs(there.x.index_select(0, rows), there.y.index_select(0, rows))

    def evaluation(self, job: EvaluationJob) -> tuple[Tensor, Tensor]:
        """Return the samples and labels of an evaluation job."""
        if self._device.type == "cpu":
            return evaluation_samples(self._site, job)
        if job.rows is not None and job.attack is None:
            there, chosen = resident(self._site.dataset, self._device), slice(*job.rows)
            return self._site.dataset.pairs(there.test_x[chosen], there.test_y[chosen])
        shards = [self._site.shard(node, job.round) for node in job.nodes]
        if job.attack is None and all(map(_is_plain, shards)):
            return self._of(torch.cat([shard.test for shard in shards]))
        x, y = evaluation_samples(self._site, job)
        return x.to(self._device), y.to(self._device)


def _is_plain(shard: Shard) -> bool:
    """Return whether the client sees the data set's samples and labels unchanged."""
    return shard.brightness == 1 and not shard.rotation and shard.relabel is None
