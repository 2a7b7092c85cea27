# SPDX-License-Identifier: Apache-2.0
"""From the clients' states to the server's next one: the family of averages. `robust.py` has the rules against liars.

A rule is a description with `begin`: it gives a small object to which states are added one by one, and whose `finish`
gives the new state. What a rule remembers from round to round (momentum, second moments) lies as tensors in the
`memory` that the caller keeps and saves, so that a resumed run goes on bit for bit.

What is not finite is no error here: a NaN passes through an average, and is found by whoever watches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fedvitals.errors import FedvitalsError
from fedvitals.lab.description import Description, require
from fedvitals.lab.engines.work import Node

Memory = dict[str, Tensor]


class AggregationError(FedvitalsError):
    """Updates that cannot be aggregated: none, of no weight, of a wrong shape, or too few for the rule."""


class WeightError(AggregationError):
    """A claimed number of samples that is none."""


class Sum(Protocol):
    """One aggregation in progress."""

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        """Takes a client's state, [size], and copies what it keeps. Weight 0 leaves it out, but it is still checked."""

    def finish(self) -> Tensor:
        """The new state of the server, [size]. Only here does the rule's memory change."""


class Aggregator(Description, frozen=True):
    """A rule. `server` is the state before the round; its first `weights` values are trained, the rest are buffers."""

    @property
    def holds(self) -> bool:
        """Whether the rule keeps every state until the end, instead of one sum."""
        return False

    @property
    def fewest(self) -> int:
        """How many updates it needs at least."""
        return 1

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Sum:
        raise NotImplementedError


def checked(state: Tensor, weight: float, node: Node, server: Tensor) -> None:
    """Refuses a state that does not fit the server's, and a weight that is none."""
    if state.shape != server.shape or state.dtype != server.dtype:
        raise AggregationError(
            f"The update of {node} does not fit: got {list(state.shape)} of {state.dtype}, expected "
            f"{list(server.shape)} of {server.dtype}. Has this client the same model as the server?"
        )
    if not (math.isfinite(weight) and weight >= 0):
        raise WeightError(
            f"The weight of {node} cannot be {weight!r}: it is a number of samples, finite and not negative."
        )


def refuse_nothing(added: int, total: float) -> None:
    """Stands before each division by the total weight."""
    if added == 0:
        raise AggregationError("There is nothing to aggregate: no update was added in this round.")
    if total == 0:
        raise AggregationError(
            f"The total weight of {added} updates is 0, so they have no average. Do the clients report their samples?"
        )


class Averaging:
    """A weighted mean in one float64 vector, however many clients there are; `conclude` makes the new state of it."""

    def __init__(self, server: Tensor, conclude: Callable[[Tensor], Tensor]) -> None:
        self.server, self.conclude = server, conclude
        self.sum = torch.zeros(server.shape, dtype=torch.float64, device=server.device)
        self.total, self.added = 0.0, 0

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        checked(state, weight, node, self.server)
        self.added += 1
        if weight > 0:  # else 0 × NaN would be NaN
            self.sum.add_(state, alpha=weight)
            self.total += weight

    def finish(self) -> Tensor:
        refuse_nothing(self.added, self.total)
        return self.conclude(self.sum / self.total).to(self.server.dtype)


def weighted_mean(states: Tensor, samples: Tensor) -> Tensor:
    """The mean of the rows of [n, size], weighted by [n]: bit for bit what FedAvg gives in this order."""
    if states.dim() != 2 or samples.shape != states.shape[:1]:
        raise AggregationError(
            f"A weighted mean needs states [n, size] and samples [n]; got {list(states.shape)}, {list(samples.shape)}."
        )
    if not len(states):
        refuse_nothing(0, 0)
    running = Averaging(states[0], lambda mean: mean)
    for row, (state, weight) in enumerate(zip(states, samples.tolist(), strict=True)):
        running.add(state, weight, f"row {row}")
    return running.finish()


class FedAvg(Aggregator, frozen=True):
    """The mean, weighted by samples (McMahan et al. 2017); a server learning rate other than 1 goes short or beyond."""

    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        positive("server_learning_rate of fedavg", self.server_learning_rate)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Sum:
        del memory  # it remembers nothing

        def conclude(mean: Tensor) -> Tensor:
            # At rate 1 the mean itself, since server + (mean − server) rounds, and a server's NaN would stay for ever.
            return stepped(server, mean, weights, self.server_learning_rate) if self.server_learning_rate != 1 else mean

        return Averaging(server, conclude)


class FedAvgM(Aggregator, frozen=True):
    """FedAvg with server momentum (Hsu, Qi, Brown 2019): v ← β·v + Δ, x ← x + η·v, where Δ = mean − x."""

    momentum: float = 0.9
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        share("momentum of fedavgm", self.momentum)
        positive("learning_rate of fedavgm", self.learning_rate)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Sum:
        velocity = remembered(memory, "momentum", server, weights)

        def conclude(mean: Tensor) -> Tensor:
            velocity.mul_(self.momentum).add_(mean[:weights] - server[:weights])
            memory["momentum"] = velocity
            return moved(server, mean, self.learning_rate * velocity)

        return Averaging(server, conclude)


class FedAdam(Aggregator, frozen=True):
    """Adam at the server (Reddi et al. 2021, algorithm 2): x ← x + η·m / (√v + τ), without bias correction.

    β₁, β₂ and τ are the paper's; it tunes η for each task on a grid, so 0.01 is a place to start from.
    """

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        adaptive(self, self.learning_rate, self.beta1, self.beta2, self.tau)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Sum:
        def second_moment(v: Tensor, squared: Tensor) -> Tensor:
            return self.beta2 * v + (1 - self.beta2) * squared

        return adapting(server, memory, weights, second_moment, (self.learning_rate, self.beta1, self.tau))


class FedYogi(Aggregator, frozen=True):
    """Yogi at the server (Reddi et al. 2021): like FedAdam, but v moves towards Δ² by steps of (1 − β₂)·Δ²."""

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        adaptive(self, self.learning_rate, self.beta1, self.beta2, self.tau)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Sum:
        def second_moment(v: Tensor, squared: Tensor) -> Tensor:
            return v - (1 - self.beta2) * squared * torch.sign(v - squared)

        return adapting(server, memory, weights, second_moment, (self.learning_rate, self.beta1, self.tau))


def adapting(
    server: Tensor,
    memory: Memory,
    weights: int,
    second_moment: Callable[[Tensor, Tensor], Tensor],
    settings: tuple[float, float, float],
) -> Averaging:
    """The step that FedAdam and FedYogi share; they differ in how the second moment follows the squared difference."""
    learning_rate, beta1, tau = settings
    m = remembered(memory, "momentum", server, weights)
    v = remembered(memory, "second_moment", server, weights, tau**2)  # the paper begins with v ≥ τ²

    def conclude(mean: Tensor) -> Tensor:
        difference = mean[:weights] - server[:weights]
        memory["momentum"] = beta1 * m + (1 - beta1) * difference
        memory["second_moment"] = second_moment(v, difference**2)
        return moved(server, mean, learning_rate * memory["momentum"] / (memory["second_moment"].sqrt() + tau))

    return Averaging(server, conclude)


def stepped(server: Tensor, mean: Tensor, weights: int, rate: float) -> Tensor:
    return moved(server, mean, rate * (mean[:weights] - server[:weights]))


def moved(server: Tensor, mean: Tensor, step: Tensor) -> Tensor:
    """The trained weights go by the step; buffers, such as running means, have no gradient: they are averaged."""
    return torch.cat([server[: len(step)] + step, mean[len(step) :]])


def remembered(memory: Memory, name: str, server: Tensor, weights: int, initial: float = 0.0) -> Tensor:
    """A float64 copy of what was kept in the last round, or its first value."""
    if name not in memory:
        return torch.full((weights,), initial, dtype=torch.float64, device=server.device)
    kept = memory[name]
    if kept.shape != (weights,):
        raise AggregationError(
            f"The remembered '{name}' has the shape {list(kept.shape)}, but the model has {weights} trained weights. "
            "It belongs to another model: begin with an empty memory."
        )
    return kept.to(torch.float64, copy=True)


def adaptive(rule: Description, learning_rate: float, beta1: float, beta2: float, tau: float) -> None:
    kind = type(rule).__name__.lower()
    positive(f"learning_rate of {kind}", learning_rate)
    share(f"beta1 of {kind}", beta1)
    share(f"beta2 of {kind}", beta2)
    positive(f"tau of {kind}", tau)


def positive(what: str, value: float) -> None:
    require(math.isfinite(value) and value > 0, what, value, "finite and above 0")


def share(what: str, value: float) -> None:
    require(0 <= value < 1, what, value, "from 0 up to, but not including, 1")


AVERAGING = (FedAvg, FedAvgM, FedAdam, FedYogi)
