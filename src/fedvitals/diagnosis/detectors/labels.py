# SPDX-License-Identifier: Apache-2.0
"""Detector of missing classes, from the label histograms that clients report.

Among clients whose data differ anyway a missing class means nothing. Where all others have every common class, a client
without one was cut off from it by a filter, a mapping or a broken import; so was one that had samples of a class, and
now has all of its data but these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of
from fedvitals.diagnosis.evidence.described_data import data_sketches
from fedvitals.diagnosis.evidence.label_counts import LabelCounts, label_counts
from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import state_of
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding
from fedvitals.stats import Array

CHANCE = 1e-6  # of missing a class by bad luck
ALIKE = 0.8  # share of the clients that must hold every common class, for its absence to mean anything
UNEQUAL = 3.0  # how much more than by chance the others' labels may scatter together, in standard deviations of χ²
COMMON = 0.02  # share of all samples that makes a class one that everybody should have
FEWEST = 5  # clients
MOST_WEIGHT = 4.0  # times the usual number of samples


@dataclass(slots=True)
class _Lacking:
    """The clients that lack classes, by the histograms of one version."""

    version: int = -1
    clients: int = 0
    classes: dict[Node, list[str]] = field(default_factory=dict)  # empty where the others are not alike


def missing_classes(history: History, round_index: int) -> Iterator[Finding]:
    """MISSING_CLASSES: a client without classes that nearly all other clients have.

    A class of which the client labels the samples as another is not missing.
    """
    counts, lacking = label_counts(history, round_index), state_of(history, _Lacking)
    if lacking.version != counts.version:
        lacking.version, lacking.clients = counts.version, len(counts.histograms)
        lacking.classes = _lacking_classes(counts)
    missing = {**lacking.classes, **{node: sorted(lost) for node, lost in counts.vanished.items()}}
    present = set(clients_of(history, round_index)) if missing else set()
    for node, absent in missing.items():
        relabelled = _relabelled(history, round_index, node)
        labels = [label for label in absent if label != relabelled]
        if node not in present or not labels:
            continue
        names = ", ".join(sorted(labels, key=lambda label: (len(label), label)))
        text = f"{node} has no sample of class {names}, which nearly all others have."
        if node in counts.vanished:
            text = f"{node} lost its samples of class {names}; the rest of its data is as before."
        yield finding(
            "MISSING_CLASSES",
            round_index,
            text,
            confidence=1 - CHANCE,
            node=node,
            severity="warning",
            numbers=[Number("classes missing", len(labels), 0.0)],
            more={"classes": sorted(labels), "clients with all classes": lacking.clients - len(lacking.classes)},
        )
    for node in clients_of(history, round_index):
        sketch = data_sketches(history, round_index).newest.get(node)
        if sketch is not None and sketch.lost and node not in missing:  # its labels are not told, how many it lost is
            yield finding(
                "MISSING_CLASSES",
                round_index,
                f"{node} lost all samples of {sketch.lost} classes; the rest of its data is as before.",
                confidence=1 - CHANCE,
                node=node,
                severity="warning",
                numbers=[Number("classes missing", sketch.lost, 0.0)],
            )


def _relabelled(history: History, round_index: int, node: Node) -> str | None:
    """Return the class of which a client labels the samples as another one, if its labels are known to be wrong so."""
    suspect = examine_data(history, round_index).suspects.get(node)
    if suspect is None or suspect.kind != "label_flip":
        return None
    if suspect.change is not None:
        return None if suspect.change.pair is None else str(suspect.change.pair[0])
    pair = None if suspect.deviation is None else suspect.deviation.pair
    return None if pair is None else str(pair[1])


def _lacking_classes(labels: LabelCounts) -> dict[Node, list[str]]:
    """Return the common classes of which each client has no samples, though it has too many samples for that to be
    chance; empty where clients are few, or not alike.

    Where they are not, it is tried again without the client that differs most: one client alone, which may claim any
    samples, decides neither what is common nor whether the others are alike.
    """
    nodes, rows = labels.nodes, np.arange(len(labels.counts))
    for _ in range(2):
        if len(rows) < FEWEST:
            break
        counts = labels.counts if len(rows) == len(labels.counts) else labels.counts[rows]
        sizes = counts.sum(axis=1)
        weights = np.minimum(1.0, MOST_WEIGHT * np.median(sizes) / np.maximum(sizes, 1.0))
        totals = weights @ counts
        places = np.flatnonzero((totals > COMMON * totals.sum()) & (np.count_nonzero(counts, axis=0) > 1))
        common, shares = counts[:, places] * weights[:, None], totals[places] / max(float(totals.sum()), 1.0)
        absent = common == 0
        missed = np.minimum(absent @ shares, 0.999)
        few = np.flatnonzero(absent.any(axis=1) & (sizes * np.log1p(-missed) < math.log(CHANCE)))
        if len(few) <= (1 - ALIKE) * len(rows) and _scatter(np.delete(common, few, axis=0), shares) <= UNEQUAL:
            return {nodes[rows[i]]: [labels.labels[places[j]] for j in np.flatnonzero(absent[i])] for i in few}
        rest = weights * sizes - common.sum(axis=1)
        distances = _distances(np.column_stack([common, rest]), np.append(shares, 1 - shares.sum()))
        rows = np.delete(rows, distances.argmax())
    return {}


def _scatter(counts: Array, shares: Array) -> float:
    """Return how unlike the histograms [clients, classes] are, as a normal score: about 0 for randomly dealt ones."""
    freedom = len(counts) * max(1, counts.shape[1] - 1)
    distance = float(_distances(counts, shares).sum())
    return (distance - freedom) / math.sqrt(2 * freedom) if len(counts) else math.inf


def _distances(counts: Array, shares: Array) -> Array:
    """Return χ² of each histogram, [clients], against these shares [classes]."""
    expected = np.maximum(counts.sum(axis=1, keepdims=True) * shares / max(float(shares.sum()), 1e-9), 1e-9)
    return np.asarray(((counts - expected) ** 2 / expected).sum(axis=1))


DETECTORS: tuple[Detector, ...] = (missing_classes,)
