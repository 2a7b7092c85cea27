# SPDX-License-Identifier: Apache-2.0
"""Faults in the configuration of the federation, and faults of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from fedvitals.lab.aggregators.averages import scaled_step
from fedvitals.lab.data.partition import ClassesPerClient
from fedvitals.lab.description import kind_of, require
from fedvitals.lab.faults.fault import AtLeastOne, Count, Fault, Positive, RunFault

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment


class Overfitting(RunFault, frozen=True):
    """A client that trains for many epochs on few samples.

    Args:
        samples: How many samples the client has.
        epochs: How many epochs it trains on them.
    """

    samples: Count = 16
    epochs: Count = 50

    def experiment(self, experiment: Experiment) -> Experiment:
        local = msgspec.structs.replace(experiment.local, iterations=None, epochs=self.epochs)
        return msgspec.structs.replace(experiment, local=local)

    def data(self, x: Tensor, y: Tensor, classes: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        kept = torch.randperm(len(y), generator=stream)[: self.samples]
        return x[kept], y[kept]


class ClientDrift(RunFault, frozen=True):
    """Clients that drift apart: each knows few classes and trains long with a high rate between two aggregations.

    Args:
        classes: How many classes each client knows.
        iterations: Local iterations between two aggregations.
        factor: The learning rate, as a multiple of the experiment's.
    """

    classes: Count = 2
    iterations: Count = 100
    factor: AtLeastOne = 5.0  # of the learning rate

    def experiment(self, experiment: Experiment) -> Experiment:
        optimizer = experiment.local.optimizer
        faster = msgspec.structs.replace(optimizer, learning_rate=optimizer.learning_rate * self.factor)
        local = msgspec.structs.replace(
            experiment.local, iterations=self.iterations, epochs=None, optimizer=faster, proximal=0.0
        )
        return msgspec.structs.replace(experiment, partition=ClassesPerClient(self.classes), local=local)


class _ServerRate(Fault, frozen=True, kw_only=True):
    nodes: tuple[str, ...] | str = ("server",)
    factor: Positive = 1.0
    strikes: ClassVar[Literal["clients", "server", "run"]] = "server"
    strength_field: ClassVar[str | None] = "factor"
    harmless: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = kind_of(type(self).__name__)
        require(self.nodes == ("server",), f"nodes of {kind}", self.nodes, '["server"], or left out')

    def server(self, before: Tensor, after: Tensor, weights: int) -> Tensor:
        return scaled_step(before, after, weights, self.factor)


class ServerRateTooHigh(_ServerRate, frozen=True):
    """An untuned server learning rate: the server's step is `factor` times too large.

    Args:
        factor: How many times too large the server's step is.
    """

    factor: Positive = 3.0
    issue: ClassVar[str] = "divergence"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor > 1, "factor of server_rate_too_high", self.factor, "above 1")


class ServerRateTooLow(_ServerRate, frozen=True):
    """An untuned server learning rate: the server takes only `factor` of its step.

    Args:
        factor: The share of its step that the server takes.
    """

    factor: Positive = 0.05
    issue: ClassVar[str] = "plateau"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.factor < 1, "factor of server_rate_too_low", self.factor, "below 1")


FAULTS = (Overfitting, ClientDrift, ServerRateTooHigh, ServerRateTooLow)
