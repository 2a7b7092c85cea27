# SPDX-License-Identifier: Apache-2.0
"""The settings of local training: optimiser, iterations and clipping."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from fedvitals.errors import ConfigError
from fedvitals.lab.description import Description, Part, require
from fedvitals.lab.learning_rates import Cosine, Restarts, Steps, Warmup


class Adam(Description, frozen=True):
    """Adam with the paper's defaults and Keras' ε. Its state is reset in every client-round.

    Args:
        learning_rate: The step size η.
        beta1: The decay rate of the mean of gradients.
        beta2: The decay rate of the mean of squared gradients.
        epsilon: Added to the denominator.
        weight_decay: The factor of the weights that is added to the gradients.
    """

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7
    weight_decay: float = 0.0

    later = ("weight_decay",)

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning rate of adam", self.learning_rate, "above 0")
        require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "betas of adam", (self.beta1, self.beta2), "in [0, 1)")
        require(self.weight_decay >= 0, "weight decay of adam", self.weight_decay, "0 or more")


class SGD(Description, frozen=True):
    """Stochastic gradient descent, as `torch.optim.SGD`.

    Args:
        learning_rate: The step size η.
        momentum: The share of the last step that is repeated.
        weight_decay: The factor of the weights that is added to the gradients.
    """

    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0

    later = ("weight_decay",)

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning rate of sgd", self.learning_rate, "above 0")
        require(0 <= self.momentum < 1, "momentum of sgd", self.momentum, "in [0, 1)")
        require(self.weight_decay >= 0, "weight decay of sgd", self.weight_decay, "0 or more")


class PlainSGD(Description, frozen=True):
    """Plain gradient descent, p ← p − η·g, without an optimiser object, so that observers see none.

    Args:
        learning_rate: η.
    """

    learning_rate: float = 0.05
    momentum: ClassVar[float] = 0.0
    weight_decay: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning rate of plain_sgd", self.learning_rate, "above 0")


Optimizer = Adam | SGD | PlainSGD
OPTIMIZERS = (Adam, SGD, PlainSGD)


class Clip(Part, frozen=True):
    """Gradient clipping, by norm or by value.

    Args:
        limit: The largest norm, or value.
        by: What is limited: the norm of each «tensor» (as in the paper), of the «whole» gradient, or each «value».
    """

    limit: float = 1.0
    by: Literal["tensor", "whole", "value"] = "tensor"

    def __post_init__(self) -> None:
        require(self.limit > 0, "limit of clipping", self.limit, "above 0")


class Local(Part, frozen=True):
    """The local training of one client-round.

    Args:
        iterations: The number of mini-batches; or give `epochs`.
        epochs: The number of passes over the client's samples.
        batch: Samples in a mini-batch.
        optimizer: `lab.SGD`, `lab.Adam` or `lab.PlainSGD`.
        clip: Gradient clipping; None: none.
        proximal: FedProx's µ, the pull towards the received model.
        keep_optimizer: Whether a client keeps its optimiser's state from one round to the next; engine «stacked», in
            one process, only.
        schedule: Changes the learning rate from round to round, such as `lab.Cosine(20)`.
        accumulate: The number of mini-batches whose mean gradient makes one iteration.
        precision: The precision of products, «float32» or «bfloat16»; weights and sums are float32.
    """

    iterations: int | None = None
    epochs: int | None = None
    batch: int = 16
    optimizer: Optimizer = SGD()
    clip: Clip | None = None
    proximal: float = 0.0
    keep_optimizer: bool = False  # from one round to the next, on the client; engine «stacked», in one process, only
    schedule: Warmup | Cosine | Steps | Restarts | None = None
    accumulate: int = 1
    precision: str = "float32"  # or "bfloat16": of products; weights and sums are float32

    later = ("accumulate", "precision")

    def __post_init__(self) -> None:
        if self.iterations is not None and self.epochs is not None:
            raise ConfigError(
                f"Local training has both iterations = {self.iterations} and epochs = {self.epochs}: give one of them."
            )
        require(self.iterations is None or self.iterations >= 1, "number of iterations", self.iterations, "at least 1")
        require(self.epochs is None or self.epochs >= 1, "number of epochs", self.epochs, "at least 1")
        require(self.batch >= 1, "batch size", self.batch, "at least 1")
        require(self.proximal >= 0, "proximal term", self.proximal, "0 or more")
        require(self.accumulate >= 1, "number of accumulated mini-batches", self.accumulate, "at least 1")
        require(self.precision in ("float32", "bfloat16"), "precision", self.precision, '"float32" or "bfloat16"')

    @property
    def step_samples(self) -> int:
        """The number of samples of one iteration."""
        return self.batch * self.accumulate

    def steps(self, samples: int) -> int:
        """Return the number of iterations for so many samples. All batches are full: epochs run into each other."""
        if self.iterations is not None:
            return self.iterations
        return math.ceil((self.epochs or 1) * samples / self.step_samples)

    def at(self, round_index: int) -> Local:
        """Return the settings of one round: the schedule applied to the learning rate."""
        if self.schedule is None:
            return self
        rate = self.optimizer.learning_rate * self.schedule.factor(round_index)
        optimizer = msgspec.structs.replace(self.optimizer, learning_rate=rate)
        return msgspec.structs.replace(self, optimizer=optimizer, schedule=None)

    def gradient_weight(self, steps: int) -> float:
        """Return how much the gradients of so many iterations weigh in the change, in units of the learning rate.

        Without momentum and proximal term that is the number of iterations. It is the change that a gradient of −1 in
        every iteration would make at rate 1: the norm ‖aᵢ‖₁ of FedNova (Wang et al. 2020).
        """
        if isinstance(self.optimizer, Adam):
            raise ConfigError("The steps of adam are no weighted sum of gradients. Use sgd or plain_sgd.")
        pull = self.optimizer.learning_rate * self.proximal
        change = velocity = 0.0
        for _ in range(steps):
            velocity = self.optimizer.momentum * velocity + 1 - pull * change
            change += velocity
        return change
