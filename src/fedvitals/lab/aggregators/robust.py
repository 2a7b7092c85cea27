# SPDX-License-Identifier: Apache-2.0
"""Aggregation rules that tolerate a minority of faulty or malicious clients.

These rules ignore the claimed numbers of samples, since claiming too many is an attack: each state counts once (except
with norm clipping, which averages clipped updates). An update of 0 samples is left out. A non-finite value counts as
the most extreme value of its coordinate, or its state as the farthest, so it reaches the result only if too many
clients send one. States are sorted by node name, so the order of arrival does not change the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels.ranked_means import column_blocks, median, trimmed_mean
from fedvitals.lab.aggregators.averages import (
    Accumulator,
    AggregationError,
    Aggregator,
    MeanAccumulator,
    Memory,
    check_update,
    require_positive,
    require_positive_weight,
)
from fedvitals.lab.description import require
from fedvitals.lab.engines.tasks import Node

Rule = Callable[[Sequence[Tensor], Sequence[float]], Tensor]


class CollectingAccumulator:
    """Keeps all states and passes them to the rule at the end, sorted by node."""

    def __init__(self, server: Tensor, rule: Rule) -> None:
        self.server, self.rule = server, rule
        self.held: list[tuple[Node, Tensor, float]] = []
        self.added = 0

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        check_update(state, weight, node, self.server)
        self.added += 1
        if weight > 0:
            self.held.append((node, state.clone(), weight))

    def finish(self) -> Tensor:
        require_positive_weight(self.added, len(self.held))
        held = sorted(self.held, key=lambda entry: entry[0])
        return self.rule([state for _, state, _ in held], [weight for _, _, weight in held]).to(self.server.dtype)


class Robust(Aggregator, frozen=True):
    """Base class of rules that compare the states with each other and therefore need all of them at once."""

    @property
    def keeps_all_states(self) -> bool:
        return True

    def combine(self, states: Sequence[Tensor], samples: Sequence[float], server: Tensor, weights: int) -> Tensor:
        """Return the new state from all states, which are sorted by node."""
        raise NotImplementedError

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        del memory  # these rules remember nothing
        return CollectingAccumulator(server, lambda states, samples: self.combine(states, samples, server, weights))


class TrimmedMean(Robust, frozen=True):
    """Coordinate-wise mean without both ends (Yin et al. 2018). Of n clients ⌊fraction·n⌋ are cut at each end, so with
    fewer than 1 / fraction of them it is the plain mean.

    Args:
        fraction: The share that is cut at each end.
    """

    fraction: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.fraction < 0.5, "fraction of trimmed_mean", self.fraction, "from 0 up to, not including, 0.5")

    def combine(self, states: Sequence[Tensor], *_: Any) -> Tensor:
        return trimmed_mean(states, self.fraction)


class Median(Robust, frozen=True):
    """Coordinate-wise median; of an even number the mean of the two in the middle (Yin et al. 2018)."""

    def combine(self, states: Sequence[Tensor], *_: Any) -> Tensor:
        return median(states)


class Krum(Robust, frozen=True):
    """The state whose n − faulty − 2 nearest neighbours are closest, in squared distance (Blanchard et al. 2017).

    Distances are between trained weights; the chosen state is used whole. It needs n ≥ 2·faulty + 3 updates.

    Args:
        faulty: How many updates may be faulty.
    """

    faulty: int

    def __post_init__(self) -> None:
        require(self.faulty >= 0, "faulty of krum", self.faulty, "a number of clients, 0 or more")

    @property
    def min_updates(self) -> int:
        return 2 * self.faulty + 3

    def combine(self, states: Sequence[Tensor], _: Sequence[float], server: Tensor, weights: int) -> Tensor:
        return states[krum_order(states, self.faulty, server, weights)[0]]


class MultiKrum(Robust, frozen=True):
    """The mean of the states with the best Krum scores.

    Args:
        faulty: How many updates may be faulty.
        keep: How many states are averaged; by default as many as are not faulty.
    """

    faulty: int
    keep: int | None = None

    def __post_init__(self) -> None:
        require(self.faulty >= 0, "faulty of multi_krum", self.faulty, "a number of clients, 0 or more")
        require(self.keep is None or self.keep >= 1, "keep of multi_krum", self.keep, "a number of clients, 1 or more")

    @property
    def min_updates(self) -> int:
        return 2 * self.faulty + 3

    def combine(self, states: Sequence[Tensor], _: Sequence[float], server: Tensor, weights: int) -> Tensor:
        keep = len(states) - self.faulty if self.keep is None else self.keep
        if keep > len(states):
            raise AggregationError(f"multi_krum cannot keep {keep} of {len(states)} updates. Lower `keep`.")
        best = sorted(krum_order(states, self.faulty, server, weights)[:keep])
        return weighted_combination([states[row] for row in best], [1.0] * keep)


class GeometricMedian(Robust, frozen=True):
    """The point with the smallest sum of distances to the states, by smoothed Weiszfeld (RFA: Pillutla et al. 2022).
    Distances are between trained weights.

    Args:
        iterations: The most steps of the algorithm.
        tolerance: It ends earlier, once a step is shorter than this share of the mean distance.
        smoothing: Shorter distances count as this one, so that no state gets an infinite weight.
    """

    iterations: int = 1000
    tolerance: float = 1e-7
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        require(self.iterations >= 1, "iterations of geometric_median", self.iterations, "1 or more")
        require_positive("tolerance of geometric_median", self.tolerance)
        require_positive("smoothing of geometric_median", self.smoothing)

    def combine(self, states: Sequence[Tensor], _: Sequence[float], server: Tensor, weights: int) -> Tensor:
        finite = [state for state, good in zip(states, are_finite(states), strict=True) if good]
        if not finite:  # nothing to go by: the result says so
            return weighted_combination(states, [1.0] * len(states))
        products = update_gram_matrix(finite, server, weights)
        shares = geometric_median_shares(products, self.iterations, self.tolerance, self.smoothing)
        return weighted_combination(finite, shares.tolist())


class NormClipping(Robust, frozen=True):
    """FedAvg of updates whose difference from the server is clipped to a norm (Sun et al. 2019).

    Without a norm the bound is the median of the round's norms, for which all states are kept. Norms are those of the
    trained weights; a client's whole difference is scaled. A non-finite difference is clipped to zero, so it counts as
    the server's state.

    Args:
        norm: The bound; None: the median of the round's norms, for which all states are kept.
    """

    norm: float | None = None

    def __post_init__(self) -> None:
        if self.norm is not None:
            require_positive("norm of norm_clipping", self.norm)

    @property
    def keeps_all_states(self) -> bool:
        return self.norm is None

    def begin(self, server: Tensor, memory: Memory, weights: int) -> Accumulator:
        if self.norm is None:
            return super().begin(server, memory, weights)
        return ClippedMeanAccumulator(server, weights, self.norm)

    def combine(self, states: Sequence[Tensor], samples: Sequence[float], server: Tensor, weights: int) -> Tensor:
        norms = torch.stack([update_norm(state, server, weights) for state in states])
        clipping = ClippedMeanAccumulator(server, weights, float(np.median(norms.cpu().numpy())))
        for state, weight in zip(states, samples, strict=True):
            clipping.add(state, weight, "")
        return clipping.finish()


class ClippedMeanAccumulator(MeanAccumulator):
    """A weighted mean of clipped states."""

    def __init__(self, server: Tensor, weights: int, bound: float) -> None:
        super().__init__(server, lambda mean: mean)
        self.weights, self.bound = weights, bound

    def add(self, state: Tensor, weight: float, node: Node) -> None:
        check_update(state, weight, node, self.server)
        norm = update_norm(state, self.server, self.weights)
        if not state.is_cpu:  # chosen by masks: nobody waits for a device to tell how long it is
            cut = self._cut(state, self.bound / norm)
            state = torch.where(norm == math.inf, self.server, torch.where(norm > self.bound, cut, state))
        elif float(norm) == math.inf:
            state = self.server
        elif float(norm) > self.bound:
            state = self._cut(state, self.bound / float(norm))
        super().add(state, weight, node)

    def _cut(self, state: Tensor, share: Tensor | float) -> Tensor:
        return self.server.double().lerp(state.double(), share).to(state.dtype)


def update_norm(state: Tensor, server: Tensor, weights: int) -> Tensor:
    """Return the norm of the change of the trained weights, [], in float64; infinite if any value of the state is not
    finite.
    """
    norm = torch.linalg.vector_norm(state[:weights].double() - server[:weights])
    return torch.where(state.isfinite().all(), norm, math.inf)


def are_finite(states: Sequence[Tensor]) -> list[bool]:
    """Return for each state whether all of it is finite, with one device synchronisation."""
    finite: list[bool] = torch.stack([state.isfinite().all() for state in states]).tolist()
    return finite


def krum_order(states: Sequence[Tensor], faulty: int, server: Tensor, weights: int) -> list[int]:
    """Return the rows from the best Krum score to the worst; ties go to the earlier row, non-finite states come
    last.
    """
    count, needed = len(states), 2 * faulty + 3
    if count < needed:
        lower = f"lower `faulty` to {(count - 3) // 2}, or " if count >= 3 else ""
        raise AggregationError(
            f"Krum against {faulty} faulty clients needs 2·{faulty} + 3 = {needed} updates or more, but got {count}. "
            f"To go on, {lower}let more clients take part."
        )
    finite = [row for row, good in enumerate(are_finite(states)) if good]
    scores = torch.full((count,), math.inf, dtype=torch.float64)
    if finite:
        products = update_gram_matrix([states[row] for row in finite], server, weights)
        lengths = products.diagonal()
        squared = (lengths[:, None] + lengths[None, :] - products - products.T).clamp_(min=0).fill_diagonal_(math.inf)
        # Too few finite neighbours: the missing ones are infinitely far for all alike, so the nearest that there are
        # decide. Only a state that is itself not finite scores as infinite.
        neighbours = min(count - faulty - 2, len(finite) - 1)
        scores[finite] = squared.sort(dim=1).values[:, :neighbours].sum(dim=1)
    return scores.argsort(stable=True).tolist()


def update_gram_matrix(states: Sequence[Tensor], server: Tensor, weights: int) -> Tensor:
    """Return all inner products of the differences from the server, [n, n], in float64 on the CPU.

    Distances and norms follow from it.
    """
    products = torch.zeros(len(states), len(states), dtype=torch.float64, device=server.device)
    for part in column_blocks(states, weights):
        block = torch.stack([state[part] for state in states]).double() - server[part]
        products += block @ block.T
    return ((products + products.T) / 2).cpu()


def geometric_median_shares(products: Tensor, iterations: int, tolerance: float, smoothing: float) -> Tensor:
    """Return the share of each state in the geometric median, [n].

    Every iterate is a mixture of the states, so its distances follow from their inner products: an iteration costs n²,
    regardless of the size of the model.
    """
    lengths, count = products.diagonal(), len(products)
    distances = (lengths[:, None] + lengths[None, :] - 2 * products).clamp_(min=0).sqrt_()
    # Start in the middle of the half around the most central state: from the mean a far liar would cost iterations,
    # from a state itself the first step would hardly leave it.
    near = distances[distances.sum(dim=1).argmin()].argsort(stable=True)[: count // 2 + 1]
    shares = torch.zeros(count, dtype=torch.float64)
    shares[near] = 1 / len(near)
    for _ in range(iterations):
        towards = products @ shares
        away = (lengths - 2 * towards + shares @ towards).clamp_(min=0).sqrt_().clamp_(min=smoothing)
        following = 1 / away
        following /= following.sum()
        change = following - shares
        shares = following
        if float((change @ products @ change).clamp_(min=0).sqrt()) <= tolerance * float(away.mean()):
            break
    return shares


def weighted_combination(states: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the mean of the states with these shares, in the dtype of the states."""
    running = MeanAccumulator(states[0], lambda mean: mean)
    for state, part in zip(states, shares, strict=True):
        running.add(state, part, "")
    return running.finish()


ROBUST = (TrimmedMean, Median, Krum, MultiKrum, GeometricMedian, NormClipping)
