# SPDX-License-Identifier: Apache-2.0
"""Label histograms that are added round by round are those that are read anew, and so is who lacks a class."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedvitals.diagnosis.detectors import labels as detector
from fedvitals.diagnosis.evidence.label_counts import LabelCounts
from fedvitals.records import Event, Where

Histograms = dict[str, dict[str, int]]


def report(number: int, node: str | None, histogram: dict[str, int] | None) -> Event:
    return Event(Where("r", number, node), float(number), "info", "labels", "", {"histogram": histogram}, "m", number)


def lacking_one_after_the_other(histograms: Histograms) -> dict[str, list[str]]:
    """The slow twin: dictionaries, client by client."""
    total: dict[str, int] = {}
    for histogram in histograms.values():
        for label, count in histogram.items():
            total[label] = total.get(label, 0) + count
    samples = sum(total.values())
    common = {label: count / samples for label, count in total.items() if count > detector.COMMON * samples}

    def lacking(histogram: dict[str, int]) -> list[str]:
        absent = [label for label in common if not histogram.get(label)]
        share = min(sum(common[label] for label in absent), 0.999)
        return absent if sum(histogram.values()) * math.log1p(-share) < math.log(detector.CHANCE) else []

    few = {node: labels for node, histogram in histograms.items() if (labels := lacking(histogram))}
    whole, distance, others = sum(common.values()), 0.0, [h for node, h in histograms.items() if node not in few]
    for histogram in others:
        size = sum(histogram.get(label, 0) for label in common)
        for label, share in common.items():
            expected = max(size * share / whole, 1e-9)
            distance += (histogram.get(label, 0) - expected) ** 2 / expected
    freedom = len(others) * max(1, len(common) - 1)
    scatter = (distance - freedom) / math.sqrt(2 * freedom) if others else math.inf
    too_few, too_many = len(histograms) < detector.FEWEST, len(few) > (1 - detector.ALIKE) * len(histograms)
    return {} if too_few or too_many or scatter > detector.UNEQUAL else few


def read_anew(events: list[Event]) -> Histograms:
    return {
        event.where.node: dict(event.data["histogram"])
        for event in events
        if event.where.node is not None and event.data.get("histogram")
    }


@pytest.mark.parametrize("seed", range(8))
def test_they_are_those_of_the_slow_twin(seed: int) -> None:
    chance, counts, events, seen = np.random.default_rng(seed), LabelCounts(), list[Event](), 0
    for number in range(25):
        for _ in range(4):
            histogram = {str(i): int(n) for i, n in enumerate(chance.multinomial(200, np.full(6, 1 / 6)))}
            if seed % 2 and chance.random() < 0.1:
                histogram = {label: n for label, n in histogram.items() if label != "3"}  # or does not name it
            if chance.random() < 0.05:
                histogram["rare"] = 1
            events.append(report(number, f"c{chance.integers(40)}", histogram))
        events += [report(number, None, {"0": 9}), report(number, "c1", None)]
        if number % 9 == 8:
            events = events[20:]  # what lies outside of the window is forgotten
        version = counts.version
        counts.update(list(events))
        assert counts.version > version
        expected = read_anew(events)
        assert counts.histograms == expected
        assert set(counts.nodes) == set(expected)
        for row, node in zip(counts.counts, counts.nodes, strict=True):
            assert dict(zip(counts.labels, row.tolist(), strict=True)) == {
                label: float(expected[node].get(label, 0)) for label in counts.labels
            }
        lacking = {node: sorted(labels) for node, labels in lacking_one_after_the_other(expected).items()}
        assert {node: sorted(labels) for node, labels in detector._lacking_classes(counts).items()} == lacking
        seen += len(lacking)
    assert bool(seen) == bool(seed % 2)


def test_nothing_changes_while_nothing_is_reported() -> None:
    counts, events = LabelCounts(), [report(0, f"c{i}", {"0": 5, "1": i}) for i in range(6)]
    counts.update(events)
    version = counts.version
    counts.update(list(events))
    assert counts.version == version
    assert counts.entropy("c5") == pytest.approx(math.log(2))
    assert math.isnan(counts.entropy("nobody"))
    counts.update([*events, report(1, "c5", {"0": 5})])
    assert counts.entropy("c5") == 0.0
    assert counts.version > version


def test_a_histogram_that_cannot_be_read_fails_each_time() -> None:
    counts, events = LabelCounts(), [report(0, "c1", {"0": 5}), report(0, "c2", {"0": "many"})]  # type: ignore[dict-item]
    for _ in range(2):
        with pytest.raises(ValueError, match="many"):
            counts.update(events)
