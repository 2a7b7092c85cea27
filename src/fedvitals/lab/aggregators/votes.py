# SPDX-License-Identifier: Apache-2.0
"""Majority vote (signSGD, Bernstein et al. 2019): every client has one vote on the sign of each weight's change."""

from __future__ import annotations

import torch
from torch import Tensor

from fedvitals.lab.aggregators.averages import (
    Accumulator,
    Aggregator,
    Memory,
    apply_step,
    check_update,
    require_positive,
    require_positive_weight,
)
from fedvitals.lab.engines.tasks import Node


class MajorityVote(Aggregator, frozen=True):
    """Each weight moves by a fixed step in the direction that most clients want, whatever their samples; on a tie it
    stays. Pairs with the compression `sign`, whose magnitudes it ignores. Buffers are averaged.

    Args:
        learning_rate: The length of a weight's step.
    """

    learning_rate: float = 0.001

    def __post_init__(self) -> None:
        require_positive("learning_rate of majority_vote", self.learning_rate)

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory  # it remembers nothing
        return VoteCount(server, weights, self.learning_rate)


class VoteCount:
    """Counts votes: +1 and −1 for a change, 0 for none or NaN."""

    def __init__(self, server: Tensor, weights: int, learning_rate: float) -> None:
        self.server, self.weights, self.learning_rate = server, weights, learning_rate
        self.votes = torch.zeros(weights, device=server.device)
        self.buffers = torch.zeros_like(server[weights:], dtype=torch.float64)
        self.added, self.voted = 0, 0

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        check_update(state, weight, node, self.server)
        self.added += 1
        if weight > 0:
            self.votes += torch.nan_to_num(torch.sign(state[: self.weights] - self.server[: self.weights]))
            self.buffers += state[self.weights :]
            self.voted += 1

    def finish(self) -> Tensor:
        require_positive_weight(self.added, float(self.voted))
        mean = torch.cat([self.server[: self.weights].double(), self.buffers / self.voted])
        return apply_step(self.server, mean, self.learning_rate * torch.sign(self.votes)).to(self.server.dtype)
