# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation (Bonawitz et al. 2017): the server learns the sum of the updates, and no single one.

Each pair of clients agrees on a secret (Diffie-Hellman), from which both draw the same mask; one adds it to its message
and the other subtracts it, modulo 2^bits. In the sum of all messages the masks cancel. Every client's secret key is
shared among the cohort (Shamir): if a client drops out, those who are left hand in their shares, and the server removes
what is left of its masks. Too few are left if they are less than the threshold; then the round fails.

Left out: the paper's second mask, which protects a client that the server takes for lost and whose message comes after
all, and the bytes of keys and shares. Keys are of 63 bits: this simulates the protocol, it protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import streams
from fedvitals.lab.aggregators.averages import AggregationError
from fedvitals.lab.description import Part, kind_of, require
from fedvitals.lab.engines.tasks import Node
from fedvitals.lab.privacy import CentralDP, require_mean
from fedvitals.lab.topologies.centralized import Centralized

if TYPE_CHECKING:
    from fedvitals.lab.experiment import Experiment

PRIME, BASE = 2**127 - 1, 3  # of the key agreement; the prime also of the shares
PURPOSE = "secure aggregation"
Share = tuple[int, int]  # a point of the polynomial whose value at 0 is the secret


class SecureAggregation(Part, frozen=True):
    """The server sees only sums. Changes are sent in fixed point; their weights and sizes are sent openly.

    Args:
        bits: The bits of a value in a message.
        limit: The largest magnitude of one value of a change; larger ones are cut off.
        threshold: The share of the asked clients that must be left to recover the masks of the others.
    """

    bits: int = 32  # of a value in a message
    limit: float = 1.0  # largest magnitude of one value of a change; larger ones are cut off
    threshold: float = 2 / 3  # share of the asked clients that must be left to recover the masks of the others

    def __post_init__(self) -> None:
        require(8 <= self.bits <= 62, "bits of secure_aggregation", self.bits, "from 8 to 62")
        possible = math.isfinite(self.limit) and self.limit > 0
        require(possible, "limit of secure_aggregation", self.limit, "finite and above 0")
        require(0 < self.threshold <= 1, "threshold of secure_aggregation", self.threshold, "above 0, up to 1")

    def check(self, experiment: Experiment) -> None:
        require_mean("secure_aggregation", experiment)
        if not isinstance(experiment.topology, Centralized):
            kind = kind_of(type(experiment.topology).__name__)
            raise ConfigError(
                f"secure_aggregation needs the topology centralized: with {kind}, single models are seen on the way."
            )
        if experiment.compression is not None:
            raise ConfigError(
                "secure_aggregation sends masked messages, which look random and cannot be compressed. Leave the "
                "compression out; `bits` says how many a value has."
            )
        if isinstance(experiment.privacy, CentralDP):
            raise ConfigError(
                "A server that sees sums alone cannot clip single updates, as central_dp does. Use client_dp."
            )
        asked = min(experiment.asked(number) for number in experiment.distinct_rounds)
        require(asked >= 2, "number of clients asked in a round", asked, "2 or more, for a sum")

    def fewest(self, asked: int) -> int:
        """Return the fewest clients that must be left; never one, whose sum would be its update."""
        return max(2, math.ceil(self.threshold * asked - 1e-9))

    def levels(self, total_weight: int) -> int:
        """Return the integer that stands for `limit`: the largest with which no weighted sum overflows."""
        largest: int = (1 << (self.bits - 1)) - 1
        return largest // max(1, total_weight)

    def quantise(self, change: Tensor, total_weight: int) -> Tensor:
        """Return a change as integers (int64) of up to ± `levels`. NaN, which no integer is, becomes 0."""
        share = torch.nan_to_num(change.double() / self.limit, 0.0).clamp(-1.0, 1.0)
        return (share * self.levels(total_weight)).round().to(torch.int64)

    def message_bytes(self, size: int) -> int:
        """Return the bytes of a masked message."""
        return math.ceil(size * self.bits / 8)


class MaskedRound:
    """One round of the protocol: `mask` is what a client does, `unmask` and `mean` what the server does."""

    def __init__(self, settings: SecureAggregation, asked: Sequence[Node], seed: int, round_index: int) -> None:
        self.settings, self.asked, self._seed, self._round = settings, list(asked), seed, round_index
        self._place = {node: place for place, node in enumerate(self.asked, 1)}
        self._modulus = 1 << settings.bits
        self._secret = {node: streams.stream_seed(seed, f"{PURPOSE}/key", round_index, node) for node in asked}
        self.public = {node: pow(BASE, secret, PRIME) for node, secret in self._secret.items()}

    def mask(self, node: Node, values: Tensor) -> Tensor:
        """Return a client's integers as it sends them: masked, from 0 up to 2^bits."""
        return (values + self._masks(node, self._secret[node], self.asked, len(values))) % self._modulus

    def _masks(self, node: Node, secret: int, others: Sequence[Node], size: int) -> Tensor:
        """Return the sum of the masks that a client with this secret shares with others."""
        total = torch.zeros(size, dtype=torch.int64)
        for other in others:
            if other != node:
                agreed = pow(self.public[other], secret, PRIME)
                stream = streams.stream(agreed, f"{PURPOSE}/mask", self._round)
                drawn = torch.randint(self._modulus, (size,), generator=stream)
                total.add_(drawn, alpha=1 if self._place[node] < self._place[other] else -1)
        return total % self._modulus  # 64 bits wrap round, too, which is no loss: 2^bits divides 2^64

    def share(self, node: Node) -> dict[Node, Share]:
        """Return what a client gives each of the others: points that tell its key only where enough are together."""
        degree = self.settings.fewest(len(self.asked)) - 1
        drawn = (streams.stream_seed(self._seed, f"{PURPOSE}/share", self._round, node, i) for i in range(degree))
        polynomial = [self._secret[node], *drawn]
        return {
            other: (place, sum(factor * pow(place, power, PRIME) for power, factor in enumerate(polynomial)) % PRIME)
            for other, place in self._place.items()
            if other != node
        }

    def unmask(self, total: Tensor, left: Sequence[Node]) -> Tensor:
        """Return the signed sum of the integers of those who are left, from the sum of their messages.

        AggregationError if fewer are left than can recover the masks of those who dropped out.
        """
        fewest = self.settings.fewest(len(self.asked))
        if len(left) < fewest:
            raise AggregationError(
                f"Of {len(self.asked)} clients asked, {len(left)} are left, and secure aggregation needs {fewest}: the "
                "masks of the others cannot be recovered."
            )
        for dropped in [node for node in self.asked if node not in left]:
            shares = self.share(dropped)
            secret = recover_secret([shares[node] for node in left][:fewest])
            total = total + self._masks(dropped, secret, left, len(total))  # what its message would have cancelled
        total = total % self._modulus
        return torch.where(total < self._modulus // 2, total, total - self._modulus)

    def mean(self, changes: Mapping[Node, Tensor], weights: Mapping[Node, int]) -> Tensor:
        """Return the weighted mean of the changes as the server computes it from the masked messages."""
        total_weight = sum(weights[node] for node in changes)
        if not self.settings.levels(total_weight):
            raise AggregationError(f"A total weight of {total_weight} does not fit into {self.settings.bits} bits.")
        received = None
        for node, change in changes.items():
            message = self.mask(node, self.settings.quantise(change, total_weight) * weights[node])
            received = message if received is None else (received + message) % self._modulus
        total = self.unmask(torch.zeros(0) if received is None else received, [*changes])
        step = self.settings.limit / self.settings.levels(total_weight)
        return total.double() * (step / max(1, total_weight))


def recover_secret(shares: Sequence[Share]) -> int:
    """Return the value at 0 of the polynomial through these points (Lagrange)."""
    secret = 0
    for place, value in shares:
        factor = value
        for other, _ in shares:
            if other != place:
                factor = factor * other * pow(other - place, -1, PRIME) % PRIME
        secret += factor
    return secret % PRIME
