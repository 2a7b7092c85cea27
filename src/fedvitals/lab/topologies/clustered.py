# SPDX-License-Identifier: Apache-2.0
"""Dynamic clusters, each with its own model: SR-FCA (Harshvardhan, Ghosh, Mazumdar 2022).

At the start every client trains alone, and clients within λ of each other form a cluster. Then each cluster trains its
own model (*refine*), and every few rounds clients move to the nearest model (*recluster*) and close models are merged.

Where the paper leaves it open:
- Distances are Euclidean, between trained weights; buffers, such as running means, do not count.
- Clients connected by steps of at most λ form one cluster (the authors' code takes a random client and its neighbours).
  Clusters are merged by the same rule, their models weighted by samples.
- Members of a group smaller than `smallest` join the nearest remaining cluster; if none is large enough, all form one.
- A cluster's first model is the trimmed mean of its members' first models, so round 0 trains the federation, too.
- A client's own model is the one it has just trained, not the one of round 0: nothing is kept of clients.
- A client that was absent at the start trains the global model when first asked, and joins the nearest cluster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.kernels.ranked_means import trimmed_mean
from fedvitals.lab.aggregators.averages import AggregationError, FedAvg, MeanAccumulator, check_update
from fedvitals.lab.aggregators.robust import update_gram_matrix
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node, Task
from fedvitals.lab.faults import table as fault_table

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation

States = dict[str, Tensor]  # [size] by the name of a client or a cluster
NOTE = "clusters"


class Clustered(Description, frozen=True):
    """Clients in clusters that follow the similarity of their models.

    Args:
        threshold: λ: models within this distance belong together.
        smallest: t: the fewest members of a cluster.
        trim: β: the share cut off at each end of every coordinate.
        every: Rounds between two reclusterings.
    """

    threshold: float = 5.0  # λ: models this near are of one kind
    smallest: int = 3  # t: the fewest members of a cluster
    trim: float = 0.1  # β: the share cut off at each end of every coordinate
    every: int = 4  # rounds between two reclusterings

    def __post_init__(self) -> None:
        possible = math.isfinite(self.threshold) and self.threshold > 0
        require(possible, "threshold of clustered", self.threshold, "finite and above 0")
        require(self.smallest >= 1, "smallest cluster of clustered", self.smallest, "1 member or more")
        require(0 <= self.trim < 0.5, "trim of clustered", self.trim, "from 0 up to, not including, 0.5")
        require(self.every >= 1, "number of rounds between reclusterings", self.every, "at least 1")

    def check(self, experiment: Experiment) -> None:
        if experiment.aggregator != FedAvg():
            kind = type(experiment.aggregator).__name__
            raise ConfigError(
                f"The topology 'clustered' aggregates by its own trimmed mean (`trim`), so the aggregator {kind} would "
                "have no effect. Leave the aggregator out, or choose another topology."
            )

    def round(self, federation: Federation) -> Tensor:
        clusters = Clusters.of(federation)
        own = train_cohort(federation, clusters)
        if not own:
            federation.observer.event("error", "aggregation.failed", "No update can be used. The models stay.")
            return federation.server.model.clone()
        if not clusters.members:
            self._start(clusters, own)
        else:
            self._refine(clusters, own)
            clusters.move({node: state for node, state in own.items() if node not in clusters.cluster_of})
            if federation.round % self.every == 0:
                clusters.move(own)  # recluster
                self._merge(clusters)
                self._dissolve(clusters, own)
        clusters.keep()
        return clusters.mean([*clusters.members])

    def models(self, federation: Federation) -> Mapping[Node, Tensor]:
        """Return the model that each client would receive now; clients in no cluster yet are left out."""
        clusters = Clusters.of(federation)
        return {node: clusters.models[cluster] for node, cluster in clusters.cluster_of.items()}

    def _start(self, clusters: Clusters, own: States) -> None:
        groups = connected_groups([*own], clusters.distances(own, own), self.threshold)
        large = [group for group in groups if len(group) >= self.smallest]
        if not large:
            message = f"No {self.smallest} clients are within {self.threshold:g} of each other: all are one cluster."
            clusters.federation.observer.event("warning", "clusters.none", message)
            large = [[*own]]
        for number, group in enumerate(large):
            clusters.members[f"cluster-{number}"] = group
            clusters.models[f"cluster-{number}"] = trimmed_mean([own[node] for node in group], self.trim)
        clusters.move({node: state for node, state in own.items() if node not in clusters.cluster_of})

    def _refine(self, clusters: Clusters, own: States) -> None:
        """Set each cluster's new model, from those of its members that took part."""
        federation = clusters.federation
        faults, weights = federation.experiment.faults, federation.site.layout.weights
        for cluster, members in clusters.members.items():
            states = [own[node] for node in members if node in own]
            if states:
                before, after = clusters.models[cluster], trimmed_mean(states, self.trim)
                clusters.models[cluster] = fault_table.apply_server(faults, federation.round, before, after, weights)

    def _merge(self, clusters: Clusters) -> None:
        apart = clusters.distances(clusters.models, clusters.models)
        for near in connected_groups([*clusters.models], apart, self.threshold):
            if len(near) > 1:
                message = f"{', '.join(near)} are within {self.threshold:g} of each other, and become {near[0]}."
                clusters.federation.observer.event("info", "clusters.merged", message, data={"clusters": near})
                clusters.unite(near)

    def _dissolve(self, clusters: Clusters, own: States) -> None:
        small = [cluster for cluster, members in clusters.members.items() if len(members) < self.smallest]
        if len(small) == len(clusters.members):
            clusters.unite(small)
            return
        for cluster in small:
            message = f"{cluster} has fewer than {self.smallest} members, who join the nearest others."
            clusters.federation.observer.event("info", "clusters.dissolved", message, data={"clusters": [cluster]})
            model = clusters.models.pop(cluster)
            clusters.move({node: own.get(node, model) for node in clusters.members.pop(cluster)})


def train_cohort(federation: Federation, clusters: Clusters) -> States:
    """Return the trained state of each participant, from the model of its cluster, or the global one without a
    cluster.
    """
    server, number, cohort = federation.server, federation.round, dict.fromkeys(federation.cohort())
    placed = clusters.cluster_of
    tasks = [
        Task(number, (node,), clusters.models[cluster], group=cluster)
        for cluster, members in clusters.members.items()
        for node in members
        if node in cohort
    ]
    tasks += [Task(number, (node,), server.model) for node in cohort if node not in placed]
    own: States = {}
    for update in federation.train(tasks):
        try:
            check_update(update.state, float(update.samples), update.node, server.model)
        except AggregationError as error:
            federation.refused(update.node, error)
            continue
        if update.samples:
            own[update.node] = update.state.clone()
    return own


@dataclass
class Clusters:
    """The members and models of the clusters, kept from round to round."""

    federation: Federation
    members: dict[str, list[Node]]
    models: States

    @classmethod
    def of(cls, federation: Federation) -> Clusters:
        server = federation.server
        here = set(federation.experiment.members(federation.round))
        left = {cluster: [n for n in nodes if n in here] for cluster, nodes in server.notes.get(NOTE, {}).items()}
        members = {cluster: nodes for cluster, nodes in left.items() if nodes}
        return cls(federation, members, {cluster: server.memory[cluster] for cluster in members})

    def keep(self) -> None:
        server = self.federation.server
        for cluster in server.notes.get(NOTE, {}):
            del server.memory[cluster]
        server.memory |= self.models
        server.notes[NOTE] = {cluster: [*nodes] for cluster, nodes in self.members.items()}
        self.federation.groups(self.members)

    @property
    def cluster_of(self) -> dict[Node, str]:
        return {node: cluster for cluster, members in self.members.items() for node in members}

    def move(self, states: States) -> None:
        """Move each of these clients to the nearest model; one with a non-finite state stays, or takes the first
        cluster.
        """
        if not states:
            return
        cluster_of, clusters = self.cluster_of, [*self.models]
        for node, away in zip(states, self.distances(states, self.models).tolist(), strict=True):
            known = [
                (distance, cluster) for distance, cluster in zip(away, clusters, strict=True) if distance < math.inf
            ]
            cluster_of[node] = min(known)[1] if known else cluster_of.get(node, clusters[0])
        order = self.federation.experiment.nodes
        self.members = {cluster: [n for n in order if cluster_of.get(n) == cluster] for cluster in clusters}
        for cluster in [cluster for cluster, members in self.members.items() if not members]:
            del self.members[cluster], self.models[cluster]

    def unite(self, clusters: Sequence[str]) -> None:
        """Merge clusters into the first one, with the mean of their models."""
        first, *others = clusters
        self.models[first] = self.mean(clusters)
        for cluster in others:
            self.members[first] += self.members.pop(cluster)
            del self.models[cluster]
        places = {node: place for place, node in enumerate(self.federation.experiment.nodes)}
        self.members[first].sort(key=places.__getitem__)

    def mean(self, clusters: Sequence[str]) -> Tensor:
        """Return the mean of the clusters' models, weighted by their members' samples."""
        total = MeanAccumulator(self.models[clusters[0]], lambda mean: mean)
        for cluster in clusters:
            samples = sum(self.federation.site.samples(node, self.federation.round) for node in self.members[cluster])
            total.add(self.models[cluster], float(samples), cluster)
        return total.finish()

    def distances(self, rows: States, columns: States) -> Tensor:
        """Return Euclidean distances, [rows, columns], in float64; NaN where a state is not finite."""
        states = [*rows.values(), *columns.values()]
        products = update_gram_matrix(states, states[0].new_zeros(len(states[0])), self.federation.site.layout.weights)
        lengths = products.diagonal()
        squared = lengths[:, None] + lengths[None, :] - 2 * products
        return squared.clamp(min=0).sqrt()[: len(rows), len(rows) :]


def connected_groups(names: Sequence[str], distances: Tensor, threshold: float) -> list[list[str]]:
    """Return groups whose members are linked by steps of at most `threshold`, each in the names' order."""
    near = (distances <= threshold).tolist()
    groups: list[list[int]] = []
    for place in range(len(names)):
        touching = [group for group in groups if any(near[place][other] for other in group)]
        groups = [group for group in groups if group not in touching]
        groups.append(sorted([*itertools.chain(*touching), place]))
    return [[names[place] for place in group] for group in sorted(groups)]
