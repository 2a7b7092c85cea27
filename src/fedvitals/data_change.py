# SPDX-License-Identifier: Apache-2.0
"""What changed in a client's data since they were last described: an exact comparison, not a score.

If checksums show that the inputs are the same and the labels are not, the labels were changed, and vice versa. New
samples change both, and are not a sign of a fault. A server that receives descriptions compares them; below privacy
level 3 the client does so itself, and only sends the kind and size of the change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedvitals.stats import Array

MOST_CLASSES, MOST_DIMENSIONS, MOST_COLUMNS = 64, 32, 64  # of a description; a larger one could fill our memory
LINEAR = 16  # of these dimensions at most, the first: projections of the inputs, which scale with them
STABLE = 2  # rounds for which data did not change, if another process, new to the data, reported them
FROM_ONE_TO_ONE = 0.8  # of the labels that changed, the share that moved from one class to one other
LEAST_MOVED = 0.02  # of all labels
CLEAR = 3.0  # standard errors by which a class's mean moves towards another class, if samples of that one joined it
RESCALED = 0.02  # relative difference up to which new inputs are the old ones times a number
SAME_MEANS = 0.6, 1.6  # times the old class means: within this range they stayed, as they do under noise
NOISIER, LESS_NOISY = 1.15, 1.05  # times the variance within classes, and the standard deviation of all inputs
FACTOR = 2.0  # or its inverse; beyond it, another scale is a fault
ROUNDED_OFF = 1e-6  # of a feature's mean: a spread below it is that of one value
ROUNDED_MEAN = 1e-3  # of a mean of 4 digits
OFFSET = 3.0  # of the spread within classes, by which a feature moves that is in another unit
LONGEST = 1e45  # of a mean of inputs, which are at most 3e38; spreads and covariances are at most its square
MOST_SAMPLES = 1 << 40
LEAST_EIGENVALUE = -0.05  # of a correlation matrix of 32 rows whose numbers have 3 digits
ROUNDED = 1.02  # times a sum of rounded numbers
KINDS = ("label_noise", "label_flip", "input_scale", "input_noise", "input_constant", "inputs")  # of changes
UNCHANGED = "none"


@dataclass(frozen=True, slots=True)
class DataChange:
    """A change of a client's data: its kind (of fault), since when, and how large."""

    kind: str  # of KINDS; «inputs»: changed in some other way
    since: int
    moved: float  # least share of the labels that changed; for inputs, the factor by which their spread grew
    pair: tuple[int, int] | None = None  # of a flip: the class before, and the label now
    features: tuple[int, ...] = ()  # of a table: those that changed, if the others did not


@dataclass(frozen=True, slots=True, eq=False)
class DataSketch:
    """What a client reported about its data in one round. Without classes if only scalars may leave the client."""

    round: int
    samples: int
    inputs: int | None  # checksums, equal if the data are; None if withheld
    labels: int | None
    looks: int  # how often the data were found unchanged since the description before
    scalars: Mapping[str, float]  # mean, std, ... of the inputs
    labelled: bool
    classes: tuple[int, ...] = ()
    counts: Array = field(default_factory=lambda: np.zeros(0))  # [classes]
    means: Array = field(default_factory=lambda: np.zeros((0, 0)))  # [classes, dimensions]
    spreads: Array = field(default_factory=lambda: np.zeros(0))  # [classes]: mean squared distances from these
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)))  # [dimensions, dimensions], within classes
    freedom: int = 0
    change: DataChange | None = None  # found by the client itself, if it may not send more
    lost: int = 0  # classes of which the client reports to have lost all samples, and no others
    compared: bool = False  # whether the client had earlier data to compare these with
    by_feature: bool = False  # whether its dimensions are the features of a table
    # [4, features] of a table: quartiles and median, in order, and the spread within classes.
    columns: Array = field(default_factory=lambda: np.zeros((4, 0)))

    @property
    def spread(self) -> float:
        """The standard deviation of the inputs; NaN if there is none, as for tokens."""
        return self.scalars.get("std", math.nan)

    @property
    def variance(self) -> float:
        """The variance of its inputs within classes, summed over the directions that inputs are projected onto."""
        return float(np.trace(self.covariance[:LINEAR, :LINEAR]))

    @property
    def distinct(self) -> float:
        """The share of its samples that are not repeated, since repeated ones add no information about a mean."""
        return min(1.0, max(0.01, 1 - self.scalars.get("duplicates", 0.0)))


def read_sketch(round_index: int, data: Mapping[str, Any]) -> DataSketch | None:
    """Return the description in an event's data; None if it cannot be read, because a client may send anything."""
    try:
        return sketch_from(round_index, data)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError, np.linalg.LinAlgError):
        return None


def sketch_from(round_index: int, data: Mapping[str, Any]) -> DataSketch:
    """Return the description in an event's data; raises an error if it is malformed."""
    names = ("mean", "std", "std_error", "min", "max", "missing", "explained", "constant", "duplicates", "length")
    scalars = {name: float(data[name]) for name in names if name in data}
    samples, checksums = int(data["samples"]), (data.get("inputs"), data.get("labels"))
    if not 0 <= samples <= MOST_SAMPLES or not all(known is None or type(known) is int for known in checksums):
        raise ValueError("Samples are counted, and checksums are whole numbers.")
    known = (round_index, samples, *checksums, int(data.get("looks", 0)), scalars)
    if "means" not in data:
        change, lost = _told_change(round_index, data), int(data.get("classes_lost", 0))
        if not 0 <= lost <= MOST_SAMPLES:
            raise ValueError("Classes are counted.")
        return DataSketch(*known, labelled=False, change=change, lost=lost, compared="change" in data)
    upper = np.array(data["covariance"], dtype=np.float64)
    dimensions = (math.isqrt(8 * len(upper) + 1) - 1) // 2
    if dimensions > MOST_DIMENSIONS or len(data["classes"]) > MOST_CLASSES:
        raise ValueError("A sketch has no more classes and dimensions than clients send.")
    covariance = np.zeros((dimensions, dimensions))
    covariance[np.triu_indices(dimensions)] = upper
    covariance += np.triu(covariance, 1).T
    classes = tuple(int(label) for label in data["classes"])
    counts, spreads = (np.array(data[name], dtype=np.float64).reshape(len(classes)) for name in ("counts", "spreads"))
    means = np.array(data["means"], dtype=np.float64).reshape(len(classes), dimensions)
    by_feature = not data.get("tokens") and dimensions == int(data.get("features", 0)) <= LINEAR
    sketch = DataSketch(
        *(*known, bool(data["labelled"]), classes, counts, means, spreads, covariance, max(1, int(data["freedom"]))),
        by_feature=by_feature,
        columns=np.array(data.get("columns", np.zeros((4, 0))), dtype=np.float64).reshape(4, -1),
    )
    _check_possible(sketch)
    return sketch


def _check_possible(sketch: DataSketch) -> None:
    """Raise a ValueError unless some samples have these classes, means and variances: one client that reports others
    would distort what all clients are compared with.
    """
    counts, spreads, covariance = sketch.counts, sketch.spreads, sketch.covariance
    bounds = (
        *((sketch.means, LONGEST), (covariance, LONGEST**2), (spreads, LONGEST**2), (counts, MOST_SAMPLES)),
        (sketch.columns, LONGEST),
    )
    if sketch.columns.shape[1] > MOST_COLUMNS or (np.diff(sketch.columns[:3], axis=0) < 0).any():
        raise ValueError("Quartiles are those of a table, and in order.")
    if not all((np.abs(numbers) <= most).all() for numbers, most in bounds) or not (spreads >= 0).all():
        raise ValueError("A sketch holds finite numbers, and inputs have no such size.")
    if len({*sketch.classes}) < len(sketch.classes) or any(abs(label) >= 1 << 63 for label in sketch.classes):
        raise ValueError("A sketch holds each class once.")
    if not (counts >= 1).all() or max(float(counts.sum()), sketch.freedom) > max(sketch.samples, 1):
        raise ValueError("A sketch describes no more samples than there are.")
    variances = np.diagonal(covariance)
    lengths = np.sqrt(np.maximum(variances, 0.0))
    correlation = covariance / np.maximum(np.outer(lengths, lengths), 1e-300)
    if (variances < 0).any() or (len(variances) and np.linalg.eigvalsh(correlation)[0] < LEAST_EIGENVALUE):
        raise ValueError("A covariance of a sketch is one.")
    within = float(((counts - 1) * spreads).sum())  # of the last directions, and perhaps of fewer classes
    if within > ROUNDED * sketch.freedom * float(variances.sum()) + 1e-300:
        raise ValueError("Classes of a sketch scatter no more than all of them do.")


def _told_change(round_index: int, data: Mapping[str, Any]) -> DataChange | None:
    kind, moved = data.get("change"), float(data.get("moved", math.nan))
    if kind not in KINDS:
        return None
    if abs(moved) > (1.0 if str(kind).startswith("label") else LONGEST**2):
        raise ValueError("A share of labels is at most 1, and no input grows by so much.")
    return DataChange(str(kind), round_index, moved)


def vanished_labels(
    before: Mapping[Any, int], now: Mapping[Any, int], vanished: frozenset[Any] = frozenset()
) -> frozenset[Any]:
    """Return the labels of which a client lost all samples, and no other samples, from its histograms.

    Those that it had lost before (`vanished`) count as lost until one of them is back.
    """
    lost = frozenset(label for label, count in before.items() if count and not now.get(label))
    kept = {label: count for label, count in before.items() if label not in lost and count}
    if lost and kept == {label: count for label, count in now.items() if count}:
        return lost | vanished
    return frozenset() if any(now.get(label) for label in vanished) else vanished


class OwnData:
    """A client's newest description, and the one that its current data are compared with."""

    __slots__ = ("newest", "reference")

    def __init__(self) -> None:
        self.newest: DataSketch | None = None
        self.reference: DataSketch | None = None  # of data that were unchanged for a while

    def add(self, sketch: DataSketch) -> None:
        """Add the next description."""
        before, self.newest = self.newest, sketch
        if before is None:
            return
        stable = sketch.looks > 0 or sketch.round - before.round >= STABLE
        if not stable or self._is_back(sketch):
            self.reference = None
        elif self.reference is None:
            self.reference = before

    @property
    def change(self) -> DataChange | None:
        """Return what changed in the data; None if nothing did, or the samples are different ones."""
        if self.newest is None:
            return None
        if self.reference is None or self.newest.inputs is None:
            return self.newest.change
        return change_of_data(self.reference, self.newest)

    def _is_back(self, sketch: DataSketch) -> bool:
        """Return whether the client has the data of the reference again, so that it was repaired."""
        known = self.reference
        return known is not None and (known.inputs, known.labels) == (sketch.inputs, sketch.labels)


def change_of_data(before: DataSketch, now: DataSketch) -> DataChange | None:
    """Return what changed between two sketches of a client; None if nothing did, or the samples are different ones."""
    if None in (before.inputs, before.labels, now.inputs, now.labels) or before.samples != now.samples:
        return None
    if before.inputs == now.inputs:
        return None if before.labels == now.labels else _changed_labels(before, now)
    return _changed_inputs(before, now) if before.labels == now.labels else None


def _changed_labels(before: DataSketch, now: DataSketch) -> DataChange | None:
    if not (before.labelled and now.labelled):
        return DataChange("label_noise", now.round, float("nan"))
    labels = sorted({*before.classes, *now.classes})
    old, new = (dict(zip(own.classes, own.counts, strict=True)) for own in (before, now))
    difference = np.array([new.get(label, 0.0) - old.get(label, 0.0) for label in labels])
    total = max(sum(old.values()), 1.0)
    gained, lost = difference.clip(min=0), (-difference).clip(min=0)
    moved = float(max(gained.sum(), lost.sum()) / total)
    one_to_one = min(gained.max(initial=0.0), lost.max(initial=0.0)) >= FROM_ONE_TO_ONE * moved * total
    if one_to_one and moved >= LEAST_MOVED:
        pair = labels[int(lost.argmax())], labels[int(gained.argmax())]
        back = _moved_back(before, now, *pair)
        net = float(gained.max())
        if net + back >= FROM_ONE_TO_ONE * (net + 2 * back):
            return DataChange("label_flip", now.round, moved, pair)
    return DataChange("label_noise", now.round, moved)


def _moved_back(before: DataSketch, now: DataSketch, losing: int, gaining: int) -> float:
    """Return how many samples moved from the class that gained to the one that lost, which counts do not show.

    Of two classes, one always gains what the other loses. But samples that join a class move its mean towards the class
    they come from, by their share of it; samples that only leave do not. 0 if the mean has not clearly moved.
    """
    if losing not in now.classes or not {losing, gaining} <= {*before.classes} or before.means.shape[1] == 0:
        return 0.0
    place, own = before.classes.index(losing), now.classes.index(losing)
    distance = before.means[before.classes.index(gaining)] - before.means[place]
    ridge = np.eye(len(distance)) * max(1e-3 * float(np.trace(before.covariance)) / len(distance), 1e-30)
    direction = np.linalg.solve(before.covariance + ridge, distance)
    apart = float(direction @ distance)  # squared, in units of the spread within classes
    share = float(direction @ (now.means[own] - before.means[place])) / max(apart, 1e-30)
    clear = share > CLEAR / math.sqrt(max(apart * float(now.counts[own]), 1e-30))
    return min(share, 1.0) * float(now.counts[own]) if clear else 0.0


def _changed_inputs(before: DataSketch, now: DataSketch) -> DataChange | None:
    ratio = now.spread / before.spread if before.spread > 0 else float("nan")
    if before.classes != now.classes or before.means.shape != now.means.shape or not before.means.size:
        return None
    if before.by_feature and now.by_feature:
        changed = _changed_features(before, now)
        if changed is not None:
            return changed
    old, new = (own.means[:, :LINEAR] * np.sqrt(own.counts)[:, None] for own in (before, now))
    factor = float((old * new).sum() / max((old**2).sum(), 1e-30))
    size = max(float(np.linalg.norm(new)), 1e-30)
    if float(np.linalg.norm(new - factor * old)) < RESCALED * size:
        scaled = factor > FACTOR or factor < 1 / FACTOR
        return DataChange("input_scale", now.round, factor) if scaled else None
    wider = now.variance / max(before.variance, 1e-30)
    if wider > NOISIER and ratio > LESS_NOISY and SAME_MEANS[0] < factor < SAME_MEANS[1]:
        return DataChange("input_noise", now.round, ratio)
    return DataChange("inputs", now.round, ratio)


def _changed_features(before: DataSketch, now: DataSketch) -> DataChange | None:
    """Return what changed in some features of a table while the others stayed the same; None if all changed, or none.

    In another unit, a feature is multiplied by a number, and perhaps moved by one, in all classes alike. Noise leaves
    the means of its classes where they were.
    """
    old, new = (np.sqrt(np.maximum(np.diagonal(own.covariance), 0.0)) for own in (before, now))  # spreads
    sizes = np.maximum(np.abs(before.means).max(axis=0), np.abs(now.means).max(axis=0))
    varied, varies = old > ROUNDED_OFF * sizes, new > ROUNDED_OFF * sizes
    factors = np.divide(new, old, out=np.where(varies, np.inf, 1.0), where=varied)
    moves = np.abs(now.means - before.means).max(axis=0)
    changed = (np.abs(factors - 1) > RESCALED) | (moves > RESCALED * old + ROUNDED_MEAN * sizes)
    if not changed.any() or changed[varied | varies].all():
        return None
    features = tuple(np.flatnonzero(changed).tolist())
    if (changed & varied & ~varies).any():
        return DataChange("input_constant", now.round, 0.0, features=features)
    if not np.isfinite(factors[changed]).all():
        return DataChange("inputs", now.round, math.nan, features=features)
    most = float(max(factors[changed], key=lambda factor: abs(math.log(factor))))
    centred = [own.means - np.average(own.means, axis=0, weights=own.counts) for own in (before, now)]
    left = np.abs(centred[1] - factors * centred[0]).max(axis=0)
    kind = "inputs"
    if (left <= RESCALED * (new + sizes))[changed].all():
        far = (factors > FACTOR) | (factors < 1 / FACTOR) | (moves > OFFSET * np.maximum(old, new))
        kind = "input_scale" if far[changed].any() else kind
    elif (moves <= CLEAR * new / math.sqrt(max(float(now.counts.min()), 1.0)))[changed].all() and most**2 > NOISIER:
        kind = "input_noise"
    return DataChange(kind, now.round, most, features=features)
