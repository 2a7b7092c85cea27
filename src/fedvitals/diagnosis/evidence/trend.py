# SPDX-License-Identifier: Apache-2.0
"""Evidence summed over the rounds: what is known of a run's clients up to a round, and who is accused of what.

Each round's evidence is added up per client as in Page's CUSUM test: signs of health subtract, signs of a fault add,
and a client that exceeds a limit is accused. The limits are those at which healthy runs, of data and models that the
evidence was not learnt on, raise as many alarms as the user allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.client_table import MOST_CLIENTS, ClientTable, Rows
from fedvitals.diagnosis.evidence.fault_kinds import AFTER_TRAINING
from fedvitals.diagnosis.evidence.log_odds import VIEWS, EvidenceModel, features, linear_features
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
_NEVER = np.iinfo(np.int64).min
UNTENABLE, PLAIN = 0.1, 0.8  # chances of the kind that was named, and of another, at which the name is changed


class EvidenceSums:
    """One view's sums of evidence, by client. `clients`: the table of which its columns are part."""

    def __init__(self, clients: ClientTable, kinds: int) -> None:
        self._clients = clients
        self._totals = clients.column()
        self._began = clients.column(dtype=np.int64, fill=_NEVER)  # round since when the total has been above 0
        # Log-probabilities of the kinds, of the newest participations, and of how many.
        self._kinds, self._known = clients.column((REMEMBERED, kinds)), clients.column(dtype=np.int64)
        self._accused = clients.column(dtype=np.bool_)
        self.withdrawn = 0  # accusations that later rounds did not confirm

    def add(self, rows: Rows, round_index: int, evidence: Array, kind_logs: Array, limit: float) -> None:
        """Add one participation's evidence of each client (a row of the table), and accuse it or withdraw the
        accusation.
        """
        sums = self._totals.values[rows] + evidence
        sums = np.where(sums > 0, sums, 0.0)
        totals = self._totals.values[rows] = np.where(sums < CAP, sums, CAP)
        began, none = self._began.values[rows], totals == 0
        self._began.values[rows] = np.where(none, _NEVER, np.where(began == _NEVER, round_index, began))
        known = np.where(none, 0, self._known.values[rows])
        full = rows[known == REMEMBERED]
        self._kinds.values[full, :-1] = self._kinds.values[full, 1:]
        self._kinds.values[rows, np.minimum(known, REMEMBERED - 1)] = kind_logs
        self._known.values[rows] = np.minimum(known + 1, REMEMBERED)
        accused = self._accused.values[rows]
        over = totals > limit
        withdrawn = accused & ~over & (totals < limit / 2)  # not at the limit itself, so that a case does not flicker
        self.withdrawn += int(withdrawn.sum())
        self._accused.values[rows] = (accused | over) & ~withdrawn

    def accused_among(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return whether each of these clients is accused."""
        return np.asarray(self._accused.values[rows])

    def is_accused(self, node: Node) -> bool:
        """Return whether a client is accused."""
        row = self._clients.row_of(node)
        return row is not None and bool(self._accused.values[row])

    def total(self, node: Node) -> float:
        """Return a client's sum of evidence; 0 if it is not known."""
        row = self._clients.row_of(node)
        return 0.0 if row is None else float(self._totals.values[row])

    def began(self, node: Node) -> int | None:
        """Return the round since when a client's sum has been above 0; None if it is not."""
        row = self._clients.row_of(node)
        return None if row is None or self._began.values[row] == _NEVER else int(self._began.values[row])

    def kind_logs(self, node: Node) -> Array:
        """Return the log-probabilities of the kinds in a client's newest participations, [participations, kinds]."""
        row = self._clients.row_of(node)
        return np.asarray(
            self._kinds.values[:0, 0] if row is None else self._kinds.values[row, : self._known.values[row]]
        )


class EvidenceTrend:
    """The evidence of a run up to a round; `add_round` takes the next one.

    `allowed`: alarms per 100 healthy rounds, over all rules together. `most`: clients that are remembered.
    """

    def __init__(self, model: EvidenceModel, allowed: float, most: int = MOST_CLIENTS) -> None:
        self.model, self.allowed = model, allowed
        self._clients = ClientTable(most)
        self.scorer = Scorer(self._clients)
        self.views = {name: EvidenceSums(self._clients, len(model.views[name].kinds)) for name in VIEWS}
        self.round: int | None = None
        self.rounds = 0
        self.vital_signs: VitalSigns | None = None
        self.scores: Scores | None = None  # of the last round; None if there were too few clients to compare
        self.accuracy = float("nan")  # of the received model, median over the clients, when it was last known
        self.limits: dict[str, float] = {}
        self.altered_since: dict[Node, int] = {}  # who sent something else than it trained, and since when
        self.kind_chances: dict[Node, dict[str, float]] = {}  # of each kind, for all that stand accused
        self.suspected_kinds: dict[Node, str] = {}  # the kind that each of these is accused of
        self.abstains = False  # whether the last round's updates were transformed, so that nobody is judged by them
        self.largest = 0.0  # norm of the median client's update, in the round in which that was largest

    @property
    def clients(self) -> Collection[Node]:
        """The clients that are remembered."""
        return self._clients

    def add_round(self, history: History, round_index: int) -> None:
        """Take in the next round."""
        vital_signs = vital_signs_of(history, round_index)
        self.round, self.rounds = round_index, self.rounds + 1
        rows = self._rows_of(vital_signs.nodes)
        self.abstains = transformation(history, round_index) is not None
        self.vital_signs, self.scores = vital_signs, None if self.abstains else self.scorer(vital_signs)
        accuracy = vital_signs.values[:, SIGNS.index("accuracy_before")]
        if np.isfinite(accuracy).any():
            self.accuracy = float(np.nanmedian(accuracy))
        if self.abstains:
            self.altered_since, self.suspected_kinds, self.kind_chances = {}, {}, {}
        if self.scores is None:
            return
        altered = clients_with_altered_updates(history, round_index)
        unaltered = clients_with_trained_updates(history, round_index)
        for node in vital_signs.nodes if altered or self.altered_since else ():
            if node in altered:
                self.altered_since.setdefault(node, round_index)
            else:
                self.altered_since.pop(node, None)
        exchanged = groups_exchange_models(groups_of(history, round_index))
        cohort = cohort_kind(len(vital_signs.nodes), len(self._clients), exchanged=exchanged)
        if not self._converged(history, round_index):
            self._add_evidence(round_index, rows, self.scores, vital_signs, cohort)
        self._update_suspected_kinds(vital_signs.nodes, rows, unaltered)

    def _rows_of(self, nodes: Sequence[Node]) -> Rows:
        """Return the rows of a round's clients; what is known of clients that gave way to new ones is dropped."""
        rows = self._clients.rows_of(nodes)
        for node in self._clients.forgotten:
            for by_client in (self.altered_since, self.suspected_kinds, self.kind_chances):
                by_client.pop(node, None)
        return rows

    def accusing_views(self, node: Node) -> list[str]:
        """Return the views in which a client is accused."""
        return [name for name, view in self.views.items() if view.is_accused(node)]

    def totals(self, node: Node) -> dict[str, float]:
        """Return a client's sum of evidence in each view."""
        return {name: view.total(node) for name, view in self.views.items()}

    def _converged(self, history: History, round_index: int) -> bool:
        """Return whether updates have shrunk so far that a few hard samples decide what is left of them.

        Healthy clients then differ as much as faulty ones do earlier, and the evidence was not learnt on such rounds,
        so it is left unchanged.
        """
        norms = [norm for norm in history.latest("update.norm", round_index).values() if np.isfinite(norm)]
        median = float(np.median(norms)) if norms else 0.0
        self.largest = max(self.largest, median)
        return 0 < median < CONVERGED * self.largest  # a model of NaN has no finite update

    def _add_evidence(self, round_index: int, rows: Rows, scores: Scores, vital_signs: VitalSigns, cohort: str) -> None:
        prepared: dict[tuple[bool, int], tuple[Array, Array]] = {}  # two of the views have the same features
        for name, view in self.views.items():
            learnt = self.model.views[name]
            key = (name == "server", learnt.scored)
            if key not in prepared:
                signs = features(scores, vital_signs, name)
                prepared[key] = (signs, linear_features(signs, learnt.scored))
            signs, linear = prepared[key]
            gained = np.clip(learnt.evidence(signs, linear) + DRIFT[name], LEAST, MOST)
            likely = learnt.likely(signs, linear)
            allowed = self.allowed * SHARES[name]
            # Higher, where this very run has shown more false alarms than are allowed.
            excess = max(0.0, view.withdrawn - max(1.0, 2 * allowed * self.rounds / 100))
            limit = self.limits[name] = learnt.limit(cohort, allowed) + excess
            view.add(rows, round_index, gained, likely, limit)

    def _update_suspected_kinds(self, nodes: Sequence[Node], rows: Rows, unaltered: Collection[Node]) -> None:
        """Set or clear the kinds of faults that a round's clients are accused of."""
        accused = np.logical_or.reduce([view.accused_among(rows) for view in self.views.values()])
        for node, stands_accused in zip(nodes, accused.tolist(), strict=True):
            if stands_accused or node in self.altered_since:
                self._update_suspected_kind(node, honest=node in unaltered)
            elif self.suspected_kinds.pop(node, None) is not None:
                self.kind_chances.pop(node, None)

    def _update_suspected_kind(self, node: Node, *, honest: bool) -> None:
        """Set the kind of fault that a client is accused of. A kind stays unless it has become clearly untenable."""
        fired = self.accusing_views(node)
        view = "telemetry" if node in self.altered_since else max(fired, key=lambda name: self.views[name].total(node))
        kinds = self.model.views[view].kinds
        possible = [True] * len(kinds)
        if node in self.altered_since:
            possible = [kind in AFTER_TRAINING for kind in kinds]
        elif honest and fired != ["server"]:
            # It sent what it trained, so the fault lies before. (The server's view does not rely on telemetry.)
            possible = [kind not in AFTER_TRAINING for kind in kinds]
        chances = self.kind_chances[node] = fault_kind_chances(self.views[view].kind_logs(node), kinds, possible)
        likeliest, before = max(chances, key=lambda kind: chances[kind]), self.suspected_kinds.get(node)
        if before is None or (chances.get(before, 0.0) < UNTENABLE and chances[likeliest] > PLAIN):
            self.suspected_kinds[node] = likeliest


def fault_kind_chances(
    logs: Sequence[Array] | Array, kinds: Sequence[str], possible: Sequence[bool]
) -> dict[str, float]:
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
