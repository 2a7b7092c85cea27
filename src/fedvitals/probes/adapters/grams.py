# SPDX-License-Identifier: Apache-2.0
"""Inner products of adapters' factors, computed where the factors are stored: on a GPU, or as NumPy arrays on the host.

The inputs of a round are the global model before and after it, and the clients' updates. For each adapter, the columns
of all B and the rows of all A are multiplied with each other, in double precision; only these small matrices are copied
to the host.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from fedvitals.probes.adapters.pairs import AdapterPair
from fedvitals.stats import Array

TOGETHER = 1 << 24  # numbers of adapters' factors that are multiplied at once: 128 MB
WEIGHED_NUMBERS = 1 << 17  # of each client, from which the averaging weights are solved


@dataclass(frozen=True, slots=True)
class PairLayout:
    """The pairs of a model, and where A and B lie in its parameters as one vector; a frozen one has no place there."""

    pairs: tuple[AdapterPair, ...]
    places: Mapping[str, tuple[int, int]]  # by the name of a parameter: first and last number


@dataclass(frozen=True, slots=True)
class Grams:
    """BᵀB and A Aᵀ of one adapter over all models side by side, [K, K], and the number of directions of each model.

    The models are the global one before and after the round, the clients, and the run's first model if it counts.
    """

    left: Array
    right: Array
    ranks: tuple[int, ...]  # of the models, in this order; their sum is K
    held: tuple[int, ...]  # directions that each client has: the remaining ones are zero, or as they were sent
    moved: int  # clients whose factors differ from what they were sent, in directions that they have


@dataclass(frozen=True, slots=True)
class FactorPair:
    """A [r, in] and B [out, r] of one adapter, as arrays of one kind and precision."""

    a: Any
    b: Any
    rounding: float = 0.0  # largest relative error of a number as the model stores it


class ClientStack:
    """The updates of clients whose models have the same layout, stacked."""

    def __init__(self, layout: PairLayout, vectors: Sequence[Any], first: int = 0) -> None:
        """`first`: index of the first of these clients among all."""
        self.size, self.places = len(vectors), range(first, first + len(vectors))
        self._pairs = {pair.name: pair for pair in layout.pairs}
        self._places = layout.places
        resident = [local(vector) for vector in vectors]
        self._matrix = resident[0][None] if len(resident) == 1 else _library(resident[0]).stack(resident)

    def rank(self, name: str) -> int:
        """Return the rank of these clients' adapter of that name."""
        return self._pairs[name].rank

    def has(self, pair: AdapterPair) -> bool:
        """Return whether these clients have an adapter of that name and size, of any rank."""
        own = self._pairs.get(pair.name)
        return own is not None and (own.inputs, own.outputs) == (pair.inputs, pair.outputs)

    def moves(self, pair: AdapterPair) -> bool:
        """Return whether any of these clients changed an adapter that they have."""
        return any(bool((step != 0).any()) for step in self.steps(pair.name))

    def steps(self, name: str) -> tuple[Any, Any]:
        """Return the clients' steps of A, [clients, r, in], and of B, [clients, r, out]; zeros of a frozen one."""
        pair = self._pairs[name]
        a, b = self._step(pair.a, pair.rank, pair.inputs), self._step(pair.b, pair.outputs, pair.rank)
        return a, b.swapaxes(1, 2)

    def steps_of(self, names: Sequence[str]) -> tuple[Any, Any]:
        """Return the same of several adapters of equal shapes, [adapters, clients, r, in] and [..., r, out]."""
        own = [self.steps(name) for name in names]
        library = _library(self._matrix)
        return library.stack([a for a, _ in own]), library.stack([b for _, b in own])

    def _step(self, name: str, rows: int, columns: int) -> Any:
        if name not in self._places:
            library = _library(self._matrix)
            return library.broadcast_to(library.zeros_like(self._matrix[:, :1, None]), (self.size, rows, columns))
        first, last = self._places[name]
        return self._matrix[:, first:last].reshape(self.size, rows, columns)


def local(values: Any) -> Any:
    """Return values in single or double precision, as an array if they are on the host."""
    if not hasattr(values, "detach"):
        return np.asarray(values)
    values = values.detach()
    if values.element_size() < 4:
        values = values.float()
    return values.numpy() if values.device.type == "cpu" else values


def rounding_of(values: Any) -> float:
    """Return the largest relative error with which a tensor or array stores a number; 0 of one without fractions."""
    if not hasattr(values, "detach"):
        kind = np.asarray(values).dtype
        return float(np.finfo(kind).eps) / 2 if kind.kind == "f" else 0.0
    return float(sys.modules["torch"].finfo(values.dtype).eps) / 2 if values.is_floating_point() else 0.0


def _library(values: Any) -> Any:
    return sys.modules["torch"] if hasattr(values, "detach") else np


def _double(values: Any) -> Any:
    return values.double() if hasattr(values, "detach") else values.astype(np.float64, copy=False)


def _on_host(values: Sequence[Any]) -> list[Array]:
    """Return small arrays on the host, copied together from a device."""
    if not values or not hasattr(values[0], "detach"):
        return [np.asarray(own) for own in values]
    joined = sys.modules["torch"].cat([own.reshape(-1).double() for own in values]).cpu().numpy()
    ends = np.cumsum([math.prod(own.shape) for own in values])[:-1]
    return [part.reshape(tuple(own.shape)) for part, own in zip(np.split(joined, ends), values, strict=True)]


def stacked_clients(clients: Sequence[tuple[Any, PairLayout]]) -> list[ClientStack]:
    """Return the updates (vector, layout) of clients, which must be sorted by layout, in as few stacks as possible."""
    stacks: list[ClientStack] = []
    for _, group in groupby(clients, key=lambda client: id(client[1])):
        own = [*group]
        stacks.append(ClientStack(own[0][1], [vector for vector, _ in own], sum(stack.size for stack in stacks)))
    return stacks


def grams_of(
    names: Sequence[str],
    before: Sequence[FactorPair],
    after: Sequence[FactorPair],
    stacks: Sequence[ClientStack],
    first: Sequence[FactorPair | None],
) -> list[Grams]:
    """Return the inner products of each named adapter; `first`: factors at the beginning of the run, if they count.

    Adapters of equal shapes are computed together: on a GPU, starting a small operation takes longer than running it.
    """
    alike: dict[Any, list[int]] = defaultdict(list)
    for place, (name, *models) in enumerate(zip(names, before, after, first, strict=True)):
        shapes = (None if own is None else (tuple(own.a.shape), tuple(own.b.shape)) for own in models)
        alike[*shapes, *(stack.rank(name) for stack in stacks)].append(place)
    batches = [part for places in alike.values() for part in _in_parts(places, before[places[0]], stacks)]
    products: list[Any] = []
    for places in batches:
        old, new, beginning = [before[p] for p in places], [after[p] for p in places], [first[p] for p in places]
        products += _products([names[p] for p in places], old, new, beginning, stacks)
    on_host, each = _on_host(products), 2 + len(stacks)
    grams: dict[int, Grams] = {}
    for number, places in enumerate(batches):
        lefts, rights, *moves = on_host[number * each : (number + 1) * each]
        start = len(before[places[0]].a) + len(after[places[0]].a)
        for row, (place, own) in enumerate(zip(places, _directions(lefts, rights, moves, start), strict=True)):
            of_global = [len(before[place].a), len(after[place].a)]
            of_clients = [stack.rank(names[place]) for stack in stacks for _ in range(stack.size)]
            ranks = (*of_global, *of_clients, *(len(model.a) for model in (first[place],) if model is not None))
            grams[place] = Grams(lefts[row], rights[row], ranks, *own)
    return [grams[place] for place in range(len(names))]


def _in_parts(places: list[int], like: FactorPair, stacks: Sequence[ClientStack]) -> list[list[int]]:
    """Return adapters of equal shapes in parts that take at most TOGETHER numbers."""
    rows = len(like.a) * (3 + sum(stack.size for stack in stacks))
    most = max(1, TOGETHER // (rows * (like.a.shape[1] + len(like.b))))
    return [places[first : first + most] for first in range(0, len(places), most)]


def _products(
    names: Sequence[str],
    before: Sequence[FactorPair],
    after: Sequence[FactorPair],
    first: Sequence[FactorPair | None],
    stacks: Sequence[ClientStack],
) -> list[Any]:
    """Return BᵀB and A Aᵀ of adapters of equal shapes, [adapters, K, K], and of each stack of clients which directions
    moved, [adapters, clients, r].
    """
    steps = [stack.steps_of(names) for stack in stacks]
    moved = [(a != 0).any(-1) | (b != 0).any(-1) for a, b in steps]
    products, library = [], _library(before[0].a)
    for side in (1, 0):
        old, new, *beginning = (
            library.stack([own.b.T if side else own.a for own in models if own is not None])
            for models in (before, after, *([] if first[0] is None else [first]))
        )
        own_steps = (step[side] for step in steps)
        clients = [
            (step + _grown(old, step.shape[2])[:, None]).reshape(len(old), -1, old.shape[2]) for step in own_steps
        ]
        wide = _double(library.concatenate([old, new, *clients, *beginning], 1))
        products.append(wide @ wide.swapaxes(1, 2))
    return [*products, *moved]


def _grown(rows: Any, rank: int) -> Any:
    """Return the first `rank` directions of global models, [adapters, rank, …]; missing ones are zeros."""
    if rank <= rows.shape[1]:
        return rows[:, :rank]
    library = _library(rows)
    return library.concatenate([rows, library.zeros_like(rows[:, :1])[:, [0] * (rank - rows.shape[1])]], 1)


def _directions(left: Array, right: Array, moved: Sequence[Array], start: int) -> list[tuple[tuple[int, ...], int]]:
    """Return of each adapter how many directions each client has, and how many clients changed any.

    start: the first column of the clients. moved: which directions differ from what a client was sent, by stack,
    [adapters, clients, r]. A client that changed nothing at all has what it was sent.
    """
    there = (np.diagonal(left, axis1=1, axis2=2) > 0) | (np.diagonal(right, axis1=1, axis2=2) > 0)
    held, changed = [], np.zeros(len(left), int)
    for own in moved:
        _, count, rank = own.shape
        exists = there[:, start : start + count * rank].reshape(own.shape)
        has = exists & ((own != 0) | (own == 0).all(2, keepdims=True))
        held.append(np.where(has.any(2), rank - has[:, :, ::-1].argmax(2), 0))
        changed += (exists & (own != 0)).any(2).sum(1)
        start += count * rank
    rows = np.concatenate(held, 1).tolist()
    return [(tuple(row), count) for row, count in zip(rows, changed.tolist(), strict=True)]


def step_products(
    names: Sequence[str],
    before: Sequence[FactorPair],
    after: Sequence[FactorPair],
    stacks: Sequence[ClientStack],
    shared: Sequence[int],
) -> tuple[Array, float]:
    """Return the inner products of the clients' steps and, last, the server's, [clients + 1, clients + 1].

    Only directions that all clients have count (`shared` of each adapter). Adapters are summed until there are enough
    numbers. The second number is the largest square that rounding can add to the server's step, which matters in half
    precision.
    """
    steps: list[list[Any]] = [[] for _ in stacks]
    old_rows: list[Any] = []
    new_rows: list[Any] = []
    count, rounding = 0, 0.0
    for name, old, new, rank in zip(names, before, after, shared, strict=True):
        if count > WEIGHED_NUMBERS:
            break
        for own, stack in zip(steps, stacks, strict=True):
            own += [step[:, :rank].reshape(stack.size, -1) for step in stack.steps(name)]
        old_rows += [old.a[:rank].reshape(-1), old.b.T[:rank].reshape(-1)]
        new_rows += [new.a[:rank].reshape(-1), new.b.T[:rank].reshape(-1)]
        count, rounding = sum(len(rows) for rows in new_rows), max(rounding, new.rounding)
    library = _library(new_rows[0])
    stored = library.concatenate(new_rows)
    clients = [library.concatenate(own, 1) for own in steps]
    wide = _double(library.concatenate([*clients, (stored - library.concatenate(old_rows))[None]]))
    rounded = (_double(stored) * rounding) ** 2 * (wide != 0).any(0)  # what nobody changes is not rounded
    products, squares = _on_host([wide @ wide.T, rounded.sum()])
    return products, float(squares)
