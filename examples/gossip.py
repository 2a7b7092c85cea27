# SPDX-License-Identifier: Apache-2.0
"""A topology of your own in one file: gossip on a ring, without a server.

Every client trains its own model, then averages it with those of its two neighbours. What is tested at the end of a
round, the mean of all models, is nobody's: it never goes back to the clients. With `iterations=1` they gossip after
every mini-batch (D-PSGD, Lian et al. 2017).

Run it with  python examples/gossip.py
"""

from dataclasses import dataclass

import torch

from fedvitals import lab


@dataclass(frozen=True)  # equal settings say the same of themselves: a saved run knows what it belongs to
class Gossip:
    def check(self, experiment):
        """Any experiment will do."""

    def round(self, federation):
        server, ring, everybody = federation.server, federation.cohort(), federation.experiment.nodes
        if not server.memory:  # in the first round all begin with the same model
            server.memory = {node: server.model.clone() for node in everybody}

        # A task's parent is who exchanges models with the client: here its neighbour on the right.
        tasks = [
            lab.Task(federation.round, (node,), server.memory[node], parent=ring[(place + 1) % len(ring)])
            for place, node in enumerate(ring)
        ]
        trained = {update.node: update.state.clone() for update in federation.train(tasks)}

        ring = [*trained]  # who failed is left out, and keeps what it had
        for place, node in enumerate(ring):
            around = {ring[place - 1], node, ring[(place + 1) % len(ring)]}
            server.memory[node] = torch.stack([trained[n] for n in ring if n in around]).mean(0)
        return torch.stack([server.memory[node] for node in everybody]).mean(0) if trained else server.model

    def models(self, federation):
        """What each client holds, for its local test."""
        return federation.server.memory


if __name__ == "__main__":
    for topology in (Gossip(), lab.Centralized()):
        experiment = lab.Experiment(dataset="digits", model="mlp", clients=10, rounds=20, topology=topology)
        result = lab.run(experiment)
        print(f"{type(topology).__name__}: accuracy {result.accuracy:.3f}")  # noqa: T201
