# SPDX-License-Identifier: Apache-2.0
"""Sums of evidence of all clients at once are those of one client after the other; what is kept has a bound."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fedvitals.diagnosis.evidence.client_table import ClientTable
from fedvitals.diagnosis.evidence.log_odds import shipped_model
from fedvitals.diagnosis.evidence.trend import CAP, REMEMBERED, EvidenceSums, EvidenceTrend
from fedvitals.records import Event, Metric, Run, Where
from fedvitals.store.in_memory import MemoryStore


@dataclass
class SlowSums:
    """The slow twin: dictionaries by client."""

    totals: dict[str, float] = field(default_factory=dict)
    began: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, list[np.ndarray]] = field(default_factory=dict)
    accused: set[str] = field(default_factory=set)
    withdrawn: int = 0

    def add(self, node: str, round_index: int, evidence: float, kind_logs: np.ndarray, limit: float) -> None:
        total = self.totals[node] = min(CAP, max(0.0, self.totals.get(node, 0.0) + evidence))
        if total == 0:
            self.kinds[node] = []
            self.began.pop(node, None)
        else:
            self.began.setdefault(node, round_index)
        self.kinds[node] = [*self.kinds.get(node, []), kind_logs][-REMEMBERED:]
        if total > limit:
            self.accused.add(node)
        elif node in self.accused and total < limit / 2:
            self.accused.discard(node)
            self.withdrawn += 1


@pytest.mark.parametrize("kinds", [1, 13])
def test_they_are_those_of_the_slow_twin(kinds: int) -> None:
    chance, table, slow = np.random.default_rng(kinds), ClientTable(), SlowSums()
    quick = EvidenceSums(table, kinds)
    for number in range(150):
        nodes = [f"c{i}" for i in chance.choice(30, size=12, replace=False)]
        evidence, logs = np.clip(chance.normal(0.3, 3.0, size=12), -3, 4), chance.normal(size=(12, kinds))
        evidence[chance.random(12) < 0.02] = np.nan
        limit = 6.0 + number % 3
        rows = table.rows_of(nodes)
        quick.add(rows, number, evidence, logs, limit)
        for index, node in enumerate(nodes):
            slow.add(node, number, float(evidence[index]), logs[index], limit)
        assert quick.accused_among(rows).tolist() == [node in slow.accused for node in nodes]
    assert quick.withdrawn == slow.withdrawn > 0
    for node in slow.totals:
        assert quick.total(node) == slow.totals[node]
        assert quick.began(node) == slow.began.get(node)
        assert quick.is_accused(node) == (node in slow.accused)
        np.testing.assert_array_equal(quick.kind_logs(node), slow.kinds[node])
        assert np.array_equal(np.sum(quick.kind_logs(node), axis=0), np.sum(slow.kinds[node], axis=0))
    assert quick.total("nobody") == 0.0
    assert quick.began("nobody") is None
    assert not quick.is_accused("nobody")
    assert len(quick.kind_logs("nobody")) == 0


def test_a_client_that_was_forgotten_is_no_longer_suspected() -> None:
    store, trend = MemoryStore(), EvidenceTrend(shipped_model(), 1.0, most=12)
    store.write([Run("r", "r")])
    for number in range(20):
        nodes = ["liar", *(f"c{number}-{i}" for i in range(5))] if number < 3 else [f"c{number}-{i}" for i in range(6)]
        for i, node in enumerate(nodes):
            trained = 1.0 + i / 100
            sent = 10.0 if node == "liar" else trained
            values = {"update.norm": sent, "weight.drift": trained, "steps": 5.0}
            store.write([Metric(Where("r", number, node), float(number), name, v) for name, v in values.items()])
        trend.add_round(store.history("r"), number)
        assert len(trend.clients) <= 12
        assert ("liar" in trend.altered_since) == ("liar" in trend.clients)
    assert "liar" not in trend.clients
    assert not trend.suspected_kinds
    assert not trend.kind_chances


CLAIMS = {
    "labels": Event(Where("r", 0, "liar"), 0.0, "info", "labels", "", {"histogram": {"0": 5, "1": 5}}),
    "accuracy in training": Metric(Where("r", 0, "liar"), 0.0, "train.accuracy", 0.5),
    "accuracy": Metric(Where("r", 0, "liar"), 0.0, "fit.accuracy_before", 0.5),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_targets_are_classes_where_two_clients_say_so(claim: str) -> None:
    store, trend = MemoryStore(), EvidenceTrend(shipped_model(), 1.0)
    nodes = ("liar", *(f"c{i}" for i in range(6)))
    store.write([Run("r", "r"), CLAIMS[claim]])
    store.write([Metric(Where("r", 0, node), 0.0, "update.norm", 1.0 + i / 100) for i, node in enumerate(nodes)])
    trend.add_round(store.history("r"), 0)
    assert not trend._has_classes
    store.write([replace(CLAIMS[claim], where=Where("r", 1, node)) for node in nodes[:2]])
    store.write([Metric(Where("r", 1, node), 1.0, "update.norm", 1.0 + i / 100) for i, node in enumerate(nodes)])
    trend.add_round(store.history("r"), 1)
    assert trend._has_classes
