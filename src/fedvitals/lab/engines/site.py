# SPDX-License-Identifier: Apache-2.0
"""What every process of an experiment holds: the data, its partition, and the initial model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn

from fedvitals.lab import streams
from fedvitals.lab.adapters import EXACT, PARTITIONED, RESIDUAL, Lora
from fedvitals.lab.aggregators.adapters import ExactMean, PartitionedMean
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
    """The data, partition and initial model of an experiment.

    Args:
        experiment: The experiment.
        dataset: Its data set, loaded.
        shards: Each client's samples, as dealt; `shard` is what a client has in a round.
        module: The model as initialised; it is never trained.
        layout: Where each tensor lies in a flat state.
        loss: The loss.
        home: The layout of what clients keep at home; None: nothing.
    """

    experiment: Experiment
    dataset: Dataset
    shards: dict[Node, Shard]  # as dealt; `shard` is what a client has in a round
    module: nn.Module  # as initialised; nobody trains it
    layout: StateLayout
    loss: Loss
    home: StateLayout | None = None  # of what clients keep at home
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
        layout, home = StateLayout.of(module), None
        if experiment.parameters is not None:
            layout, home = experiment.parameters.prepare(module, streams.stream(experiment.seed, "adapters"))
        state = layout.flat(module)
        fault_table.apply_initial(experiment.faults, layout.views(state), experiment.seed)
        layout.load(module, state)
        shards = dict(zip(experiment.nodes, dealt, strict=True))
        site = cls(experiment, dataset, shards, module, layout, loss, home)
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
        whole = self.home is None  # else there is no model of the server's to try them on
        if not whole or not any(fault_table.has_target(fault) for _, fault in faults):
            return {}
        x, y = self.dataset.inputs(self.dataset.test_x), self.dataset.test_y
        tried = {place: fault.triggered(x, y) for place, fault in faults if fault_table.has_target(fault)}
        return {place: samples for place, samples in tried.items() if samples is not None and len(samples[1])}

    # -- adapters and homes -------------------------------------------------------------------------------------------

    @property
    def lora(self) -> Lora | None:
        """The experiment's low-rank adapters, if it has some."""
        parameters = self.experiment.parameters
        return parameters.adapters if parameters is not None and isinstance(parameters.adapters, Lora) else None

    def server_module(self) -> nn.Module:
        """Return a copy of the module as the server has it: nothing that stays at home trains in it."""
        module = copy.deepcopy(self.module)
        for name, parameter in module.named_parameters():
            if self.home is not None and name in self.home.names:
                parameter.requires_grad_(False)  # so that an observer of the server's model does not expect it
        return module

    @functools.cached_property
    def adapter_mean(self) -> ExactMean | PartitionedMean | None:
        """The rule in place of the aggregator, where adapters need one."""
        lora = self.lora
        if lora is None or lora.aggregation not in (EXACT, PARTITIONED):
            return None
        return ExactMean(self.layout, lora.scale_of) if lora.aggregation == EXACT else PartitionedMean(self.held)

    @functools.cached_property
    def scales_differ(self) -> bool:
        """Whether clients have an α/r of their own."""
        wrong = fault_table.any_overrides("scale", self.experiment.faults)
        return self.lora is not None and (wrong or bool(self.lora.alphas))

    @functools.cached_property
    def clients_differ(self) -> bool:
        """Whether clients have models of their own: ranks, scales, or parts at home."""
        return self.home is not None or self.scales_differ or (self.lora is not None and bool(self.lora.ranks))

    def held(self, node: Node) -> Tensor | None:
        """Return which numbers of the state a client has, [size]; None for all."""
        lora = self.lora
        if lora is None or lora.rank_of(node) == lora.full_rank:
            return None
        return self._held_by_rank[lora.rank_of(node)]

    @functools.cached_property
    def _held_by_rank(self) -> dict[int, Tensor]:
        lora = self.lora
        return (
            {} if lora is None else {rank: lora.held(self.layout, rank) for rank in {lora.rank, *lora.ranks.values()}}
        )

    def scale(self, node: Node | None, round_index: int) -> float | None:
        """Return a client's α/r, with faults applied, or the server's; None without low-rank adapters."""
        if self.lora is None or node is None:
            return None if self.lora is None else self.lora.scale_of()
        return fault_table.apply_scale(self.experiment.faults, round_index, node, self.lora.scale_of(node))

    @functools.cached_property
    def residual_bytes(self) -> int:
        """The bytes of a model that clients receive and do not send back."""
        layers = zip(self.layout.names, self.layout.shapes, strict=True)
        return 4 * sum(math.prod(shape) for name, shape in layers if name.endswith(f".{RESIDUAL}"))

    def lacking_bytes(self, node: Node) -> int:
        """Return the bytes of a model that a client of a lower rank neither receives nor sends."""
        held = self.held(node)
        return 0 if held is None else 4 * int((~held).sum())

    # -- samples ------------------------------------------------------------------------------------------------------

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
