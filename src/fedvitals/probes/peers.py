# SPDX-License-Identifier: Apache-2.0
"""How one client's update compares with those of the same round: the family `update.peers`, one row per client.

Every client has the same weight, whatever its update's size: one that sends a hundred times as much is compared with
the others, not they with it. Nearly everything derives from one pass over the updates: the sum of unit vectors, and the
products of all updates with that sum and with the last global models.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedvitals.probes.host_copies import to_host
from fedvitals.probes.layer_products import UpdateRows, Workspace, piece_length
from fedvitals.probes.peer_columns import (
    BACK,
    BIAS,
    CLASS_ENTROPY,
    CLASSES,
    CLASSES_MIN,
    COSINE,
    FIRST,
    HEAD,
    NEAREST,
    ROUNDS_BACK,
    RUN_OF_SIGNS,
    SIGNS,
    STEP,
    LayerSlice,
    PeerLayout,
    layout_of,
    sign_stride,
    spread_rows,
)
from fedvitals.probes.view import flatten
from fedvitals.stats import SUM_SQUARES, Array

__all__ = ["PastModels", "PeerLayout", "Peers", "from_sketches", "layout_of", "sign_stride", "spread_rows"]

CANDIDATE = 0.8  # sketch cosine above which a pair is compared exactly
CANDIDATES = 4  # maximum per client; only one each if updates are so large that four would take long:
PAIRED_NUMBERS = 64 << 20  # values read for exact comparisons
PAIRED_AT_ONCE = 4 << 20
SIGNS_AT_ONCE = 1 << 14  # of each client, on a CPU
# Below this share of a client's own square, the remainder after subtracting its part from a sum is mostly rounding.
_CANCELLED = 1e-3
_NOTHING = 1e-10  # square below which the others cancel out, so that there is no direction to compare with


class PastModels:
    """The global models with which the last rounds began, if they fit into `memory` bytes."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._past: deque[tuple[int, Tensor]] = deque(maxlen=ROUNDS_BACK + 1)

    def add(self, number: int, parameters: Sequence[Tensor]) -> None:
        """Add the model that a round begins with. If a round begins again, its last model counts."""
        if (ROUNDS_BACK + 1) * sum(p.numel() * p.element_size() for p in parameters) > self._memory:
            self._past.clear()
            return
        spare = None  # the memory of a model that is no longer needed
        if self._past and self._past[-1][0] == number:
            spare = self._past.pop()[1]
        elif len(self._past) == self._past.maxlen:
            spare = self._past.popleft()[1]
        self._past.append((number, flatten([*parameters], spare)))

    def compared_with(self, like: Tensor) -> int:
        """Return the number of earlier models to compare updates like this one with, and move them to its device."""
        if len(self._past) < 2 or any(model.shape != like.shape for _, model in self._past):
            return 0
        for place, (number, model) in enumerate(self._past):
            self._past[place] = number, model.to(like)  # kept there, because moving them again each round takes long
        return len(self._past) - 1

    def backwards(self, place: slice, workspace: Workspace) -> Tensor:
        """Return [k, ...]: a range of the differences from the newest model to the earlier ones, newest first."""
        *past, now = (model[place] for _, model in self._past)
        differences = workspace.rows("models", now, len(past), len(now))
        for model, difference in zip(reversed(past), differences, strict=True):
            torch.sub(model, now, out=difference)
        return differences

    def steps_back(self, sizes: Sequence[int]) -> dict[int, Array]:
        """Return, by rounds ago, each layer's sum of the earlier model minus the newest; {} for other layer sizes."""
        if len(self._past) < 2 or any(model.numel() != sum(sizes) for _, model in self._past):
            return {}
        *past, (number, now) = self._past
        return {
            number - earlier: np.array([float(part.double().sum()) for part in (model.to(now) - now).split([*sizes])])
            for earlier, model in reversed(past)
        }


class Peers:
    """The updates of one round, all finite and of equal layout; `rows` compares each with the others.

    A client that sent only zeros has no direction: it is ignored, and its own row is NaN.
    """

    def __init__(
        self, vectors: Sequence[Tensor], sums: Array, layout: PeerLayout, models: PastModels, workspace: Workspace
    ) -> None:
        """`sums` are the nine sums, [clients, layers, 9]; of a single layer if layers are unknown."""
        self._vectors, self._workspace = vectors, workspace
        self._updates = UpdateRows(vectors, workspace, "updates")
        self._rows = spread_rows(sums)
        self._head = layout.head
        squares = sums[..., SUM_SQUARES]
        self._norms = np.sqrt(squares.sum(axis=1))
        self._compared = {COSINE: (slice(0, vectors[0].numel()), self._norms)}
        for column, piece in ((FIRST, layout.first), (HEAD, layout.head), (BIAS, layout.bias)):
            if piece is not None:
                self._compared[column] = piece.place, np.sqrt(squares[:, piece.layer])
        self._models, self._rounds_back = models, models.compared_with(vectors[0])

    def rows(self, sketches: Array) -> Array:
        """Return [clients, PEER_COLUMNS]; `sketches`, [clients, 256], select the pairs to compare exactly."""
        dots, squares, to_models, lengths, heads = self._products()
        with np.errstate(all="ignore"):
            for column, (place, norms) in self._compared.items():
                self._rows[:, column] = self._to_others(place, norms, dots[column], squares[column])
            if self._rounds_back:
                self._to_models(to_models, lengths)
            if self._head is not None:
                self._to_classes(self._head, torch.cat(heads))
        self._rows[:, SIGNS] = agreement(self._signs())
        cosines = cosines_of(sketches)
        most = PAIRED_NUMBERS // max(1, self._vectors[0].numel())
        self._rows[:, NEAREST] = nearest(cosines, self._exact_pairs(candidates(cosines, most)))
        self._rows[self._norms == 0] = np.nan
        return self._rows

    def _signs(self) -> Tensor:
        """Return the signs of the coordinates that are compared, [clients, ...]."""
        every = sign_stride(len(self._vectors), self._vectors[0].numel())
        if self._updates.matrix is not None:
            return chosen_coordinates(self._updates.matrix, every).flatten(1).sign()
        chosen = [chosen_coordinates(vector, every) for vector in self._vectors]
        signs = self._workspace.rows("signs", chosen[0], len(chosen), chosen[0].numel())
        for row, values in zip(signs, chosen, strict=True):
            torch.sign(values, out=row.view(values.shape))
        return signs

    def _products(self) -> tuple[dict[int, Array], dict[int, float], Array, Array, list[Tensor]]:
        """Compute in one pass, range by range, each update times the sum of all unit vectors, and times the models.

        Returns these products by column, [clients]; the squares of the sums; the products with the differences of
        models, [k, clients], and the lengths of these, [k]; and the head's sum of unit vectors, in pieces. A range is
        small enough to stay in the processor's cache.
        """
        factors = {column: torch.as_tensor(_inverse(norms)) for column, (_, norms) in self._compared.items()}
        dots = {column: np.zeros(len(self._vectors)) for column in self._compared}
        squares = dict.fromkeys(self._compared, 0.0)
        to_models, model_squares = np.zeros((self._rounds_back, len(self._vectors))), np.zeros(self._rounds_back)
        heads: list[Tensor] = []
        columns_of_parts: list[list[int]] = []
        parts: list[Tensor | Array] = []
        for stretch in self._stretches():
            own = self._updates.at(stretch)
            columns = [c for c, (place, _) in self._compared.items() if place.start <= stretch.start < place.stop]
            chosen = torch.stack([factors[column] for column in columns]).to(own)
            units = torch.mm(chosen, own, out=self._workspace.rows("units", own, len(columns), own.shape[1]))
            back = self._models.backwards(stretch, self._workspace) if self._rounds_back else own[:0]
            columns_of_parts.append(columns)
            if HEAD in columns:
                heads.append(units[columns.index(HEAD)].clone())
            # The reverse order takes twice as long.
            parts += units @ own.T, units.square_().sum(1), back @ own.T, back.square_().sum(1)
        fetched = to_host(parts)
        for columns, *rows in zip(columns_of_parts, *(fetched[i::4] for i in range(4)), strict=True):
            for column, products, total in zip(columns, *rows[:2], strict=True):
                dots[column] += products
                squares[column] += float(total)
            to_models += rows[2]
            model_squares += rows[3]
        return dots, squares, to_models, np.sqrt(model_squares), heads

    def _stretches(self) -> Iterator[slice]:
        """Yield ranges of coordinates that lie entirely inside or outside of every separately compared layer."""
        edges = sorted({edge for place, _ in self._compared.values() for edge in (place.start, place.stop)})
        width = piece_length(self._vectors)
        for start, stop in itertools.pairwise(edges):
            for first in range(start, stop, width):
                yield slice(first, min(first + width, stop))

    def _others(self, place: slice, norms: Array, without: int) -> Tensor:
        """Return the sum of all unit vectors but one, for cases where subtracting it would leave rounding errors."""
        total = torch.zeros_like(self._vectors[0][place])
        for i, factor in enumerate(_inverse(norms).tolist()):
            if factor and i != without:
                total.add_(self._vectors[i][place], alpha=factor)
        return total

    def _to_others(self, place: slice, norms: Array, dots: Array, square: float) -> Array:
        """Return cosines to the sum of the others' unit vectors: the total minus the client's own, of length 1."""
        own = dots / norms
        squares = square - 2 * own + 1
        cosines = np.where(norms > 0, (own - 1) / np.sqrt(squares), np.nan)
        cancelled = np.flatnonzero((squares < _CANCELLED) & (norms > 0)).tolist()
        products: list[Tensor | Array] = []
        for i in cancelled:
            others = self._others(place, norms, without=i)
            products += (self._vectors[i][place] @ others, others.double().square().sum())
        fetched = [float(product) for product in to_host(products)]
        for i, dot, left in zip(cancelled, fetched[::2], fetched[1::2], strict=True):
            cosines[i] = dot / norms[i] / math.sqrt(left) if left > _NOTHING else np.nan
        return np.clip(cosines, -1, 1)

    def _to_models(self, dots: Array, lengths: Array) -> None:
        """Set the cosines along the last step of the global model, and back to its state some rounds ago."""
        distances = lengths[:, None]
        cosines = np.clip(np.where(distances > 0, dots / self._norms / distances, np.nan), -1, 1)
        self._rows[:, STEP] = -cosines[0]
        self._rows[:, BACK] = np.fmax.reduce(cosines, axis=0)

    def _to_classes(self, head: LayerSlice, total: Tensor) -> None:
        """Compare each row of the head, which belongs to one class, with the others' rows for that class."""
        norms = self._compared[HEAD][1]
        own = self._updates.at(head.place).unflatten(1, (head.rows, -1))
        total = total.view(head.rows, -1)
        sizes, dots, squares = to_host(
            [
                torch.linalg.vector_norm(own, dim=2),  # of each row
                torch.bmm(own.transpose(0, 1), total[..., None])[..., 0].T,
                total.double().square().sum(1),
            ]
        )
        dots = dots / norms[:, None]
        mine = (sizes / norms[:, None]) ** 2
        left = squares - 2 * dots + mine
        cosines = np.where((mine > 0) & (left > _NOTHING), (dots - mine) / np.sqrt(mine * left), np.nan)
        cancelled = np.flatnonzero((left < _CANCELLED * mine).any(axis=1)).tolist()
        products: list[Tensor | Array] = []
        for i in cancelled:
            rest = self._others(head.place, norms, without=i).view(head.rows, -1)
            products += ((own[i] * rest).sum(1), rest.double().square().sum(1))
        fetched = to_host(products)
        for i, dot, square in zip(cancelled, fetched[::2], fetched[1::2], strict=True):
            cosines[i] = np.where((mine[i] > 0) & (square > _NOTHING), dot / sizes[i] / np.sqrt(square), np.nan)
        self._tell_classes(np.clip(cosines, -1, 1), sizes)

    def _tell_classes(self, cosines: Array, sizes: Array) -> None:
        known = ~np.isnan(cosines)
        weights = np.where(known, sizes, 0.0)
        self._rows[:, CLASSES] = np.where(known, weights * cosines, 0.0).sum(axis=1) / weights.sum(axis=1)
        moved = known & (sizes > 0.5 * sizes.mean(axis=1, keepdims=True))
        least = np.where(moved, cosines, np.inf).min(axis=1)
        self._rows[:, CLASSES_MIN] = np.where(np.isinf(least), np.nan, least)
        if sizes.shape[1] > 1:
            shares = sizes**2 / (sizes**2).sum(axis=1, keepdims=True)
            entropy = -np.where(shares > 0, shares * np.log(shares), 0.0 * shares).sum(axis=1)
            self._rows[:, CLASS_ENTROPY] = entropy / math.log(sizes.shape[1])

    def _exact_pairs(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Return the cosine of each pair, computed once, so that both clients get the same value to the last bit."""
        if not pairs:
            return {}
        if len(pairs) * self._vectors[0].numel() <= PAIRED_AT_ONCE:  # small ones, for which a call each would cost more
            own = self._updates.at(slice(None))
            left, right = (own[list(side)] for side in zip(*pairs, strict=True))
            dots = (left * right).sum(1, dtype=torch.float64).tolist()
        else:
            dots = torch.stack([self._vectors[a] @ self._vectors[b] for a, b in pairs]).tolist()
        lengths = [float(self._norms[a] * self._norms[b]) for a, b in pairs]
        cosines = [min(1.0, max(-1.0, dot / length)) for dot, length in zip(dots, lengths, strict=True)]
        return dict(zip(pairs, cosines, strict=True))


def chosen_coordinates(vectors: Tensor, every: int) -> Tensor:
    """Return one run of neighbours in `every` such runs, along the last axis: [..., runs, neighbours].

    If `every` is 1, all coordinates are in one run.
    """
    if every == 1:
        return vectors.unsqueeze(-2)
    whole = vectors.shape[-1] // RUN_OF_SIGNS * RUN_OF_SIGNS
    runs: Tensor = vectors[..., :whole].unflatten(-1, (-1, RUN_OF_SIGNS))
    return runs[..., ::every, :]


def agreement(signs: Tensor) -> Array:
    """Return the share of each client's signs that equals the sign of the sum of the others' signs, without zeros.

    Without a client's own sign s, the sum T becomes T − s, which agrees with s where s·T ≥ 2, and disagrees where s·T ≤
    0. So two products serve all clients. They are sums of few integers, hence exact.
    """
    counts = []
    for part in signs.split(SIGNS_AT_ONCE if signs.is_cpu else max(1, signs.shape[1]), dim=1):
        total = part.sum(0)
        with_plus, with_minus = (total >= 2).to(part), (total <= -2).to(part)
        against_plus, against_minus = (total <= 0).to(part), (total >= 0).to(part)
        differences = torch.stack([with_plus - with_minus, against_plus - against_minus]) @ part.T
        sums = torch.stack([with_plus + with_minus, against_plus + against_minus]) @ part.abs().T
        counts.append((sums + differences) / 2)
    agree, against = np.sum(to_host(counts), axis=0)
    with np.errstate(invalid="ignore"):
        return np.asarray(agree / (agree + against))


def from_sketches(sums: Array, sketches: Array) -> Array:
    """Return [clients, PEER_COLUMNS] if the updates themselves are not kept."""
    rows, cosines = spread_rows(sums), cosines_of(sketches)
    with np.errstate(divide="ignore", invalid="ignore"):
        units = np.nan_to_num(sketches / np.linalg.norm(sketches, axis=1, keepdims=True))
        others = units.sum(axis=0) - units
        squares = (others**2).sum(axis=1)
        to_others = (units * others).sum(axis=1) / np.sqrt(squares)
    usable = (squares > _NOTHING) & units.any(axis=1)
    rows[:, COSINE] = np.where(usable, np.clip(to_others, -1, 1), np.nan)
    rows[:, NEAREST] = nearest(cosines, {})
    rows[~units.any(axis=1)] = np.nan
    return rows


def cosines_of(sketches: Array) -> Array:
    """Return [clients, clients], bitwise symmetric; −∞ on the diagonal and for clients without a direction."""
    norms = np.linalg.norm(sketches, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        units = sketches / norms[:, None]
        cosines: Array = np.clip(np.triu(units @ units.T, 1), -1, 1)
    cosines += cosines.T
    cosines[np.isnan(cosines)] = -np.inf
    np.fill_diagonal(cosines, -np.inf)
    return cosines


def candidates(cosines: Array, most: int) -> list[tuple[int, int]]:
    """Return pairs whose updates may be nearly equal, by their sketches: each client's best, then its second best, ...

    Between one and four per client; no more than `most`, except for the best ones.
    """
    few = min(CANDIDATES, len(cosines) - 1)
    if few < 1 or cosines.max() <= CANDIDATE:
        return []
    best = np.argsort(-cosines, axis=1, kind="stable")[:, :few]
    pairs: dict[tuple[int, int], None] = {}
    for rank in range(few):
        for i, j in enumerate(best[:, rank].tolist()):
            if cosines[i, j] > CANDIDATE and (rank == 0 or len(pairs) < most):
                pairs[min(i, j), max(i, j)] = None
    return [*pairs]


def nearest(cosines: Array, exact: dict[tuple[int, int], float]) -> Array:
    """Return each client's largest cosine to another: exact where it has candidates, else from the sketches."""
    largest = np.full(len(cosines), -np.inf)
    for pair, cosine in exact.items():
        for i in pair:
            largest[i] = max(largest[i], cosine)
    largest = np.where(np.isinf(largest), cosines.max(axis=1, initial=-np.inf), largest)
    return np.where(np.isinf(largest), np.nan, largest)


def _inverse(norms: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(norms > 0, 1 / norms, 0.0)
