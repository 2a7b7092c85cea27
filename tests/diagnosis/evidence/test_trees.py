# SPDX-License-Identifier: Apache-2.0
"""Boosted trees that ask all nodes at once give what a walk from the root gives, to the last bit."""

import numpy as np
import pytest

from fedvitals.diagnosis.evidence.log_odds import VIEWS, BoostedTrees, shipped_model


def walked(trees: BoostedTrees, rows: np.ndarray) -> np.ndarray:
    """The slow twin: each row goes from the root of each tree to a leaf."""
    sums = np.empty((len(rows), len(trees.feature)))
    for i, row in enumerate(rows):
        for tree in range(len(trees.feature)):
            node = 0
            while not trees.leaf[tree, node]:
                value = row[trees.feature[tree, node]]
                left = trees.missing_left[tree, node] if np.isnan(value) else value <= trees.limit[tree, node]
                node = int((trees.left if left else trees.right)[tree, node])
            sums[i, tree] = trees.value[tree, node]
    return sums.sum(axis=1) + trees.baseline


def grown(chance: np.random.Generator, leaves: int, features: int, trees: int) -> BoostedTrees:
    """Trees of any shape with so many leaves."""
    nodes = 2 * leaves - 1
    feature, left, right = (np.zeros((trees, nodes), np.int64) for _ in range(3))
    leaf = np.ones((trees, nodes), bool)
    for tree in range(trees):
        used, ends = 1, [0]
        while used < nodes - (tree % 3 if leaves > 2 else 0) * 2:  # some are smaller
            node = ends.pop(int(chance.integers(len(ends))))
            left[tree, node], right[tree, node], leaf[tree, node] = used, used + 1, False
            feature[tree, node] = chance.integers(features)
            ends += [used, used + 1]
            used += 2
    limit = chance.integers(-2, 3, size=(trees, nodes)).astype(float)
    limit[chance.random(limit.shape) < 0.05] = np.inf
    missing = chance.random((trees, nodes)) < 0.5
    return BoostedTrees(feature, limit, left, right, missing, chance.normal(size=(trees, nodes)), leaf, 0.25)


def rows_of(chance: np.random.Generator, count: int, features: int) -> np.ndarray:
    rows = chance.integers(-3, 4, size=(count, features)).astype(float)  # equal to limits, often
    rows[chance.random(rows.shape) < 0.2] = np.nan
    rows[chance.random(rows.shape) < 0.05] = np.inf
    return rows


@pytest.mark.parametrize("leaves", [1, 2, 5, 16, 17, 33, 64])
def test_trees_of_any_shape(leaves: int) -> None:
    chance = np.random.default_rng(leaves)
    trees, rows = grown(chance, leaves, 6, 9), rows_of(chance, 40, 6)
    np.testing.assert_array_equal(trees(rows), walked(trees, rows))


@pytest.mark.parametrize("view", VIEWS)
def test_the_trees_that_are_shipped(view: str) -> None:
    trees, chance = shipped_model().views[view].trees, np.random.default_rng(3)
    rows = rows_of(chance, 30, int(trees.feature.max()) + 1)
    np.testing.assert_array_equal(trees(rows), walked(trees, rows))
    assert len(trees(rows[:0])) == 0
