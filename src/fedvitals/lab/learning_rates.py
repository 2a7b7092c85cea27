# SPDX-License-Identifier: Apache-2.0
"""Schedules of the clients' learning rate: a factor for each round, the same for all of its local steps.

In a warm-up of n rounds the factor rises in equal steps from 1 / (n + 1) to 1; a schedule that decays may begin with
one. The values are those of `torch.optim.lr_scheduler`, one step a round.
"""

from __future__ import annotations

import math

from fedvitals.lab.description import Description, require


class Warmup(Description, frozen=True):
    """A learning rate that rises by equal steps, and then stays constant.

    Args:
        rounds: The rounds that it takes.
    """

    rounds: int = 5

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds of warmup", self.rounds, "at least 1")

    def factor(self, round_index: int) -> float:
        """Return what the learning rate is multiplied by in a round."""
        return min(1.0, (round_index + 1) / (self.rounds + 1))


class Decay(Description, frozen=True, kw_only=True):
    """Base class of the schedules that lower the learning rate, after a warm-up."""

    warmup: int = 0

    def __post_init__(self) -> None:
        require(self.warmup >= 0, "number of warm-up rounds", self.warmup, "0 or more")

    def factor(self, round_index: int) -> float:
        """Return what the learning rate is multiplied by in a round."""
        if round_index < self.warmup:
            return (round_index + 1) / (self.warmup + 1)
        return self.decay(round_index - self.warmup)

    def decay(self, round_index: int) -> float:
        """Return the factor of a round, counted from the end of the warm-up."""
        raise NotImplementedError


class Cosine(Decay, frozen=True):
    """A learning rate that falls along half a cosine, and then stays constant.

    Args:
        rounds: The rounds that it takes.
        floor: Where it ends, as a share of where it began.
        warmup: Rounds over which the rate first rises to the one that the optimiser is given; 0: none.
    """

    rounds: int
    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_cosine("cosine", self.rounds, self.floor)

    def decay(self, round_index: int) -> float:
        return _half_cosine(min(round_index / self.rounds, 1.0), self.floor)


class Steps(Decay, frozen=True):
    """A learning rate that is multiplied by `gamma` at regular intervals.

    Args:
        every: Rounds between two steps.
        gamma: The factor of the learning rate at each step, above 0 and up to 1.
        warmup: Rounds over which the rate first rises to the one that the optimiser is given; 0: none.
    """

    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.every >= 1, "rounds between two steps", self.every, "at least 1")
        require(0 < self.gamma <= 1, "gamma of steps", self.gamma, "above 0, up to 1")

    def decay(self, round_index: int) -> float:
        return max(float(self.gamma ** (round_index // self.every)), 1e-300)  # a rate is never 0


class Restarts(Decay, frozen=True):
    """A learning rate that falls along half a cosine again and again (Loshchilov, Hutter 2017).

    Args:
        rounds: The rounds of the first fall.
        growth: The factor by which each fall is longer than the one before.
        floor: Where it ends, as a share of where it began.
        warmup: Rounds over which the rate first rises to the one that the optimiser is given; 0: none.
    """

    rounds: int
    growth: int = 1
    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_cosine("restarts", self.rounds, self.floor)
        require(self.growth >= 1, "growth of restarts", self.growth, "at least 1")

    def decay(self, round_index: int) -> float:
        length = self.rounds
        while round_index >= length:
            round_index, length = round_index - length, length * self.growth
        return _half_cosine(round_index / length, self.floor)


def _half_cosine(share: float, floor: float) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2


def _check_cosine(kind: str, rounds: int, floor: float) -> None:
    require(rounds >= 1, f"rounds of {kind}", rounds, "at least 1")
    require(0 < floor <= 1, f"floor of {kind}", floor, "a share of the learning rate, above 0, up to 1")


SCHEDULES = (Warmup, Cosine, Steps, Restarts)
