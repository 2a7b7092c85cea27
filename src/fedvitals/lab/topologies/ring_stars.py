# SPDX-License-Identifier: Apache-2.0
"""A ring of stars (RING-stars, Lee et al. 2020, arXiv 2012.03214), and a plain ring of clients: one model goes round.

A star's members train the model that reached their hub, the hub averages them, and the average goes on to the next
star; the next round begins with what the last star passed on. Nothing is averaged over the whole ring. A model that is
trained sequentially forgets where the data of the stations differ, so stars are composed to resemble the whole; in a
plain ring, where every client is a station, neighbours are the most similar clients instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from fedvitals.lab import streams
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node, Task
from fedvitals.lab.topologies.hierarchical import assign_to_edges
from fedvitals.lab.topologies.rings import build_rings

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import Federation


class RingStars(Description, frozen=True):
    """One model goes from star to star; in each, all members train it and their hub averages them.

    Args:
        stars: The number of stars, each of which resembles the whole.
    """

    stars: int = 5

    def check(self, experiment: Experiment) -> None:
        allowed = f"from 1 to the number of clients, {experiment.clients}"
        require(1 <= self.stars <= experiment.clients, "number of stars", self.stars, allowed)

    def fixed_groups(self, experiment: Experiment, labels: Mapping[Node, Tensor]) -> dict[str, tuple[Node, ...]]:  # noqa: ARG002
        """Return the members of each star, from each client's numbers of samples per class."""
        edges = assign_to_edges(labels, self.stars)
        return {f"star-{place}": members for place, members in enumerate(edges.values())}

    def updates_together(self, clients: int) -> int:
        """Return how many updates the smallest star's hub aggregates at once."""
        return max(1, clients // self.stars)

    def round(self, federation: Federation) -> Tensor:
        stars = federation.site.groups
        present = {star: members for star, members in federation.present_members(stars).items() if members}
        federation.groups(stars)

        model = federation.server.model
        for star, members in present.items():
            tasks = [Task(federation.round, (node,), model, group=star, parent=star) for node in members]
            model = federation.aggregate(federation.train(tasks), model)
        for hub, following in itertools.pairwise([*present, *[*present][:1]]):
            if hub != following:
                federation.passed(hub, following)
        return model


class Ring(Description, frozen=True):
    """One model goes from client to client: each trains it for its local iterations and passes it on."""

    def check(self, experiment: Experiment) -> None:
        """Accept any experiment."""

    def fixed_groups(self, experiment: Experiment, labels: Mapping[Node, Tensor]) -> dict[str, tuple[Node, ...]]:
        """Return the clients in the order of the ring: from each one to the most similar that is left."""
        return build_rings(labels, 1, streams.stream(experiment.seed, "rings"))

    def updates_together(self, clients: int) -> int:  # noqa: ARG002
        """Return 1: a client's own model is passed on."""
        return 1

    def round(self, federation: Federation) -> Tensor:
        federation.groups(federation.site.groups)
        ((ring, members),) = federation.present_members(federation.site.groups).items()

        model = federation.server.model
        for node, following in zip(members, (*members[1:], *members[:1]), strict=True):
            task = Task(federation.round, (node,), model, group=ring, parent=following)
            model = federation.aggregate(federation.train([task]), model)
        return model
