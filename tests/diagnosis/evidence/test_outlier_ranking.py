# SPDX-License-Identifier: Apache-2.0
"""Who stands out: a ranking for the eye."""

import math

import numpy as np

from fedvitals.diagnosis.evidence.outlier_ranking import rank_outlier_clients, rank_outlier_layers, robust_scores
from fedvitals.records import Layer, LayerStats, LayerTable, Metric, Run, Where
from fedvitals.stats import empty_sums
from fedvitals.store import MemoryStore

TABLE = LayerTable("parameter", (Layer("a", (4,), "float32"), Layer("b", (4,), "float32")))


def history(norms, cosines=None):
    """A history of rounds × clients."""
    memory = MemoryStore()
    memory.write([Run("r", "r", tables=(TABLE,), source="t")])
    sequence = 1
    for number, row in enumerate(norms):
        for client, norm in enumerate(row):
            where = Where("r", number, f"c{client}")
            cosine = cosines[number][client] if cosines is not None else 0.5
            memory.write([
                Metric(where, float(number), "update.norm", norm, "t", sequence),
                Metric(where, float(number), "update.cosine_mean", cosine, "t", sequence + 1),
            ])  # fmt: skip
            sequence += 2
    return memory.history("r")


def test_robust_scores_are_distances_from_the_median():
    """One outlier does not hide itself by widening the spread."""
    scores = robust_scores(np.array([1.0, 1.1, 0.9, 1.05, 0.95, 9.0]), 0.05)
    assert scores.argmax() == 5
    assert scores[5] > 20
    assert np.all(np.abs(scores[:5]) < 2)


def test_equal_values_give_no_scores():
    """A cohort of equal values has no spread; rounding must not become a score."""
    assert np.all(np.abs(robust_scores(np.array([1.0, 1.0, 1.0 + 1e-9, 1.0]), 0.05)) < 1e-6)


def test_a_large_update_stands_out():
    """Ten times the norm of its peers comes first, and the reason is named."""
    ranked = rank_outlier_clients(history([[1.0, 1.1, 0.9, 10.0, 1.05]] * 3))
    assert (ranked[0].name, ranked[0].why) == ("c3", "larger updates")
    assert len(ranked) == 5


def test_an_opposite_update_stands_out():
    """A cosine far below its peers' comes first."""
    ranked = rank_outlier_clients(history([[1.0, 1.1, 0.9, 1.0, 1.05]], [[0.8, 0.7, 0.75, 0.72, -0.6]]))
    assert (ranked[0].name, ranked[0].why) == ("c4", "other direction")


def test_zero_and_infinite_updates_come_first():
    """What has no logarithm is not left out, it is put on top."""
    ranked = rank_outlier_clients(history([[1.0, 1.1, 0.0, 1.0, 1.05]], [[0.5, 0.5, math.nan, 0.5, 0.5]]))
    assert ranked[0].name == "c2"
    assert math.isinf(ranked[0].score)


def test_a_tiny_cohort_is_compared_with_its_own_rounds():
    """With three clients a median says nothing; all are in the table, the one that changed first."""
    assert [o.score for o in rank_outlier_clients(history([[1.0, 1.0, 9.0]]))] == [0.0, 0.0, 0.0]
    first, *others = rank_outlier_clients(history([[1.0, 1.0, 9.0], [1.1, 1.1, 9.1], [1.0, 4.0, 9.0]]))
    assert (first.name, len(others)) == ("c1", 2)
    assert "3.8× as large" in first.why


def test_who_had_nan_first_is_first_and_the_server_is_no_client():
    """The others trained a model that the first had spoiled, and have more NaN than it."""
    memory = MemoryStore()
    memory.write([Run("r", "r", tables=(TABLE,), source="t")])
    counts = [{"c4": 1.0}, {"c1": 1234567.0, "c4": 5.0, "server": 9e6}]
    for number, of_nodes in enumerate(counts):
        for sequence, (node, count) in enumerate(of_nodes.items()):
            where = Where("r", number, node)
            memory.write([Metric(where, 0.0, "weight.nonfinite", count, "t", 10 * number + sequence + 1)])
    ranked = rank_outlier_clients(memory.history("r"))
    assert [client.name for client in ranked] == ["c4", "c1"]
    assert ranked[1].why == "1\u2009234\u2009567 values NaN or Inf"


def test_layers_are_ranked_by_how_their_gradient_changed():
    """A layer whose gradient faded comes before one that stayed; NaN comes before both."""
    memory = MemoryStore()
    memory.write([Run("r", "r", tables=(TABLE,), source="t")])
    for number in range(8):
        matrix = empty_sums(2)
        matrix[:, :6] = [[4, 0, 4 * 0.5**number, 4, -1, 1], [4, 0, 4, 4, -1, 1]]
        memory.write([LayerStats(Where("r", number, "c0"), float(number), "gradient", matrix, TABLE.digest)])
    assert [layer.name for layer in rank_outlier_layers(memory.history("r"))] == ["a", "b"]
    matrix = matrix.copy()
    matrix[1, 7] = 3
    memory.write([LayerStats(Where("r", 8, "c0"), 8.0, "gradient", matrix, TABLE.digest)])
    first = rank_outlier_layers(memory.history("r"))[0]
    assert first.name == "b"
    assert "3 gradient values NaN or Inf" in first.why
