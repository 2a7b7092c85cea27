# SPDX-License-Identifier: Apache-2.0
"""Detector of missing classes, from the label histograms that clients report.

Among clients whose data differ anyway a missing class means nothing. Where all others have every common class, a client
without one was cut off from it by a filter, a mapping or a broken import.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fedvitals.diagnosis.evidence.attendance import clients_of, labels_of
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History
from fedvitals.records import Finding

CHANCE = 1e-6  # of missing a class by bad luck
ALIKE = 0.8  # share of the clients that must hold every common class, for its absence to mean anything
UNEQUAL = 3.0  # how much more than by chance the others' labels may scatter together, in standard deviations of χ²
COMMON = 0.02  # share of all samples that makes a class one that everybody should have
FEWEST = 5  # clients

Histogram = Mapping[str, int]


def missing_classes(history: History, round_index: int) -> Iterator[Finding]:
    """MISSING_CLASSES: a client without classes that nearly all other clients have."""
    histograms = labels_of(history, round_index)
    present = clients_of(history, round_index)
    total: dict[str, int] = {}
    for histogram in histograms.values():
        for label, count in histogram.items():
            total[label] = total.get(label, 0) + count
    samples = sum(total.values())
    common = {label: count / samples for label, count in total.items() if count > COMMON * samples}
    lacking = {node: _lacking(histogram, common) for node, histogram in histograms.items()}
    few = {node: labels for node, labels in lacking.items() if labels}
    others = [histogram for node, histogram in histograms.items() if node not in few]
    if len(histograms) < FEWEST or len(few) > (1 - ALIKE) * len(histograms) or _scatter(others, common) > UNEQUAL:
        return
    for node, labels in few.items():
        if node not in present:
            continue
        names = ", ".join(sorted(labels, key=lambda label: (len(label), label)))
        yield finding(
            "MISSING_CLASSES",
            round_index,
            f"{node} has no sample of class {names}, which nearly all others have.",
            confidence=1 - CHANCE,
            node=node,
            severity="warning",
            numbers=[Number("classes missing", len(labels), 0.0)],
            more={"classes": sorted(labels), "clients with all classes": len(histograms) - len(few)},
        )


def _lacking(histogram: Histogram, common: Mapping[str, float]) -> list[str]:
    """Return the common classes of which a client has no samples, though it has too many samples for that to be
    chance.
    """
    absent = [label for label in common if not histogram.get(label)]
    share = min(sum(common[label] for label in absent), 0.999)
    return absent if sum(histogram.values()) * math.log1p(-share) < math.log(CHANCE) else []


def _scatter(histograms: Sequence[Histogram], common: Mapping[str, float]) -> float:
    """Return how unlike the histograms are, as a normal score: about 0 for samples that were dealt at random."""
    whole, distance = sum(common.values()), 0.0
    for histogram in histograms:
        size = sum(histogram.get(label, 0) for label in common)
        for label, share in common.items():
            expected = max(size * share / whole, 1e-9)
            distance += (histogram.get(label, 0) - expected) ** 2 / expected
    freedom = len(histograms) * max(1, len(common) - 1)
    return (distance - freedom) / math.sqrt(2 * freedom) if histograms else math.inf


DETECTORS: tuple[Detector, ...] = (missing_classes,)
