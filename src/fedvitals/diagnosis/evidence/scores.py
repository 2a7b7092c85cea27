# SPDX-License-Identifier: Apache-2.0
"""Score each client's vital signs: how far it differs from its peers, from its own past, and for how long.

Small cohorts scatter more than large ones: a distance in robust deviations is converted to a normal score through
Student's t with as many degrees of freedom as there are peers, so that 3 means the same with five clients and with
fifty. Signs that depend on a client's number of samples and labels are first corrected for that, by a regression over
the run.

How well the model fits a client's samples may be measured in turns, for a few clients per round. These are then
compared with the newest values of their peers as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.attendance import clients_of
from fedvitals.diagnosis.evidence.client_table import ClientTable, Rows
from fedvitals.diagnosis.evidence.vital_signs import FIT, FLOOR, SIGNS, VitalSigns
from fedvitals.diagnosis.medians import column_medians
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

FEWEST = 4  # clients in a round, and of these with a sign; below this a median says nothing about a client
CLIP = 8.0
OWN, LASTING = 0.8, 0.7  # how much of a client's past carries over to the next participation
_RIDGE = 0.5
_FLOORS = np.array([FLOOR[name] for name in SIGNS])
_FIT = slice(SIGNS.index(FIT[0]), SIGNS.index(FIT[-1]) + 1)
LONGEST_TURN = 20  # participations without a measured fit, after which a client counts as not measured


def too_few_peers(history: History, round_index: int) -> bool:
    """Return whether a round has too few clients to compare them with each other.

    Then only exact relations and a client's own past apply.
    """
    return 0 < len(clients_of(history, round_index)) < FEWEST


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one round, [clients, SIGNS] each.

    Against peers, against the client's own past, and averaged over the last participations.
    """

    nodes: list[Node]
    peers: Array
    own: Array
    lasting: Array
    counts: Array  # participations, including this one
    persistent: Array  # whether the same two classes are confused as the last time
    rare: Array  # share of the peers that confuse other classes
    unmeasured: npt.NDArray[np.bool_]  # whether a client's fit, known from other rounds, was not measured in this one


class Scorer:
    """Scores rounds one after the other, in order. `clients`: where the past of the clients is kept."""

    def __init__(self, clients: ClientTable | None = None) -> None:
        self._clients = ClientTable() if clients is None else clients
        self._residual, self._weight = (self._clients.column((len(SIGNS),)) for _ in range(2))
        self._lasting, self._lasting_weight = (self._clients.column((len(SIGNS),)) for _ in range(2))
        self._count = self._clients.column()
        self._pair = self._clients.column((2,), fill=np.nan)  # the classes that it last confused
        self._fit = self._clients.column((len(FIT),), fill=np.nan)  # newest values of the signs measured in turns
        self._since_fit = self._clients.column()  # participations since these were measured
        # Least squares of each sign on size and diversity, pooled over the run.
        self._products = np.zeros((2, len(SIGNS)))
        self._squares = np.zeros((2, len(SIGNS)))
        self._rounds = 0

    def __call__(self, vitals: VitalSigns) -> Scores | None:
        """Return the scores of a round; None if there are too few clients to compare."""
        if len(vitals.nodes) < FEWEST:
            return None
        rows = self._clients.rows_of(vitals.nodes)
        values, earlier = self._with_newest_fit(vitals.values, rows)
        values = _of_enough(values)
        residual = self._corrected(values - _median_by_sign(values), [vitals.size, vitals.diversity])
        peers = np.where(earlier, 0.0, _normalised(residual))
        residual = np.where(earlier, np.nan, residual)
        own = self._against_own(residual, rows)
        lasting = self._lasting_scores(peers, rows, earlier)
        persistent, rare = self._confusion_pairs(vitals.pairs, rows)
        self._count.values[rows] += 1
        unmeasured = earlier[:, _FIT.start]
        return Scores(vitals.nodes, peers, own, lasting, self._count.values[rows], persistent, rare, unmeasured)

    def _with_newest_fit(self, values: Array, rows: Rows) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the signs with those of the fit as last measured for each client, and which of these are older."""
        fit, before = values[:, _FIT], self._fit.values[rows]
        measured = np.isfinite(fit[:, 0])
        age = self._since_fit.values[rows] = np.where(measured, 0, self._since_fit.values[rows] + 1)
        kept = ~measured & (age <= LONGEST_TURN)
        newest = self._fit.values[rows] = np.where(kept[:, None], before, fit)
        filled, earlier = values.copy(), np.zeros(values.shape, np.bool_)
        filled[:, _FIT] = newest
        earlier[:, _FIT] = kept[:, None] & np.isfinite(newest)
        return filled, earlier

    def _corrected(self, centred: Array, covariates: Sequence[Array]) -> Array:
        residual = centred.copy()
        for i, covariate in enumerate(covariates):
            if not np.isfinite(covariate).any():
                continue
            x = np.clip(np.nan_to_num(covariate - np.nanmedian(covariate)), -2.5, 2.5)
            spread = np.maximum(_spread(residual), 1e-9)
            clipped = np.clip(residual / spread, -2.5, 2.5) * spread
            self._products[i] += np.nansum(x[:, None] * clipped, axis=0)
            self._squares[i] += np.nansum(np.where(np.isnan(clipped), np.nan, (x**2)[:, None]), axis=0)
            slope = self._products[i] / (self._squares[i] + _RIDGE * len(x))
            residual = residual - x[:, None] * slope
            residual = residual - _median_by_sign(residual)
        return residual

    def _against_own(self, residual: Array, rows: Rows) -> Array:
        before, weight = self._residual.values[rows], self._weight.values[rows]
        change = np.where(weight > 0, residual - before / np.maximum(weight, 1e-9), np.nan)
        there = np.isfinite(residual)
        self._residual.values[rows] = np.where(there, OWN * before + np.nan_to_num(residual), before)
        self._weight.values[rows] = np.where(there, OWN * weight + 1, weight)
        change = _of_enough(change)
        return _normalised(change - _median_by_sign(change))

    def _lasting_scores(self, peers: Array, rows: Rows, earlier: npt.NDArray[np.bool_]) -> Array:
        """Return the scores averaged over the last participations; for signs of an `earlier` round, the old average."""
        sums, weights = self._lasting.values[rows], self._lasting_weight.values[rows]
        sums = self._lasting.values[rows] = np.where(earlier, sums, LASTING * sums + peers)
        weights = self._lasting_weight.values[rows] = np.where(earlier, weights, LASTING * weights + 1)
        return np.asarray(sums / weights * np.sqrt(np.minimum(weights, 3.0)))

    def _confusion_pairs(self, pairs: Array, rows: Rows) -> tuple[Array, Array]:
        """Return whether each client confuses the same two classes as the last time, and how few of the others do."""
        known, before = np.asarray(~np.isnan(pairs).any(axis=1)), self._pair.values[rows]
        persistent = (pairs == before).all(axis=1).astype(np.float64)
        self._pair.values[rows] = np.where(known[:, None], pairs, before)
        confused = [tuple(pair) if there else None for pair, there in zip(pairs.tolist(), known, strict=True)]
        counts, others = Counter(confused), max(1, int(known.sum()) - 1)
        rare = [0.0 if pair is None else 1 - (counts[pair] - 1) / others for pair in confused]
        return persistent, np.array(rare)


def _of_enough(values: Array) -> Array:
    """Return the values without the signs that fewer than `FEWEST` clients have, which count as missing."""
    return np.where(np.isfinite(values).sum(axis=0) < FEWEST, np.nan, values)


def _median_by_sign(values: Array) -> Array:
    """Return the median of each sign; 0 where no client has a finite value."""
    return np.where(np.isfinite(values).any(axis=0), column_medians(values), 0.0)


def _spread(centred: Array) -> Array:
    """Return 1.4826 · median of the distances."""
    return 1.4826 * _median_by_sign(np.abs(centred))


def _normalised(centred: Array) -> Array:
    scale = np.hypot(_spread(centred), _FLOORS)
    distances = centred / scale
    freedom = max(1, len(centred) - 2)
    return np.nan_to_num(np.clip(normal_scores(np.nan_to_num(distances), freedom), -CLIP, CLIP))


# Student's t as a normal score, without scipy: a monotone approximation, accurate to a few hundredths.


def normal_scores(t: Array, freedom: int) -> Array:
    """Return the normal score with the same tail probability as `t` with this many degrees of freedom.

    Wallace's approximation (1959): z = ±√(f · ln(1 + t²/f)) · (8f + 1) / (8f + 3). The error is below 0.05 up to a
    score of 4 from three degrees of freedom on; a test compares it with numerical integration.
    """
    size = np.sqrt(freedom * np.log1p(t**2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return np.asarray(np.sign(t) * size)
