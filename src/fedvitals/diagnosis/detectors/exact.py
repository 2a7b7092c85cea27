# SPDX-License-Identifier: Apache-2.0
"""Detectors of updates that provably differ from what their client trained (`evidence.exact_relations`).

They run before the learnt evidence, which then reports nothing more about these clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedvitals.diagnosis.evidence.attendance import clients_of, median_of_others, rounds_until
from fedvitals.diagnosis.evidence.damage import deciding_client
from fedvitals.diagnosis.evidence.equal_updates import peer_statistic
from fedvitals.diagnosis.evidence.exact_relations import SAME_FACTOR, ExactRelation, Kind, exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import WORDS
from fedvitals.diagnosis.evidence.update_mismatch import update_mismatches
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

CONFIDENCE = 0.99  # for a violated equality: telemetry itself may be broken
UNREPORTED = 0.9  # if an opposed update may have been trained, on inverted labels of two classes
TRAINED_SO = " It does not report what it trained: inverted labels of two classes look the same."
_ISSUE: dict[Kind, tuple[str, str, str | None]] = {  # issue, severity, and the fault of `fault_kinds`
    "negated": ("BYZANTINE", "warning", "sign_flip"),
    "scaled": ("BYZANTINE", "warning", "scaling"),
    "shrunk": ("BYZANTINE", "warning", "scaling"),
    "clipped": ("TRANSFORMED_UPDATES", "note", None),
    "sparsified": ("TRANSFORMED_UPDATES", "note", None),
    "stale": ("STALE_UPDATE", "warning", "stale_update"),
    "repeated": ("STALE_UPDATE", "warning", "stale_update"),
    "colluding": ("BYZANTINE", "warning", None),
    "opposed": ("BYZANTINE", "warning", None),
}


def untrained_updates(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE or STALE_UPDATE for an update that is an exact function of what was trained, or of nobody's training.

    A note for a client that alone clips or sparsifies.
    """
    deciding = deciding_client(history, round_index)
    for node, relation in exact_relations(history, round_index).items():
        issue, severity, fault = _ISSUE[relation.kind]
        since = _since(history, round_index, node, relation.kind)
        evidence: dict[str, Any] = {"views": ["exact"], "relation": relation.kind}
        suspects = []
        unreported = relation.kind == "opposed" and node not in update_mismatches(history, round_index)
        confidence = UNREPORTED if unreported else CONFIDENCE
        reason = "the others' updates turned round" if unreported else "an update that none of them trained"
        if severity != "note":
            evidence |= {"verdict": "faulty", "causes": [[fault, 1.0]] if fault else []}
            suspects = [Suspect(node, confidence, WORDS[fault] if fault else reason)]
        yield finding(
            issue,
            round_index,
            f"{_sentence(node, relation)}{f', since round {since}' if since < round_index else ''}."
            f"{TRAINED_SO if unreported else ''}",
            confidence=confidence,
            since=since,
            node=node,
            severity="critical" if severity != "note" and node == deciding else severity,
            numbers=_numbers(history, round_index, node, relation),
            suspects=suspects,
            more=evidence,
        )


def _sentence(node: Node, relation: ExactRelation) -> str:
    rounds = "the round before" if relation.rounds == 1 else f"{relation.rounds} rounds ago"
    turned = "" if abs(relation.factor + 1) < SAME_FACTOR else f", {-relation.factor:.3g} times as long"
    scaled = f"{node} sends what it trained scaled by {relation.factor:.3g}"
    same = "nearly the same" if relation.nearly else "the same"
    sentences: dict[Kind, str] = {
        "negated": f"{node} sends what it trained with its sign flipped{turned}",
        "scaled": scaled,
        "shrunk": scaled,
        "clipped": f"{scaled}, as clipping does",
        "sparsified": f"{node} sends what it trained with most values set to 0, as sparsification does",
        "stale": f"{node} adds what it trained to the model of {rounds}",
        "repeated": f"{node} sends its update of {rounds} again",
        "colluding": f"{node} and {', '.join(relation.others)} send {same} update, which none of them trained",
        "opposed": f"{node} sends what all others send together, turned round",
    }
    return sentences[relation.kind]


def _numbers(history: History, round_index: int, node: Node, relation: ExactRelation) -> list[Number]:
    norms, drift = history.latest("update.norm", round_index), history.latest("weight.drift", round_index)
    numbers = [Number("update.norm", norms.get(node, float("nan")), median_of_others(norms, [node]))]
    if relation.factor != 1.0:
        numbers.insert(0, Number("update.factor", relation.factor, 1.0, of="limit"))
    if relation.kind == "stale":
        numbers.insert(0, Number("update.base_age", relation.rounds, 0.0, of="limit"))
    if relation.kind == "opposed":
        cosines = peer_statistic(history, round_index, "cosine")
        numbers.insert(0, Number("update.peers.cosine", cosines[node], median_of_others(cosines, [node])))
    if relation.kind == "colluding":
        twins = history.latest("update.duplicates", round_index).get(node)
        numbers += [Number("update.duplicates", twins, 0.0, of="limit")] if twins is not None else []
    if node in drift:
        numbers.append(Number("weight.drift", drift[node], median_of_others(drift, [node])))
    return numbers


def _since(history: History, round_index: int, node: Node, kind: Kind) -> int:
    """Return the first of the consecutive participations in which the relation held."""
    since = round_index
    for past_round in reversed(rounds_until(history, round_index - 1)):
        relation = exact_relations(history, past_round).get(node)
        if relation is not None and relation.kind == kind:
            since = past_round
        elif node in clients_of(history, past_round):
            break
    return since


DETECTORS: tuple[Detector, ...] = (untrained_updates,)
