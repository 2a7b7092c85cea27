# SPDX-License-Identifier: Apache-2.0
"""Updates as the server sees them: size, direction relative to the cohort and to the client's own past, duplicates.

Cosines are exact as long as the round's updates and each client's previous one fit into `memory` bytes; beyond that
they are estimated from the sketches (standard error 1/16), and `approximate` says so.

Updates are compared on their device. Sums, products and sketches are copied to the host once for all clients, the
updates never.

Kept between rounds: of each of the `MOST_CLIENTS` clients that took part last, its newest update, as far as `memory`
allows, and that update's sketch (2 KB).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import count_sketch, sums, sums_of_parts
from fedvitals.probes.attempts import Attempt, unguarded
from fedvitals.probes.input_profiles import InputProfiles
from fedvitals.probes.layer_products import Workspace, as_matrix, products_by_layer
from fedvitals.probes.peer_columns import MOST_CLIENTS, LayerSlice
from fedvitals.probes.peers import PastModels, PeerLayout, Peers, from_sketches, layout_of
from fedvitals.probes.view import flatten
from fedvitals.records import LayerTable
from fedvitals.stats import ALIGNMENT_COLUMNS, COUNT, INFS, NANS, PEER_COLUMNS, SUM, SUM_SQUARES, Array

_ROUNDING = 1e-6  # of a sum of squares
# Below this share of a client's own ‖d‖², what is left after taking it from the total is mostly rounding.
_CANCELLED = 1e-3
_TOGETHER = 32 << 20  # bytes of updates that are copied into one matrix
_TOGETHER_AWAY = 2 << 30  # on a device, where each call has its price
_LONG = 1 << 17  # numbers of an update on a CPU that is not copied: fresh memory costs more than the calls


@dataclass(slots=True)
class ClientUpdate:
    """One client's update: its size, its sketch, and, memory allowing, the vector itself."""

    node: str
    length: int
    squares: float  # ‖d‖²: NaN or infinite when the update is
    rows: Array | None = None  # nine sums per layer
    sketch: Tensor | None = None
    vector: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    alignment: Array | None = None  # [layers × ALIGNMENT_COLUMNS]
    peers: Array | None = None  # [1 × PEER_COLUMNS]
    sizes: list[int] = field(init=False)  # the number of values of each layer; one layer if they are not known

    def __post_init__(self) -> None:
        self.sizes = [self.length] if self.rows is None else self.rows[:, COUNT].astype(int).tolist()

    @property
    def finite(self) -> bool:
        return math.isfinite(self.squares)

    @property
    def squares_of_layers(self) -> Array:
        return np.array([self.squares]) if self.rows is None else self.rows[:, SUM_SQUARES]


@dataclass(slots=True)
class PreviousUpdate:
    """What is kept of a client's newest update until its next one."""

    sizes: list[int]
    finite: bool
    squares_of_layers: Array
    sketch: Tensor | None
    vector: Tensor | None


def flatten_and_sum(updates: Mapping[str, Sequence[Tensor]]) -> list[tuple[str, Tensor, Array]]:
    """Return each update as (node, one vector, its nine sums per layer); those of equal shapes are measured in one
    pass.
    """
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for node, tensors in updates.items():
        alike[tuple(tensor.numel() * (1 + tensor.is_complex()) for tensor in tensors)].append(node)
    measured: list[tuple[str, Tensor, Array]] = []
    for sizes, nodes in alike.items():
        flat = [flatten(updates[node]) for node in nodes]
        whole = as_matrix(flat)
        vectors = torch.stack(flat) if whole is None else whole
        layers = vectors.split(sizes, dim=1)
        rows = np.asarray(torch.as_tensor(sums(layers, clients=True)).cpu())
        measured += zip(nodes, vectors, rows, strict=True)
    return measured


class UpdateTracker:
    """The updates of a run, round by round: `add` them as they come, `close_round` when all are in."""

    def __init__(self, *, brief: bool = False, memory: int = 512 << 20) -> None:
        self._brief = brief  # only the size, and the cosine to the others
        self._memory = memory
        self._held = self._expected = 0
        self._models = PastModels(memory // 4)
        self._workspace = Workspace()
        self._profiles = InputProfiles()
        self._layouts: dict[str, tuple[tuple[int, ...], PeerLayout]] = {}  # by the digest of their table
        self._round: dict[str, ClientUpdate] = {}
        self._previous: dict[str, PreviousUpdate] = {}  # the client that was absent longest first
        self._lock = threading.Lock()
        self.approximate = False

    @property
    def held_bytes(self) -> int:
        """The bytes of the kept updates."""
        return self._held

    def has_room(self, size: int, clients: int = 1) -> bool:
        """Return whether an update of so many bytes would be kept; `clients`: and those of so many clients in this
        round and the next, since a first round that is kept for nothing costs more than many that are not.
        """
        awaited = max(1, clients - len(self._round))
        needed = max(self._held + self._expected + (awaited + 1) * size, (2 * clients + 1) * size if clients > 1 else 0)
        return not self.approximate and needed <= self._memory

    def expect(self, size: int) -> None:
        """Count so many more bytes of updates that will be added when their sums have come from a device."""
        with self._lock:
            self._expected += size

    def add(
        self, node: str, vector: Tensor | None, rows: Array | None = None, sketch: Tensor | None = None
    ) -> ClientUpdate:
        """Add one update: a vector with its nine sums per layer, or, without a vector, sums and sketch.

        Without sums the vector is measured as one layer. A second update of the same client in the same round, as sent
        according to the host, replaces the first.
        """
        if rows is None:
            rows = np.asarray(torch.as_tensor(sums([] if vector is None else [vector])).cpu())
        length, kept = int(rows[:, COUNT].sum()), None if self._brief else rows
        update = ClientUpdate(node, length, _squares(rows), kept, vector=vector, sketch=sketch)
        update.metrics["update.norm"] = math.sqrt(rows[:, SUM_SQUARES].sum())
        if update.squares == 0:
            update.metrics["update.zero"] = 1.0
        if not update.finite:
            update.metrics["update.nonfinite"] = float(rows[:, [NANS, INFS]].sum())
        size = 0 if vector is None else vector.numel() * vector.element_size()
        with self._lock:
            self._release(self._round.get(node))
            if vector is None or not self.has_room(size):
                self.approximate, update.vector = True, None
            else:
                self._held += size
            if vector is not None and update.vector is None:
                update.sketch = count_sketch(vector)
            self._round[node] = update
        return update

    def begin_round(self, number: int, parameters: Sequence[Tensor]) -> None:
        """Set the global model that the clients of a round start from."""
        if not self._brief:
            self._models.add(number, parameters)

    def steps_back(self, sizes: Sequence[int]) -> dict[int, Array]:
        """Return, by rounds ago, each layer's sum of that global model minus the present one; those that are kept."""
        return self._models.steps_back(sizes)

    def know(self, tables: Iterable[LayerTable]) -> None:
        """Set the shapes of layers, which an update itself does not carry."""
        for table in tables:
            if table.rows == "parameter" and table.digest not in self._layouts:
                sizes = tuple(math.prod(layer.shape) for layer in table.layers)
                self._layouts[table.digest] = sizes, layout_of(table)

    def close_round(self, attempt: Attempt = unguarded) -> list[ClientUpdate]:
        """Return the round's updates with their cosines and duplicates; they become the clients' previous ones.

        `attempt` does each comparison separately. If one fails, only its cosines are missing.
        """
        with self._lock:
            closing, self._round = self._round, {}
        attempt("fetching sketches", lambda: _fetch_sketches(closing.values()), None)
        attempt("sharing updates out", lambda: _share(closing.values()), None)
        cohorts: dict[tuple[int, ...], list[ClientUpdate]] = defaultdict(list)
        for update in closing.values():
            if not self._brief:
                update.peers = np.full((1, len(PEER_COLUMNS)), np.nan)
            if update.finite:
                cohorts[tuple(update.sizes)].append(update)  # only updates of equal models can be compared
        for cohort in cohorts.values():
            if not attempt("comparing updates", partial(self._align, cohort), None):
                attempt("comparing sketches", partial(self._align_by_sketch, cohort), None)
        attempt("looking for equal updates", lambda: _count_duplicates(closing.values()), None)
        self._keep(closing, attempt)
        return list(closing.values())

    def _align(self, cohort: list[ClientUpdate]) -> bool:
        """True, once it is done."""
        vectors = [update.vector for update in cohort if update.vector is not None]
        if len(vectors) == len(cohort):
            self._align_exactly(cohort, vectors)
        else:
            self._align_by_sketch(cohort)
        return True

    def _align_exactly(self, cohort: list[ClientUpdate], vectors: list[Tensor]) -> None:
        """Compute cosines per layer and as a whole, to the mean of the *other* updates and the client's previous one.

        Small updates are combined into one matrix, since for a small model a call costs more than its computation.
        """
        whole = as_matrix(vectors)
        is_long = vectors[0].is_cpu and vectors[0].numel() >= _LONG
        room = _TOGETHER if vectors[0].is_cpu else _TOGETHER_AWAY
        if whole is None and not is_long and sum(vector.nbytes for vector in vectors) <= room:
            whole = torch.stack(vectors)
            vectors = [*whole]
            for update, vector in zip(cohort, vectors, strict=True):
                update.vector = vector
        if not self._brief:
            sketches = count_sketch(whole).cpu() if whole is not None else [count_sketch(own).cpu() for own in vectors]
            for update, values in zip(cohort, sketches, strict=True):
                update.sketch = values
        self._align_to_vectors(cohort, vectors)
        if not self._brief:
            sizes = tuple(cohort[0].sizes)
            layout = next((own for known, own in reversed(self._layouts.values()) if known == sizes), PeerLayout())
            peers = Peers(vectors, _sums(cohort), layout, self._models, self._workspace)
            _set_peers(cohort, peers.rows(_sketches(cohort)))
            self._compare_inputs(cohort, vectors, layout.dense)

    def _compare_inputs(self, cohort: list[ClientUpdate], vectors: list[Tensor], dense: LayerSlice | None) -> None:
        if dense is None:
            return
        norms = [torch.linalg.vector_norm(own[dense.place].view(dense.rows, -1), dim=0) for own in vectors]
        squares = torch.stack(norms).cpu().numpy().astype(np.float64) ** 2
        measured = self._profiles.compare([update.node for update in cohort], squares)
        for update in cohort:
            update.metrics |= measured.get(update.node, {})

    def _align_to_vectors(self, cohort: list[ClientUpdate], vectors: list[Tensor]) -> None:
        sizes = cohort[0].sizes
        past = {i: old for i, update in enumerate(cohort) if (old := self._comparable(update)) is not None}
        if len(cohort) == 1 and not past:
            return
        before = [old.vector for old in past.values() if old.vector is not None]
        with_total, total_squares, with_previous = products_by_layer(vectors, sizes, before, [*past], self._workspace)
        if len(cohort) > 1:
            own = np.stack([update.squares_of_layers for update in cohort])
            # others = total − own, so these follow without forming that vector...
            dot, squares = with_total - own, total_squares - 2 * with_total + own
            for i in np.flatnonzero((squares < _CANCELLED * own).any(axis=1)):  # ...unless one outweighs the others
                others = _sum([vector for place, vector in enumerate(vectors) if place != i])
                dot[i], squares[i] = _dots(vectors[i], others, sizes), _dots(others, others, sizes)
            _store_cosines("update.cosine_mean", 0, cohort, dot, own, squares)
        if past:
            these = [cohort[i] for i in past]
            own, squares = (np.stack([u.squares_of_layers for u in group]) for group in (these, past.values()))
            _store_cosines("update.cosine_previous", 1, these, with_previous, own, squares)

    def _comparable(self, update: ClientUpdate) -> PreviousUpdate | None:
        """Return the client's previous update, if it was finite, of the same model, and is still kept."""
        old = self._previous.get(update.node)
        usable = old is not None and old.vector is not None and old.finite and old.sizes == update.sizes
        return old if usable else None

    def _align_by_sketch(self, cohort: list[ClientUpdate]) -> None:
        """Compute cosines of the whole, since a sketch has no layers."""
        for update in cohort:
            if update.sketch is None and update.vector is not None:
                update.sketch = count_sketch(update.vector)
        _fetch_sketches(cohort)
        sketches = [update.sketch for update in cohort]
        total = torch.stack([sketch for sketch in sketches if sketch is not None]).sum(0)
        for update, sketch in zip(cohort, sketches, strict=True):
            if sketch is None:
                continue
            if len(cohort) > 1:
                _put(update.metrics, "update.cosine_mean", _cosine_of(sketch, total - sketch))
            previous = self._previous.get(update.node)
            if previous is not None and previous.sketch is not None and previous.finite:
                _put(update.metrics, "update.cosine_previous", _cosine_of(sketch, previous.sketch))
        if not self._brief:
            _set_peers(cohort, from_sketches(_sums(cohort), _sketches(cohort)))

    def _keep(self, closing: dict[str, ClientUpdate], attempt: Attempt) -> None:
        if self._brief:
            self._held = 0
            return
        for node in closing:
            self._release(self._previous.pop(node, None))
        # Vectors of a stack would keep all of it alive until the last of its clients has come again.
        apart = bool(self._previous)
        for node, update in closing.items():
            previous = attempt("keeping an update", partial(_previous_of, update, apart=apart), node)
            if previous is None:
                self._release(update)
            else:
                self._previous[node] = previous
        for node in [*itertools.islice(self._previous, max(0, len(self._previous) - MOST_CLIENTS))]:
            self._release(self._previous.pop(node))

    def _release(self, old: ClientUpdate | PreviousUpdate | None) -> None:
        if old is not None and old.vector is not None:
            self._held -= old.vector.numel() * old.vector.element_size()


def _previous_of(update: ClientUpdate, *, apart: bool) -> PreviousUpdate:
    """Return what is kept of an update; `apart`: not as a part of the round's stack."""
    vector = _own(update.vector) if apart else update.vector
    squares = update.squares_of_layers.copy()
    return PreviousUpdate(update.sizes, update.finite, squares, _own(update.sketch), vector)


def _own(vector: Tensor | None) -> Tensor | None:
    """Return the vector in memory of its own: a copy where it is part of something larger."""
    if vector is None or vector.untyped_storage().nbytes() <= vector.numel() * vector.element_size():
        return vector
    return vector.clone()


def _sums(cohort: list[ClientUpdate]) -> Array:
    """[clients, layers, 9]."""
    return np.stack([update.rows for update in cohort if update.rows is not None])


def _sketches(cohort: list[ClientUpdate]) -> Array:
    return torch.stack([u.sketch for u in cohort if u.sketch is not None]).cpu().numpy()


def _fetch_sketches(updates: Iterable[ClientUpdate]) -> None:
    """Copy the sketches to the CPU with one copy, since they are used one by one afterwards."""
    away = [(update, update.sketch) for update in updates if update.sketch is not None and not update.sketch.is_cpu]
    if away:
        for (update, _), sketch in zip(away, torch.stack([own for _, own in away]).cpu(), strict=True):
            update.sketch = sketch


def _set_peers(cohort: list[ClientUpdate], rows: Array) -> None:
    for update, row in zip(cohort, rows, strict=True):
        update.peers = row[None]


def _sum(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def _dots(a: Tensor, b: Tensor, sizes: list[int]) -> Array:
    """Return ⟨a, b⟩ of each layer."""
    products = sums_of_parts(a * b, tuple(sizes))
    return np.asarray(torch.as_tensor(products).cpu())[..., SUM]


def _store_cosines(name: str, column: int, cohort: list[ClientUpdate], dot: Array, own: Array, squares: Array) -> None:
    """Store cosines: of the whole as a metric, of the layers in their column of the alignment."""
    layers = _cosine(dot, own, squares)
    whole = _cosine(dot.sum(1), own.sum(1), squares.sum(1))
    for update, cosines, cosine in zip(cohort, layers, whole.tolist(), strict=True):
        if not math.isnan(cosine):  # a cosine with nothing is absent
            update.metrics[name] = cosine
        if update.alignment is not None:
            update.alignment[:, column] = cosines


def _share(updates: Iterable[ClientUpdate]) -> None:
    """Create the alignments where layers are known: no cosines yet, and each layer's share of ‖d‖²."""
    alike: dict[int, list[tuple[ClientUpdate, Array]]] = defaultdict(list)
    for update in updates:
        if update.rows is not None:
            alike[len(update.rows)].append((update, update.rows[:, SUM_SQUARES]))
    for same in alike.values():
        own = np.stack([squares for _, squares in same])
        total = own.sum(axis=1, keepdims=True)
        alignments = np.full((*own.shape, len(ALIGNMENT_COLUMNS)), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            alignments[..., 2] = np.where(total > 0, own / total, 0.0)
        for (update, _), alignment in zip(same, alignments, strict=True):
            update.alignment = alignment


def _squares(rows: Array) -> float:
    """Return ‖d‖² from the nine sums of the layers; NaN if a value is not finite."""
    return math.nan if rows[:, NANS : INFS + 1].any() else float(rows[:, SUM_SQUARES].sum())


def _cosine(dot: Any, squares_a: Any, squares_b: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.where(squares_a * squares_b > 0, dot / np.sqrt(squares_a * squares_b), np.nan), -1, 1)


def _cosine_of(a: Tensor, b: Tensor) -> float:
    return float(_cosine(float(a @ b), float(a @ a), float(b @ b)))


def _put(metrics: dict[str, float], name: str, value: Any) -> None:
    """Add a cosine unless it is NaN: a cosine with nothing is absent."""
    if not math.isnan(float(value)):
        metrics[name] = float(value)


def _count_duplicates(cohort: Iterable[ClientUpdate]) -> None:
    """Set `update.duplicates` where others sent exactly the same: norms nearly agree, and vectors to the last bit.

    Nearly, since a device may sum the same numbers in another order at another address.
    """
    alike: list[list[ClientUpdate]] = []
    for update in sorted((u for u in cohort if u.finite and u.squares > 0), key=lambda u: u.squares):
        if alike and update.squares <= alike[-1][-1].squares * (1 + _ROUNDING):
            alike[-1].append(update)
        else:
            alike.append([update])
    for group in alike:
        for update in group if len(group) > 1 else ():
            same = sum(other is not update and _same(update, other) for other in group)
            if same:
                update.metrics["update.duplicates"] = float(same)


def _same(a: ClientUpdate, b: ClientUpdate) -> bool:
    if a.vector is not None and b.vector is not None:
        return torch.equal(a.vector, b.vector)
    return a.sketch is not None and b.sketch is not None and torch.equal(a.sketch, b.sketch)
