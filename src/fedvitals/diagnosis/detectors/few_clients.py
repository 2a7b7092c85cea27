# SPDX-License-Identifier: Apache-2.0
"""Detectors for rounds with too few clients to compare them with each other: two or three are a usual federation.

There the learnt evidence says nothing. What a client trained is still compared with what it sent, and its signs with
its own past (`changed_clients`).
"""

from __future__ import annotations

from collections.abc import Iterator

from fedvitals.diagnosis.detectors.copies import duplicates, free_riders
from fedvitals.diagnosis.evidence.attendance import clients_of, rounds_until
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.scores import too_few_peers
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import clients_with_altered_updates, update_mismatches
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

CONFIDENCE = 0.99  # of an equality that does not hold: telemetry itself may be broken


def altered_updates(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE, in rounds of few clients: one client did not send what it trained, and no exact relation fits."""
    if not too_few_peers(history, round_index) or transformation(history, round_index) is not None:
        return
    for node in clients_with_altered_updates(history, round_index) - _explained(history, round_index):
        since = _altered_since(history, round_index, node)
        distance = update_mismatches(history, round_index)[node]
        yield finding(
            "BYZANTINE",
            round_index,
            f"{node} does not send what it trained{f', since round {since}' if since < round_index else ''}.",
            confidence=CONFIDENCE,
            since=since,
            node=node,
            severity="warning",
            numbers=[Number("sent against trained", distance, 0.0, of="limit")],
            suspects=[Suspect(node, CONFIDENCE, "an update that it did not train")],
            more={"views": ["exact"], "verdict": "faulty"},
        )


def _explained(history: History, round_index: int) -> set[Node]:
    """Return the clients of which other exact rules speak."""
    copies = [f.where.node for rule in (duplicates, free_riders) for f in rule(history, round_index)]
    return {*exact_relations(history, round_index), *(node for node in copies if node is not None)}


def _altered_since(history: History, round_index: int, node: Node) -> int:
    since = round_index
    for past_round in reversed(rounds_until(history, round_index - 1)):
        if node in clients_with_altered_updates(history, past_round):
            since = past_round
        elif node in clients_of(history, past_round):
            break
    return since


DETECTORS: tuple[Detector, ...] = (altered_updates,)
