# SPDX-License-Identifier: Apache-2.0
"""Hierarchical learning: clients average at their edge node after each local iteration, the server averages the edges.

After the paper (5 edges of 20 clients). Clients with similar label distributions are spread over the edges, so that
each edge resembles the whole (after Mhaisen et al. 2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.topologies.exchanges import average

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation


class Hierarchical(Description, frozen=True):
    """Clients average at edge nodes after each local iteration, and the server averages the edges.

    Args:
        edges: The number of edge nodes.
        every: Mini-batches between two averages at an edge.
    """

    later: ClassVar[tuple[str, ...]] = ("every",)

    edges: int = 5
    every: int = 1  # mini-batches between two averages at an edge

    def check(self, experiment: Experiment) -> None:
        require(self.every >= 1, "every of hierarchical", self.every, "1 mini-batch or more")
        allowed = f"from 1 to the number of clients, {experiment.clients}"
        require(1 <= self.edges <= experiment.clients, "number of edges", self.edges, allowed)

    def fixed_groups(self, experiment: Experiment, labels: Mapping[Node, Tensor]) -> dict[str, tuple[Node, ...]]:  # noqa: ARG002
        """Return the members of each edge, from each client's numbers of samples per class."""
        return assign_to_edges(labels, self.edges)

    def updates_together(self, clients: int) -> int:  # noqa: ARG002
        """Return how many updates the server aggregates at once: those of the edges."""
        return self.edges

    def round(self, federation: Federation) -> Tensor:
        edges = federation.site.groups
        present = federation.present_members(edges)
        federation.groups(edges)

        model = federation.server.model
        tasks = [
            Task(federation.round, members, model, group=edge, exchange=average, every=self.every, parent=edge)
            for edge, members in present.items()
        ]
        return federation.aggregate(self._edges(federation, federation.train(tasks)))

    def _edges(self, federation: Federation, updates: Iterable[Update]) -> Iterable[Update]:
        """Yield each edge's average, as it is sent to the server."""
        for edge, members in itertools.groupby(updates, key=lambda update: update.group):
            federation.passed("server", edge or "")
            gathered = GroupMean(edge or "")
            for update in members:
                gathered.add(update)
                # All exchanges but the last: that one was announced with the update itself.
                times = (update.steps - 1) // self.every
                federation.passed(update.node, edge or "", times, kind="update")
                federation.passed(edge or "", update.node, times)
            federation.passed(edge or "", "server", kind="update")
            yield gathered.update()


class GroupMean:
    """The weighted mean of a group, accumulated member by member."""

    def __init__(self, node: Node) -> None:
        self._node, self._samples = node, 0
        self._sum: Tensor | None = None

    def add(self, update: Update) -> None:
        weighted = update.state.double() * update.samples
        self._sum = weighted if self._sum is None else self._sum.add_(weighted)
        self._samples += update.samples
        self._last = update

    def update(self) -> Update:
        assert self._sum is not None  # noqa: S101 - a group has members
        state = (self._sum / self._samples).to(torch.float32)
        return Update(self._node, state, self._last.start, self._samples, self._node)


def assign_to_edges(labels: Mapping[Node, Tensor], edges: int) -> dict[str, tuple[Node, ...]]:
    """Return the members of each edge: the largest clients first, each to the edge that then resembles the whole
    most.
    """
    whole = torch.stack([*labels.values()]).sum(0).double()
    room = -(-len(labels) // edges)
    totals = torch.zeros(edges, len(whole), dtype=torch.float64)
    members: list[list[Node]] = [[] for _ in range(edges)]
    for node in sorted(labels, key=lambda n: -int(labels[n].sum())):
        # How far each edge would be from its fair share of every class, were this client there.
        distance = (totals + labels[node] - whole / edges).clamp(min=0).square().sum(1)
        before = (totals - whole / edges).clamp(min=0).square().sum(1)
        cost = distance - before + torch.tensor([len(m) for m in members]) * 1e-9
        cost[[i for i, m in enumerate(members) if len(m) >= room]] = torch.inf
        fewest = min(len(m) for m in members)
        cost[[i for i, m in enumerate(members) if len(m) > fewest]] = torch.inf  # one each in turn: equal sizes
        chosen = int(cost.argmin())
        members[chosen].append(node)
        totals[chosen] += labels[node]
    order = {node: i for i, node in enumerate(labels)}
    return {f"edge-{i}": tuple(sorted(m, key=lambda n: order[n])) for i, m in enumerate(members)}
