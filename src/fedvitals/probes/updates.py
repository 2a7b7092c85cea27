# SPDX-License-Identifier: Apache-2.0
"""Updates, as the server sees them: size, direction against the cohort and against the client's own past, duplicates.

Cosines are exact as long as the round's updates and each client's previous one fit into `memory` bytes; past that they
are estimated from the sketches (standard error 1/16), and `approximate` says so.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import sums
from fedvitals.probes.sketch import Sketcher
from fedvitals.stats import COUNT, INFS, NANS, SUM, SUM_SQUARES, Array

# Below this share of a client's own ‖d‖², what is left after taking it from the total is mostly rounding.
_CANCELLED = 1e-3


@dataclass(slots=True)
class Update:
    """One client's update: its size, its sketch, and, memory allowing, the vector itself."""

    node: str
    length: int
    squares: float  # ‖d‖²: NaN or infinite when the update is
    rows: Array | None = None  # nine sums per layer
    sketch: Tensor | None = None
    vector: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    alignment: Array | None = None  # [layers × ALIGNMENT_COLUMNS]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.squares)

    @property
    def squares_of_layers(self) -> Array:
        return np.array([self.squares]) if self.rows is None else self.rows[:, SUM_SQUARES]

    def dots(self, a: Tensor, b: Tensor) -> Array:
        """⟨a, b⟩ of each layer: the sums of the product, in one pass; of the whole when layers are not known."""
        if self.rows is None:
            return np.array([float(torch.dot(a, b))])
        pieces = (a * b).split(self.rows[:, COUNT].astype(int).tolist())
        return np.asarray(torch.as_tensor(sums(pieces)).cpu())[:, SUM]

    def align(self, to_others: Array | None, to_previous: Array | None) -> None:
        """Write down the cosines of the layers and their shares of ‖d‖², where layers are known."""
        if self.rows is not None:
            own = self.squares_of_layers
            share = own / own.sum() if own.sum() > 0 else np.zeros_like(own)
            absent = np.full(len(own), np.nan)
            columns = (absent if cosines is None else cosines for cosines in (to_others, to_previous))
            self.alignment = np.stack([*columns, share], axis=1)


class Updates:
    """The updates of a run, round by round: `add` as they come, `close_round` when all are in."""

    def __init__(self, *, brief: bool = False, memory: int = 512 << 20) -> None:
        self._brief = brief  # only the size, and the cosine to the others
        self._memory = memory
        self._held = 0
        self._sketcher = Sketcher()
        self._round: dict[str, Update] = {}
        self._previous: dict[str, Update] = {}
        self._lock = threading.Lock()
        self.approximate = False

    def add(self, node: str, vector: Tensor, rows: Array | None) -> Update:
        """Take in one update: as one vector, and its nine sums per layer (not needed when brief).

        A second one of the same client in the same round, what a host says was sent, stands for the first.
        """
        update = Update(node, vector.numel(), _squares(vector, rows), rows, vector=vector)
        update.metrics["update.norm"] = math.sqrt(update.squares) if update.finite else _finite_norm(vector, rows)
        if update.squares == 0:
            update.metrics["update.zero"] = 1.0
        size = vector.numel() * vector.element_size()
        with self._lock:
            self._release(self._round.get(node))
            if self.approximate or self._held + 2 * size > self._memory:
                self.approximate, update.vector = True, None
            else:
                self._held += size
            if not self._brief or self.approximate:
                update.sketch = self._sketcher(vector)
            self._round[node] = update
        return update

    def close_round(self) -> list[Update]:
        """The round's updates with their cosines and duplicates; they become the clients' previous ones."""
        with self._lock:
            closing, self._round = self._round, {}
        cohorts: dict[int, list[Update]] = defaultdict(list)
        for update in closing.values():
            if update.finite:
                cohorts[update.length].append(update)  # only updates of equal models can be compared
            else:
                update.align(None, None)
        for cohort in cohorts.values():
            vectors = [update.vector for update in cohort if update.vector is not None]
            if len(vectors) == len(cohort):
                self._align_exactly(cohort, vectors)
            else:
                self._align_by_sketch(cohort)
        _count_duplicates(closing.values())
        self._keep(closing)
        return list(closing.values())

    def _align_exactly(self, cohort: list[Update], vectors: list[Tensor]) -> None:
        """Cosines per layer and as a whole, to the mean of the *other* updates and to the client's previous one."""
        total = _sum(vectors)
        total_squares = cohort[0].dots(total, total)
        for update, vector in zip(cohort, vectors, strict=True):
            own, to_others = update.squares_of_layers, None
            if len(cohort) > 1:
                with_total = update.dots(vector, total)
                # others = total − own, so these follow without forming that vector...
                dot, squares = with_total - own, total_squares - 2 * with_total + own
                if (squares < _CANCELLED * own).any():  # ...unless one client outweighs all others
                    others = _sum([v for v in vectors if v is not vector])
                    dot, squares = update.dots(vector, others), update.dots(others, others)
                to_others = _cosine(dot, own, squares)
                _put(update.metrics, "update.cosine_mean", _cosine(dot.sum(), own.sum(), squares.sum()))
            update.align(to_others, self._to_previous(update, vector))

    def _to_previous(self, update: Update, vector: Tensor) -> Array | None:
        """The cosines of each layer to the client's previous update; the whole's goes into the metrics."""
        previous = self._previous.get(update.node)
        if previous is None or previous.vector is None or not previous.finite or previous.length != update.length:
            return None
        dot, own, past = update.dots(vector, previous.vector), update.squares_of_layers, previous.squares_of_layers
        _put(update.metrics, "update.cosine_previous", _cosine(dot.sum(), own.sum(), past.sum()))
        return np.asarray(_cosine(dot, own, past))

    def _align_by_sketch(self, cohort: list[Update]) -> None:
        """Cosines of the whole: a sketch does not tell layers apart."""
        sketches = [self._sketcher(u.vector) if u.sketch is None and u.vector is not None else u.sketch for u in cohort]
        total = torch.stack([sketch for sketch in sketches if sketch is not None]).sum(0)
        for update, sketch in zip(cohort, sketches, strict=True):
            update.align(None, None)
            if sketch is None:
                continue
            if len(cohort) > 1:
                _put(update.metrics, "update.cosine_mean", _cosine_of(sketch, total - sketch))
            previous = self._previous.get(update.node)
            if previous is not None and previous.sketch is not None and previous.finite:
                _put(update.metrics, "update.cosine_previous", _cosine_of(sketch, previous.sketch))

    def _keep(self, closing: dict[str, Update]) -> None:
        if self._brief:
            self._held = 0
            return
        for node, update in closing.items():
            self._release(self._previous.get(node))
            self._previous[node] = update

    def _release(self, old: Update | None) -> None:
        if old is not None and old.vector is not None:
            self._held -= old.vector.numel() * old.vector.element_size()


def _sum(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def _squares(vector: Tensor, rows: Array | None) -> float:
    """‖d‖², NaN or infinite when a value is."""
    if rows is None:
        return float(torch.linalg.vector_norm(vector)) ** 2
    return math.nan if rows[:, NANS].any() or rows[:, INFS].any() else float(rows[:, SUM_SQUARES].sum())


def _finite_norm(vector: Tensor, rows: Array | None) -> float:
    """The norm over the finite values, as everywhere; NaN and Inf are counted elsewhere."""
    if rows is None:
        rows = np.asarray(torch.as_tensor(sums([vector])).cpu())
    return math.sqrt(rows[:, SUM_SQUARES].sum())


def _cosine(dot: Any, squares_a: Any, squares_b: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(np.where(squares_a * squares_b > 0, dot / np.sqrt(squares_a * squares_b), np.nan), -1, 1)


def _cosine_of(a: Tensor, b: Tensor) -> float:
    return float(_cosine(float(a @ b), float(a @ a), float(b @ b)))


def _put(metrics: dict[str, float], name: str, value: Any) -> None:
    """A cosine with nothing is no number: absent, not NaN."""
    if not math.isnan(float(value)):
        metrics[name] = float(value)


def _count_duplicates(cohort: Iterable[Update]) -> None:
    """`update.duplicates` where others sent exactly the same: norms agree to the last bit, and so do the vectors."""
    alike: dict[float, list[Update]] = {}
    for update in cohort:
        if update.finite and update.squares > 0:
            alike.setdefault(update.squares, []).append(update)
    for group in alike.values():
        for update in group if len(group) > 1 else ():
            same = sum(other is not update and _same(update, other) for other in group)
            if same:
                update.metrics["update.duplicates"] = float(same)


def _same(a: Update, b: Update) -> bool:
    if a.vector is not None and b.vector is not None:
        return torch.equal(a.vector, b.vector)
    return a.sketch is not None and b.sketch is not None and torch.equal(a.sketch, b.sketch)
