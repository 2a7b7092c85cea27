# SPDX-License-Identifier: Apache-2.0
"""What every process of an experiment holds: the data, its partition, and the initial model."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn

from fedvitals.lab import streams
from fedvitals.lab.data.datasets import Dataset, load
from fedvitals.lab.data.partition import Shard, deal, label_counts, shard_tensors
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.faults import table as fault_table
from fedvitals.lab.losses import Loss, usual_loss
from fedvitals.lab.models.catalog import build, flops
from fedvitals.lab.population import Pool
from fedvitals.lab.state import StateLayout


@dataclass(frozen=True)
class Site:
    """The data, partition and initial model of an experiment."""

    experiment: Experiment
    dataset: Dataset
    shards: dict[Node, Shard]  # as dealt; `shard` is what a client has in a round
    module: nn.Module  # as initialised; nobody trains it
    layout: StateLayout
    loss: Loss
    _changed: dict[Node, tuple[object, Shard]] = field(default_factory=dict, init=False, repr=False)  # newest ones

    @classmethod
    def of(cls, experiment: Experiment, data: str | os.PathLike[str] | None = None) -> Site:
        """Create everything that an experiment describes, from its seed."""
        dataset = load(experiment.dataset, data)
        loss = (experiment.loss or usual_loss(dataset.targets)).prepared(dataset)
        dealing, drawing = (streams.stream(experiment.seed, purpose) for purpose in ("partition", "model"))
        if experiment.population is not None:
            experiment.population.check_data(dataset)
        dealt = deal(experiment.partition, dataset, experiment.clients, dealing, experiment.test_share)
        module = build(experiment.model, dataset, drawing)
        layout = StateLayout.of(module)
        state = layout.flat(module)
        fault_table.apply_initial(experiment.faults, layout.views(state), experiment.seed)
        layout.load(module, state)
        shards = dict(zip(experiment.nodes, dealt, strict=True))
        site = cls(experiment, dataset, shards, module, layout, loss)
        if all(fault_table.names_nodes_only(fault, experiment.nodes) for fault in experiment.faults):
            return site
        faults = tuple(fault_table.name_members(fault, site.groups) for fault in experiment.faults)
        return dataclasses.replace(site, experiment=msgspec.structs.replace(experiment, faults=faults))

    def shard(self, node: Node, round_index: int) -> Shard:
        """Return the data that a client has in a round, after what the population has gone through until then."""
        population, seed = self.experiment.population, self.experiment.seed
        if population is None:
            return self.shards[node]
        phases = tuple(
            phase if node in affected else None
            for phase, affected in zip(population.phases(round_index), self._affected, strict=True)
        )
        if node not in self._changed or self._changed[node][0] != phases:
            self._changed[node] = phases, population.shard(self.shards[node], node, phases, self._pool, seed)
        return self._changed[node][1]

    @functools.cached_property
    def _affected(self) -> list[frozenset[Node]]:
        """The clients that each change of the population affects."""
        changes = () if self.experiment.population is None else self.experiment.population.changes
        return [frozenset(self.shards if change.nodes == "all" else change.nodes) for change in changes]

    @functools.cached_property
    def _pool(self) -> Pool:
        return Pool(self.dataset, [*self.shards.values()])

    def samples(self, node: Node, round_index: int = 0) -> int:
        return len(self.shard(node, round_index).train)

    @property
    def vector_bytes(self) -> int:
        """The bytes that the aggregator sends with each model, both ways, beside the model itself."""
        return 4 * self.layout.weights if getattr(self.experiment.aggregator, "sends_vectors", False) else 0

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
        return flops(self.module, self.dataset.shape, dtype, backward=backward)

    @functools.cached_property
    def groups(self) -> dict[str, tuple[Node, ...]]:
        """The members of each edge or ring; empty for topologies without groups that stay the same."""
        topology = self.experiment.topology
        return topology.fixed_groups(self.experiment, self.labels) if hasattr(topology, "fixed_groups") else {}

    @functools.cached_property
    def labels(self) -> dict[Node, Tensor]:
        """Each client's numbers of training samples per class, as dealt."""
        counts = label_counts([*self.shards.values()], self.dataset.labels, self.dataset.classes, "train")
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
        x, y = shard_tensors(self.dataset, self.shard(node, round_index))
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
