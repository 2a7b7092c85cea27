# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of layer statistics: which columns a family has, how they merge, what derives from them.

Everything measured of a tensor is a row of sums that can be added: steps add up to a client-round, clients to an edge,
edges to the round. A *family* names such a row. Arrays are `[..., layers, columns]`, float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

STATISTICS = ("count", "sum", "sum_squares", "sum_magnitudes", "min", "max", "zeros", "nans", "infs")
LABEL_CLASSES = 10_000  # in a label histogram: clients send at most this many, and the server accepts no more
COUNT, SUM, SUM_SQUARES, SUM_MAGNITUDES, MIN, MAX, ZEROS, NANS, INFS = range(9)

STEP_COLUMNS = (
    "steps",
    "norm_sum",
    "norm_max",
    "norm_max_step",
    "norm_last",
    "norm_last_step",
    "change_max",
    "change_max_step",
)
HEALTH_COLUMNS = ("units", "dead", "saturated", "sign_diverse")
CLASS_COLUMNS = ("samples", "loss", "loss_squares", "right", "guessed")
MOST_CLASSES = 100  # with a row each in `training.classes`; a task with more has no such table
TOKEN_COLUMNS = CLASS_COLUMNS[:4]  # "samples" are targets: tokens that the training predicts
LENGTH_COLUMNS = (*TOKEN_COLUMNS, "texts")
ALIGNMENT_COLUMNS = ("cosine_mean", "cosine_previous", "share")
PEER_COLUMNS = (
    "cosine",
    "first",
    "head",
    "step",
    "back",
    "nearest",
    "signs",
    "classes",
    "classes_min",
    "class_entropy",
    "bias",
    "spread",
)
PEERS = {
    "cosine": "`cos(d_i, Σ_{j≠i} d_j/‖d_j‖)`: everybody else counts the same, whatever its size",
    "first, head": "the same on the first and on the last weight of two or more dimensions",
    "step": "`cos(d_i, w_t − w_{t−1})`: along the last step of the global model",
    "back": "largest of `cos(d_i, w_{t−k} − w_t)`, k = 1 … 5: back to an earlier model, as a stale update goes",
    "nearest": "largest cosine to another client's update; exact above 0.8, below that by sketches",
    "signs": "share of signs (of at most 65,536 coordinates) that are those of the sum of the others' signs",
    "classes": "mean over the head's rows of their cosines to the others' rows, weighted by the rows' norms",
    "classes_min": "the smallest of these, of rows with more than half of the mean norm",
    "class_entropy": "entropy of the rows' squared norms, 1 where all classes move alike",
    "bias": "as `head`, of the head's bias",
    "spread": "`‖d‖₁ / (‖d‖₂ √D)`: 1 where all coordinates move alike, small where few do",
}
"""The columns of the family `update.peers`."""

ADAPTER_ROWS = "adapter"  # the kind of a table whose rows are low-rank adapters, each with an A and a B
ADAPTER_COLUMNS = (
    "rank",
    "norm",
    "change",
    "drift",
    "effective_rank",
    "stable_rank",
    "energy_above",
    "energy_kept",
    "error",
    "error_by_rank",
    "moved",
)
ADAPTERS = {
    "rank": "directions of the adapter; of a client, those that it has",
    "norm": "`‖P‖`, P = (α/r) B A",
    "change": "`‖P − P₀‖`, P₀ of the round's start",
    "drift": "`‖P − P_first‖`, of the run's start",
    "effective_rank": "`exp(−Σ p log p)`, p_k = σ_k² / Σ σ²",
    "stable_rank": "`‖P‖² / σ₁²`",
    "energy_above": "share of `‖P‖²` above the smallest rank of a client; where ranks differ",
    "energy_kept": "the same over that of the mean over the clients that have these directions",
    "error": "`‖P − M‖ / ‖M‖`, M = Σ w_i (α/r)_i B_i A_i: the mean of products",
    "error_by_rank": "the same, each direction averaged over the clients that have it; as before where none has",
    "moved": "clients whose product differs from what they were sent",
}
"""The columns of the family `update.adapters`; for a client, only the first three are set, the others are NaN."""
DIRECTIONS = 16  # singular directions recorded of an adapter

CLASS_ROWS = "class"  # the kind of a table whose rows are classes rather than layers of a model
TOKEN_ROWS, LENGTH_ROWS = "token", "length"  # whose rows are bands of a vocabulary's ids, and of lengths of texts
GROUP_ROWS = (CLASS_ROWS, TOKEN_ROWS, LENGTH_ROWS)
# Each band begins at a bound and ends before the next; the first begins at 0. They are the same for all clients.
TOKEN_BOUNDS = tuple(4**k for k in range(2, 9))  # ids: 16 … 65,536
LENGTH_BOUNDS = tuple(2**k for k in range(4, 16))  # targets of a text: 16 … 32,768
FEWEST_IN_BAND = 4  # targets, and texts; a mean of fewer would reveal single ones
COMMON_TOKENS, LONG_TEXT = 4**5, 2**7  # the bounds between common and rare tokens, and between short and long texts

# The histogram has one bin per sign and binary exponent; values outside 2^-48 .. 2^16 fall into the end bins.
LOWEST_EXPONENT, EXPONENTS = -48, 64
HISTOGRAM_COLUMNS = tuple(f"{sign}2^{LOWEST_EXPONENT + i}" for sign in ("-", "+") for i in range(EXPONENTS))


def merge_sums(rows: Array) -> Array:
    """Merge rows stacked along axis 0 into one: sums add, the smallest and the largest are kept."""
    merged: Array = rows.sum(axis=0)
    merged[..., MIN] = rows[..., MIN].min(axis=0)
    merged[..., MAX] = rows[..., MAX].max(axis=0)
    return merged


def merge_counts(rows: Array) -> Array:
    """Add up the rows of histograms or counts."""
    return np.asarray(rows.sum(axis=0))


def merge_steps(rows: Array) -> Array:
    """Merge rows of step statistics.

    Totals add; the largest norm and change keep the step where they occurred; the last value is that of the last step.
    A tie goes to the earlier step, so that the order of merging does not matter. NaN counts as the largest. A row of
    zeros, «no step», is neutral.
    """
    merged: Array = rows.sum(axis=0)
    measured = rows[..., 0] > 0
    for value, step in ((2, 3), (6, 7)):
        largest = rows[..., value].max(axis=0)
        there = (rows[..., value] == largest) | (np.isnan(rows[..., value]) & np.isnan(largest))
        steps = np.where(there & measured, rows[..., step], np.inf).min(axis=0)
        merged[..., value], merged[..., step] = largest, np.where(np.isinf(steps), 0, steps)
    last_step = rows[..., 5].max(axis=0)
    last = np.where(rows[..., 5] == last_step, rows[..., 4], -np.inf).max(axis=0)
    merged[..., 4], merged[..., 5] = last, last_step
    return merged


@dataclass(frozen=True, slots=True)
class Family:
    """The meaning of the columns of a layer matrix, the table its rows belong to, and how two of them merge."""

    columns: tuple[str, ...]
    rows: str  # which layer table: "parameter", "buffer", "module", "model" (a single row), "adapter", or a group
    merge: Callable[[Array], Array] | None  # None for a ratio, which cannot be merged
    level: int = 3  # privacy level from which it may leave a client


FAMILIES: dict[str, Family] = {
    "gradient": Family(STATISTICS, "parameter", merge_sums),
    "gradient.steps": Family(STEP_COLUMNS, "parameter", merge_steps),
    "gradient.histogram": Family(HISTOGRAM_COLUMNS, "parameter", merge_counts),
    "gradient.full": Family(STATISTICS, "parameter", merge_sums),
    "weight": Family(STATISTICS, "parameter", merge_sums),
    "buffer": Family(STATISTICS, "buffer", merge_sums),
    "update": Family(STATISTICS, "parameter", merge_sums),
    "update.alignment": Family(ALIGNMENT_COLUMNS, "parameter", None),
    "update.peers": Family(PEER_COLUMNS, "model", None),
    "update.adapters": Family(ADAPTER_COLUMNS, ADAPTER_ROWS, None),
    "update.directions": Family(tuple(f"direction_{k + 1}" for k in range(DIRECTIONS)), ADAPTER_ROWS, None),
    "activation": Family(STATISTICS, "module", merge_sums),
    "activation.health": Family(HEALTH_COLUMNS, "module", merge_counts),
    "training.classes": Family(CLASS_COLUMNS, CLASS_ROWS, merge_counts),
    "training.tokens": Family(TOKEN_COLUMNS, TOKEN_ROWS, merge_counts),
    "training.lengths": Family(LENGTH_COLUMNS, LENGTH_ROWS, merge_counts),
}


def group_names(rows: str, count: int) -> tuple[str, ...]:
    """Return the names of the rows of a table of classes or bands."""
    bounds = {TOKEN_ROWS: TOKEN_BOUNDS, LENGTH_ROWS: LENGTH_BOUNDS}.get(rows)
    if bounds is None:
        return tuple(map(str, range(count)))
    first = 0 if rows == TOKEN_ROWS else 1
    inner = (f"{low:,}–{high - 1:,}" for low, high in zip((first, *bounds), bounds, strict=False))
    return (*inner, f"{bounds[-1]:,} and more")


def empty_sums(*shape: int) -> Array:
    """Return the neutral element of `merge_sums`: nothing counted, smallest +inf, largest -inf."""
    rows = np.zeros((*shape, len(STATISTICS)))
    rows[..., MIN], rows[..., MAX] = np.inf, -np.inf
    return rows


def merge(family: str, matrices: Sequence[Array] | Array) -> Array:
    """Return the matrices of one family, optionally stacked along a first axis, merged into one.

    The order does not matter (within float tolerance).
    """
    rule = FAMILIES[family].merge
    if rule is None:
        raise ValueError(f"'{family}' holds ratios, which cannot be merged. Merge the sums they derive from.")
    return rule(matrices if isinstance(matrices, np.ndarray) else np.stack(matrices))


def _over(value: Array, total: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, value / total, np.nan)


def _finite(m: Array) -> Array:
    return m[..., COUNT] - m[..., NANS] - m[..., INFS]


def _mean(m: Array) -> Array:
    return _over(m[..., SUM], _finite(m))


def _std(m: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        variance = _over(m[..., SUM_SQUARES], _finite(m)) - _mean(m) ** 2
    return np.sqrt(np.maximum(variance, 0))


def _absmax(m: Array) -> Array:
    return np.where(_finite(m) > 0, np.maximum(np.abs(m[..., MIN]), np.abs(m[..., MAX])), np.nan)


# Statistics over the finite values of a tensor, each computed when read. NaN means «nothing finite was measured».
DERIVED: dict[str, Callable[[Array], Array]] = {
    "mean": _mean,
    "std": _std,
    "l2": lambda m: np.sqrt(m[..., SUM_SQUARES]),
    "rms": lambda m: np.sqrt(_over(m[..., SUM_SQUARES], _finite(m))),
    "absmax": _absmax,
    "mean_magnitude": lambda m: _over(m[..., SUM_MAGNITUDES], _finite(m)),
    "sparsity": lambda m: _over(m[..., ZEROS], m[..., COUNT]),
    "finite": _finite,
}


def _class_loss_std(m: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        variance = _over(m[..., 2], m[..., 0]) - _over(m[..., 1], m[..., 0]) ** 2
    return np.sqrt(np.maximum(variance, 0))


# The same for `training.classes` and its like; NaN means that the class or band has no samples.
CLASS_STATISTICS: dict[str, Callable[[Array], Array]] = {
    "loss_mean": lambda m: _over(m[..., 1], m[..., 0]),
    "loss_std": _class_loss_std,
    "accuracy": lambda m: _over(m[..., 3], m[..., 0]),
}


def statistics_of(family: str) -> tuple[str, ...]:
    """Return every statistic that `derive` knows for a family."""
    columns = FAMILIES[family].columns
    if columns is STATISTICS:
        return (*columns, *DERIVED)
    if columns is STEP_COLUMNS:
        return (*columns, "norm_mean")
    if columns is HEALTH_COLUMNS:
        return (*columns, "dead_fraction", "saturated_fraction", "sign_diversity")
    if FAMILIES[family].rows in GROUP_ROWS:
        return (*columns, *CLASS_STATISTICS)
    return columns


def derive(family: str, matrix: Any, statistic: str) -> Array:
    """Return one statistic of every layer: `[..., layers, columns]` → `[..., layers]`."""
    columns = FAMILIES[family].columns
    if statistic in columns:
        return np.asarray(matrix[..., columns.index(statistic)])
    if columns is STATISTICS and statistic in DERIVED:
        return np.asarray(DERIVED[statistic](matrix))
    if columns is STEP_COLUMNS and statistic == "norm_mean":
        return _over(matrix[..., 1], matrix[..., 0])
    fraction = {"dead_fraction": 1, "saturated_fraction": 2, "sign_diversity": 3}.get(statistic)
    if columns is HEALTH_COLUMNS and fraction is not None:
        return _over(matrix[..., fraction], matrix[..., 0])
    if FAMILIES[family].rows in GROUP_ROWS and statistic in CLASS_STATISTICS:
        return CLASS_STATISTICS[statistic](matrix)
    known = ", ".join(statistics_of(family))
    raise ValueError(f"Unknown statistic '{statistic}' of family '{family}'. Known: {known}.")


def pack(family: str, matrix: Array) -> npt.NDArray[np.float32]:
    """Return the matrix in float32 without overflow or cancellation, for storage.

    Sums of squares overflow float32 from |x| > 1.8e19, and a small spread around a large mean is lost in them. So the
    nine sums are stored as count, mean, std, smallest...: each in range whenever the tensor's own values were.
    """
    with np.errstate(all="ignore"):
        packed = matrix.astype(np.float32)
        if FAMILIES[family].columns is STATISTICS:
            _pack_sums(matrix.T, packed.T)
        return packed


def pack_entries(family: str, matrices: Array) -> npt.NDArray[np.float32]:
    """Return matrices [entries, layers, columns] packed like `pack`, but contiguous as [layers, columns, entries]."""
    sums = np.ascontiguousarray(matrices.transpose(1, 2, 0))
    with np.errstate(all="ignore"):
        packed = sums.astype(np.float32)
        if FAMILIES[family].columns is STATISTICS:
            _pack_sums(sums.transpose(1, 0, 2), packed.transpose(1, 0, 2))
        return packed


def _pack_sums(sums: Array, packed: npt.NDArray[np.float32]) -> None:
    """Replace the nine sums by means and spread; both arrays are [columns, ...], the rest in any order."""
    finite = sums[COUNT] - sums[NANS] - sums[INFS]
    means = sums[SUM:MIN] / finite  # of values, of squares, of magnitudes
    mean, variance = means[0], means[1]
    np.subtract(variance, mean * mean, out=variance)
    np.sqrt(np.maximum(variance, 0, out=variance), out=variance)
    total = np.add.reduce(means, axis=None)
    if total == total and np.minimum.reduce(finite, axis=None, initial=1.0) > 0:  # noqa: PLR0124 - as a rule
        packed[SUM:MIN] = means
    else:
        packed[SUM:MIN] = np.where((finite > 0) & (means == means), means, 0.0)  # noqa: PLR0124 - not NaN


def unpack(family: str, packed: npt.NDArray[np.float32]) -> Array:
    """Return the sums from `pack`, each within 1e-6 of the original."""
    matrix = packed.astype(np.float64)
    if FAMILIES[family].columns is not STATISTICS:
        return matrix
    finite = _finite(matrix)
    mean, std = matrix[..., SUM], matrix[..., SUM_SQUARES]
    np.add(std * std, mean * mean, out=std)  # the mean square
    matrix[..., SUM:MIN] *= finite[..., None]
    return matrix
