# SPDX-License-Identifier: Apache-2.0
"""Evidence summed over the rounds: what is known of a run's clients up to a round, and who is accused of what.

Each round's evidence is added up per client as in Page's CUSUM test: signs of health subtract, signs of a fault add,
and a client that exceeds a limit is accused. The limits are those at which healthy runs, of data and models that the
evidence was not learnt on, raise as many alarms as the user allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.fault_kinds import AFTER_TRAINING
from fedvitals.diagnosis.evidence.log_odds import VIEWS, EvidenceModel, features
from fedvitals.diagnosis.evidence.scores import Scorer, Scores
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import clients_with_altered_updates, clients_with_trained_updates
from fedvitals.diagnosis.evidence.vital_signs import SIGNS, VitalSigns, vital_signs_of
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

# Log-odds added to each round's evidence: what a single healthy-looking round takes away is limited by it.
DRIFT = {"telemetry": 1.5, "server": 1.5, "flip": 3.0}
LEAST, MOST = -3.0, 4.0  # limits of what one round can add
CAP = 20.0  # so that a repaired client is cleared again before long
# Shares of the allowed alarms; they overlap, and the rest belongs to all other rules together.
SHARES = {"telemetry": 0.35, "server": 0.2, "flip": 0.1}
SMALL, PARTIAL = 12, 0.7  # clients in a cohort; share of the known clients that take part in a round
CONVERGED = 0.1  # of the run's largest update, the median client's
REMEMBERED = 6  # participations from which the kind of the fault is inferred
UNTENABLE, PLAIN = 0.1, 0.8  # chances of the kind that was named, and of another, at which the name is changed


@dataclass
class EvidenceSums:
    """One view's sums of evidence, by client."""

    totals: dict[Node, float] = field(default_factory=dict)
    began: dict[Node, int] = field(default_factory=dict)  # round since when the total has been above 0
    kinds: dict[Node, list[Array]] = field(default_factory=dict)  # log-probabilities, of the newest participations
    accused: set[Node] = field(default_factory=set)
    withdrawn: int = 0  # accusations that later rounds did not confirm

    def add(self, node: Node, round_index: int, evidence: float, kind_logs: Array, limit: float) -> None:
        """Add one participation's evidence of a client, and accuse it or withdraw the accusation."""
        total = self.totals[node] = min(CAP, max(0.0, self.totals.get(node, 0.0) + evidence))
        if total == 0:
            self.kinds[node] = []
            self.began.pop(node, None)
        else:
            self.began.setdefault(node, round_index)
        self.kinds[node] = [*self.kinds.get(node, []), kind_logs][-REMEMBERED:]
        if total > limit:
            self.accused.add(node)
        elif node in self.accused and total < limit / 2:  # not at the limit itself, so that a case does not flicker
            self.accused.discard(node)
            self.withdrawn += 1


@dataclass
class EvidenceTrend:
    """The evidence of a run up to a round; `add_round` takes the next one."""

    model: EvidenceModel
    allowed: float  # alarms per 100 healthy rounds, over all rules together
    scorer: Scorer = field(default_factory=Scorer)
    views: dict[str, EvidenceSums] = field(default_factory=lambda: {name: EvidenceSums() for name in VIEWS})
    clients: set[Node] = field(default_factory=set)
    round: int | None = None
    rounds: int = 0
    vital_signs: VitalSigns | None = None
    scores: Scores | None = None  # of the last round; None if there were too few clients to compare
    accuracy: float = float("nan")  # of the received model, median over the clients, when it was last known
    limits: dict[str, float] = field(default_factory=dict)
    # Who sent something else than it trained, and since when.
    altered_since: dict[Node, int] = field(default_factory=dict)
    kind_chances: dict[Node, dict[str, float]] = field(default_factory=dict)  # of each kind, for all that stand accused
    suspected_kinds: dict[Node, str] = field(default_factory=dict)  # the kind that each of these is accused of
    abstains: bool = False  # whether the last round's updates were transformed, so that nobody is judged by them
    largest: float = 0.0  # norm of the median client's update, in the round in which that was largest

    def add_round(self, history: History, round_index: int) -> None:
        """Take in the next round."""
        vital_signs = vital_signs_of(history, round_index)
        self.round, self.rounds = round_index, self.rounds + 1
        self.clients |= set(vital_signs.nodes)
        self.abstains = transformation(history, round_index) is not None
        self.vital_signs, self.scores = vital_signs, None if self.abstains else self.scorer(vital_signs)
        accuracy = vital_signs.values[:, SIGNS.index("accuracy_before")]
        if np.isfinite(accuracy).any():
            self.accuracy = float(np.nanmedian(accuracy))
        if self.abstains:
            self.altered_since, self.suspected_kinds = {}, {}
        if self.scores is None:
            return
        altered = clients_with_altered_updates(history, round_index)
        unaltered = clients_with_trained_updates(history, round_index)
        for node in vital_signs.nodes:
            if node in altered:
                self.altered_since.setdefault(node, round_index)
            else:
                self.altered_since.pop(node, None)
        exchanged = groups_exchange_models(groups_of(history, round_index))
        cohort = cohort_kind(len(vital_signs.nodes), len(self.clients), exchanged=exchanged)
        if not self._converged(history, round_index):
            self._add_evidence(round_index, self.scores, vital_signs, cohort)
        for node in vital_signs.nodes:
            self._update_suspected_kind(node, honest=node in unaltered)

    def accusing_views(self, node: Node) -> list[str]:
        """Return the views in which a client is accused."""
        return [name for name, view in self.views.items() if node in view.accused]

    def totals(self, node: Node) -> dict[str, float]:
        """Return a client's sum of evidence in each view."""
        return {name: view.totals.get(node, 0.0) for name, view in self.views.items()}

    def _converged(self, history: History, round_index: int) -> bool:
        """Return whether updates have shrunk so far that a few hard samples decide what is left of them.

        Healthy clients then differ as much as faulty ones do earlier, and the evidence was not learnt on such rounds,
        so it is left unchanged.
        """
        norms = [norm for norm in history.latest("update.norm", round_index).values() if np.isfinite(norm)]
        median = float(np.median(norms)) if norms else 0.0
        self.largest = max(self.largest, median)
        return 0 < median < CONVERGED * self.largest  # a model of NaN has no finite update

    def _add_evidence(self, round_index: int, scores: Scores, vital_signs: VitalSigns, cohort: str) -> None:
        for name, view in self.views.items():
            learnt, signs = self.model.views[name], features(scores, vital_signs, name)
            gained = np.clip(learnt.evidence(signs) + DRIFT[name], LEAST, MOST)
            likely = learnt.likely(signs)
            allowed = self.allowed * SHARES[name]
            # Higher, where this very run has shown more false alarms than are allowed.
            excess = max(0.0, view.withdrawn - max(1.0, 2 * allowed * self.rounds / 100))
            limit = self.limits[name] = learnt.limit(cohort, allowed) + excess
            for index, node in enumerate(vital_signs.nodes):
                view.add(node, round_index, float(gained[index]), likely[index], limit)

    def _update_suspected_kind(self, node: Node, *, honest: bool) -> None:
        """Set or clear the kind of fault a client is accused of. A kind stays unless it has become clearly
        untenable.
        """
        fired = self.accusing_views(node)
        if node not in self.altered_since and not fired:
            self.suspected_kinds.pop(node, None)
            return
        view = "telemetry" if node in self.altered_since else max(fired, key=lambda name: self.views[name].totals[node])
        kinds = self.model.views[view].kinds
        possible = [True] * len(kinds)
        if node in self.altered_since:
            possible = [kind in AFTER_TRAINING for kind in kinds]
        elif honest and fired != ["server"]:
            # It sent what it trained, so the fault lies before. (The server's view does not rely on telemetry.)
            possible = [kind not in AFTER_TRAINING for kind in kinds]
        chances = self.kind_chances[node] = fault_kind_chances(self.views[view].kinds.get(node, []), kinds, possible)
        likeliest, before = max(chances, key=lambda kind: chances[kind]), self.suspected_kinds.get(node)
        if before is None or (chances.get(before, 0.0) < UNTENABLE and chances[likeliest] > PLAIN):
            self.suspected_kinds[node] = likeliest


def fault_kind_chances(logs: Sequence[Array], kinds: Sequence[str], possible: Sequence[bool]) -> dict[str, float]:
    """Return the probability of each kind from its log-probabilities in several participations; 0 for kinds that are
    not possible.
    """
    total = np.where(possible, np.sum(logs, axis=0), -np.inf)
    shares = np.exp(total - total.max())
    return {kind: float(share) for kind, share in zip(kinds, shares / shares.sum(), strict=True)}


def groups_exchange_models(groups: Mapping[Node, str]) -> bool:
    """Return whether clients pass models to each other within their groups: edges and rings do, clusters do not."""
    return any(not group.startswith("cluster") for group in groups.values())


def cohort_kind(present: int, known: int, *, exchanged: bool = False) -> str:
    """Return which limits apply: kinds of cohorts raise false alarms at very different rates."""
    if exchanged:
        return "exchanging"
    if present < PARTIAL * known:
        return "partial"
    return "small" if present <= SMALL else "large"
