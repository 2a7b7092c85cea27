# SPDX-License-Identifier: Apache-2.0
"""Detector of a client whose optimiser is set to another learning rate than the others' (`evidence.learning_rates`)."""

from __future__ import annotations

from collections.abc import Iterator

from fedvitals.diagnosis.evidence.attendance import rounds_until
from fedvitals.diagnosis.evidence.fault_kinds import WORDS
from fedvitals.diagnosis.evidence.learning_rates import METRIC, own_learning_rates
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

CONFIDENCE = 0.97  # that it is not intended


def wrong_learning_rate(history: History, round_index: int) -> Iterator[Finding]:
    """WRONG_LEARNING_RATE: the optimiser of a client is set to another rate than the others share."""
    for node, own in own_learning_rates(history, round_index).items():
        others = "it began with" if own.before else "the others use"
        since = _since(history, round_index, node)
        yield finding(
            "WRONG_LEARNING_RATE",
            round_index,
            f"{node} trains with a learning rate of {own.rate:.3g}; {others} {own.common:.3g}.",
            confidence=CONFIDENCE,
            since=since,
            node=node,
            severity="warning",
            numbers=[Number(METRIC, own.rate, own.common, of="own past" if own.before else "peers")],
            suspects=[Suspect(node, CONFIDENCE, WORDS["wrong_learning_rate"])],
            more={"verdict": "faulty", "causes": [["wrong_learning_rate", 1.0]], "views": ["exact"]},
        )


def _since(history: History, round_index: int, node: Node) -> int:
    """Return the first of the consecutive participations in which the client had a rate of its own."""
    since = round_index
    for past_round in reversed(rounds_until(history, round_index - 1)):
        if node in own_learning_rates(history, past_round):
            since = past_round
        elif node in history.latest(METRIC, past_round):
            break
    return since


DETECTORS: tuple[Detector, ...] = (wrong_learning_rate,)
