# SPDX-License-Identifier: Apache-2.0
"""Compare each client with its own past: what changed on one client while its peers stayed the same.

The learnt evidence (`log_odds`) applies to updates of classifiers that arrive as they were trained. This comparison
needs nothing learnt, so it also applies to compressed updates, other tasks and two or three clients. A sign is the
logarithm of a measured value over that of the usual client of the round; a client's deviation from its own usual sign
is divided by the usual deviation of the clients of this run, and summed over its participations as in Page's CUSUM
test. A fault that was there from the beginning is not detected.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.attendance import clients_of
from fedvitals.diagnosis.evidence.client_table import ClientTable, Rows
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

PAST = 6  # participations that define a client's usual sign
FEWEST_PAST = 3  # of these, needed before a client is compared
FEWEST_PEERS = 4  # clients of a round, needed for one of them to stand out
FEWEST_DEVIATIONS = 8  # of all clients, before their spread is known; with two or three clients, two of each
SPREAD_ROUNDS = 20  # newest rounds from whose deviations the spread is computed
TURN = 20  # participations for which a value measured in turns represents its client among the peers
USUAL = 2.5  # up to which a deviation is added to the client's past and the run's spread
MOST, ALLOWANCE = 4.0, 2.0  # cap on a deviation, and the amount subtracted in each participation
LIMIT = 5.0  # sum above which a change counts as lasting: at least three participations
CAP = 10.0
SETBACK, SETBACK_ROUNDS = 1.25, 6  # times the lowest usual value of this many rounds: the model got worse for all
# Times its own last ordinary value: a client that only falls behind while its peers improve has harder data, not a
# fault.
RISE, RISE_OF_FEW = 1.15, 1.3  # in a small group, any client may be the unusual one
FIT_SAMPLES = 64.0  # the most samples on which a client's losses are measured; with fewer they scatter more


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """A metric that is compared. `floor`: of its largest usual value; below it differences mean nothing."""

    metric: str
    floor: float
    spread: float  # least spread in any run; for a loss, when measured on `FIT_SAMPLES`
    factor: float  # by which a client must exceed its usual value
    over: str | None = None  # another metric, by which this one is divided

    @property
    def name(self) -> str:
        """Return the name of the compared quantity, as findings show it."""
        return self.metric if self.over is None else f"{self.metric} / {self.over}"

    @property
    def is_loss(self) -> bool:
        """Return whether this is a loss on a client's own samples."""
        return self.metric.startswith("fit.")


LOSS = ComparedMetric("fit.loss_before", 0.1, 0.09, 1.3)
LOSS_AFTER = ComparedMetric(
    "fit.loss_after", 0.1, 0.07, 1.2
)  # random labels cannot be learnt in a round, however little is known
SIZE = ComparedMetric("update.norm", 0.1, 0.1, 4.0)
PROPORTION = ComparedMetric("update.norm", 0.1, 0.1, 2.5, over="weight.drift")  # of what arrives to what was trained


@dataclass(frozen=True, slots=True)
class ClientChange:
    """A lasting change of one client: since when, and the metric's value with the expected one."""

    sign: ComparedMetric
    since: int
    value: float
    expected: float
    deviations: float  # of the newest participation, in spreads of the run


class OwnPast:
    """One sign of a run's clients, up to a round; `add_round` adds the next one."""

    def __init__(self, sign: ComparedMetric) -> None:
        self._sign = sign
        self._clients = ClientTable()
        self._past = self._clients.column((PAST,), fill=np.nan)
        self._newest = self._clients.column(fill=np.nan)
        self._age = self._clients.column()
        self._ordinary = self._clients.column(fill=np.inf)  # the newest value that was not unusual
        self._sums = self._clients.column()
        self._compared = self._clients.column(dtype=np.bool_)  # whether the newest value was compared
        self._began = self._clients.column(dtype=np.int64, fill=-1)
        self._deviations: deque[Array] = deque(maxlen=SPREAD_ROUNDS)
        self._largest = 0.0
        self._typical: deque[float] = deque(maxlen=SETBACK_ROUNDS)  # usual values of the newest rounds
        self.round: int | None = None
        self._lasting: dict[Node, ClientChange] = {}  # by the newest measurement of each client that changed
        self.changes: dict[Node, ClientChange] = {}  # of the clients of the last round
        self.compared: frozenset[Node] = frozenset()  # clients of the last round whose newest value was compared

    def add_round(self, history: History, round_index: int) -> None:
        """Add the next round."""
        self.round = round_index
        nodes = clients_of(history, round_index)
        self._measure(history, round_index, nodes)
        self.changes = {node: self._lasting[node] for node in nodes if node in self._lasting}
        rows = [self._clients.row_of(node) for node in nodes]
        self.compared = frozenset(
            node
            for node, row in zip(nodes, rows, strict=True)
            if row is not None and self._compared.values[row] and self._age.values[row] <= TURN
        )

    def _measure(self, history: History, round_index: int, nodes: Sequence[Node]) -> None:
        measured = history.latest(self._sign.metric, round_index)
        values = np.array([measured.get(node, np.nan) for node in nodes], dtype=np.float64)
        if self._sign.over is not None:
            divisors = history.latest(self._sign.over, round_index)
            values /= np.array([divisors.get(node, 0.0) or np.nan for node in nodes])
        values[~(np.isfinite(values) & (values > 0))] = np.nan
        if not np.isfinite(values).any():
            return
        rows = self._clients.rows_of(nodes)
        known = np.isfinite(values)
        age = self._age.values[rows] = np.where(known, 0, self._age.values[rows] + 1)
        newest = self._newest.values[rows] = np.where(known, values, self._newest.values[rows])
        usual = usual_values(np.where(age <= TURN, newest, np.nan))
        if not np.isfinite(usual).any():
            return  # a single client
        typical = float(np.nanmin(usual))
        self._largest = max(self._largest, typical)
        self._typical.append(typical)
        samples = history.latest("fit.samples", round_index) if self._sign.is_loss else {}
        counts = np.array([min(max(samples.get(node, FIT_SAMPLES), 1.0), FIT_SAMPLES) for node in nodes])
        self._compare(round_index, nodes, rows, values, usual, self._sign.spread * np.sqrt(FIT_SAMPLES / counts))

    def _compare(
        self, round_index: int, nodes: Sequence[Node], rows: Rows, values: Array, usual: Array, least_spread: Array
    ) -> None:
        floor = self._sign.floor * self._largest
        signs = np.log((values + floor) / (usual + floor))
        past = self._past.values[rows]
        counts = np.isfinite(past).sum(axis=1)
        comparable = np.isfinite(signs) & (counts >= FEWEST_PAST)
        own = np.full(len(nodes), np.nan)
        own[comparable] = np.nanmedian(past[comparable], axis=1)
        deviations = signs - own
        spread = np.hypot(self._spread(), least_spread)
        # The usual sign is itself only known as precisely as a few participations allow.
        scores = deviations / (spread * np.sqrt(1 + 1.57 / np.maximum(counts, 1)))
        judged = comparable & np.isfinite(scores)
        unusual = judged & (scores > USUAL)
        if (comparable & ~unusual).any():
            self._deviations.append(deviations[comparable & ~unusual])
        sums = self._sums.values[rows]
        # While the model gets worse for all, it is no fault of a client to be affected more than others.
        worse = self._typical[-1] + floor > SETBACK * (min(self._typical) + floor) and len(nodes) >= FEWEST_PEERS
        most = 0.0 if worse and self._sign.is_loss else MOST
        sums = np.where(judged, np.clip(sums + np.clip(scores, -MOST, most) - ALLOWANCE, 0.0, CAP), sums)
        began = self._began.values[rows]
        self._sums.values[rows] = sums
        self._began.values[rows] = began = np.where(sums <= 0, -1, np.where(began < 0, round_index, began))
        ordinary = np.isfinite(signs) & ~unusual
        before = self._ordinary.values[rows]
        self._ordinary.values[rows] = np.where(ordinary, values, before)
        past[ordinary, :-1] = past[ordinary, 1:]
        past[ordinary, -1] = signs[ordinary]
        self._past.values[rows] = past
        known = np.isfinite(values)
        self._compared.values[rows] = np.where(known, judged, self._compared.values[rows])
        for i in np.flatnonzero(known).tolist():
            self._lasting.pop(nodes[i], None)
        lasting = judged & (sums > LIMIT) & (deviations > np.log(self._sign.factor))
        lasting &= values > (RISE if len(nodes) >= FEWEST_PEERS else RISE_OF_FEW) * before
        lasting &= self._outstanding(signs) | (len(nodes) < FEWEST_PEERS)
        if (judged & (sums > LIMIT / 2)).sum() > max(1, len(nodes) // 4):
            return
        for i in np.flatnonzero(lasting).tolist():
            expected = float(np.exp(own[i]) * (usual[i] + floor) - floor)
            expected = expected if expected > before[i] / 10 else float(before[i])  # small ones vanish in the floor
            self._lasting[nodes[i]] = ClientChange(
                self._sign, int(began[i]), float(values[i]), expected, float(scores[i])
            )

    def _outstanding(self, signs: Array) -> npt.NDArray[np.bool_]:
        """Return which clients exceed the usual one as they exceed their own past, and nearly all others."""
        known = signs[np.isfinite(signs)]
        limit = np.sort(known)[-max(1, len(known) // 4)] if len(known) else np.inf
        return np.asarray((signs >= limit) & (signs > np.log(self._sign.factor)))

    def _spread(self) -> float:
        """Return how far the clients of this run usually deviate; NaN until enough is known."""
        if sum(map(len, self._deviations)) < min(FEWEST_DEVIATIONS, 2 * len(self._clients)):
            return float("nan")
        return 1.4826 * float(np.median(np.abs(np.concatenate(self._deviations))))


def usual_values(values: Array) -> Array:
    """Return for each client the usual value of the round: the median of all, or of the others if there are few.

    With an even number of values it is the lower of the two middle ones. NaN if nothing is known.
    """
    if np.isfinite(values).sum() >= FEWEST_PEERS:
        return np.full(len(values), _lower_median(values))
    return np.array([_lower_median(np.delete(values, i)) for i in range(len(values))])


def _lower_median(values: Array) -> float:
    known = np.sort(values[np.isfinite(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else float("nan")


class OwnPasts:
    """The comparisons of each history, cached so that a long run is not read again in every round."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[History, dict[ComparedMetric, OwnPast]] = weakref.WeakKeyDictionary()

    def up_to(self, history: History, round_index: int, sign: ComparedMetric) -> OwnPast:
        """Return the comparison up to this round."""
        by_sign = self._kept.setdefault(history, {})
        past = by_sign.get(sign)
        if past is None or (past.round is not None and past.round > round_index):
            past = by_sign[sign] = OwnPast(sign)
        for past_round in history.rounds():
            if past_round <= round_index and (past.round is None or past_round > past.round):
                past.add_round(history, past_round)
        return past


OWN_PASTS = OwnPasts()


def compared_with_own_past(history: History, round_index: int) -> frozenset[Node]:
    """Return the clients of a round whose losses and update sizes are compared with their own past."""
    losses = OWN_PASTS.up_to(history, round_index, LOSS).compared
    return losses & OWN_PASTS.up_to(history, round_index, SIZE).compared
