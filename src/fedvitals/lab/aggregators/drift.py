# SPDX-License-Identifier: Apache-2.0
"""Rules against client drift: SCAFFOLD and FedDyn. Each client remembers a vector, and the server their mean.

A client's vector estimates its own gradient. While the client trains, a constant made of both vectors is added to its
gradients; afterwards its vector follows from how far the client came. The papers average over clients, not samples, and
so do these rules. A client's vector is taken from what it trained, before faults and compression; the server's changes
with those clients only whose updates are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.aggregators.averages import (
    Accumulator,
    Aggregator,
    MeanAccumulator,
    Memory,
    check_update,
    require_positive,
    scaled_step,
)
from fedvitals.lab.description import kind_of
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.local import Adam, Local
from fedvitals.lab.topologies.centralized import Centralized

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment
    from fedvitals.lab.federation import ServerState


class DriftCorrection(Aggregator, frozen=True):
    """Base class of rules whose clients remember a vector."""

    @property
    def needs_training(self) -> bool:
        return True

    @property
    def sends_vectors(self) -> bool:
        """Whether the vectors travel with the models, or each side computes its own."""
        return False

    def check(self, experiment: Experiment) -> None:
        require_centralized(self, experiment)
        if experiment.local.proximal:
            raise ConfigError(
                f"The aggregator {kind_of(type(self).__name__)} corrects the drift of clients itself: leave out "
                "the proximal term of local training."
            )

    def local(self, settings: Local) -> Local:
        """Return the settings that clients train with."""
        return settings

    def shift(self, server: Tensor, own: Tensor) -> Tensor:
        """Return what is added to a client's gradients, [weights], from the server's vector and its own."""
        raise NotImplementedError

    def next_vector(self, server: Tensor, own: Tensor, change: Tensor, rates: float) -> Tensor:
        """Return a client's new vector, from both vectors, the change of its weights, and the sum of the learning
        rates of its steps.
        """
        raise NotImplementedError

    def correct(self, mean: Tensor, server: Tensor) -> Tensor:
        """Return the server's new weights, from those that the updates gave and the server's new vector."""
        del server
        return mean


class Scaffold(DriftCorrection, frozen=True):
    """SCAFFOLD, option II (Karimireddy et al. 2020): gradients are shifted by c − cᵢ; cᵢ ← cᵢ − c + (x − yᵢ) / Σ η.

    Clients train with plain SGD. c and cᵢ are sent beside the models, uncompressed.

    Args:
        server_learning_rate: The factor of the mean change.
    """

    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        require_positive("server_learning_rate of scaffold", self.server_learning_rate)

    @property
    def sends_vectors(self) -> bool:
        return True

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        optimizer = experiment.local.optimizer
        if isinstance(optimizer, Adam) or optimizer.momentum:
            raise ConfigError(
                "The aggregator scaffold needs clients with plain SGD, whose steps reveal their gradients: "
                'optimizer = {kind = "sgd"} without momentum, or "plain_sgd".'
            )

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory
        rate = self.server_learning_rate
        return EqualMean(server, lambda mean: mean if rate == 1 else scaled_step(server, mean, weights, rate))

    def shift(self, server: Tensor, own: Tensor) -> Tensor:
        return server - own

    def next_vector(self, server: Tensor, own: Tensor, change: Tensor, rates: float) -> Tensor:
        return own - server - change / rates


class FedDyn(DriftCorrection, frozen=True):
    """FedDyn (Acar et al. 2021): clients minimise fᵢ(θ) − ⟨hᵢ, θ⟩ + α/2·‖θ − x‖²; hᵢ ← hᵢ − α·(θᵢ − x).

    The server's h is the mean of all hᵢ, and its new model the mean of the updates minus h / α.

    Args:
        alpha: α, the strength of the regularisation.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        require_positive("alpha of feddyn", self.alpha)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory, weights
        return EqualMean(server, lambda mean: mean)

    def local(self, settings: Local) -> Local:
        return msgspec.structs.replace(settings, proximal=self.alpha)

    def shift(self, server: Tensor, own: Tensor) -> Tensor:
        del server
        return -own

    def next_vector(self, server: Tensor, own: Tensor, change: Tensor, rates: float) -> Tensor:
        del server, rates
        return own - self.alpha * change

    def correct(self, mean: Tensor, server: Tensor) -> Tensor:
        return mean - server / self.alpha


class EqualMean(MeanAccumulator):
    """A mean in which every client with samples counts once."""

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        check_update(state, weight, node, self.server)
        super().add(state, float(weight > 0), node)


class DriftMemory:
    """The vectors of a federation's clients, float32 [weights], and of its server, float64, in the server's memory."""

    def __init__(self, rule: DriftCorrection, server: ServerState, clients: int, weights: int) -> None:
        self._rule, self._server, self._clients, self._weights = rule, server, clients, weights
        self._sent = self._vector("server")  # in this round
        self._changes: dict[Node, Tensor] = {}  # of the vectors of clients that have trained in this round

    def prepare(self, tasks: Sequence[Task], local: Local) -> list[Task]:
        """Return a round's tasks, of one client each, with their shifts; `local` are the experiment's settings."""
        self._sent, self._changes = self._vector("server"), {}
        return [self._prepare(task, local) for task in tasks]

    def _prepare(self, task: Task, local: Local) -> Task:
        (node,) = task.nodes
        shift = self._rule.shift(self._sent, self._vector(node)).float()
        return dataclasses.replace(task, shift=shift, local=self._rule.local(task.local or local))

    def trained(self, update: Update, rates: float) -> None:
        """Compute a client's new vector from its training; `rates` is the sum of its steps' learning rates."""
        own = self._vector(update.node)
        change = update.state[: self._weights].double() - update.start[: self._weights]
        vector = self._rule.next_vector(self._sent, own, change, rates).float()
        self._changes[update.node] = vector.double() - own
        self._server.memory[_key(update.node)] = vector

    def received(self, node: Node) -> None:
        """Add the change of a client's vector to the server's: its update is used."""
        self._server.memory[_key("server")] = self._vector("server") + self._changes.pop(node) / self._clients

    def correct(self, after: Tensor) -> Tensor:
        """Return the server's new state from the one that the updates gave."""
        weights = self._rule.correct(after[: self._weights].double(), self._vector("server"))
        return torch.cat((weights.to(after.dtype), after[self._weights :]))

    def _vector(self, node: Node) -> Tensor:
        vector = self._server.memory.get(_key(node))
        if vector is not None:
            return vector
        return torch.zeros(self._weights, dtype=torch.float64, device=self._server.model.device)


def _key(node: Node) -> str:
    return f"drift/{node}"


def require_centralized(rule: Aggregator, experiment: Experiment) -> None:
    """Raise ConfigError unless all clients train the server's model alone."""
    if not isinstance(experiment.topology, Centralized):
        raise ConfigError(
            f"The aggregator {kind_of(type(rule).__name__)} is for clients that train the server's model alone: "
            f'topology = "centralized"; got {type(experiment.topology).__name__}.'
        )


DRIFT = (Scaffold, FedDyn)
