# SPDX-License-Identifier: Apache-2.0
"""Updates of models that are NumPy arrays, measured by NumPy: for servers without torch.

The numbers are those of `probes.updates` as far as possible: per layer the nine sums, the share of the whole and
cosines to the mean of the others and to the client's previous update; for the whole its norm, cosines and duplicates,
and how a client compares with its peers. Sketches need torch, and are left out.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fedvitals.probes.adapters.watch import AdapterWatch
from fedvitals.probes.allowance import Turns
from fedvitals.probes.attempts import Attempt, unguarded
from fedvitals.probes.input_profiles import InputProfiles
from fedvitals.probes.numpy_peers import PastArrayModels, peer_rows
from fedvitals.probes.peer_columns import MOST_CLIENTS, LayerSlice, PeerLayout, layout_of
from fedvitals.probes.presets import Preset
from fedvitals.probes.results import Results
from fedvitals.records import Layer, LayerTable
from fedvitals.stats import (
    ALIGNMENT_COLUMNS,
    COUNT,
    INFS,
    NANS,
    PEER_COLUMNS,
    STATISTICS,
    SUM_SQUARES,
    Array,
    empty_sums,
)

Values = npt.NDArray[Any]
REMARK = (
    "torch is not installed here, so updates are measured by NumPy. Sketches of updates, with which clients are "
    "compared over many rounds, and models that train inside of fv.watch need  pip install 'fedvitals[torch]'"
)


@np.errstate(all="ignore")  # a client may send anything
def sums(arrays: Iterable[Values]) -> Array:
    """Return `[layers, 9]`: the columns `stats.STATISTICS` of every array, over finite values."""
    rows = [_sums_of(np.asarray(values).reshape(-1)) for values in arrays]
    return np.stack(rows) if rows else np.empty((0, len(STATISTICS)))


def _sums_of(values: Values) -> Array:
    row: Array = empty_sums(1)[0]
    row[COUNT], row[NANS], row[INFS] = values.size, np.isnan(values).sum(), np.isinf(values).sum()
    finite = values[np.isfinite(values)] if row[NANS] or row[INFS] else values
    if finite.size:
        wide = finite.astype(np.float64)
        magnitudes = np.abs(wide)
        row[1:7] = wide.sum(), wide @ wide, magnitudes.sum(), wide.min(), wide.max(), (wide == 0).sum()
    return row


class FlatArrays(list[Values]):
    """Arrays that are contiguous in `vector`, in the order of the layers."""

    def __init__(self, vector: Values, shapes: Sequence[Sequence[int]]) -> None:
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
        parts = zip([0, *ends[:-1]], ends, shapes, strict=True) if ends else ()
        super().__init__(vector[first:last].reshape(tuple(shape)) for first, last, shape in parts)
        self.vector = vector


def flatten_and_sum(updates: Mapping[str, Sequence[Any]]) -> list[tuple[str, Values, Array]]:
    """Return each update as (node, one vector, its nine sums per layer)."""
    measured = []
    for node, update in updates.items():
        arrays = [np.asarray(array) for array in update]
        vector = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.zeros(0, np.float32)
        measured.append((node, vector, sums(arrays)))
    return measured


@dataclass(slots=True)
class ArrayUpdate:
    """One client's update; its fields are those of `probes.updates.ClientUpdate` that a round reports."""

    node: str
    rows: Array
    vector: Values | None
    squares: float  # ‖d‖² over the finite values
    metrics: dict[str, float] = field(default_factory=dict)
    alignment: Array | None = None  # [layers × ALIGNMENT_COLUMNS]
    peers: Array | None = None  # [1 × PEER_COLUMNS]
    sketch: None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.squares) and not (self.rows[:, NANS].any() or self.rows[:, INFS].any())

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.rows[:, COUNT].astype(int).tolist())


class ArrayUpdates:
    """The updates of a run, round by round, with the methods of `probes.updates.UpdateTracker`.

    `memory` is the bytes of updates kept for cosines. Beyond it, updates have none.
    """

    def __init__(self, *, brief: bool, memory: int) -> None:
        self._brief, self._memory, self._held = brief, memory, 0
        self._models = PastArrayModels(memory // 4)
        self._profiles = InputProfiles()
        self._layouts: dict[tuple[int, ...], PeerLayout] = {}  # by the sizes of the layers
        self._round: dict[str, ArrayUpdate] = {}
        self._previous: dict[str, ArrayUpdate] = {}  # longest absent client first
        self._lock = threading.Lock()
        self.approximate = False  # no estimates: a cosine is exact, or absent

    @property
    def held_bytes(self) -> int:
        return self._held

    def has_room(self, size: int, clients: int = 1) -> bool:
        """Return whether an update of this many bytes would be kept.

        `clients`: whether those of this many clients would be, in this round and the next.
        """
        needed = self._held + (max(1, clients - len(self._round)) + 1) * size
        return max(needed, (2 * clients + 1) * size if clients > 1 else 0) <= self._memory

    def add(self, node: str, vector: Values, rows: Array | None) -> ArrayUpdate:
        """Add one update. A second one of the same client in the same round replaces the first."""
        own = sums([vector]) if rows is None else rows
        update = ArrayUpdate(node, own, vector, float(own[:, SUM_SQUARES].sum()))
        update.metrics["update.norm"] = math.sqrt(update.squares)
        if update.finite and update.squares == 0:
            update.metrics["update.zero"] = 1.0
        lost = own[:, NANS].sum() + own[:, INFS].sum()
        if lost:
            update.metrics["update.nonfinite"] = float(lost)
        with self._lock:
            self._release(self._round.get(node))
            if self.has_room(vector.nbytes):
                self._held += vector.nbytes
            else:
                update.vector = None
            self._round[node] = update
        return update

    def begin_round(self, number: int, parameters: Sequence[Any]) -> None:
        """Set the global model that the clients of a round start from."""
        if not self._brief:
            self._models.add(number, [np.asarray(values) for values in parameters])

    def steps_back(self, sizes: Sequence[int]) -> dict[int, Array]:
        """Return, by rounds ago, each layer's sum of a kept earlier global model minus the current one."""
        return self._models.steps_back(sizes)

    def know(self, tables: Iterable[LayerTable]) -> None:
        """Set the shapes of layers, which an update itself does not contain."""
        for table in tables:
            if table.rows == "parameter":
                self._layouts[tuple(math.prod(layer.shape) for layer in table.layers)] = layout_of(table)

    @np.errstate(all="ignore")
    def close_round(self, attempt: Attempt = unguarded) -> list[ArrayUpdate]:
        """Return the round's updates with their cosines and duplicates; they become the clients' previous ones.

        `attempt` runs each comparison separately. If one fails, only its cosines are missing.
        """
        with self._lock:
            closing, self._round = self._round, {}
        cohorts: dict[tuple[int, ...], list[ArrayUpdate]] = defaultdict(list)
        for update in closing.values():
            squares = update.rows[:, SUM_SQUARES]
            update.alignment = np.full((len(squares), len(ALIGNMENT_COLUMNS)), np.nan)
            update.alignment[:, 2] = squares / squares.sum() if squares.sum() > 0 else 0.0
            if not self._brief:
                update.peers = np.full((1, len(PEER_COLUMNS)), np.nan)
            if update.finite and update.vector is not None:
                cohorts[update.sizes].append(update)  # only updates of equal models can be compared
        for cohort in cohorts.values():
            attempt("comparing updates", partial(self._align, cohort), None)
        for node, update in closing.items():
            if self._brief:  # no cosines to a client's own past are needed
                self._release(update)
                update.vector = None
            else:
                self._release(self._previous.pop(node, None))
                self._previous[node] = replace(update, metrics={}, alignment=None, peers=None)
        for node in [*itertools.islice(self._previous, max(0, len(self._previous) - MOST_CLIENTS))]:
            self._release(self._previous.pop(node))
        return list(closing.values())

    def _align(self, cohort: list[ArrayUpdate]) -> None:
        vectors = [update.vector for update in cohort if update.vector is not None]
        total = np.sum(np.stack(vectors), axis=0, dtype=np.float64)
        for update, vector in zip(cohort, vectors, strict=True):
            if len(cohort) > 1:
                _store_cosines(update, "update.cosine_mean", 0, vector, total - vector)
            previous = self._previous.get(update.node)
            if self._brief or previous is None or previous.vector is None or not previous.finite:
                continue
            if previous.sizes == update.sizes:
                _store_cosines(update, "update.cosine_previous", 1, vector, previous.vector)
        if not self._brief:
            sums_of_all = np.stack([update.rows for update in cohort])
            layout = self._layouts.get(cohort[0].sizes, PeerLayout())
            for update, row in zip(cohort, peer_rows(vectors, sums_of_all, layout, self._models), strict=True):
                update.peers = row[None]
            self._compare_inputs(cohort, vectors, layout.dense)
        for update, copies in zip(cohort, _count_copies(vectors), strict=True):
            if copies and update.squares > 0:
                update.metrics["update.duplicates"] = float(copies)

    def _compare_inputs(self, cohort: list[ArrayUpdate], vectors: Sequence[Values], dense: LayerSlice | None) -> None:
        if dense is None:
            return
        layers = (own[dense.place].reshape(dense.rows, -1).astype(np.float64) for own in vectors)
        squares = np.stack([(layer**2).sum(axis=0) for layer in layers])
        measured = self._profiles.compare([update.node for update in cohort], squares)
        for update in cohort:
            update.metrics |= measured.get(update.node, {})

    def _release(self, old: ArrayUpdate | None) -> None:
        if old is not None and old.vector is not None:
            self._held -= old.vector.nbytes


def _store_cosines(update: ArrayUpdate, name: str, column: int, own: Values, other: Values) -> None:
    """Store cosines: of the whole as a metric, of the layers in their column of the alignment."""
    ends = np.cumsum(update.sizes)[:-1]
    pairs = zip(np.split(own, ends), np.split(other, ends), strict=True)
    parts = np.array([(_dot(a, b), _dot(a, a), _dot(b, b)) for a, b in pairs])
    if update.alignment is not None:
        update.alignment[:, column] = [_cosine(*part) for part in parts]
    cosine = _cosine(*parts.sum(axis=0))
    if not math.isnan(cosine):
        update.metrics[name] = cosine


def _dot(a: Values, b: Values) -> float:
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def _cosine(dot: float, squares: float, other_squares: float) -> float:
    product = squares * other_squares
    return float(np.clip(dot / math.sqrt(product), -1, 1)) if 0 < product < math.inf else math.nan


def _count_copies(vectors: Sequence[Values]) -> list[int]:
    """Return for each vector the number of others that have the same bits."""
    contents = [vector.tobytes() for vector in vectors]
    groups: dict[int, list[bytes]] = defaultdict(list)
    for content in contents:
        groups[hash(content)].append(content)
    return [groups[hash(content)].count(content) - 1 for content in contents]


# -- the global model -------------------------------------------------------------------------------------------------


class ArrayInstruments:
    """The state that a run keeps between its rounds, with the fields of `probes.instruments.Instruments` that a
    server uses.
    """

    def __init__(self, preset: Preset, update_memory: int) -> None:
        self.preset = preset
        self.updates = ArrayUpdates(brief=preset.brief, memory=update_memory)
        self.adapters = AdapterWatch()
        self.turns = Turns(preset)
        self.initial: Any = None  # the reference for drift; no client trains here
        self.global_parameters: Sequence[Any] = ()
        self.norms: dict[str, float] = {}
        self.trained: frozenset[str] = frozenset()  # every array that is sent counts as trained
        self._remarked = False

    def parameters(self, model: Any) -> list[Any]:
        """Return the arrays of a global model."""
        return [*model.parameters()]

    def tables(self, model: Any) -> list[dict[str, LayerTable]]:
        """Return the layer tables of a model that has `named_parameters()`."""
        layers = tuple(Layer(name, values.shape, str(values.dtype)) for name, values in model.named_parameters())
        size, dtype = sum(math.prod(layer.shape) for layer in layers), layers[0].dtype if layers else "float32"
        whole = LayerTable("model", (Layer("model", (size,), dtype),))
        return [{"parameter": LayerTable("parameter", layers), "model": whole}]

    def first_model(self, model: Any) -> list[tuple[str, str, bool]]:  # noqa: ARG002 - as of the other instruments
        """Return no remarks about the initial model, which may not be a network."""
        self.initial = np.zeros(0, np.float32)  # known, but not needed
        return []

    def begin_adapters(self, model: Any) -> Mapping[str, LayerTable]:
        """Record the adapters of the model that a round begins with; returns their table, if there are any."""
        return self.adapters.begin_round(model, [*model.named_parameters()])

    def trained_parts(self, model: Any) -> tuple[str, int] | None:  # noqa: ARG002
        """Return nothing: of arrays alone, it is not known which parts of a model are frozen."""
        return None

    def zero_layers(self, model: Any) -> list[str]:
        """Return the matrices that start at 0; it is not known which of them train."""
        return [name for name, values in model.named_parameters() if values.ndim > 1 and not values.any()]

    def measure_model(self, model: Any) -> tuple[list[dict[str, LayerTable]], Callable[[], Results]]:
        """Return the model's layer tables, and a function that returns the statistics of its weights."""
        self.adapters.end_round(model, [*model.named_parameters()])
        return self.tables(model), lambda: self._model_results(model)

    def _model_results(self, model: Any) -> Results:
        rows = sums(values for _, values in model.named_parameters())
        results = Results(matrices=[("weight", rows, None)])
        nonfinite = rows[:, NANS].sum() + rows[:, INFS].sum()
        results.take({"weight.norm": math.sqrt(rows[:, SUM_SQUARES].sum()), "weight.nonfinite": nonfinite})
        return results

    def remarks(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return, once, that torch is missing and what that means."""
        already_reported, self._remarked = self._remarked, True
        return [] if already_reported else [("updates.numpy", REMARK, {})]
