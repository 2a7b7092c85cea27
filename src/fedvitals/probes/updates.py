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
    """One client's update: its nine sums per layer, its sketch, and, memory allowing, the vector itself."""

    node: str
    rows: Array
    sketch: Tensor | None
    vector: Tensor | None
    metrics: dict[str, float] = field(default_factory=dict)
    alignment: Array | None = None  # [layers × ALIGNMENT_COLUMNS]

    @property
    def finite(self) -> bool:
        return not (self.rows[:, NANS].any() or self.rows[:, INFS].any())


class Updates:
    """The updates of a run, round by round: `add` as they come, `close_round` when all are in."""

    def __init__(self, *, brief: bool = False, memory: int = 512 << 20) -> None:
        self._brief = brief
        self._memory = memory
        self._held = 0
        self._sketcher = Sketcher()
        self._round: dict[str, Update] = {}
        self._previous: dict[str, Update] = {}
        self._total: Tensor | None = None
        self._lock = threading.Lock()
        self.approximate = False

    def add(self, node: str, vector: Tensor, rows: Array) -> Update:
        """Take in one update: as one vector, and its nine sums per layer."""
        update = Update(node, rows, None, vector)
        norm = math.sqrt(rows[:, SUM_SQUARES].sum())
        update.metrics = {"update.norm": norm, "update.zero": float(norm == 0 and update.finite)}
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
        for update in closing.values():
            if exact and total is not None:
                self._align(update, total, like)
            else:
                self._align_by_sketch(update, list(closing.values()))
            update.metrics["update.duplicates"] = float(_duplicates(update, closing.values()))
        self._keep(closing)
        return list(closing.values())

    def _align(self, update: Update, total: Tensor, like: Sequence[Tensor]) -> None:
        """Cosines per layer and as a whole, to the mean of the *other* updates and to the client's previous one."""
        own = update.rows[:, SUM_SQUARES]
        whole = own.sum()
        to_others = to_previous = np.full(len(own), np.nan)
        previous = self._previous.get(update.node)
        if update.vector is not None and update.finite:
            with_total = _dots(update.vector, total, like)
            total_squares = _dots(total, total, like)
            # others = total − own, so ⟨own, others⟩ and ‖others‖² follow without forming the vector.
            dot, squares = with_total - own, total_squares - 2 * with_total + own
            # What is left of ‖others‖² after cancellation is rounding when nobody else took part.
            squares = np.where(squares > 1e-9 * total_squares, squares, 0.0)
            to_others = _cosine(dot, own, squares)
            _put(update.metrics, "update.cosine_mean", _cosine(dot.sum(), whole, squares.sum()))
            if previous is not None and previous.vector is not None and previous.vector.shape == update.vector.shape:
                past = _dots(update.vector, previous.vector, like)
                past_squares = previous.rows[:, SUM_SQUARES]
                to_previous = _cosine(past, own, past_squares)
                _put(update.metrics, "update.cosine_previous", _cosine(past.sum(), whole, past_squares.sum()))
        if not self._brief:
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


def _duplicates(update: Update, cohort: Iterable[Update]) -> int:
    """Others with exactly the same update: nine sums of every layer agree to the last bit, and so does the vector."""
    if update.metrics["update.zero"]:
        return 0
    same = 0
    for other in cohort:
        if other is update or not np.array_equal(other.rows, update.rows, equal_nan=True):
            continue
        if update.vector is None or other.vector is None or torch.equal(update.vector, other.vector):
            same += 1
    return same
