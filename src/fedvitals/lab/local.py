# SPDX-License-Identifier: Apache-2.0
"""The settings of local training: optimiser, iterations and clipping."""

from __future__ import annotations

import math
from typing import Literal

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, Part, require


class Adam(Description, frozen=True):
    """Adam with the paper's defaults and Keras' ε. Its state is reset in every client-round."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning rate of adam", self.learning_rate, "above 0")
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "betas of adam", (self.beta1, self.beta2), "in [0, 1)")


class SGD(Description, frozen=True):
    """Stochastic gradient descent with momentum."""

    learning_rate: float = 0.05
    momentum: float = 0.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning rate of sgd", self.learning_rate, "above 0")
        require(0 <= self.momentum < 1, "momentum of sgd", self.momentum, "in [0, 1)")


OPTIMIZERS = (Adam, SGD)


class Clip(Part, frozen=True):
    """Gradient clipping: the norm of each tensor («tensor», as in the paper), of all tensors together, or each
    value.
    """

    limit: float = 1.0
    by: Literal["tensor", "whole", "value"] = "tensor"

    def __post_init__(self) -> None:
        require(self.limit > 0, "limit of clipping", self.limit, "above 0")


class Local(Part, frozen=True):
    """The local training of one client-round: `iterations` mini-batches, or `epochs` passes over the client's samples.

    `proximal` is FedProx's µ, the pull towards the received model.
    """

    iterations: int | None = None
    epochs: int | None = None
    batch: int = 16
    optimizer: Adam | SGD = SGD()
    clip: Clip | None = None
    proximal: float = 0.0
    keep_optimizer: bool = False  # from one round to the next, on the client; engine «stacked», in one process, only

    def __post_init__(self) -> None:
        if self.iterations is not None and self.epochs is not None:
            raise ConfigError(
                f"Local training has both iterations = {self.iterations} and epochs = {self.epochs}: give one of them."
            )
        require(self.iterations is None or self.iterations >= 1, "number of iterations", self.iterations, "at least 1")
        require(self.epochs is None or self.epochs >= 1, "number of epochs", self.epochs, "at least 1")
        require(self.batch >= 1, "batch size", self.batch, "at least 1")
        require(self.proximal >= 0, "proximal term", self.proximal, "0 or more")

    def steps(self, samples: int) -> int:
        """Return the number of mini-batches for so many samples. All batches are full: epochs run into each other."""
        if self.iterations is not None:
            return self.iterations
        return math.ceil((self.epochs or 1) * samples / self.batch)
