# SPDX-License-Identifier: Apache-2.0
"""What clients told of their data (`probes.data_sketch`), read once: of each client what it has now, and had before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedvitals.diagnosis.history_cutoff import shared, state_of
from fedvitals.protocols import History, Node
from fedvitals.records import Event
from fedvitals.stats import Array

EVENT = "data"
MOST_CLASSES, MOST_DIMENSIONS = 64, 16  # see `probes.data_sketch`; who sends more wants to fill our memory
SOON = 2  # rounds before a change shows in what a client trains, its data may have changed
STABLE = 2  # rounds for which data did not change, if it was told by another process that they are new to


@dataclass(frozen=True, slots=True, eq=False)
class DataSketch:
    """What a client told of its data in one round. Without classes, where no more than scalars may leave it."""

    round: int
    samples: int
    inputs: int | None  # checksums: equal where the data are; None where they are not told
    labels: int | None
    looks: int  # how often the data before these were found unchanged
    scalars: Mapping[str, float]  # mean, std, ... of the inputs
    labelled: bool
    classes: tuple[int, ...] = ()
    counts: Array = field(default_factory=lambda: np.zeros(0))  # [classes]
    means: Array = field(default_factory=lambda: np.zeros((0, 0)))  # [classes, dimensions]
    spreads: Array = field(default_factory=lambda: np.zeros(0))  # [classes]: mean squared distances from these
    covariance: Array = field(default_factory=lambda: np.zeros((0, 0)))  # [dimensions, dimensions], within classes
    freedom: int = 0

    @property
    def spread(self) -> float:
        """The standard deviation of the inputs; NaN where there is none, as of tokens."""
        return self.scalars.get("std", math.nan)

    @property
    def distinct(self) -> float:
        """The share of its samples that are not repeated: repeated ones tell nothing new of a mean."""
        return min(1.0, max(0.01, 1 - self.scalars.get("duplicates", 0.0)))


def read_sketch(event: Event) -> DataSketch | None:
    """Return the sketch that an event holds; None if it cannot be read, as a client may send anything."""
    try:
        return _read(event.where.round or 0, event.data)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError):
        return None


def _read(round_index: int, data: Mapping[str, Any]) -> DataSketch:
    names = ("mean", "std", "std_error", "min", "max", "missing", "constant", "duplicates", "length")
    scalars = {name: float(data[name]) for name in names if name in data}
    known = (
        round_index,
        int(data["samples"]),
        data.get("inputs"),
        data.get("labels"),
        int(data.get("looks", 0)),
        scalars,
    )
    if "means" not in data:
        return DataSketch(*known, labelled=False)
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
    finite = all(np.isfinite(part).all() for part in (covariance, counts, spreads, means))
    if not finite or (counts < 1).any() or (spreads < 0).any() or len({*classes}) < len(classes):
        raise ValueError("A sketch holds finite numbers, and each class once.")
    freedom = max(1, int(data["freedom"]))
    return DataSketch(*known, bool(data["labelled"]), classes, counts, means, spreads, covariance, freedom)


class DataSketches:
    """Each client's newest sketch, and the one that its present data are compared with."""

    def __init__(self) -> None:
        self.version = 0  # rises with every change
        self.newest: dict[Node, DataSketch] = {}
        self.reference: dict[Node, DataSketch] = {}  # of data that were found unchanged for a while
        self._first: dict[Node, int] = {}  # round in which a client first told of its data
        self._read: set[tuple[Node, int, float]] = set()

    def update(self, events: list[Event]) -> None:
        """Take in what was told, as the events of that name, oldest first."""
        for event in events:
            node = event.where.node
            key = (node or "", event.where.round or 0, event.at)
            if node is None or key in self._read:
                continue
            self._read.add(key)
            sketch = read_sketch(event)
            if sketch is None:
                continue
            self.version += 1
            self._first.setdefault(node, sketch.round)
            before = self.newest.get(node)
            stable = sketch.looks > 0 or (before is not None and sketch.round - before.round >= STABLE)
            if before is not None and stable and not self._back_again(node, sketch):
                self.reference.setdefault(node, before)
            elif before is not None:
                self.reference.pop(node, None)
            self.newest[node] = sketch

    def labels_unchanged_since(self, node: Node, round_index: int) -> bool:
        """Return whether a client's labels are known to be the same as before a round: its data did not change about
        then, or its inputs alone did.
        """
        newest, reference = self.newest.get(node), self.reference.get(node)
        if newest is None:
            return False
        if newest.round == self._first[node] or newest.round < round_index - SOON:
            return True
        return reference is not None and reference.labels is not None and reference.labels == newest.labels

    def _back_again(self, node: Node, sketch: DataSketch) -> bool:
        """Return whether a client has the data again that it was compared with: it was cured."""
        reference = self.reference.get(node)
        return reference is not None and (reference.inputs, reference.labels) == (sketch.inputs, sketch.labels)


@shared
def data_sketches(history: History, round_index: int) -> DataSketches:
    """Return what clients told of their data up to a round. Nobody may change it."""
    sketches = state_of(history, DataSketches)
    sketches.update([event for event in history.events(EVENT) if (event.where.round or 0) <= round_index])
    return sketches
