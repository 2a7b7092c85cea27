# SPDX-License-Identifier: Apache-2.0
"""Label histograms that are added round by round are those that are read anew, and so is who lacks a class."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from fedvitals.diagnosis.detectors import labels as detector
from fedvitals.diagnosis.evidence import label_counts
from fedvitals.diagnosis.evidence.label_counts import LabelCounts
from fedvitals.records import Event, Where

Histograms = dict[str, dict[str, int]]


def report(number: int, node: str | None, histogram: dict[str, int] | None) -> Event:
    return Event(Where("r", number, node), float(number), "info", "labels", "", {"histogram": histogram}, "m", number)


def lacking_one_after_the_other(histograms: Histograms, attempts: int = 2) -> dict[str, list[str]]:
    """The slow twin: dictionaries, client by client."""
    if len(histograms) < detector.FEWEST or not attempts:
        return {}
    most = detector.MOST_WEIGHT * statistics.median(sum(own.values()) for own in histograms.values())
    weights = {node: min(1.0, most / sum(own.values())) for node, own in histograms.items()}
    total: dict[str, float] = {}
    for node, histogram in histograms.items():
        for label, count in histogram.items():
            total[label] = total.get(label, 0) + weights[node] * count
    samples = sum(total.values())
    several = {label for label in total if sum(bool(own.get(label)) for own in histograms.values()) > 1}
    common = {label: n / samples for label, n in total.items() if n > detector.COMMON * samples and label in several}

    def lacking(histogram: dict[str, int]) -> list[str]:
        absent = [label for label in common if not histogram.get(label)]
        share = min(sum(common[label] for label in absent), 0.999)
        return absent if sum(histogram.values()) * math.log1p(-share) < math.log(detector.CHANCE) else []

    def distance(node: str, shares: dict[str, float], labels: set[str]) -> float:
        counts = {label: histograms[node].get(label, 0) for label in shares}
        counts |= {"": sum(histograms[node].values()) - sum(counts.values())} if "" in labels else {}
        expected = {
            label: weights[node] * sum(counts.values()) * shares[label] / sum(shares.values()) for label in labels
        }
        return sum(
            (weights[node] * counts[label] - expected[label]) ** 2 / max(expected[label], 1e-9) for label in labels
        )

    few = {node: labels for node, histogram in histograms.items() if (labels := lacking(histogram))}
    others = [node for node in histograms if node not in few]
    freedom = len(others) * max(1, len(common) - 1)
    scatter = sum(distance(node, common, {*common}) for node in others) - freedom
    too_many = len(few) > (1 - detector.ALIKE) * len(histograms)
    if others and not too_many and scatter <= detector.UNEQUAL * math.sqrt(2 * freedom):
        return few
    whole = common | {"": 1 - sum(common.values())}
    worst = max(histograms, key=lambda node: distance(node, whole, {*whole}))
    return lacking_one_after_the_other({n: own for n, own in histograms.items() if n != worst}, attempts - 1)


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


def test_labels_that_no_client_names_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_counts, "MOST_LABELS", 50)
    counts = LabelCounts()
    events = [report(0, f"c{i}", {"0": 5, "1": i + 1}) for i in range(3)]
    for number in range(30):
        events.append(report(number, "liar", {str(number * 10 + i): 7 for i in range(10)}))
        counts.update(list(events))
        newest = read_anew(events)
        for row, node in zip(counts.counts, counts.nodes, strict=True):
            assert {a: n for a, n in zip(counts.labels, row.tolist(), strict=True) if n} == newest[node]
        assert len(counts.labels) <= 62
    assert counts.counts.base.shape[1] <= 62


def test_one_client_does_not_decide_how_many_classes_there_are() -> None:
    counts = LabelCounts()
    counts.update([report(0, f"c{i}", {"0": 5, str(1 + i): 5}) for i in range(5)])
    assert counts.classes == 6
    counts.update([*counts._events, report(0, "liar", {str(i): 1 for i in range(1_000)})])
    assert len(counts.labels) == 1_000
    assert counts.classes == 6
    alone = LabelCounts()
    alone.update([report(0, "c0", {str(i): 1 for i in range(10)})])
    assert alone.classes == 10
