# SPDX-License-Identifier: Apache-2.0
"""What every process of an experiment holds: the data, its partition, and the initial model."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from fedvitals.lab import models, streams
from fedvitals.lab.data.datasets import Dataset, load
from fedvitals.lab.data.partition import Shard, deal, label_counts, shard_tensors
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.state import StateLayout


@dataclass(frozen=True)
class Site:
    """The data, partition and initial model of an experiment."""

    experiment: Experiment
    dataset: Dataset
    shards: dict[Node, Shard]
    module: nn.Module  # as initialised; nobody trains it
    layout: StateLayout

    @classmethod
    def of(cls, experiment: Experiment, data: str | os.PathLike[str] | None = None) -> Site:
        """Create everything that an experiment describes, from its seed."""
        dataset = load(experiment.dataset, data)
        dealing, drawing = (streams.stream(experiment.seed, purpose) for purpose in ("partition", "model"))
        dealt = deal(experiment.partition, dataset, experiment.clients, dealing, experiment.test_share)
        module = models.build(experiment.model, dataset, drawing)
        layout = StateLayout.of(module)
        state = layout.flat(module)
        fault_table.apply_initial(experiment.faults, layout.views(state), experiment.seed)
        layout.load(module, state)
        site = cls(experiment, dataset, dict(zip(experiment.nodes, dealt, strict=True)), module, layout)
        if all(fault_table.names_nodes_only(fault, experiment.nodes) for fault in experiment.faults):
            return site
        faults = tuple(fault_table.name_members(fault, site.groups) for fault in experiment.faults)
        return dataclasses.replace(site, experiment=msgspec.structs.replace(experiment, faults=faults))

    def samples(self, node: Node) -> int:
        return len(self.shards[node].train)

    @functools.cached_property
    def flops(self) -> int:
        """The operations of one sample's forward and backward pass."""
        return self._flops(backward=True)

    @functools.cached_property
    def forward_flops(self) -> int:
        """The operations of one sample's forward pass."""
        return self._flops(backward=False)

    def _flops(self, *, backward: bool) -> int:
        dtype = self.dataset.inputs(self.dataset.x[:1]).dtype
        return models.flops(self.module, self.dataset.shape, dtype, backward=backward)

    @functools.cached_property
    def groups(self) -> dict[str, tuple[Node, ...]]:
        """The members of each edge or ring; empty for topologies without groups that stay the same."""
        topology = self.experiment.topology
        return topology.fixed_groups(self.experiment, self.labels) if hasattr(topology, "fixed_groups") else {}

    @functools.cached_property
    def labels(self) -> dict[Node, Tensor]:
        """Each client's numbers of training samples per class."""
        counts = label_counts([*self.shards.values()], self.dataset.y, self.dataset.classes, "train")
        return dict(zip(self.shards, counts, strict=True))

    @functools.cached_property
    def attacks(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The test samples on which attacks with a target are tried, and the labels that they want, by the fault's
        place in the list.
        """
        faults = [*enumerate(self.experiment.faults)]
        if not any(fault_table.has_target(fault) for _, fault in faults):
            return {}
        x, y = self.dataset.inputs(self.dataset.test_x), self.dataset.test_y
        tried = {place: fault.triggered(x, y) for place, fault in faults if fault_table.has_target(fault)}
        return {place: samples for place, samples in tried.items() if samples is not None and len(samples[1])}

    def tensors(self, node: Node, round_index: int) -> tuple[Tensor, Tensor]:
        """Return the samples and labels that a client trains on in a round, with faults of its data applied."""
        x, y = shard_tensors(self.dataset, self.shards[node])
        e = self.experiment
        return fault_table.apply_data(e.faults, round_index, node, x, y, self.dataset.classes, e.seed)

    def order(self, node: Node, round_index: int, steps: int, batch: int, samples: int) -> Tensor:
        """Return the sample indices of each mini-batch, [steps, batch]: consecutive shuffled passes, all batches
        full.
        """
        stream = streams.stream(self.experiment.seed, "batches", round_index, node)
        passes = math.ceil(steps * batch / samples)
        order = torch.cat([torch.randperm(samples, generator=stream) for _ in range(passes)])
        order = order[: steps * batch].view(steps, batch)
        return fault_table.apply_order(self.experiment.faults, round_index, node, order, samples, self.experiment.seed)
