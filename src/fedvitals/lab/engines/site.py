# SPDX-License-Identifier: Apache-2.0
"""What every process of an experiment holds: the data, its partition, and the initial model."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass

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
        return cls(experiment, dataset, dict(zip(experiment.nodes, dealt, strict=True)), module, layout)

    @property
    def vector_bytes(self) -> int:
        """The bytes that the aggregator sends with each model, both ways, beside the model itself."""
        return 4 * self.layout.weights if getattr(self.experiment.aggregator, "sends_vectors", False) else 0

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
    def labels(self) -> dict[Node, Tensor]:
        """Each client's numbers of training samples per class."""
        counts = label_counts([*self.shards.values()], self.dataset.y, self.dataset.classes, "train")
        return dict(zip(self.shards, counts, strict=True))

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
        return order[: steps * batch].view(steps, batch)
