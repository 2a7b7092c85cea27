# SPDX-License-Identifier: Apache-2.0
"""Detectors of clients that changed relative to their own past, without learnt evidence (`evidence.own_past`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fedvitals.diagnosis.evidence.attendance import rounds_until
from fedvitals.diagnosis.evidence.described_data import data_sketches
from fedvitals.diagnosis.evidence.exact_relations import HARMLESS, exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import WORDS
from fedvitals.diagnosis.evidence.faulty_clients import LOCATOR, likely_limit
from fedvitals.diagnosis.evidence.label_counts import predicts_texts
from fedvitals.diagnosis.evidence.own_past import LOSS, LOSS_AFTER, OWN_PASTS, PROPORTION, SIZE, ClientChange
from fedvitals.diagnosis.evidence.update_mismatch import clients_with_altered_updates
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

AFTERMATH = 5  # rounds for which a model suffers from an altered update
SURE = 0.9  # that a lasting change not shared by the peers is a fault


def changed_losses(history: History, round_index: int) -> Iterator[Finding]:
    """LABEL_NOISE: the model fits a client's own samples far worse than before, but not its peers'.

    UNUSUAL_CLIENT for texts, which have no labels. No client is named while another sends something other than it
    trained, because that damages the model for some clients more than for others; nor is a client whose labels are
    known not to have changed, because then the model changed.
    """
    changes = changed_loss_clients(history, round_index)
    if not changes:
        return
    beside = located_clients(history, round_index) | _recently_altered(history, round_index)
    trend, data = LOCATOR.trend_up_to(history, round_index), data_sketches(history, round_index)
    for node, change in changes.items() if not beside - changes.keys() else ():
        if node in beside or trend.is_explained(node) or data.labels_unchanged_since(node, change.since):
            continue
        when = "receives" if change.sign is LOSS else "has trained"
        text = (
            f"Since round {change.since}, the model that {node} {when} has a loss of {change.value:.3g} on the "
            f"client's own samples; by its past and its peers, about {change.expected:.3g} was to be expected. "
        )
        if predicts_texts(history, round_index):
            text += "Its texts are others than before: in another language, of another kind, or damaged."
            yield _change_finding("UNUSUAL_CLIENT", round_index, node, change, text, {}, severity="note")
            continue
        causes = {"label_noise": 0.9, "input_noise": 0.05, "input_scale": 0.05}
        text += "Most likely its labels or targets are wrong."
        yield _change_finding("LABEL_NOISE", round_index, node, change, text, causes)


def changed_loss_clients(history: History, round_index: int) -> dict[Node, ClientChange]:
    """Return the clients whose losses rose permanently, before or after their training."""
    after = OWN_PASTS.up_to(history, round_index, LOSS_AFTER).changes
    return after | OWN_PASTS.up_to(history, round_index, LOSS).changes


def _recently_altered(history: History, round_index: int) -> set[Node]:
    """Return the clients that recently sent something other than they trained, or far larger updates than before."""
    rounds = rounds_until(history, round_index, AFTERMATH)
    altered: set[Node] = set()
    for past_round in rounds:
        relations = exact_relations(history, past_round)
        harmless = {node for node, relation in relations.items() if relation.kind in HARMLESS}
        altered |= {*clients_with_altered_updates(history, past_round), *relations} - harmless
    return altered | _enlarged(history, round_index).keys()


def _enlarged(history: History, round_index: int) -> dict[Node, ClientChange]:
    """Return the clients whose updates became larger, relative to what they trained if that is known."""
    drifts = history.latest("weight.drift", round_index)
    trained = {node for node, drift in drifts.items() if 0 < drift < math.inf}  # NaN and infinity hide no client
    sizes = OWN_PASTS.up_to(history, round_index, SIZE).changes
    return {
        **{node: change for node, change in sizes.items() if node not in trained},
        **OWN_PASTS.up_to(history, round_index, PROPORTION).changes,
    }


def changed_sizes(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE: a client's updates became several times as large, with no evidence that it trained them so."""
    trend = LOCATOR.trend_up_to(history, round_index)
    for node, change in _enlarged(history, round_index).items():
        if node in exact_relations(history, round_index) or trend.is_explained(node):
            continue
        times = change.value / change.expected if change.expected > 0 else float("inf")
        text = (
            f"Since round {change.since}, the updates of {node} are {times:.2g} times as large as was to be expected "
            f"by its past and its peers{'' if change.sign is SIZE else ', measured by what it trains'}."
        )
        yield _change_finding("BYZANTINE", round_index, node, change, text, {"scaling": 0.9, "gaussian": 0.1})


def _change_finding(
    issue: str,
    round_index: int,
    node: Node,
    change: ClientChange,
    text: str,
    causes: Mapping[str, float],
    severity: str = "warning",
) -> Finding:
    """Return the finding about a client that changed. `causes`: kinds of faults with their chances, likeliest first."""
    return finding(
        issue,
        round_index,
        text,
        confidence=SURE,
        since=change.since,
        node=node,
        severity=severity,
        numbers=[Number(change.sign.name, change.value, change.expected, change.deviations, of="own past")],
        suspects=[Suspect(node, SURE, WORDS[next(iter(causes))] if causes else "other texts")],
        more={"causes": [[kind, chance] for kind, chance in causes.items()]} if causes else None,
    )


def located_clients(history: History, round_index: int) -> set[Node]:
    """Return the clients that the learnt evidence accuses in this round; it also names the kind of fault."""
    trend = LOCATOR.trend_up_to(history, round_index)
    probable = (node for node in trend.suspected_kinds if trend.probability(node) >= likely_limit(trend))
    return {*probable, *trend.altered_since} if trend.scores is not None else set()


DETECTORS: tuple[Detector, ...] = (changed_losses, changed_sizes)
