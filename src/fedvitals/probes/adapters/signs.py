# SPDX-License-Identifier: Apache-2.0
"""The vital signs of low-rank adapters, from inner products of their factors, without forming a product.

All these products are combinations Σ_k c_k b_k a_kᵀ of the same columns b_k and rows a_k: the clients' and the
server's. Their inner products are G = (LᵀL) ∘ (R Rᵀ), with L = [b_1 … b_K] and R = [a_1; …; a_K], and ‖Σ_k c_k b_k
a_kᵀ‖² = cᵀ G c. So one Gram matrix gives every norm and every distance, exactly. Adapters of equal ranks are computed
together, along the first axis of every array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvitals.probes.adapters.grams import Grams
from fedvitals.stats import DIRECTIONS, Array

LINEAR = 1e-3  # of the step: residual up to which the server's step counts as a weighted mean of the clients'
COARSE = 0.25  # of the step: rounding of the server's numbers above which the weights are unknown
SUM_TOLERANCE = 0.02  # of the weights, around 1
ROUNDING = 1e-14  # of the squares of equal products: the remainder of their difference
FAINT = 1e-6  # of the largest singular value: smaller directions are not recorded


@dataclass(frozen=True, slots=True)
class AdapterSigns:
    """The signs of adapters after a round, [adapters], and each client's part in them, [adapters, clients].

    Unknown values are NaN.
    """

    held: tuple[int, ...]  # directions that each client has
    norm: Array  # ‖P‖, P = s B A of the new global model
    change: Array  # ‖P − P₀‖
    drift: Array  # ‖P − P_first‖
    effective_rank: Array  # exp(−Σ p log p) of the shares p of energy; 0 of a product that is zero
    stable_rank: Array  # ‖P‖_F² / ‖P‖₂²; 0 of a product that is zero
    energy_above: Array  # share of ‖P‖² in the directions above the smallest rank of a client
    energy_kept: Array  # of these directions: ‖P‖² over that of the mean over the clients that have them
    error: Array  # ‖P − M‖ / ‖M‖, M = Σ w_i s_i B_i A_i
    error_by_rank: Array  # the same, each direction averaged over the clients that have it; where none has, it stays
    moved: Array  # clients whose factors differ from what they were sent
    spectrum: Array  # [adapters, DIRECTIONS]: shares of ‖P‖² of the first singular directions
    client_norms: Array  # ‖M_i‖
    client_changes: Array  # ‖M_i − P₀‖
    client_directions: Array  # [adapters, clients, DIRECTIONS]: a client's share of each singular direction of P


def mean_weights(products: Array, rounding: float = 0.0) -> Array | None:
    """Return the weights with which the server averaged what the clients sent; None if it did something else.

    products: inner products of the clients' steps and, last, the server's. The server's step is solved for the clients'
    steps, which leaves no residual if it is a weighted mean, except for what the server's numbers were rounded by.
    rounding: the largest square of that.
    """
    gram, aligned, size = products[:-1, :-1], products[:-1, -1], float(products[-1, -1])
    if not (size > 0 and np.isfinite(products).all()):
        return None
    weights = np.asarray(np.linalg.lstsq(gram, aligned, rcond=1e-9)[0], np.float64)
    left = size - 2 * float(weights @ aligned) + float(weights @ gram @ weights)
    exact = left <= LINEAR**2 * size
    if not exact and (left > rounding or rounding > COARSE**2 * size):
        return None
    if abs(float(weights.sum()) - 1) > SUM_TOLERANCE or weights.min() < -(LINEAR if exact else SUM_TOLERANCE):
        return None
    kept = np.maximum(weights, 0.0)
    return np.asarray(kept / kept.sum())


def signs_of(grams: Sequence[Grams], scales: Array, weights: Array | None, *, first: int | None) -> AdapterSigns:
    """Return the signs of adapters of equal ranks, whose clients hold the same directions.

    scales: α/r of each adapter in each model, [adapters, models]. weights: of the clients in the mean; if None
    (unknown), there are no errors. first: the index of the run's first model; None: its product is zero.
    """
    stack = _Stack(grams, scales)
    held, clients = grams[0].held, len(grams[0].held)
    coefficients = stack.coefficients()
    before, after, own = coefficients[:, 0], coefficients[:, 1], coefficients[:, 2 : 2 + clients]
    beginning = 0.0 if first is None else coefficients[:, first]
    known_ranks = [rank for rank in held if rank]
    smallest = min(known_ranks, default=grams[0].ranks[1])
    above = stack.numbers >= smallest
    resting = before * (stack.numbers >= max(known_ranks, default=0))  # directions that none of these clients has
    differing = len({*known_ranks}) > 1 or bool(known_ranks and stack.norms(resting[:, None]).any())
    mean = intended = np.zeros_like(after)
    if weights is not None:
        mean = weights @ own
        intended = stack.in_columns(_shares(held, weights)) * stack.scale_by_column + resting
    whole = (after, after - before, after - beginning, after * above)
    averaged = (mean, after - mean, intended, after - intended, intended * above)
    rows = np.stack((*whole, *averaged), axis=1)
    norms = stack.norms(np.concatenate([rows, own, own - before[:, None]], axis=1))
    norm, change, drift, upper, of_mean, error, of_intended, by_rank, of_wanted = norms[:, :9].T
    unknown = np.full_like(norm, math.nan)
    changes = norms[:, 9 + clients :]
    values, parts = stack.along_new()
    energies = values**2 / np.maximum((values**2).sum(1, keepdims=True), np.finfo(float).tiny)
    shares = np.full(clients, 1 / max(1, clients)) if weights is None else weights
    return AdapterSigns(
        held,
        norm,
        change,
        drift,
        _effective_rank(energies),
        np.divide(1.0, energies[:, 0], out=energies[:, 0] * 0, where=energies[:, 0] > 0),
        _over(upper, norm) ** 2 if differing else unknown,
        _over(upper, of_wanted) ** 2 if differing else unknown,
        _over(error, of_mean),
        _over(by_rank, of_intended) if differing else unknown,
        np.array([own.moved for own in grams], np.float64),
        _first_directions(energies, 0.0),
        norms[:, 9 : 9 + clients],
        changes,
        parts[:, 2 : 2 + clients] * shares[:, None],
    )


def _shares(held: Sequence[int], weights: Array) -> Array:
    """Return the weights of a mean that averages each direction over the clients that have it, [clients, rank]."""
    has = np.arange(max(held, default=0)) < np.array(held)[:, None]
    totals = (has * weights[:, None]).sum(0)
    return np.asarray(np.divide(has * weights[:, None], totals, out=np.zeros(has.shape), where=totals > 0))


class _Stack:
    """Factors of several adapters side by side, with the inner products of their products."""

    def __init__(self, grams: Sequence[Grams], scales: Array) -> None:
        self._left, self._right = np.stack([g.left for g in grams]), np.stack([g.right for g in grams])
        self._gram, self._scales, self._ranks = self._left * self._right, scales, grams[0].ranks
        self._model = np.repeat(np.arange(len(self._ranks)), self._ranks)  # model of each column
        self.numbers = np.concatenate([np.arange(rank) for rank in self._ranks])  # direction number of each column
        self.scale_by_column = scales[:, self._model]

    def coefficients(self) -> Array:
        """Return the coefficients of each model's scaled product, [adapters, models, K]."""
        own = self._model == np.arange(len(self._ranks))[:, None]
        return np.asarray(own * self._scales[:, :, None])

    def in_columns(self, shares: Array) -> Array:
        """Return a number for each direction of each client [clients, rank] by column, and zeros elsewhere, [K]."""
        columns = np.zeros(len(self.numbers))
        of_client = (self._model >= 2) & (self._model < 2 + len(shares)) & (self.numbers < shares.shape[1])
        columns[of_client] = shares[self._model[of_client] - 2, self.numbers[of_client]]
        return columns

    def norms(self, rows: Array) -> Array:
        """Return the norms of the products with these coefficients, [adapters, rows, K] to [adapters, rows]."""
        squares = ((rows @ self._gram) * rows).sum(-1)
        largest = (rows**2 @ np.diagonal(self._gram, axis1=1, axis2=2)[:, :, None])[:, :, 0]
        return np.asarray(np.sqrt(np.where(squares <= ROUNDING * largest, 0.0, squares)))

    def along_new(self) -> tuple[Array, Array]:
        """Return the singular values of the new model's product P, and u_kᵀ M v_k / σ_k of every model's product M.

        The latter in P's first singular directions, [adapters, models, DIRECTIONS]; NaN if there is none, or P is not
        finite. Weighted as in a mean of products, they add up to 1. B = Q √Λ Vᵀ with BᵀB = V Λ Vᵀ, and A likewise, so
        that P's singular values are those of √Λ Vᵀ V' √Λ'.
        """
        new = slice(self._ranks[0], self._ranks[0] + self._ranks[1])
        finite = np.isfinite(self._gram[:, new, new].sum(axis=(1, 2), keepdims=True))  # otherwise undecomposable
        roots_b, basis_b, inverse_b = _roots(np.where(finite, self._left[:, new, new], 0.0))
        roots_a, basis_a, inverse_a = _roots(np.where(finite, self._right[:, new, new], 0.0))
        core = roots_b[:, :, None] * (basis_b.swapaxes(1, 2) @ basis_a) * roots_a[:, None]
        u, values, vt = np.linalg.svd(core * self._scales[:, 1, None, None])
        values = np.where(finite[:, 0], values, math.nan)
        left = (basis_b * inverse_b[:, None]) @ u
        right = (basis_a * inverse_a[:, None]) @ vt.swapaxes(1, 2)
        products = (left.swapaxes(1, 2) @ self._left[:, new]) * (right.swapaxes(1, 2) @ self._right[:, new])
        starts = np.concatenate([[0], np.cumsum(self._ranks)[:-1]])
        sums = np.add.reduceat(products, starts, axis=2).swapaxes(1, 2) * self._scales[:, :, None]
        seen = (values > FAINT * values[:, :1])[:, None]
        parts = np.divide(sums, values[:, None], out=np.full(sums.shape, math.nan), where=seen)
        return values, _first_directions(parts, math.nan)


def _roots(gram: Array) -> tuple[Array, Array, Array]:
    """Return √Λ, V and 1/√Λ of symmetric matrices V Λ Vᵀ; the inverse is zero where values are only rounding."""
    squares, basis = np.linalg.eigh(gram)
    roots = np.sqrt(np.maximum(squares, 0.0))
    there = squares > 1e-15 * squares[:, -1:]
    return roots, basis, np.divide(1.0, roots, out=np.zeros_like(roots), where=there & (roots > 0))


def _effective_rank(energies: Array) -> Array:
    logs = np.log(energies, out=np.zeros_like(energies), where=energies > 0)
    return np.asarray(np.where(energies[:, 0] > 0, np.exp(-(energies * logs).sum(1)), energies[:, 0] * 0))


def _first_directions(values: Array, missing: float) -> Array:
    """Return the first DIRECTIONS of the last axis, padded if there are fewer."""
    whole = np.full((*values.shape[:-1], DIRECTIONS), missing)
    count = min(DIRECTIONS, values.shape[-1])
    whole[..., :count] = values[..., :count]
    return whole


def _over(values: Array, totals: Array) -> Array:
    return np.divide(values, totals, out=np.full_like(values, math.nan), where=totals > 0)
