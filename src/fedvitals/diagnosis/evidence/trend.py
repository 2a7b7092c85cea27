# SPDX-License-Identifier: Apache-2.0
"""Evidence over time: what is known of a run's clients up to a round, and who stands accused of what.

Each round's evidence is added up for each client as in Page's CUSUM test: what speaks for health takes away, what
speaks for a fault adds, and who passes a limit is accused. The limits are those at which healthy runs of data and
models that the evidence was not learnt on raise as many alarms as the user allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.fault_kinds import AFTER_TRAINING
from fedvitals.diagnosis.evidence.log_odds import VIEWS, Model, features
from fedvitals.diagnosis.evidence.scores import Scorer, Scores
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import trained, untrained
from fedvitals.diagnosis.evidence.vital_signs import SIGNS, Vitals, vitals
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

# Log-odds added to each round's evidence: what a single healthy-looking round takes away is limited by it.
DRIFT = {"telemetry": 1.5, "server": 1.5, "flip": 3.0}
LEAST, MOST = -3.0, 4.0  # that one round can add
CAP = 20.0  # so that a cured client is believed again before long
# Of the alarms that the user allows; they overlap, and the rest belongs to all other rules together.
SHARES = {"telemetry": 0.35, "server": 0.2, "flip": 0.1}
SMALL, PARTIAL = 12, 0.7  # clients in a cohort; share of the known clients that take part in a round
CONVERGED = 0.1  # of the run's largest update, the median client's
REMEMBERED = 6  # participations from which the kind of the fault is told
UNTENABLE, PLAIN = 0.1, 0.8  # chances of the kind that was named, and of another, at which the name is changed


@dataclass
class Sums:
    """One view's sums of evidence."""

    totals: dict[Node, float] = field(default_factory=dict)
    began: dict[Node, int] = field(default_factory=dict)  # round since when the total has been above 0
    kinds: dict[Node, list[Array]] = field(default_factory=dict)  # log-probabilities, of the newest participations
    accused: set[Node] = field(default_factory=set)
    withdrawn: int = 0  # accusations that the following rounds did not bear out

    def add(self, node: Node, number: int, gained: float, likely: Array, limit: float) -> None:
        total = self.totals[node] = min(CAP, max(0.0, self.totals.get(node, 0.0) + gained))
        if total == 0:
            self.kinds[node] = []
            self.began.pop(node, None)
        else:
            self.began.setdefault(node, number)
        self.kinds[node] = [*self.kinds.get(node, []), likely][-REMEMBERED:]
        if total > limit:
            self.accused.add(node)
        elif node in self.accused and total < limit / 2:  # not at the limit itself: a case shall not flicker
            self.accused.discard(node)
            self.withdrawn += 1


@dataclass
class Course:
    """A run up to a round; `take` the next one. All that it says follows from the rounds that it took."""

    model: Model
    allowed: float  # alarms per 100 healthy rounds, over all rules together
    scorer: Scorer = field(default_factory=Scorer)
    views: dict[str, Sums] = field(default_factory=lambda: {name: Sums() for name in VIEWS})
    clients: set[Node] = field(default_factory=set)
    round: int | None = None
    rounds: int = 0
    vitals: Vitals | None = None
    scores: Scores | None = None  # of the last round; None if there were too few clients to compare
    accuracy: float = float("nan")  # of the received model, median over the clients, when it was last known
    limits: dict[str, float] = field(default_factory=dict)
    swapped: dict[Node, int] = field(default_factory=dict)  # who sent something else than it trained, and since when
    chances: dict[Node, dict[str, float]] = field(default_factory=dict)  # of each kind, for all that stand accused
    named: dict[Node, str] = field(default_factory=dict)  # the kind that each of these is accused of
    abstains: bool = False  # whether the last round's updates were transformed, so that nobody is judged by them
    largest: float = 0.0  # norm of the median client's update, in the round in which that was largest

    def take(self, history: History, number: int) -> None:
        seen = vitals(history, number)
        self.round, self.rounds = number, self.rounds + 1
        self.clients |= set(seen.nodes)
        self.abstains = transformation(history, number) is not None
        self.vitals, self.scores = seen, None if self.abstains else self.scorer(seen)
        accuracy = seen.values[:, SIGNS.index("accuracy_before")]
        if np.isfinite(accuracy).any():
            self.accuracy = float(np.nanmedian(accuracy))
        if self.abstains:
            self.swapped, self.named = {}, {}
        if self.scores is None:
            return
        struck, honest = untrained(history, number), trained(history, number)
        for node in seen.nodes:
            if node in struck:
                self.swapped.setdefault(node, number)
            else:
                self.swapped.pop(node, None)
        exchanged = exchanging(groups_of(history, number))
        cohort = cohort_of(len(seen.nodes), len(self.clients), exchanged=exchanged)
        if not self._converged(history, number):
            self._gather(number, self.scores, seen, cohort)
        for node in seen.nodes:
            self._name(node, honest=node in honest)

    def fired(self, node: Node) -> list[str]:
        """The views in which it stands accused."""
        return [name for name, view in self.views.items() if node in view.accused]

    def totals(self, node: Node) -> dict[str, float]:
        return {name: view.totals.get(node, 0.0) for name, view in self.views.items()}

    def _converged(self, history: History, number: int) -> bool:
        """Whether updates have shrunk so far that a few hard samples decide what is left of them.

        Healthy clients then differ as much as faulty ones do while there is something to learn, and evidence was not
        learnt on such rounds: it neither grows nor shrinks.
        """
        norms = [norm for norm in history.latest("update.norm", number).values() if np.isfinite(norm)]
        median = float(np.median(norms)) if norms else 0.0
        self.largest = max(self.largest, median)
        return 0 < median < CONVERGED * self.largest  # of a model that died of NaN, nothing finite is left

    def _gather(self, number: int, scores: Scores, seen: Vitals, cohort: str) -> None:
        for name, view in self.views.items():
            learnt, found = self.model.views[name], features(scores, seen, name)
            gained = np.clip(learnt.evidence(found) + DRIFT[name], LEAST, MOST)
            likely = learnt.likely(found)
            allowed = self.allowed * SHARES[name]
            # Higher, where this very run has shown more false alarms than are allowed.
            excess = max(0.0, view.withdrawn - max(1.0, 2 * allowed * self.rounds / 100))
            limit = self.limits[name] = learnt.limit(cohort, allowed) + excess
            for place, node in enumerate(seen.nodes):
                view.add(node, number, float(gained[place]), likely[place], limit)

    def _name(self, node: Node, *, honest: bool) -> None:
        """What it is accused of, if it is. That stays, unless it has become plainly untenable."""
        fired = self.fired(node)
        if node not in self.swapped and not fired:
            self.named.pop(node, None)
            return
        view = "telemetry" if node in self.swapped else max(fired, key=lambda name: self.views[name].totals[node])
        kinds = self.model.views[view].kinds
        possible = [True] * len(kinds)
        if node in self.swapped:
            possible = [kind in AFTER_TRAINING for kind in kinds]
        elif honest and fired != ["server"]:
            # It sent what it trained: what is wrong was wrong before. (The server's view believes no such word.)
            possible = [kind not in AFTER_TRAINING for kind in kinds]
        chances = self.chances[node] = chances_of(self.views[view].kinds.get(node, []), kinds, possible)
        likeliest, before = max(chances, key=lambda kind: chances[kind]), self.named.get(node)
        if before is None or (chances.get(before, 0.0) < UNTENABLE and chances[likeliest] > PLAIN):
            self.named[node] = likeliest


def chances_of(logs: Sequence[Array], kinds: Sequence[str], possible: Sequence[bool]) -> dict[str, float]:
    """The chance of each kind, from its log-probabilities in several participations; 0 for what is not possible."""
    total = np.where(possible, np.sum(logs, axis=0), -np.inf)
    shares = np.exp(total - total.max())
    return {kind: float(share) for kind, share in zip(kinds, shares / shares.sum(), strict=True)}


def exchanging(groups: Mapping[Node, str]) -> bool:
    """Whether clients pass their models on to each other within their groups: edges and rings do, clusters do not."""
    return any(not group.startswith("cluster") for group in groups.values())


def cohort_of(present: int, known: int, *, exchanged: bool = False) -> str:
    """Which limits hold: cohorts of these kinds raise false alarms at very different rates."""
    if exchanged:
        return "exchanging"
    if present < PARTIAL * known:
        return "partial"
    return "small" if present <= SMALL else "large"
