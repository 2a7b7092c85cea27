# SPDX-License-Identifier: Apache-2.0
"""Problems of low-rank adapters: each is named by its own numbers, and nothing is said where these are not known."""

from __future__ import annotations

import pytest

from fedvitals.diagnosis.detectors.adapters import DETECTORS
from support.histories import findings_of, history_of

RANKS = {("update.adapter_rank", f"c{i}"): [float(rank)] * 3 for i, rank in enumerate((4, 4, 8))}


def issues(history, number):
    return [found.issue for found in findings_of(DETECTORS, history, number)]


def test_directions_that_are_averaged_away_are_a_collapse():
    kept = {("adapter.energy_kept", "server"): [0.97, 0.05, 0.04], ("adapter.energy_above", "server"): [0.6, 0.02, 0.0]}
    history = history_of({**RANKS, **kept, ("adapter.effective_rank", "server"): [6.0, 3.0, 2.0]})
    assert [issues(history, number) for number in range(3)] == [[], ["RANK_COLLAPSE"], ["RANK_COLLAPSE"]]
    (found,) = findings_of(DETECTORS, history, 2)
    assert found.message == (
        "The adapters' directions above 4 (up to 8), which 1 of the round's 3 clients has, keep 4.0 % of their energy "
        "in the average; they hold 0.0 % of the aggregated adapters."
    )
    assert found.evidence["since"] == 1


@pytest.mark.parametrize(
    ("errors", "by_rank", "expected"),
    [
        ([0.1, 0.8, 0.8], [None] * 3, [[], [], ["ADAPTER_AGGREGATION_BIAS"]]),
        ([0.8, 0.1, 0.8], [None] * 3, [[], [], []]),  # a single round
        ([2.0, 1.8, 1.7], [0.03, 0.02, 0.01], [[], [], []]),  # each direction over the clients that have it
        ([0.2, 0.2, 0.1], [0.9, 0.8, 0.8], [[], [], []]),  # the mean of products
    ],
)
def test_a_product_far_from_either_mean_in_two_rounds_is_a_bias(errors, by_rank, expected):
    history = history_of(
        {("adapter.product_error", "server"): errors, ("adapter.product_error_by_rank", "server"): by_rank}
    )
    assert [issues(history, number) for number in range(3)] == expected


def test_another_scale_is_named_and_explains_the_error():
    scales = {("adapter.scale", node): [2.0, 2.0, 2.0] for node in ("c0", "c1", "c2", "server")}
    scales["adapter.scale", "c3"] = [2.0, 8.0, 8.0]
    history = history_of({**scales, ("adapter.product_error", "server"): [0.9, 0.9, 0.9]})
    assert issues(history, 1) == ["ADAPTER_SCALE_MISMATCH"]
    (found,) = findings_of(DETECTORS, history, 2)
    assert found.message == "The adapters' α/r differs: 8 on c3; 2 on 3 clients and the server's model."
    assert (found.where.node, [own.node for own in found.suspects], found.evidence["since"]) == ("c3", ["c3"], 1)


def test_scales_of_ranks_that_differ_name_nobody():
    history = history_of({("adapter.scale", f"c{i}"): [scale] for i, scale in enumerate((4.0, 2.0, 1.0))})
    (found,) = findings_of(DETECTORS, history, 0)
    assert found.where.node is None
    assert not found.suspects


@pytest.mark.parametrize(("kept", "collapses"), [(0.3, False), (0.04, True)])
def test_energy_that_another_scale_takes_is_no_collapse(kept, collapses):
    scales = {("adapter.scale", node): [scale] for node, scale in (("c0", 2.0), ("c1", 1.0), ("server", 1.0))}
    history = history_of({**scales, **RANKS, ("adapter.energy_kept", "server"): [kept]})
    assert ("RANK_COLLAPSE" in issues(history, 0)) == collapses
    assert "ADAPTER_SCALE_MISMATCH" in issues(history, 0)


def test_equal_scales_and_unknown_numbers_say_nothing():
    assert issues(history_of({("adapter.scale", f"c{i}"): [2.0, 2.001] for i in range(4)}), 1) == []
    assert issues(history_of({("adapter.energy_kept", "server"): [float("nan")]}), 0) == []
    assert issues(history_of({("loss", "server"): [1.0]}), 0) == []
