# SPDX-License-Identifier: Apache-2.0
"""Updates, as the server sees them: size, direction against the cohort and against the client's own past, duplicates.

Cosines are exact as long as the round's updates and each client's previous one fit into `memory` bytes; past that they
are estimated from the sketches (standard error 1/16), and `approximate` says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels import sums
from fedvitals.probes.sketch import Sketcher
from fedvitals.probes.view import split
from fedvitals.stats import INFS, NANS, SUM, SUM_SQUARES, Array


@dataclass(slots=True)
class Update:
    """One client's update: its size, its sketch, and, memory allowing, the vector itself."""

    node: str
    squares: float  # ‖d‖²: NaN or infinite when the update is
    rows: Array | None = None  # nine sums per layer
    sketch: Tensor | None = None
    vector: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    alignment: Array | None = None  # [layers × ALIGNMENT_COLUMNS]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.squares)


class Updates:
    """The updates of a run, round by round: `add` as they come, `close_round` when all are in."""

    def __init__(self, *, brief: bool = False, memory: int = 512 << 20) -> None:
        self._brief = brief  # only the size, and the cosine to the others
        self._memory = memory
        self._held = 0
        self._sketcher = Sketcher()
        self._round: dict[str, Update] = {}
        self._previous: dict[str, Update] = {}
        self._total: Tensor | None = None
        self._lock = threading.Lock()
        self.approximate = False

    def add(self, node: str, vector: Tensor, rows: Array | None) -> Update:
        """Take in one update: as one vector, and its nine sums per layer (not needed when brief)."""
        update = Update(node, _squares(vector, rows), rows, vector=vector)
        update.metrics["update.norm"] = math.sqrt(update.squares) if update.finite else _finite_norm(vector, rows)
        if update.squares == 0:
            update.metrics["update.zero"] = 1.0
        size = vector.numel() * vector.element_size()
        with self._lock:
            if self.approximate or self._held + 2 * size > self._memory:
                self.approximate, update.vector = True, None
            else:
                self._held += size
            if not self._brief or self.approximate:
                update.sketch = self._sketcher(vector)
            if update.finite and not self.approximate:
                self._total = vector.clone() if self._total is None else self._total.add_(vector)
            self._round[node] = update
        return update

    def close_round(self, like: Sequence[Tensor]) -> list[Update]:
        """The round's updates with their cosines and duplicates; they become the clients' previous ones."""
        with self._lock:
            closing, total = self._round, self._total
            self._round, self._total = {}, None
        exact = total is not None and all(u.vector is not None for u in closing.values() if u.finite)
        if not exact or total is None:
            for update in closing.values():
                self._align_by_sketch(update, list(closing.values()))
        elif self._brief:
            _align_briefly(closing.values(), total)
        else:
            squares = _dots(total, total, like)
            for update in closing.values():
                self._align(update, total, squares, like)
        _count_duplicates(closing.values())
        self._keep(closing)
        return list(closing.values())

    def _align(self, update: Update, total: Tensor, total_squares: Array, like: Sequence[Tensor]) -> None:
        """Cosines per layer and as a whole, to the mean of the *other* updates and to the client's previous one."""
        assert update.rows is not None  # noqa: S101 - only a brief cohort goes without
        own = update.rows[:, SUM_SQUARES]
        whole = own.sum()
        to_others = to_previous = np.full(len(own), np.nan)
        previous = self._previous.get(update.node)
        if update.vector is not None and update.finite:
            with_total = _dots(update.vector, total, like)
            dot, squares = _without(own, with_total, total_squares)
            to_others = _cosine(dot, own, squares)
            _put(update.metrics, "update.cosine_mean", _cosine(dot.sum(), whole, squares.sum()))
            if previous is not None and previous.rows is not None and _comparable(update.vector, previous.vector):
                past = _dots(update.vector, previous.vector, like)
                past_squares = previous.rows[:, SUM_SQUARES]
                to_previous = _cosine(past, own, past_squares)
                _put(update.metrics, "update.cosine_previous", _cosine(past.sum(), whole, past_squares.sum()))
        share = own / whole if whole > 0 else np.zeros_like(own)
        update.alignment = np.stack([to_others, to_previous, share], axis=1)

    def _align_by_sketch(self, update: Update, cohort: list[Update]) -> None:
        if update.sketch is None or not update.finite:
            return
        others = [u.sketch for u in cohort if u is not update and u.sketch is not None and u.finite]
        if others:
            mean = torch.stack(others).sum(0)
            _put(update.metrics, "update.cosine_mean", _cosine_of(update.sketch, mean))
        previous = self._previous.get(update.node)
        if previous is not None and previous.sketch is not None:
            _put(update.metrics, "update.cosine_previous", _cosine_of(update.sketch, previous.sketch))

    def _keep(self, closing: dict[str, Update]) -> None:
        if self._brief:
            self._held = 0
            return
        for node, update in closing.items():
            old = self._previous.get(node)
            if old is not None and old.vector is not None:
                self._held -= old.vector.numel() * old.vector.element_size()
            self._previous[node] = update


def _comparable(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape


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


def _align_briefly(cohort: Iterable[Update], total: Tensor) -> None:
    total_squares = float(torch.dot(total, total))
    for update in cohort:
        if update.vector is not None and update.finite:
            dot, squares = _without(update.squares, float(torch.dot(update.vector, total)), total_squares)
            _put(update.metrics, "update.cosine_mean", _cosine(dot, update.squares, squares))


def _without(own: Any, with_total: Any, total_squares: Any) -> tuple[Any, Any]:
    """⟨own, others⟩ and ‖others‖², where others = total − own: they follow without forming that vector."""
    squares = total_squares - 2 * with_total + own
    # What cancellation leaves of ‖others‖² when nobody else took part is rounding.
    return with_total - own, np.where(squares > 1e-6 * total_squares, squares, 0.0)


def _dots(a: Tensor, b: Tensor, like: Sequence[Tensor]) -> Array:
    """⟨a, b⟩ of each layer: the sums of the product, in one pass."""
    return np.asarray(torch.as_tensor(sums(split(a * b, like))).cpu())[:, SUM]


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
    """`update.duplicates` where others sent exactly the same: their norms agree to the last bit, and so do the vectors."""
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
