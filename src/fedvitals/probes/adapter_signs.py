# SPDX-License-Identifier: Apache-2.0
"""The vital signs of one low-rank adapter, from the factors that the server holds, without forming a product.

All products in question are combinations Σ_k c_k b_k a_kᵀ of the same columns b_k and rows a_k: the clients' and the
server's. Their inner products are G = (LᵀL) ∘ (R Rᵀ), with L = [b_1 … b_K] and R = [a_1; …; a_K], and ‖Σ_k c_k b_k
a_kᵀ‖² = cᵀ G c. So one Gram matrix gives every norm and every distance, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.stats import DIRECTIONS, Array

LINEAR = 1e-3  # of the step: up to this the server's step counts as a weighted mean of the clients'
SUM_TOLERANCE = 0.02  # of the weights, around 1


@dataclass(frozen=True, slots=True)
class Factors:
    """B [out, r] and A [r, in] of one adapter, in double precision, with its α/r."""

    b: Array
    a: Array
    scale: float = 1.0

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class ClientFactors:
    """What one client sent of an adapter; `moved`: by direction, whether A or B differ from what it was sent."""

    factors: Factors
    held: int  # directions that the client has: those behind are zero, or as they were sent


@dataclass(frozen=True, slots=True)
class ClientSigns:
    """One client's part: ‖M_i − P₀‖, and how much of each singular direction of the new product is its own."""

    rank: int
    norm: float
    change: float
    effective_rank: float
    directions: Array


@dataclass(frozen=True, slots=True)
class AdapterSigns:
    """The signs of one adapter after a round; NaN for what cannot be known."""

    rank: int
    norm: float  # ‖P‖, P = s B A of the new global model
    change: float  # ‖P − P₀‖
    drift: float  # ‖P − P_first‖
    effective_rank: float
    stable_rank: float
    energy_above: float  # share of ‖P‖² in the directions above the smallest rank of a client
    energy_kept: float  # of these directions: ‖P‖² over that of the mean over those who have them
    error: float  # ‖P − M‖ / ‖M‖, M = Σ w_i s_i B_i A_i
    error_by_rank: float  # the same, each direction averaged over the clients that have it
    moved: int  # clients whose product differs from what they were sent
    spectrum: Array  # shares of ‖P‖² of the first singular directions


def held_rank(sent: Factors, start: Factors) -> int:
    """Return how many directions a client has: behind them, A and B are zero, or exactly what it was sent.

    A client that has moved nothing at all has what it was sent.
    """
    rank = sent.rank
    there = np.any(sent.a != 0, axis=1) | np.any(sent.b != 0, axis=0)
    shared = min(rank, start.rank)
    moved = np.ones(rank, np.bool_)
    moved[:shared] = np.any(sent.a[:shared] != start.a[:shared], axis=1)
    moved[:shared] |= np.any(sent.b[:, :shared] != start.b[:, :shared], axis=0)
    has = there & moved if moved.any() else there
    return int(np.flatnonzero(has)[-1]) + 1 if has.any() else 0


def mean_weights(starts: Sequence[Array], ends: Sequence[Sequence[Array]], aggregated: Sequence[Array]) -> Array | None:
    """Return the weights with which the server averaged what the clients sent; None if it did something else.

    starts, aggregated: arrays before and after; ends: the same of each client. The server's step is solved for the
    clients' steps, which leaves no residual if it is a weighted mean.
    """
    steps = [np.concatenate([(e - s).ravel() for e, s in zip(own, starts, strict=True)]) for own in ends]
    target = np.concatenate([(e - s).ravel() for e, s in zip(aggregated, starts, strict=True)])
    size = float(target @ target)
    matrix = np.stack(steps)
    gram, products = matrix @ matrix.T, matrix @ target
    if not (size > 0 and np.isfinite(gram).all() and math.isfinite(size)):
        return None
    weights: Array = np.linalg.lstsq(gram, products, rcond=1e-9)[0]
    left = target - weights @ matrix
    if (
        float(left @ left) > LINEAR**2 * size
        or abs(float(weights.sum()) - 1) > SUM_TOLERANCE
        or weights.min() < -LINEAR
    ):
        return None
    kept = np.maximum(weights, 0.0)
    return np.asarray(kept / kept.sum())


def signs_of(
    start: Factors,
    clients: Sequence[ClientFactors],
    weights: Array | None,
    new: Factors,
    first: Factors | None = None,
) -> tuple[AdapterSigns, list[ClientSigns]]:
    """Return the signs of an adapter and of each client's part in it.

    start, new: the global model's before and after the round; first: that of the run's beginning, None where its
    product is zero. weights: of the clients in the mean; None if unknown, and then there are no errors.
    """
    stack = _Stack([start, new, *(c.factors for c in clients), *(() if first is None else (first,))])
    before, after = stack.coefficients(0), stack.coefficients(1)
    own = [stack.coefficients(2 + place) for place in range(len(clients))]
    beginning = np.zeros_like(before) if first is None else stack.coefficients(2 + len(clients))
    ranks = [client.held for client in clients if client.held]
    smallest = min(ranks, default=new.rank)
    above = stack.part(after, 1, smallest)
    norm = stack.norm(after)
    error = by_rank = energy_kept = math.nan
    if weights is not None and len(clients):
        mean = np.sum([w * c for w, c in zip(weights, own, strict=True)], axis=0)
        error = _over(stack.norm(after - mean), stack.norm(mean))
        intended = _intended(stack, clients, weights)
        by_rank = _over(stack.norm(after - intended), stack.norm(intended))
        if len(set(ranks)) > 1:
            wanted = np.sum([stack.part(intended, 2 + i, smallest) for i in range(len(clients))], axis=0)
            energy_kept = _over(stack.norm(above), stack.norm(wanted)) ** 2
    spectrum = Spectrum(new)
    differing = len(set(ranks)) > 1
    signs = AdapterSigns(
        new.rank,
        norm,
        stack.norm(after - before),
        stack.norm(after - beginning),
        spectrum.effective_rank,
        spectrum.stable_rank,
        _over(stack.norm(above), norm) ** 2 if differing else math.nan,
        energy_kept,
        error,
        by_rank if differing else math.nan,
        sum(stack.norm(c - before) > 0 for c in own),
        spectrum.shares,
    )
    shares = np.full(len(clients), 1 / max(1, len(clients))) if weights is None else weights
    parts = [
        ClientSigns(
            client.held,
            stack.norm(c),
            stack.norm(c - before),
            Spectrum(client.factors).effective_rank,
            spectrum.contributions(client.factors, float(share)),
        )
        for client, c, share in zip(clients, own, shares, strict=True)
    ]
    return signs, parts


def _intended(stack: _Stack, clients: Sequence[ClientFactors], weights: Array) -> Array:
    """Return the coefficients of the mean in which each direction counts the clients that have it."""
    rank = max(client.factors.rank for client in clients)
    held = np.array([np.arange(rank) < client.held for client in clients])
    totals = np.sum(held * weights[:, None], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_direction = np.where(totals > 0, held * weights[:, None] / totals, 0.0)
    coefficients = np.zeros(stack.size)
    for place, (client, shares) in enumerate(zip(clients, by_direction, strict=True)):
        coefficients += stack.coefficients(2 + place) * stack.spread(2 + place, shares[: client.factors.rank])
    return coefficients


class _Stack:
    """Factors side by side, with the Gram matrix of their products."""

    def __init__(self, factors: Sequence[Factors]) -> None:
        left, right = np.concatenate([f.b for f in factors], axis=1), np.concatenate([f.a for f in factors])
        self._gram = (left.T @ left) * (right @ right.T)
        self._ends = np.cumsum([f.rank for f in factors]).tolist()
        self._scales = [f.scale for f in factors]
        self.size = self._ends[-1]

    def _place(self, which: int) -> slice:
        return slice(self._ends[which - 1] if which else 0, self._ends[which])

    def coefficients(self, which: int) -> Array:
        """Return the coefficients of one pair's scaled product."""
        return self.spread(which, np.full(self._place(which).stop - self._place(which).start, self._scales[which]))

    def spread(self, which: int, values: Array) -> Array:
        """Return values for the directions of one pair, and zeros for those of the others."""
        coefficients = np.zeros(self.size)
        coefficients[self._place(which)] = values
        return coefficients

    def part(self, coefficients: Array, which: int, first: int) -> Array:
        """Return the coefficients of one pair's directions from the number `first` on."""
        kept, place = np.zeros(self.size), self._place(which)
        own = slice(min(place.start + first, place.stop), place.stop)
        kept[own] = coefficients[own]
        return kept

    def norm(self, coefficients: Array) -> float:
        used = np.flatnonzero(coefficients)
        own = coefficients[used]
        squares = float(own @ self._gram[np.ix_(used, used)] @ own) if len(used) else 0.0
        # Of a difference of equal products, rounding leaves this much of their own squares.
        largest = float(own**2 @ np.diag(self._gram)[used]) if len(used) else 0.0
        return math.sqrt(squares) if squares > 1e-14 * largest else 0.0


class Spectrum:
    """The singular values and directions of one scaled product."""

    def __init__(self, factors: Factors) -> None:
        self._left, upper_b = np.linalg.qr(factors.b)
        self._right, upper_a = np.linalg.qr(factors.a.T)
        self._u, self.values, vt = np.linalg.svd(upper_b @ upper_a.T * factors.scale)
        self._v = vt.T

    @property
    def _energies(self) -> Array:
        squares = self.values**2
        total = squares.sum()
        return squares / total if total > 0 else np.zeros_like(squares)

    @property
    def shares(self) -> Array:
        """The shares of the energy of the first singular directions, [DIRECTIONS]."""
        shares = np.zeros(DIRECTIONS)
        own = self._energies[:DIRECTIONS]
        shares[: len(own)] = own
        return shares

    @property
    def effective_rank(self) -> float:
        """exp(−Σ p log p) of the shares p of energy; 0 of a product that is zero."""
        shares = self._energies[self._energies > 0]
        return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0

    @property
    def stable_rank(self) -> float:
        """‖P‖_F² / ‖P‖₂²; 0 of a product that is zero."""
        return float(1 / self._energies[0]) if len(self._energies) and self._energies[0] > 0 else 0.0

    def contributions(self, client: Factors, weight: float) -> Array:
        """Return w u_kᵀ M v_k / σ_k of a client's product M: its part in each of the first directions, [DIRECTIONS].

        Over all clients of a weighted mean of products they add up to 1.
        """
        count = int(min(DIRECTIONS, (self.values > self.values[:1].max(initial=0.0) * 1e-9).sum()))
        left = self._u[:, :count].T @ (self._left.T @ client.b)
        right = (client.a @ self._right) @ self._v[:, :count]
        parts = np.full(DIRECTIONS, np.nan)
        parts[:count] = weight * client.scale * np.einsum("kr,rk->k", left, right) / self.values[:count]
        return parts


def _over(value: float, total: float) -> float:
    return value / total if total > 0 else math.nan
