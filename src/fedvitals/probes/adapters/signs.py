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
    if rank <= start.rank and sent.a[-1].any() and (sent.a[-1] != start.a[rank - 1]).any():
        return rank  # as a rule
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
    before, after, *_ = coefficients = stack.all_coefficients()
    own = coefficients[2 : 2 + len(clients)]
    beginning = np.zeros_like(before) if first is None else coefficients[-1]
    ranks = [client.held for client in clients if client.held]
    differing, smallest = len(set(ranks)) > 1, min(ranks, default=new.rank)
    nothing = np.full_like(after, math.nan)
    mean = intended = wanted = nothing
    if weights is not None and len(clients):
        mean, intended = weights @ own, _intended(stack, clients, weights)
        wanted = intended * stack.directions(from_number=smallest)
    above = after * stack.directions(from_number=smallest)
    rows = np.array(
        [after, after - before, after - beginning, above, mean, after - mean, intended, after - intended, wanted]
    )
    norm, change, drift, upper, of_mean, error, of_intended, by_rank, of_wanted = stack.norms(rows).tolist()
    norms, changes = stack.norms(own), stack.norms(own - before)
    spectrum = Spectrum(new)
    signs = AdapterSigns(
        new.rank,
        norm,
        change,
        drift,
        spectrum.effective_rank,
        spectrum.stable_rank,
        _over(upper, norm) ** 2 if differing else math.nan,
        _over(upper, of_wanted) ** 2 if differing else math.nan,
        _over(error, of_mean),
        _over(by_rank, of_intended) if differing else math.nan,
        int((changes > 0).sum()),
        spectrum.shares,
    )
    shares = np.full(len(clients), 1 / max(1, len(clients))) if weights is None else weights
    directions = stack.along(spectrum)[2 : 2 + len(clients)] * shares[:, None]
    parts = [
        ClientSigns(client.held, own_norm, own_change, own_directions)
        for client, own_norm, own_change, own_directions in zip(
            clients, norms.tolist(), changes.tolist(), directions, strict=True
        )
    ]
    return signs, parts


def _intended(stack: _Stack, clients: Sequence[ClientFactors], weights: Array) -> Array:
    """Return the coefficients of the mean in which each direction counts the clients that have it."""
    rank = max(client.factors.rank for client in clients)
    held = np.array([np.arange(rank) < client.held for client in clients])
    totals = np.sum(held * weights[:, None], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_direction = np.where(totals > 0, held * weights[:, None] / totals, 0.0)
    shares = [
        own[: client.factors.rank] * client.factors.scale for own, client in zip(by_direction, clients, strict=True)
    ]
    return stack.of_clients(np.concatenate(shares))


class _Stack:
    """Factors side by side, with the Gram matrix of their products."""

    def __init__(self, factors: Sequence[Factors]) -> None:
        left, right = np.concatenate([f.b for f in factors], axis=1), np.concatenate([f.a for f in factors])
        self._left, self._right = left, right
        self._gram = (left.T @ left) * (right @ right.T)
        self._ends = np.cumsum([f.rank for f in factors]).tolist()
        self._scales = [f.scale for f in factors]
        self.size = self._ends[-1]

    def all_coefficients(self) -> Array:
        """Return the coefficients of each pair's scaled product, [pairs, K]."""
        which = np.repeat(np.arange(len(self._scales)), np.diff([0, *self._ends]))
        return np.asarray((which == np.arange(len(self._scales))[:, None]) * np.array(self._scales)[:, None])

    def of_clients(self, values: Array) -> Array:
        """Return values for the directions of the clients, which follow the first two pairs, and zeros elsewhere."""
        coefficients = np.zeros(self.size)
        coefficients[self._ends[1] : self._ends[1] + len(values)] = values
        return coefficients

    def directions(self, from_number: int) -> Array:
        """Return 1 for each direction of a pair from this number on, and 0 for those before."""
        starts = [0, *self._ends[:-1]]
        return np.concatenate(
            [np.arange(end - start) >= from_number for start, end in zip(starts, self._ends, strict=True)]
        ).astype(np.float64)

    def along(self, spectrum: Spectrum) -> Array:
        """Return u_kᵀ M v_k / σ_k of each pair's product M, in the first singular directions of another, [pairs,
        DIRECTIONS]; NaN where there is no direction.

        Weighted as in a mean of products, they add up to 1.
        """
        left, right, values = spectrum.directions()
        products = (left.T @ self._left) * (self._right @ right).T / values[:, None]
        parts = np.full((len(self._scales), DIRECTIONS), np.nan)
        sums = np.add.reduceat(products, [0, *self._ends[:-1]], axis=1).T
        parts[:, : len(values)] = sums * np.array(self._scales)[:, None]
        return parts

    def norms(self, rows: Array) -> Array:
        """Return the norms of the products with these coefficients, [products, K]; NaN where they are."""
        squares = np.einsum("ik,ik->i", rows @ self._gram, rows)
        # Of a difference of equal products, rounding leaves this much of their own squares.
        largest = (rows**2) @ np.diag(self._gram)
        return np.asarray(np.where(squares > 1e-14 * largest, np.sqrt(np.maximum(squares, 0.0)), squares * 0.0))


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

    def directions(self) -> tuple[Array, Array, Array]:
        """Return the first singular directions, [out, k] and [in, k], and their values; at most DIRECTIONS."""
        count = int(min(DIRECTIONS, (self.values > self.values[:1].max(initial=0.0) * 1e-9).sum()))
        return self._left @ self._u[:, :count], self._right @ self._v[:, :count], self.values[:count]


def _over(value: float, total: float) -> float:
    return value / total if total > 0 else math.nan  # NaN if either is
