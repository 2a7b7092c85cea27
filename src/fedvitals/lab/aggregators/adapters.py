# SPDX-License-Identifier: Apache-2.0
"""Means of low-rank adapters for which averaging A and B as they are is not enough (see `lab.adapters.Lora`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvitals.lab.adapters import RESIDUAL, A, B
from fedvitals.lab.aggregators.averages import (
    Accumulator,
    MeanAccumulator,
    Memory,
    check_update,
    require_positive_weight,
)
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.state import StateLayout


@dataclass(frozen=True)
class PartitionedMean:
    """Averages each number over the clients that have it; `held` gives which those are, [size], or None for all."""

    held: Callable[[Node], Tensor | None]

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory, weights
        return _PartitionedAccumulator(server, self.held)


class _PartitionedAccumulator:
    def __init__(self, server: Tensor, held: Callable[[Node], Tensor | None]) -> None:
        self.server, self.held, self.added = server, held, 0
        self.sum = torch.zeros(server.shape, dtype=torch.float64, device=server.device)
        self.total = torch.zeros_like(self.sum)

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        check_update(state, weight, node, self.server)
        self.added += 1
        if weight > 0:
            held = self.held(node)
            self.sum.add_(state if held is None else torch.where(held.to(state.device), state, 0), alpha=weight)
            self.total.add_(1 if held is None else held.to(state.device), alpha=weight)

    def finish(self) -> Tensor:
        require_positive_weight(self.added, float(self.total.max()))
        return torch.where(self.total > 0, self.sum / self.total, self.server).to(self.server.dtype)


@dataclass(frozen=True)
class ExactMean:
    """FedAvg, and the difference between the mean of the products and the product of the means goes to the residual.

    `scale_of` gives α/r of a client, or of the server for None.
    """

    layout: StateLayout
    scale_of: Callable[[Node | None], float]

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory, weights
        return _ExactAccumulator(server, self)


class _ExactAccumulator(MeanAccumulator):
    def __init__(self, server: Tensor, rule: ExactMean) -> None:
        super().__init__(server, lambda mean: mean)
        self.rule, self.products = rule, dict[str, Tensor]()

    def _factors(self, state: Tensor) -> dict[str, Tensor]:
        """Return B A of each adapted layer, by the name of its residual."""
        views = self.rule.layout.views(state.double())
        prefixes = [(name, name.removesuffix(RESIDUAL)) for name in views if name.endswith(f".{RESIDUAL}")]
        return {name: views[prefix + B] @ views[prefix + A] for name, prefix in prefixes}

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        super().add(state, weight, node)
        for name, product in self._factors(state).items() if weight > 0 else ():
            scaled = weight * self.rule.scale_of(node) * product
            self.products[name] = self.products[name] + scaled if name in self.products else scaled

    def finish(self) -> Tensor:
        mean = super().finish()
        before, after = self.rule.layout.views(self.server), self.rule.layout.views(mean)
        for name, product in self._factors(mean).items():
            difference = self.products[name] / self.total - self.rule.scale_of(None) * product
            after[name].copy_(before[name] + difference)
        return mean
