# SPDX-License-Identifier: Apache-2.0
"""What every process of an experiment holds: the data, who has which of it, and the model to begin with."""

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
from fedvitals.lab.engines.work import Node
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.faults import table as ill
from fedvitals.lab.state import Layout


@dataclass(frozen=True)
class Site:
    experiment: Experiment
    dataset: Dataset
    shards: dict[Node, Shard]
    module: nn.Module  # as initialised; nobody trains it
    layout: Layout

    @classmethod
    def of(cls, experiment: Experiment, data: str | os.PathLike[str] | None = None) -> Site:
        """Everything that an experiment's description stands for, made from its seed."""
        dataset = load(experiment.dataset, data)
        dealt = deal(
            experiment.partition,
            dataset,
            experiment.clients,
            streams.stream(experiment.seed, "partition"),
            experiment.test_share,
        )
        stream = streams.stream(experiment.seed, "model")
        module = models.build(experiment.model, dataset, stream)
        layout = Layout.of(module)
        state = layout.flat(module)
        ill.apply_initial(experiment.faults, layout.views(state), experiment.seed)
        layout.load(module, state)
        return cls(experiment, dataset, dict(zip(experiment.nodes, dealt, strict=True)), module, layout)

    def samples(self, node: Node) -> int:
        return len(self.shards[node].train)

    @functools.cached_property
    def flops(self) -> int:
        """Of one sample's forward and backward pass."""
        return self._flops(backward=True)

    @functools.cached_property
    def forward_flops(self) -> int:
        """Of its forward pass alone."""
        return self._flops(backward=False)

    def _flops(self, *, backward: bool) -> int:
        dtype = self.dataset.inputs(self.dataset.x[:1]).dtype
        return models.flops(self.module, self.dataset.shape, dtype, backward=backward)

    @functools.cached_property
    def labels(self) -> dict[Node, Tensor]:
        """Each client's numbers of training samples per class."""
        counts = label_counts([*self.shards.values()], self.dataset.y, self.dataset.classes, "train")
        return dict(zip(self.shards, counts, strict=True))

    def tensors(self, node: Node, number: int) -> tuple[Tensor, Tensor]:
        """What the client trains on in a round: its own samples, as floats, after whatever is wrong with them."""
        x, y = shard_tensors(self.dataset, self.shards[node])
        e = self.experiment
        return ill.apply_data(e.faults, number, node, x, y, self.dataset.classes, e.seed)

    def order(self, node: Node, number: int, steps: int, batch: int, samples: int) -> Tensor:
        """Which samples make up each mini-batch, [steps, batch]: one shuffled pass after the other, all full."""
        stream = streams.stream(self.experiment.seed, "batches", number, node)
        passes = math.ceil(steps * batch / samples)
        order = torch.cat([torch.randperm(samples, generator=stream) for _ in range(passes)])
        return order[: steps * batch].view(steps, batch)
