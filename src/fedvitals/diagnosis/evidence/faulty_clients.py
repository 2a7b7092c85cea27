# SPDX-License-Identifier: Apache-2.0
"""Find the faulty clients, without test data and without knowing how many there are.

An exact test comes first: whether a client sent what it trained. Then evidence is summed over the rounds (`trend`) in
three views: one trusts what clients report about their training; one uses only what they sent, so that a client gains
nothing by falsifying its telemetry; and one looks for a single flipped class, which the others miss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedvitals.diagnosis.abstentions import unjudged_clients
from fedvitals.diagnosis.detectors.copies import duplicates, free_riders
from fedvitals.diagnosis.evidence.adapter_ranks import clients_of_other_rank
from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.damage import deciding_client
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF, WORDS
from fedvitals.diagnosis.evidence.log_odds import EvidenceModel, shipped_model
from fedvitals.diagnosis.evidence.trend import CAP, EvidenceTrend
from fedvitals.diagnosis.evidence.update_mismatch import update_mismatches
from fedvitals.diagnosis.evidence.vital_signs import SIGNS, TELEMETRY
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

WHOLE = 3  # smallest group that is accused as a whole
SURE, LIKELY = 0.9, 0.6  # probabilities of a critical finding (if the model is lost), and of any
LIKELY_EXCHANGING = 0.8  # the latter in rings and under edges, where neighbours look alike
CERTAIN = 0.99  # for a violated equality: telemetry itself may be broken
LEARNT = 0.35  # accuracy of the received model below which wrong labels cannot be seen
UNLIKE = 4.0  # score of a client that counts as different, whether or not that is a fault


class FaultyClientLocator:
    """The detector of faulty clients. `false_alarms`: the number allowed per 100 healthy rounds, over all rules
    together.
    """

    __name__ = "locate"

    def __init__(self, false_alarms: float = 1.0, model: EvidenceModel | None = None) -> None:
        self._allowed = false_alarms
        self._model = model
        # Evidence of the earlier rounds, by history, so that a long run is not read again in every round.
        self._trends: weakref.WeakKeyDictionary[History, EvidenceTrend] = weakref.WeakKeyDictionary()

    def __call__(self, history: History, round_index: int) -> Iterator[Finding]:
        trend = self.trend_up_to(history, round_index)
        if trend.round != round_index or trend.scores is None:
            return
        elsewhere = {
            *(findings.where.node for rule in (duplicates, free_riders) for findings in rule(history, round_index)),
            *exact_relations(history, round_index),
            *(node for node in trend.scores.nodes if node not in trend.altered_since and trend.is_explained(node)),
            *(node for node in clients_of_other_rank(history, round_index) if _is_by_updates_alone(trend, node)),
        }
        mismatches = update_mismatches(history, round_index)
        deciding = deciding_client(history, round_index)
        findings = []
        for index, node in enumerate(trend.scores.nodes):
            if node in trend.suspected_kinds and node not in elsewhere:
                exact = node in trend.altered_since
                accusation = (
                    _altered_update_finding(trend, index, mismatches[node])
                    if exact
                    else _evidence_finding(trend, index)
                )
                lost = node == deciding and accusation.confidence > SURE
                findings.append(replace(accusation, severity="critical") if lost else accusation)
        accusations = merge_by_group(findings, trend.scores.nodes, groups_of(history, round_index))
        yield from (accusation for accusation in accusations if accusation.confidence >= likely_limit(trend))

    def trend_up_to(self, history: History, round_index: int) -> EvidenceTrend:
        """Return the evidence up to this round.

        Continues from the last call, or reads the run from its beginning.
        """
        trend = self._trends.get(history)
        if trend is None or trend.round is None or trend.round > round_index:
            trend = self._trends[history] = EvidenceTrend(self._model or shipped_model(), self._allowed)
        for past_round in history.rounds():
            if past_round <= round_index and (trend.round is None or past_round > trend.round):
                trend.add_round(history, past_round)
        return trend


def _is_by_updates_alone(trend: EvidenceTrend, node: Node) -> bool:
    """Return whether only a client's update speaks against it, and neither its training nor an equality does."""
    return node not in trend.altered_since and not {*trend.accusing_views(node)} - {"server"}


def _altered_update_finding(trend: EvidenceTrend, index: int, distance: float) -> Finding:
    """Return the finding about a client that did not send what it trained, without a known exact relation.

    This much is certain, but honest clients do it too: they send their best checkpoint, or add noise for privacy.
    """
    node = trend.scores.nodes[index] if trend.scores is not None else ""
    since = trend.altered_since[node]
    text = (
        f"{node} does not send what it trained, since round {since}: most likely {WORDS[trend.suspected_kinds[node]]}."
    )
    numbers = [
        Number("sent against trained", distance, 0.0, of="limit"),
        *_outlying_signs(trend, index, telemetry=False)[:3],
    ]
    return _client_finding(trend, node, text, CERTAIN, since, numbers, {"views": ["exact"]})


def _evidence_finding(trend: EvidenceTrend, index: int) -> Finding:
    """Return the finding about a client against which there is enough evidence."""
    node = trend.scores.nodes[index] if trend.scores is not None else ""
    fired = trend.accusing_views(node)
    beginnings = [trend.views[name].began(node) for name in fired]
    since = min(beginning for beginning in beginnings if beginning is not None)
    kind, probability = WORDS[trend.suspected_kinds[node]], trend.probability(node)
    sure = "something is wrong" if probability >= SURE else "if something is wrong"
    text = (
        f"{node} is unlike its peers since round {since}: {sure}, most likely {kind}. The cause is less certain than "
        "that there is one."
    )
    evidence = {
        "views": fired,
        "evidence": {name: round(trend.views[name].total(node), 2) for name in fired},
        "limit": {name: round(trend.limits[name], 2) for name in fired},
    }
    numbers = _outlying_signs(trend, index, telemetry=fired != ["server"])
    return _client_finding(trend, node, text, probability, since, numbers, evidence)


def _client_finding(
    trend: EvidenceTrend,
    node: Node,
    text: str,
    probability: float,
    since: int,
    numbers: Sequence[Number],
    extra_evidence: Mapping[str, Any],
) -> Finding:
    kind, chances = trend.suspected_kinds[node], trend.kind_chances[node]
    order = sorted(chances, key=lambda name: (name != kind, -chances[name]))[:4]
    return finding(
        ISSUE_OF[kind],
        trend.round or 0,
        text,
        confidence=probability,
        since=since,
        node=node,
        severity="warning",
        numbers=numbers,
        suspects=[Suspect(node, probability, WORDS[kind])],
        more={"verdict": "faulty", "causes": [[name, round(chances[name], 3)] for name in order], **extra_evidence},
    )


def likely_limit(trend: EvidenceTrend) -> float:
    """Return the probability from which evidence accuses a client: below it, nothing is said, shown or corrected."""
    return LIKELY_EXCHANGING if trend.exchanging else LIKELY


def merge_by_group(
    findings: Sequence[Finding], present: Sequence[Node], groups: Mapping[Node, str]
) -> Iterator[Finding]:
    """Yield the findings, but only one for a group (edge, cluster or ring) of which nearly all members are accused.

    In a ring one faulty member makes the others look faulty, and an edge may be faulty as a whole. If more than half of
    the groups would be accused, findings stay with the members.
    """
    members: dict[str, list[Node]] = {}
    for node in present:
        if node in groups:
            members.setdefault(groups[node], []).append(node)
    accused = {accusation.where.node: accusation for accusation in findings}
    ill = [
        group
        for group, nodes in members.items()
        if len(nodes) >= WHOLE and sum(node in accused for node in nodes) >= len(nodes) - 1
    ]
    ill = ill if 2 * len(ill) <= len(members) else []
    for accusation in findings:
        if groups.get(accusation.where.node or "") not in ill:
            yield accusation
    for group in ill:
        own = [accused[node] for node in members[group] if node in accused]
        worst = max(own, key=lambda accusation: accusation.confidence)
        names = ", ".join(accusation.where.node or "" for accusation in own)
        text = f"Nearly all of {group} are unlike the others: {names}."
        suspects = sorted((s for accusation in own for s in accusation.suspects), key=lambda s: -s.score)
        yield replace(
            worst,
            where=replace(worst.where, node=None, group=group),
            message=f"{text} {worst.message}",
            suspects=tuple(suspects),
        )


def _outlying_signs(trend: EvidenceTrend, index: int, *, telemetry: bool) -> list[Number]:
    """Return the most outlying signs over the last participations, each with the usual value among the peers."""
    assert trend.scores is not None  # noqa: S101 - there is a finding, so there are scores
    assert trend.vital_signs is not None  # noqa: S101
    lasting, values = trend.scores.lasting[index], trend.vital_signs.values
    known = np.isfinite(values[index])
    order = [i for i in np.argsort(-np.abs(lasting)) if known[i] and (telemetry or SIGNS[i] not in TELEMETRY)]
    return [
        Number(SIGNS[i], float(values[index, i]), float(np.nanmedian(values[:, i])), float(lasting[i]))
        for i in order[:4]
    ]


# -- statements about every client ------------------------------------------------------------------------------------

LOCATOR = FaultyClientLocator()
DETECTORS: tuple[Detector, ...] = (LOCATOR,)


def evidence_totals(history: History, round_index: int) -> dict[Node, float]:
    """Return every client's sum of evidence, the largest over all views, which ranks the clients to look at first."""
    trend = LOCATOR.trend_up_to(history, round_index)
    return {node: max(trend.totals(node).values()) + CAP * (node in trend.altered_since) for node in trend.clients}


def fault_probabilities(history: History, round_index: int) -> dict[Node, float]:
    """Return every client's probability of being faulty, as it would be reported now."""
    trend = LOCATOR.trend_up_to(history, round_index)
    stated = {node: trend.probability(node) for node in trend.clients}
    return stated | dict.fromkeys(trend.altered_since, CERTAIN)


def verdicts(history: History, round_index: int) -> dict[Node, str]:
    """Return «healthy», «different», «not yet decidable», «not judged» or «faulty» for every client seen so far.

    Wrong labels only show against a model that has learnt something, so before that no client is called healthy.
    Whether it has is judged by the clients' own samples, or else by the accuracy that the host logged before this
    round. Clients that could not be judged in this round (see `abstentions`) are not called healthy either.
    """
    trend = LOCATOR.trend_up_to(history, round_index)
    accuracies = [
        value for past_round, value in zip(*history.series("accuracy", None), strict=True) if past_round < round_index
    ]
    learnt = trend.accuracy >= LEARNT or (bool(accuracies) and accuracies[-1] >= LEARNT)
    stated = dict.fromkeys(trend.clients, "healthy" if learnt else "not yet decidable")
    unjudged = unjudged_clients(history, round_index)
    stated |= dict.fromkeys(trend.clients if trend.abstains else stated.keys() & unjudged, "not judged")
    if trend.scores is not None and learnt:
        unlike = np.abs(trend.scores.lasting).max(axis=1)
        stated |= {node: "different" for node, most in zip(trend.scores.nodes, unlike, strict=True) if most > UNLIKE}
    likely = [node for node in trend.suspected_kinds if trend.probability(node) >= likely_limit(trend)]
    return (
        stated
        | dict.fromkeys(trend.suspected_kinds, "different")
        | dict.fromkeys((*likely, *trend.altered_since), "faulty")
    )
