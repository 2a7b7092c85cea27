# SPDX-License-Identifier: Apache-2.0
"""FedNova (Wang et al. 2020): updates divided by how much their client trained, so that none counts by its steps.

A client's change is a weighted sum of its gradients; dᵢ is the change divided by the sum of these weights, ‖aᵢ‖₁
(`Local.gradient_weight`). The server's step is Σ pᵢ·‖aᵢ‖₁ times Σ pᵢ·dᵢ, where pᵢ are the shares of samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.aggregators.averages import (
    Aggregator,
    MeanAccumulator,
    Memory,
    apply_step,
    check_update,
    require_positive_weight,
)
from fedvitals.lab.aggregators.drift import require_centralized
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.local import Adam

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment


class FedNova(Aggregator, frozen=True):
    """The mean of updates normalised by their local steps. Clients train with SGD, with momentum or a proximal term."""

    @property
    def needs_training(self) -> bool:
        return True

    @property
    def counts_steps(self) -> bool:
        """Whether `add` is given each client's steps."""
        return True

    def check(self, experiment: Experiment) -> None:
        require_centralized(self, experiment)
        local = experiment.local
        if isinstance(local.optimizer, Adam) or local.keep_optimizer:
            raise ConfigError(
                "The aggregator fednova needs clients whose change is a known sum of gradients: "
                'optimizer = {kind = "sgd"}, with or without momentum, and no keep_optimizer.'
            )
        if local.optimizer.learning_rate * local.proximal >= 1:
            raise ConfigError("The aggregator fednova needs a proximal term below one over the learning rate.")

    def begin(self, server: Tensor, memory: Memory, weights: int) -> NormalizedMean:
        del memory  # it remembers nothing
        return NormalizedMean(server, weights)


class NormalizedMean(MeanAccumulator):
    """A weighted mean of changes per step, multiplied by the mean of the steps."""

    def __init__(self, server: Tensor, weights: int) -> None:
        super().__init__(server, lambda mean: mean)
        self.weights, self.steps = weights, 0.0

    def add(self, state: Tensor, weight: float, node: Node, *, steps: float = 1.0) -> None:
        check_update(state, weight, node, self.server)
        self.added += 1
        if weight > 0:
            change = (state[: self.weights].double() - self.server[: self.weights]) / steps
            self.sum[: self.weights].add_(change, alpha=weight)
            self.sum[self.weights :].add_(state[self.weights :], alpha=weight)
            self.total += weight
            self.steps += weight * steps

    def finish(self) -> Tensor:
        require_positive_weight(self.added, self.total)
        mean = self.sum / self.total
        step = mean[: self.weights] * (self.steps / self.total)
        return apply_step(self.server, mean, step).to(self.server.dtype)
