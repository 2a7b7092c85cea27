# SPDX-License-Identifier: Apache-2.0
"""What happened to a client's data since it last told of them: an equality, not a score.

Where checksums show that the inputs are the same and the labels are not, somebody changed the labels; the other way
round, the inputs. New samples change both, and are no sign of a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.evidence.described_data import DataSketch

FROM_ONE_TO_ONE = 0.8  # of the labels that changed, the share that is one class's, for another
LEAST_MOVED = 0.02  # of all labels
RESCALED = 0.02  # relative difference up to which new inputs are the old ones times a number
SAME_MEANS = 0.6, 1.6  # times the old means of classes, between which they stayed, as they do under noise
NOISIER, LESS_NOISY = 1.15, 1.05  # times the variance within classes, and the standard deviation of all inputs
FACTOR = 2.0  # or its inverse, from which another scale is a fault


@dataclass(frozen=True, slots=True)
class DataChange:
    """A change of a client's data: of what kind (of fault), since when, and by how much."""

    kind: str  # «label_noise», «label_flip», «input_scale», «input_noise» or «inputs»: changed in some other way
    since: int
    moved: float  # least share of the labels that changed; of inputs, how many times as large their spread is
    pair: tuple[int, int] | None = None  # of a flip: the class before, and the label now


def change_of_data(before: DataSketch, now: DataSketch) -> DataChange | None:
    """Return what was changed between two sketches of a client; None if nothing was, or the samples are others."""
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
        return DataChange("label_flip", now.round, moved, (labels[int(lost.argmax())], labels[int(gained.argmax())]))
    return DataChange("label_noise", now.round, moved)


def _changed_inputs(before: DataSketch, now: DataSketch) -> DataChange | None:
    ratio = now.spread / before.spread if before.spread > 0 else float("nan")
    if before.classes != now.classes or before.means.shape != now.means.shape or not before.means.size:
        return None
    old, new = before.means * np.sqrt(before.counts)[:, None], now.means * np.sqrt(now.counts)[:, None]
    factor = float((old * new).sum() / max((old**2).sum(), 1e-30))
    size = max(float(np.linalg.norm(new)), 1e-30)
    if float(np.linalg.norm(new - factor * old)) < RESCALED * size:
        scaled = factor > FACTOR or factor < 1 / FACTOR
        return DataChange("input_scale", now.round, factor) if scaled else None
    wider = np.trace(now.covariance) / max(float(np.trace(before.covariance)), 1e-30)
    if wider > NOISIER and ratio > LESS_NOISY and SAME_MEANS[0] < factor < SAME_MEANS[1]:
        return DataChange("input_noise", now.round, ratio)
    return DataChange("inputs", now.round, ratio)
