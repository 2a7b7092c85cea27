# SPDX-License-Identifier: Apache-2.0
"""Hybrid STAR-rings (Lee et al. 2020, arXiv 2012.03214): models circulate in rings, then the server averages.

In each local iteration every member trains the model it holds and passes it to the next one. Clients within a ring are
similar, because sequential training forgets where their distributions vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedvitals.lab import streams
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.topologies.exchanges import pass_to_next

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation


class Rings(Description, frozen=True):
    """Models circulate in rings of similar clients, and the server averages them all.

    Args:
        rings: The number of rings; by default a third of the clients: the paper has 33 of 100.
        every: Mini-batches that a member trains before it passes the model on.
    """

    later: ClassVar[tuple[str, ...]] = ("every",)

    rings: int | None = None  # by default a third of the clients: the paper has 33 of 100
    every: int = 1  # mini-batches that a member trains before it passes the model on

    def check(self, experiment: Experiment) -> None:
        require(self.every >= 1, "every of rings", self.every, "1 mini-batch or more")
        allowed = f"from 1 to the number of clients, {experiment.clients}"
        require(1 <= self._count(experiment) <= experiment.clients, "number of rings", self.rings, allowed)

    def _count(self, experiment: Experiment) -> int:
        return max(1, experiment.clients // 3) if self.rings is None else self.rings

    def fixed_groups(self, experiment: Experiment, labels: Mapping[Node, Tensor]) -> dict[str, tuple[Node, ...]]:
        """Return the members of each ring, from each client's numbers of samples per class."""
        return build_rings(labels, self._count(experiment), streams.stream(experiment.seed, "rings"))

    def round(self, federation: Federation) -> Tensor:
        rings = federation.site.groups
        present = federation.present_members(rings)
        federation.groups(rings)

        model = federation.server.model
        tasks = [
            Task(federation.round, m, model, group=ring, exchange=pass_to_next, every=self.every)
            for ring, m in present.items()
        ]
        return federation.aggregate(self._announced(federation, present, federation.train(tasks)))

    def _announced(
        self, federation: Federation, rings: Mapping[str, tuple[Node, ...]], updates: Iterable[Update]
    ) -> Iterable[Update]:
        for update in updates:
            ring = rings[update.group or ""]
            following = ring[(ring.index(update.node) + 1) % len(ring)]
            if following != update.node:
                federation.passed(update.node, following, (update.steps - 1) // self.every)
            yield update


def build_rings(labels: Mapping[Node, Tensor], rings: int, stream: torch.Generator) -> dict[str, tuple[Node, ...]]:
    """Return rings of different lengths: a path from each client to the most similar one left, cut at random places."""
    nodes = [*labels]
    shares = torch.stack([labels[node] / labels[node].sum().clamp(min=1) for node in nodes]).double()
    taken = torch.zeros(len(nodes), dtype=torch.bool)
    path = [0]
    while len(path) < len(nodes):
        taken[path[-1]] = True
        apart = (shares - shares[path[-1]]).abs().sum(1).masked_fill(taken, torch.inf)
        path.append(int(apart.argmin()))
    cuts = sorted((torch.randperm(len(nodes) - 1, generator=stream)[: rings - 1] + 1).tolist())
    bounds = [0, *cuts, len(nodes)]
    return {
        f"ring-{i}": tuple(nodes[j] for j in path[first:last])
        for i, (first, last) in enumerate(itertools.pairwise(bounds))
    }
