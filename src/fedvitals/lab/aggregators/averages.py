# SPDX-License-Identifier: Apache-2.0
"""Aggregation rules based on a weighted mean: FedAvg, FedAvgM, FedAdam and FedYogi. Robust rules are in `robust.py`.

A rule is a description whose `begin` returns an accumulator. States are added to it one by one, and its `finish`
returns the new state. What a rule carries from round to round (momentum, second moments) is stored as tensors in the
`memory` that the caller keeps and saves, so that a resumed run continues bit for bit.

Non-finite values are not an error here: a NaN passes through the mean, and detectors report it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedvitals.errors import FedvitalsError
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.tasks import Node

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment

Memory = dict[str, Tensor]


class AggregationError(FedvitalsError):
    """Raised when updates cannot be aggregated: no updates, no weight, a wrong shape, or too few for the rule."""


class WeightError(AggregationError):
    """Raised when a client claims an impossible number of samples."""


class Accumulator(Protocol):
    """One aggregation in progress."""

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        """Add a client's state, [size], copying what is kept. A state of weight 0 is checked and then left out."""

    def finish(self) -> Tensor:
        """Return the server's new state, [size], and update the rule's memory."""


class Aggregator(Description, frozen=True):
    """Base class of aggregation rules.

    `begin` takes the server's state before the round, whose first `weights` values are trained and the rest buffers.
    """

    @property
    def keeps_all_states(self) -> bool:
        """Whether the rule keeps every state until the end instead of one running sum."""
        return False

    @property
    def min_updates(self) -> int:
        """The smallest number of updates that the rule can aggregate."""
        return 1

    @property
    def needs_training(self) -> bool:
        """Whether the rule needs more of clients than their updates: these alone cannot be aggregated again."""
        return False

    def check(self, experiment: Experiment) -> None:
        """Raise ConfigError if the rule does not fit the experiment."""

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        raise NotImplementedError


def check_update(state: Tensor, weight: float, node: Node, server: Tensor) -> None:
    """Raise AggregationError if a state does not match the server's, or if its weight is not a valid number of
    samples.
    """
    if state.shape != server.shape or state.dtype != server.dtype:
        raise AggregationError(
            f"The update of {node} does not fit: got {list(state.shape)} of {state.dtype}, expected "
            f"{list(server.shape)} of {server.dtype}. Has this client the same model as the server?"
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise WeightError(
            f"The weight of {node} cannot be {weight!r}: it is a number of samples, finite and not negative."
        )


def require_positive_weight(added: int, total: float) -> None:
    """Raise AggregationError unless at least one state with a positive weight was added."""
    if added == 0:
        raise AggregationError("There is nothing to aggregate: no update was added in this round.")
    if total == 0:
        raise AggregationError(
            f"The total weight of {added} updates is 0, so they have no average. Do the clients report their samples?"
        )


class MeanAccumulator:
    """A weighted mean in one float64 vector, independent of the number of clients; `conclude` turns it into the new
    state.
    """

    def __init__(self, server: Tensor, conclude: Callable[[Tensor], Tensor]) -> None:
        self.server, self.conclude = server, conclude
        self.sum = torch.zeros(server.shape, dtype=torch.float64, device=server.device)
        self.total, self.added = 0.0, 0

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        check_update(state, weight, node, self.server)
        self.added += 1
        if weight > 0:  # else 0 × NaN would be NaN
            self.sum.add_(state, alpha=weight)
            self.total += weight

    def finish(self) -> Tensor:
        require_positive_weight(self.added, self.total)
        return self.conclude(self.sum / self.total).to(self.server.dtype)


def weighted_mean(states: Tensor, samples: Tensor) -> Tensor:
    """Return the mean of the rows of [n, size], weighted by [n]; bit for bit what FedAvg gives in this order."""
    if states.dim() != 2 or samples.shape != states.shape[:1]:
        raise AggregationError(
            f"A weighted mean needs states [n, size] and samples [n]; got {list(states.shape)}, {list(samples.shape)}."
        )
    if not len(states):
        require_positive_weight(0, 0)
    running = MeanAccumulator(states[0], lambda mean: mean)
    for row, (state, weight) in enumerate(zip(states, samples.tolist(), strict=True)):
        running.add(state, weight, f"row {row}")
    return running.finish()


class FedAvg(Aggregator, frozen=True):
    """The mean weighted by samples (McMahan et al. 2017).

    Args:
        server_learning_rate: The factor of the mean change; 1 is plain FedAvg.
    """

    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        require_positive("server_learning_rate of fedavg", self.server_learning_rate)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory  # it remembers nothing

        def conclude(mean: Tensor) -> Tensor:
            # At rate 1 the mean itself, since server + (mean − server) rounds, and a server's NaN would stay for ever.
            rate = self.server_learning_rate
            return mean if rate == 1 else scaled_step(server, mean, weights, rate)

        return MeanAccumulator(server, conclude)


class FedAvgM(Aggregator, frozen=True):
    """FedAvg with server momentum (Hsu, Qi, Brown 2019): v ← β·v + Δ, x ← x + η·v, where Δ = mean − x.

    Args:
        momentum: β.
        learning_rate: η.
    """

    momentum: float = 0.9
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        require_below_one("momentum of fedavgm", self.momentum)
        require_positive("learning_rate of fedavgm", self.learning_rate)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        velocity = stored_moment(memory, "momentum", server, weights)

        def conclude(mean: Tensor) -> Tensor:
            velocity.mul_(self.momentum).add_(mean[:weights] - server[:weights])
            memory["momentum"] = velocity
            return apply_step(server, mean, self.learning_rate * velocity)

        return MeanAccumulator(server, conclude)


class Adaptive(Aggregator, frozen=True):
    """The step that FedAdam and FedYogi share; they differ in how the second moment follows the squared difference."""

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        kind = type(self).__name__.lower()
        require_positive(f"learning_rate of {kind}", self.learning_rate)
        require_below_one(f"beta1 of {kind}", self.beta1)
        require_below_one(f"beta2 of {kind}", self.beta2)
        require_positive(f"tau of {kind}", self.tau)

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the next second moment, from the last one and the squared difference."""
        raise NotImplementedError

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        m = stored_moment(memory, "momentum", server, weights)
        v = stored_moment(memory, "second_moment", server, weights, self.tau**2)  # the paper begins with v ≥ τ²

        def conclude(mean: Tensor) -> Tensor:
            difference = mean[:weights] - server[:weights]
            memory["momentum"] = self.beta1 * m + (1 - self.beta1) * difference
            memory["second_moment"] = self.second_moment(v, difference**2)
            step = self.learning_rate * memory["momentum"] / (memory["second_moment"].sqrt() + self.tau)
            return apply_step(server, mean, step)

        return MeanAccumulator(server, conclude)


class FedAdam(Adaptive, frozen=True):
    """Adam at the server (Reddi et al. 2021, algorithm 2): x ← x + η·m / (√v + τ), without bias correction.

    β₁, β₂ and τ are the paper's. The paper tunes η on a grid for each task, so 0.01 is only a starting point.

    Args:
        learning_rate: η.
        beta1: The decay rate of the mean of changes.
        beta2: The decay rate of the mean of squared changes.
        tau: τ, added to the denominator.
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


class FedYogi(Adaptive, frozen=True):
    """Yogi at the server (Reddi et al. 2021): like FedAdam, but v moves towards Δ² by steps of (1 − β₂)·Δ².

    Args:
        learning_rate: η.
        beta1: The decay rate of the mean of changes.
        beta2: The decay rate of the mean of squared changes.
        tau: τ, added to the denominator.
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


def scaled_step(server: Tensor, mean: Tensor, weights: int, rate: float) -> Tensor:
    """Return the server's state after a step towards the mean, scaled by the rate."""
    return apply_step(server, mean, rate * (mean[:weights] - server[:weights]))


def apply_step(server: Tensor, mean: Tensor, step: Tensor) -> Tensor:
    """Return the server's state with the step added to its trained weights. Buffers, such as running means, are
    averaged.
    """
    return torch.cat([server[: len(step)] + step, mean[len(step) :]])


def stored_moment(memory: Memory, name: str, server: Tensor, weights: int, initial: float = 0.0) -> Tensor:
    """Return a float64 copy of a moment from the last round, or its initial value."""
    if name not in memory:
        return torch.full((weights,), initial, dtype=torch.float64, device=server.device)
    kept = memory[name]
    if kept.shape != (weights,):
        raise AggregationError(
            f"The remembered '{name}' has the shape {list(kept.shape)}, but the model has {weights} trained weights. "
            "It belongs to another model: begin with an empty memory."
        )
    return kept.to(torch.float64, copy=True)


def require_positive(what: str, value: float) -> None:
    """Raise ConfigError unless the value is finite and above 0."""
    require(math.isfinite(value) and value > 0, what, value, "finite and above 0")


def require_below_one(what: str, value: float) -> None:
    """Raise ConfigError unless the value is in [0, 1)."""
    require(0 <= value < 1, what, value, "from 0 up to, but not including, 1")


AVERAGING = (FedAvg, FedAvgM, FedAdam, FedYogi)
