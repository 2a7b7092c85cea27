# SPDX-License-Identifier: Apache-2.0
"""Score each client's vital signs: how far it differs from its peers, from its own past, and for how long.

Small cohorts scatter more than large ones: a distance in robust deviations is mapped through Student's t with as many
degrees of freedom as there are peers to a normal score, so that 3 means the same with five clients and with fifty.
Signs that depend on a client's number of samples and labels are first corrected for that, by a regression over the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fedvitals.diagnosis.evidence.vital_signs import FLOOR, SIGNS, VitalSigns
from fedvitals.protocols import Node
from fedvitals.stats import Array

FEWEST = 4  # clients in a round, under which a median says nothing of anybody
CLIP = 8.0
OWN, LASTING = 0.8, 0.7  # how much of a client's past is kept from one participation to the next
_RIDGE = 0.5
_FLOORS = np.array([FLOOR[name] for name in SIGNS])


@dataclass
class _ClientPast:
    """One client's participations so far."""

    residual: Array = field(default_factory=lambda: np.zeros(len(SIGNS)))
    weight: Array = field(default_factory=lambda: np.zeros(len(SIGNS)))
    lasting: Array = field(default_factory=lambda: np.zeros(len(SIGNS)))
    lasting_weight: float = 0.0
    count: int = 0
    pair: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one round, [clients, SIGNS] each: against peers, against the own past, and averaged over the last
    participations.
    """

    nodes: list[Node]
    peers: Array
    own: Array
    lasting: Array
    counts: Array  # participations, this one included
    persistent: Array  # whether the same two classes are confused as the last time
    rare: Array  # share of the peers that confuse others


class Scorer:
    """Scores rounds one after the other, in their order."""

    def __init__(self) -> None:
        self._past: dict[Node, _ClientPast] = {}
        # Least squares of each sign on size and diversity, pooled over the run.
        self._products = np.zeros((2, len(SIGNS)))
        self._squares = np.zeros((2, len(SIGNS)))
        self._rounds = 0

    def __call__(self, vitals: VitalSigns) -> Scores | None:
        """Return the scores of a round; None if there are too few clients to compare."""
        if len(vitals.nodes) < FEWEST:
            return None
        centred = vitals.values - _median_by_sign(vitals.values)
        residual = self._corrected(centred, [vitals.size, vitals.diversity])
        peers = _normalised(residual)
        past = [self._past.setdefault(node, _ClientPast()) for node in vitals.nodes]
        own = self._against_own(residual, past)
        lasting = _lasting_scores(peers, past)
        persistent, rare = _confusion_pairs(vitals, past)
        for client in past:
            client.count += 1
        counts = np.array([float(client.count) for client in past])
        return Scores(vitals.nodes, peers, own, lasting, counts, persistent, rare)

    def _corrected(self, centred: Array, covariates: Sequence[Array]) -> Array:
        residual = centred.copy()
        for i, covariate in enumerate(covariates):
            if not np.isfinite(covariate).any():
                continue
            x = np.clip(np.nan_to_num(covariate - np.nanmedian(covariate)), -2.5, 2.5)
            clipped = np.clip(residual / np.maximum(_spread(residual), 1e-9), -2.5, 2.5) * np.maximum(
                _spread(residual), 1e-9
            )
            self._products[i] += np.nansum(x[:, None] * clipped, axis=0)
            self._squares[i] += np.nansum(np.where(np.isnan(clipped), np.nan, (x**2)[:, None]), axis=0)
            slope = self._products[i] / (self._squares[i] + _RIDGE * len(x))
            residual = residual - x[:, None] * slope
            residual = residual - _median_by_sign(residual)
        return residual

    def _against_own(self, residual: Array, past: list[_ClientPast]) -> Array:
        before = np.stack([client.residual for client in past])
        weight = np.stack([client.weight for client in past])
        change = np.where(weight > 0, residual - before / np.maximum(weight, 1e-9), np.nan)
        for client, row in zip(past, residual, strict=True):
            there = np.isfinite(row)
            client.residual = np.where(there, OWN * client.residual + np.nan_to_num(row), client.residual)
            client.weight = np.where(there, OWN * client.weight + 1, client.weight)
        if np.isfinite(change).any(axis=1).sum() < FEWEST:
            return np.zeros_like(residual)
        return _normalised(change - _median_by_sign(change))


def _median_by_sign(values: Array) -> Array:
    with np.errstate(all="ignore"):
        known = np.isfinite(values).any(axis=0)
        middle = np.zeros(values.shape[1])
        middle[known] = np.nanmedian(values[:, known], axis=0)
        return middle


def _spread(centred: Array) -> Array:
    """1.4826 · median of the distances."""
    return 1.4826 * _median_by_sign(np.abs(centred))


def _normalised(centred: Array) -> Array:
    scale = np.hypot(_spread(centred), _FLOORS)
    distances = centred / scale
    freedom = max(1, len(centred) - 2)
    return np.nan_to_num(np.clip(normal_scores(np.nan_to_num(distances), freedom), -CLIP, CLIP))


def _lasting_scores(peers: Array, past: list[_ClientPast]) -> Array:
    lasting = np.empty_like(peers)
    for i, (client, row) in enumerate(zip(past, peers, strict=True)):
        client.lasting = LASTING * client.lasting + row
        client.lasting_weight = LASTING * client.lasting_weight + 1
        lasting[i] = client.lasting / client.lasting_weight * math.sqrt(min(client.lasting_weight, 3.0))
    return lasting


def _confusion_pairs(vitals: VitalSigns, past: list[_ClientPast]) -> tuple[Array, Array]:
    pairs = [None if np.isnan(pair).any() else (float(pair[0]), float(pair[1])) for pair in vitals.pairs]
    persistent = np.array([float(pair is not None and pair == c.pair) for pair, c in zip(pairs, past, strict=True)])
    known = [pair for pair in pairs if pair is not None]
    rare = np.array([0.0 if pair is None else 1 - (known.count(pair) - 1) / max(1, len(known) - 1) for pair in pairs])
    for pair, client in zip(pairs, past, strict=True):
        client.pair = pair or client.pair
    return persistent, rare


# Student's t as a normal score, without scipy: an approximation that is monotone and good to a few hundredths.


def normal_scores(t: Array, freedom: int) -> Array:
    """The normal score with the same tail probability as `t` with so many degrees of freedom.

    Wallace's approximation (1959): z = ±√(f · ln(1 + t²/f)) · (8f + 1) / (8f + 3). Off by under 0.05 up to a score of
    4 from three degrees of freedom on; a test holds it against numerical integration.
    """
    size = np.sqrt(freedom * np.log1p(t**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return np.asarray(np.sign(t) * size)
