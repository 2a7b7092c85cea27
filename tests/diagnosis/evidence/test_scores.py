# SPDX-License-Identifier: Apache-2.0
"""Scores of all clients at once are those of one client after the other, to the last bit."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest

from fedvitals.diagnosis.evidence import scores as fast
from fedvitals.diagnosis.evidence.client_table import ClientTable
from fedvitals.diagnosis.evidence.scores import FEWEST, LASTING, LONGEST_TURN, OWN, Scorer, Scores
from fedvitals.diagnosis.evidence.vital_signs import ABSOLUTE, FIT, SIGNS, VitalSigns


@dataclass
class Past:
    """One client's participations so far."""

    residual: np.ndarray = field(default_factory=lambda: np.zeros(len(SIGNS)))
    weight: np.ndarray = field(default_factory=lambda: np.zeros(len(SIGNS)))
    lasting: np.ndarray = field(default_factory=lambda: np.zeros(len(SIGNS)))
    lasting_weight: np.ndarray = field(default_factory=lambda: np.zeros(len(SIGNS)))
    fit: dict[str, float] = field(default_factory=dict)  # when it was last measured
    since_fit: int = 0
    count: int = 0
    pair: tuple[float, float] | None = None


def median_by_sign(values: np.ndarray) -> np.ndarray:
    known = np.isfinite(values).any(axis=0)
    middle = np.zeros(values.shape[1])
    middle[known] = np.nanmedian(values[:, known], axis=0)
    return middle


def of_enough_clients(values: np.ndarray) -> np.ndarray:
    kept = values.copy()
    for j in range(values.shape[1]):
        if sum(math.isfinite(value) for value in values[:, j]) < FEWEST:
            kept[:, j] = np.nan
    return kept


class SlowScorer(Scorer):
    """The slow twin: a client's past is an object of its own, and medians are NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.past: dict[str, Past] = {}

    def __call__(self, vitals: VitalSigns) -> Scores | None:
        past = [self.past.setdefault(node, Past()) for node in vitals.nodes]
        values, earlier = vitals.values.copy(), np.zeros(vitals.values.shape, bool)
        for i, client in enumerate(past):
            self.slow_fit(values[i], earlier[i], client)
        values = of_enough_clients(values)
        residual = self._corrected(values - median_by_sign(values), [vitals.size, vitals.diversity])
        peers = fast._normalised(residual)
        peers[earlier], residual[earlier] = 0.0, np.nan
        own = self.slow_against_own(residual, past)
        lasting = np.empty_like(peers)
        for i, client in enumerate(past):
            for j in range(len(SIGNS)):
                if not earlier[i, j]:
                    client.lasting[j] = LASTING * client.lasting[j] + peers[i, j]
                    client.lasting_weight[j] = LASTING * client.lasting_weight[j] + 1
                weight = client.lasting_weight[j]
                lasting[i, j] = client.lasting[j] / weight * math.sqrt(min(weight, 3.0))
        pairs = [None if np.isnan(pair).any() else (float(pair[0]), float(pair[1])) for pair in vitals.pairs]
        persistent = [float(pair is not None and pair == c.pair) for pair, c in zip(pairs, past, strict=True)]
        known = [pair for pair in pairs if pair is not None]
        rare = [0.0 if pair is None else 1 - (known.count(pair) - 1) / max(1, len(known) - 1) for pair in pairs]
        for pair, client in zip(pairs, past, strict=True):
            client.pair = pair or client.pair
            client.count += 1
        counts = np.array([float(client.count) for client in past])
        unmeasured = earlier[:, SIGNS.index("loss_before")]
        return Scores(vitals.nodes, peers, own, lasting, counts, np.array(persistent), np.array(rare), unmeasured)

    def slow_fit(self, values: np.ndarray, earlier: np.ndarray, client: Past) -> None:
        """Put the newest fit of a client in the place of what was not measured in this round."""
        fit = {name: float(values[SIGNS.index(name)]) for name in FIT}
        if np.isfinite(fit["loss_before"]):
            client.fit, client.since_fit = fit, 0
            return
        client.since_fit += 1
        if client.since_fit > LONGEST_TURN:
            client.fit = fit
            return
        client.fit = client.fit or dict.fromkeys(FIT, math.nan)
        for name in FIT:
            values[SIGNS.index(name)] = client.fit[name]
            earlier[SIGNS.index(name)] = np.isfinite(client.fit[name])

    def slow_against_own(self, residual: np.ndarray, past: list[Past]) -> np.ndarray:
        before, weight = np.stack([c.residual for c in past]), np.stack([c.weight for c in past])
        change = np.where(weight > 0, residual - before / np.maximum(weight, 1e-9), np.nan)
        for client, row in zip(past, residual, strict=True):
            there = np.isfinite(row)
            client.residual = np.where(there, OWN * client.residual + np.nan_to_num(row), client.residual)
            client.weight = np.where(there, OWN * client.weight + 1, client.weight)
        change = of_enough_clients(change)
        return fast._normalised(change - median_by_sign(change))


def vitals_of(chance: np.random.Generator, nodes: list[str]) -> VitalSigns:
    """Signs of a round: some are missing, some infinite, and some unknown of everybody."""
    values = chance.normal(size=(len(nodes), len(SIGNS)))
    values[chance.random(values.shape) < 0.1] = np.nan
    values[chance.random(values.shape) < 0.01] = np.inf
    values[:, chance.random(len(SIGNS)) < 0.1] = np.nan
    values[np.ix_(chance.random(len(nodes)) < 0.5, [SIGNS.index(name) for name in FIT])] = np.nan  # in turns
    size, diversity = chance.normal(size=(2, len(nodes)))
    diversity[chance.random(len(nodes)) < 0.3] = np.nan
    pairs = chance.integers(0, 3, size=(len(nodes), 2)).astype(np.float64)
    pairs[chance.random(pairs.shape) < 0.2] = np.nan
    return VitalSigns(nodes, values, size, diversity, np.zeros((len(nodes), len(ABSOLUTE))), pairs)


@pytest.mark.parametrize("present", [5, 8, 30])
def test_they_are_those_of_the_slow_twin(present: int) -> None:
    chance, quick, slow = np.random.default_rng(present), Scorer(), SlowScorer()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for _ in range(25):
            vitals = vitals_of(chance, [f"c{i}" for i in sorted(chance.choice(40, size=present, replace=False))])
            scores, expected = quick(vitals), slow(vitals)
            assert scores is not None
            assert expected is not None
            for name in ("peers", "own", "lasting", "counts", "persistent", "rare", "unmeasured"):
                np.testing.assert_array_equal(getattr(scores, name), getattr(expected, name), err_msg=name)


def test_a_sign_that_only_three_of_six_clients_have_says_nothing() -> None:
    scorer, chance = Scorer(), np.random.default_rng(2)
    rare, common = SIGNS.index("bias"), SIGNS.index("norm")
    for _ in range(3):
        values = chance.normal(size=(6, len(SIGNS)))
        values[0, [rare, common]] = 50.0
        values[3:, rare] = np.nan
        nothing = np.full(6, np.nan)
        signs = VitalSigns([f"c{i}" for i in range(6)], values, nothing, nothing, np.zeros((6, 1)), np.zeros((6, 2)))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scores = scorer(signs)
        assert scores is not None
        assert not scores.peers[:, rare].any()
        assert not scores.lasting[:, rare].any()
        assert scores.peers[0, common] > 3


def test_what_is_kept_does_not_grow_with_the_clients_ever_seen() -> None:
    table, chance = ClientTable(most=64), np.random.default_rng(1)
    scorer = Scorer(table)
    with np.errstate(all="ignore"):
        for number in range(60):
            assert scorer(vitals_of(chance, [f"c{10 * number + i}" for i in range(10)])) is not None
    assert len(table) == table.capacity == 64
