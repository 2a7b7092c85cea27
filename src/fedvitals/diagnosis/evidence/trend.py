# SPDX-License-Identifier: Apache-2.0
"""Evidence summed over the rounds: what is known about a run's clients up to a round, and which are accused of what.

Each round's evidence is added up per client as in Page's CUSUM test: signs of health subtract, signs of a fault add,
and a client above a limit is accused. At these limits healthy runs, of data and models that the evidence was not learnt
on, raise as many alarms as the user allows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedvitals.diagnosis.evidence.attendance import clients_with_few_samples, groups_of
from fedvitals.diagnosis.evidence.client_table import MOST_CLIENTS, ClientTable, Rows
from fedvitals.diagnosis.evidence.different_classes import trains_different_classes
from fedvitals.diagnosis.evidence.equal_updates import peer_statistic
from fedvitals.diagnosis.evidence.exact_relations import HARMLESS, exact_relations, harmless_alterations
from fedvitals.diagnosis.evidence.fault_kinds import AFTER_TRAINING, DATA_FAULTS, INPUT_FAULTS, MULTIPLES
from fedvitals.diagnosis.evidence.label_counts import (
    clients_with_rare_labels,
    label_counts,
    predicts_texts,
)
from fedvitals.diagnosis.evidence.learning_rates import METRIC as LEARNING_RATE
from fedvitals.diagnosis.evidence.learning_rates import own_learning_rates
from fedvitals.diagnosis.evidence.log_odds import VIEWS, EvidenceModel, features, linear_features
from fedvitals.diagnosis.evidence.scores import Scorer, Scores
from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import clients_with_altered_updates, clients_with_trained_updates
from fedvitals.diagnosis.evidence.vital_signs import SIGNS, VitalSigns, vital_signs_of
from fedvitals.diagnosis.evidence.wrong_labels import wrong_label_odds
from fedvitals.protocols import History, Node
from fedvitals.stats import Array

# Log-odds added to each round's evidence, which bounds what a single healthy-looking round can subtract.
DRIFT = {"telemetry": 1.5, "server": 1.5, "flip": 3.0}
LEAST, MOST = -3.0, 4.0  # bounds on what one round can add
CAP = 20.0  # so that a repaired client is cleared again before long
# Shares of the allowed alarms; they overlap, and the rest is left to all other rules together.
SHARES = {"telemetry": 0.35, "server": 0.2, "flip": 0.1}
SMALL, PARTIAL = 12, 0.7  # clients in a cohort; share of the known clients taking part in a round
CONVERGED = 0.1  # of the run's largest update norm, for the median client
POINTS_BACK = 0.2  # cosine to an earlier model, above which an update may have been added to one
EXPLAINED_FOR = 5  # rounds
REMEMBERED = 6  # participations from which the kind of the fault is inferred
_NEVER = np.iinfo(np.int64).min
EVEN, CORROBORATED = 0.5, 0.9  # probabilities: above the first misclassified samples count, up to the second
FAR_BELOW = 2.0  # standard deviations of the number of correct samples
CLEARED = 2.0  # times the limit, for the server's evidence against a client that is otherwise normal
UNTENABLE, PLAIN = 0.1, 0.8  # chances of the named kind, and of another, at which the name is changed


class EvidenceSums:
    """One view's sums of evidence, by client. `clients`: the table that its columns belong to."""

    def __init__(self, clients: ClientTable, kinds: int) -> None:
        self._clients = clients
        self._totals = clients.column()
        self._began = clients.column(dtype=np.int64, fill=_NEVER)  # round since which the total has been above 0
        # Log-probabilities of the kinds in the newest participations, and the number of these.
        self._kinds, self._known = clients.column((REMEMBERED, kinds)), clients.column(dtype=np.int64)
        self._accused = clients.column(dtype=np.bool_)
        self.withdrawn = 0  # accusations that later rounds did not confirm

    def add(self, rows: Rows, round_index: int, evidence: Array, kind_logs: Array, limit: float) -> None:
        """Add one participation's evidence for each client (a row of the table).

        Accuses the client or withdraws the accusation.
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
        withdrawn = accused & ~over & (totals < limit / 2)  # well below the limit, so that a case does not flicker
        self.withdrawn += int(withdrawn.sum())
        self._accused.values[rows] = (accused | over) & ~withdrawn

    def knows_kind(self, node: Node) -> bool:
        """Return whether there is evidence from which the kind of a client's fault can be inferred."""
        return len(self.kind_logs(node)) > 0 and self.total(node) > 0

    def totals_among(self, rows: Rows) -> Array:
        """Return the sums of evidence of these clients."""
        return np.asarray(self._totals.values[rows])

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
        """Return the round since which a client's sum has been above 0; None if it is not."""
        row = self._clients.row_of(node)
        return None if row is None or self._began.values[row] == _NEVER else int(self._began.values[row])

    def kind_logs(self, node: Node) -> Array:
        """Return the log-probabilities of the kinds in a client's newest participations, [participations, kinds]."""
        row = self._clients.row_of(node)
        return np.asarray(
            self._kinds.values[:0, 0] if row is None else self._kinds.values[row, : self._known.values[row]]
        )


class EvidenceTrend:
    """The evidence of a run up to a round; `add_round` adds the next one.

    `allowed`: alarms per 100 healthy rounds, over all rules together. `most`: the number of clients remembered.
    """

    def __init__(self, model: EvidenceModel, allowed: float, most: int = MOST_CLIENTS) -> None:
        self.model, self.allowed = model, allowed
        self._clients = ClientTable(most)
        self.scorer = Scorer(self._clients)
        self.views = {name: EvidenceSums(self._clients, len(model.views[name].kinds)) for name in VIEWS}
        # Counts since there has been evidence against a client: samples that the received model classified correctly,
        # the usual number, and all of them; and the first two from before.
        self._classified, self._classified_before = self._clients.column((3,)), self._clients.column((2,))
        self._classifying: set[Node] = set()  # up to two clients seen to have a label per sample
        self._has_classes = False  # whether clients are known to have classes rather than regression targets
        self._chance = 0.0  # accuracy of a blind guess; 0 if the classes are unknown
        self.round: int | None = None
        self.rounds = 0
        self.vital_signs: VitalSigns | None = None
        self.scores: Scores | None = None  # of the last round; None if there were too few clients to compare
        self.accuracy = float("nan")  # of the received model, median over the clients, when last known
        self.limits: dict[str, float] = {}
        self.altered_since: dict[Node, int] = {}  # clients that sent something other than they trained, and since when
        self.kind_chances: dict[Node, dict[str, float]] = {}  # of each kind, for all accused clients
        self.suspected_kinds: dict[Node, str] = {}  # the kind that each of these is accused of
        self.abstains = False  # whether the last round's updates were transformed, so that no client is judged by them
        self._ruled_out: dict[Node, frozenset[str]] = {}  # kinds that an exact test of the last round excludes
        self._explained: dict[Node, int] = {}  # round in which an exact finding last explained a client's signs
        self._excluded: dict[Node, frozenset[str]] = {}  # kinds ruled out by a client's data and settings of the round
        self._with_rare_labels: frozenset[Node] = frozenset()
        self.exchanging = False  # whether clients pass models on, so that a fault makes neighbours look faulty
        self.largest = 0.0  # the largest median norm of the clients' updates in any round

    @property
    def clients(self) -> Collection[Node]:
        """The clients that are remembered."""
        return self._clients

    def add_round(self, history: History, round_index: int) -> None:
        """Add the next round."""
        vital_signs = vital_signs_of(history, round_index)
        self.round, self.rounds = round_index, self.rounds + 1
        rows = self._rows_of(vital_signs.nodes)
        self._explained |= dict.fromkeys(_explained(history, round_index), round_index)
        self.abstains = transformation(history, round_index) is not None
        self.vital_signs, self.scores = vital_signs, None if self.abstains else self.scorer(vital_signs)
        accuracy = vital_signs.values[:, SIGNS.index("accuracy_before")]
        if np.isfinite(accuracy).any():
            self.accuracy = float(np.nanmedian(accuracy))
        if self.abstains:
            self.altered_since, self.suspected_kinds, self.kind_chances = {}, {}, {}
        if self.scores is None:
            return
        altered = clients_with_altered_updates(history, round_index) - harmless_alterations(history, round_index)
        unaltered = clients_with_trained_updates(history, round_index)
        for node in vital_signs.nodes if altered or self.altered_since else ():
            if node in altered:
                self.altered_since.setdefault(node, round_index)
            else:
                self.altered_since.pop(node, None)
        # Clients whose sums were compared without being a multiple: neither negated nor scaled; and not near an earlier
        # model.
        differing, factors = (history.latest(f"update.{name}", round_index) for name in ("differs", "factor"))
        back = peer_statistic(history, round_index, "back") if differing else {}
        self._ruled_out = {
            node: MULTIPLES | ({"stale_update"} if back.get(node, 1.0) < POINTS_BACK else set())
            for node in differing
            if node not in factors
        }
        self._excluded = _excluded_kinds(history, round_index)
        self._with_rare_labels = clients_with_rare_labels(history, round_index)
        exchanged = self.exchanging = groups_exchange_models(groups_of(history, round_index))
        cohort = cohort_kind(len(vital_signs.nodes), len(self._clients), exchanged=exchanged)
        if not self._converged(history, round_index):
            few = clients_with_few_samples(history, round_index)
            # Where all differ by their classes, evidence only says what was done to an update known to be altered.
            apart = trains_different_classes(history, round_index)
            judged = [node in self.altered_since if apart else node not in few for node in vital_signs.nodes]
            comparable = np.array(judged, np.bool_)
            self._add_evidence(round_index, rows, self.scores, vital_signs, cohort, comparable)
        self._count_classified(history, round_index, rows, vital_signs)
        self._update_suspected_kinds(vital_signs.nodes, rows, unaltered)

    def _rows_of(self, nodes: Sequence[Node]) -> Rows:
        """Return the rows of a round's clients, after dropping clients that were replaced by new ones."""
        rows = self._clients.rows_of(nodes)
        for node in self._clients.forgotten:
            for by_client in (self.altered_since, self.suspected_kinds, self.kind_chances, self._explained):
                by_client.pop(node, None)
        return rows

    def is_explained(self, node: Node) -> bool:
        """Return whether an exact finding of the last rounds explains what is unusual about a client.

        Such a finding is about its data, its learning rate or an exact relation of its update; no other one names it.
        """
        return self.round is not None and self.round - self._explained.get(node, _NEVER) <= EXPLAINED_FOR

    def accusing_views(self, node: Node) -> list[str]:
        """Return the views in which a client is accused."""
        return [name for name, view in self.views.items() if view.is_accused(node)]

    def totals(self, node: Node) -> dict[str, float]:
        """Return a client's sum of evidence in each view."""
        return {name: view.total(node) for name, view in self.views.items()}

    def _converged(self, history: History, round_index: int) -> bool:
        """Return whether updates have shrunk so far that a few hard samples determine what is left of them.

        Healthy clients then differ as much as faulty ones do earlier, and the evidence was not learnt on such rounds,
        so it is left unchanged.
        """
        norms = [norm for norm in history.latest("update.norm", round_index).values() if np.isfinite(norm)]
        median = float(np.median(norms)) if norms else 0.0
        self.largest = max(self.largest, median)
        return 0 < median < CONVERGED * self.largest  # a model of NaN has no finite update

    def _add_evidence(
        self,
        round_index: int,
        rows: Rows,
        scores: Scores,
        vital_signs: VitalSigns,
        cohort: str,
        comparable: npt.NDArray[np.bool_],
    ) -> None:
        prepared: dict[tuple[bool, int], tuple[Array, Array]] = {}  # two of the views share their features
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
            # Higher if this run has shown more false alarms than are allowed.
            excess = max(0.0, view.withdrawn - max(1.0, 2 * allowed * self.rounds / 100))
            limit = self.limits[name] = learnt.limit(cohort, allowed) + excess
            # A round without a measured fit is no sign of a client's health, so such views wait for the next one.
            counted = comparable if name == "server" else comparable & ~scores.unmeasured
            view.add(rows[counted], round_index, gained[counted], likely[counted], limit)

    def _count_classified(self, history: History, round_index: int, rows: Rows, vital_signs: VitalSigns) -> None:
        labels = label_counts(history, round_index)
        classes = labels.classes
        self._chance = 1 / classes if classes > 1 else 0.0
        # Where no data are given, the training itself tells: only one with a label per sample has this.
        if len(self._classifying) < 2:
            classified = vital_signs.values[:, SIGNS.index("accuracy_before")]
            measured = [node for node, own in zip(vital_signs.nodes, classified, strict=True) if math.isfinite(own)]
            self._classifying.update([*{*history.latest("train.accuracy", round_index), *measured}][:2])
        several = 1 if len(vital_signs.nodes) == 1 else 2  # what one of several clients claims is not so for all
        known = len(self._classifying) >= several
        self._has_classes = len(labels.histograms) >= several or (known and not predicts_texts(history, round_index))
        sizes = history.latest("fit.samples", round_index)
        samples = np.array([sizes.get(node, 0.0) for node in vital_signs.nodes])
        right = samples * vital_signs.values[:, SIGNS.index("accuracy_before")]
        counts = np.stack([right, samples * self.accuracy, samples], axis=1)
        counts = np.where(np.isfinite(counts).all(axis=1)[:, None], counts, 0.0)
        suspicious = np.logical_or.reduce([view.totals_among(rows) > 0 for view in self.views.values()])[:, None]
        self._classified.values[rows] = np.where(suspicious, self._classified.values[rows] + counts, 0.0)
        self._classified_before.values[rows] += np.where(suspicious, 0.0, counts[:, :2])

    def probability(self, node: Node) -> float:
        """Return the probability that a client is faulty, by its evidence.

        Its reported samples can raise it if the model gets fewer than half as many of them right as of its peers', and
        did not before.
        """
        row = self._clients.row_of(node)
        probability = self.model.probability(self.totals(node), exchanging=self.exchanging)
        if row is None or probability < EVEN:
            return probability
        right, expected, _ = self._classified.values[row]
        before, expected_before = self._classified_before.values[row]
        rarely_right = expected / 2 - right > FAR_BELOW * (expected / 2) ** 0.5
        rarely_before = expected_before - before > FAR_BELOW * max(expected_before, 1.0) ** 0.5
        return max(probability, CORROBORATED) if rarely_right and not rarely_before else probability

    def _update_suspected_kinds(self, nodes: Sequence[Node], rows: Rows, unaltered: Collection[Node]) -> None:
        """Set or clear the kinds of fault that a round's clients are accused of."""
        accused = np.logical_or.reduce([view.accused_among(rows) for view in self.views.values()])
        for node, stands_accused in zip(nodes, accused.tolist(), strict=True):
            if stands_accused or node in self.altered_since:
                self._update_suspected_kind(node, honest=node in unaltered)
            else:
                self._clear_suspicion(node)

    def _clear_suspicion(self, node: Node) -> None:
        self.suspected_kinds.pop(node, None)
        self.kind_chances.pop(node, None)

    def _update_suspected_kind(self, node: Node, *, honest: bool) -> None:
        """Set the kind of fault that a client is accused of. A kind stays unless it has become clearly untenable."""
        fired = self.accusing_views(node)
        believed = node in self.altered_since or (honest and self.views["telemetry"].knows_kind(node))
        view = "telemetry" if believed else max(fired, key=lambda name: self.views[name].total(node))
        kinds = self.model.views[view].kinds
        possible = self._possible_kinds(node, fired, kinds, honest=honest)
        if not any(possible):  # it differs from its peers, but no known fault is possible
            self._clear_suspicion(node)
            return
        logs = self.views[view].kind_logs(node)
        if view == "telemetry" and (honest or not len(logs)) and self.model.views["server"].kinds == kinds:
            # Telemetry of a client that sent what it trained supplements what the server sees, without replacing it. Of
            # other clients, the fit may not have been measured yet.
            logs = np.concatenate([logs, self.views["server"].kind_logs(node)])
        chances = self.kind_chances[node] = fault_kind_chances(logs, kinds, possible)
        if "label_noise" in chances and honest:
            row = self._clients.row_of(node)
            right, _, total = self._classified.values[row] if row is not None else (0.0, 0.0, 0.0)
            odds = wrong_label_odds(right, total, self.accuracy, self._chance)
            chances["label_noise"] *= odds
            whole = sum(chances.values())
            chances |= {kind: chance / whole for kind, chance in chances.items()}
        likeliest, before = max(chances, key=lambda kind: chances[kind]), self.suspected_kinds.get(node)
        if likeliest in DATA_FAULTS and not self._has_classes:
            # A client with harder regression targets looks like one with wrong data.
            self._clear_suspicion(node)
            return
        stands = chances.get(before, 0.0) if before is not None else 0.0
        if stands == 0 or (stands < UNTENABLE and chances[likeliest] > PLAIN):
            self.suspected_kinds[node] = likeliest

    def _possible_kinds(self, node: Node, fired: Sequence[str], kinds: Sequence[str], *, honest: bool) -> list[bool]:
        """Return which kinds of fault are possible for a client, given its update, data and settings.

        A client that reports having sent what it trained, with the data and the learning rate of its peers, can only be
        lying. The server's own evidence decides, but must be twice as strong as usual.
        """
        if node in self.altered_since:
            return [kind in AFTER_TRAINING - self._ruled_out.get(node, frozenset()) for kind in kinds]
        excluded = self._excluded.get(node, frozenset())
        if "server" not in fired and node in self._with_rare_labels:
            excluded |= DATA_FAULTS
        before = [kind not in AFTER_TRAINING | excluded for kind in kinds]
        needed = min(CLEARED * self.limits["server"], CAP)  # no sum is larger
        if honest and not any(before) and self.views["server"].total(node) < needed:
            return before
        if honest and fired != ["server"] and (any(before) or "server" not in fired):
            # It sent what it trained, so the fault is in the training. (The server's view does not rely on telemetry.)
            return before
        return [kind not in excluded for kind in kinds]


def _explained(history: History, round_index: int) -> set[Node]:
    """Return the clients of a round that are named by an exact finding."""
    relations = exact_relations(history, round_index)
    altered = {node for node, relation in relations.items() if relation.kind not in HARMLESS}
    examined = examine_data(history, round_index)
    return {*altered, *own_learning_rates(history, round_index), *examined.suspects, *examined.group}


def _excluded_kinds(history: History, round_index: int) -> dict[Node, frozenset[str]]:
    """Return the kinds of fault that clients cannot have.

    Their data are like their peers', or their learning rate is the common one.
    """
    own = own_learning_rates(history, round_index)
    excluded = {node: {"wrong_learning_rate"} for node in history.latest(LEARNING_RATE, round_index) if node not in own}
    examined = examine_data(history, round_index)
    for nodes, kinds in ((examined.usual, DATA_FAULTS), (examined.usual_inputs, INPUT_FAULTS)):
        for node in nodes:
            excluded.setdefault(node, set()).update(kinds)
    return {node: frozenset(kinds) for node, kinds in excluded.items()}


def fault_kind_chances(
    logs: Sequence[Array] | Array, kinds: Sequence[str], possible: Sequence[bool]
) -> dict[str, float]:
    """Return the probability of each kind from its log-probabilities in several participations.

    It is 0 for kinds that are not possible.
    """
    total = np.where(possible, np.sum(logs, axis=0), -np.inf)
    shares = np.exp(total - total.max())
    return {kind: float(share) for kind, share in zip(kinds, shares / shares.sum(), strict=True)}


def groups_exchange_models(groups: Mapping[Node, str]) -> bool:
    """Return whether clients pass models to each other within their groups: edges and rings do, clusters do not."""
    return any(not group.startswith("cluster") for group in groups.values())


def cohort_kind(present: int, known: int, *, exchanged: bool = False) -> str:
    """Return which limits apply, since kinds of cohorts raise false alarms at very different rates."""
    if exchanged:
        return "exchanging"
    if present < PARTIAL * known:
        return "partial"
    return "small" if present <= SMALL else "large"
