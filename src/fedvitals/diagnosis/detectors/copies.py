# SPDX-License-Identifier: Apache-2.0
"""Detectors of updates that were not trained: a copy of a peer's update, or the server's own last step.

Either may have noise added. Two equal updates do not show which client copied. The pair is reported, and one client is
named only if something else distinguishes the two: a peer that changes from round to round, or telemetry that
contradicts what the client sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of, failed_calls, median_of_others, rounds_until
from fedvitals.diagnosis.evidence.equal_updates import (
    STANDS_OUT,
    UNLIKE,
    equal_updates,
    nearly_equal_updates,
    peer_statistic,
)
from fedvitals.diagnosis.evidence.exact_relations import exact_relations, untrained_among
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import (
    COHORT_WIDE_SHARE,
    clients_with_altered_updates,
    clients_with_trained_updates,
)
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node
from fedvitals.records import Finding, Suspect

# Cosine to the server's last step: if telemetry shows that something else was trained, and otherwise.
STEP, STEP_UNSEEN = 0.94, 0.99
FEWEST_UNLIKE = 3  # other clients that are unlike the step, above which a client's own telemetry cannot clear it

Pair = tuple[Node, Node]


def duplicates(history: History, round_index: int) -> Sequence[Finding]:
    """DUPLICATE_UPDATE: pairs of clients that send the same update, or nearly so."""
    return _duplicates(history, round_index)


@shared
def _duplicates(history: History, round_index: int) -> tuple[Finding, ...]:
    return tuple(_duplicate_findings(history, round_index))


def _duplicate_findings(history: History, round_index: int) -> Iterator[Finding]:
    pairs = dict.fromkeys(_equal_pairs(history, round_index), 1.0) or _nearly_equal_pairs(history, round_index)
    nearest = peer_statistic(history, round_index, "nearest")
    for pair, cosine in pairs.items():
        copier = _likelier_copier(history, round_index, pair)
        order = pair if copier in (None, pair[0]) else pair[::-1]
        alike = "send the same update" if cosine == 1.0 else f"send nearly the same update (cosine {cosine:.4f})"
        text = f"{order[0]} and {order[1]} {alike}."
        text += f" {copier} is the likelier copy." if copier else " Which is the copy cannot be seen."
        chances = (0.95, 0.05) if copier else (0.5, 0.5)
        suspects = [Suspect(node, chance, "one of the pair") for node, chance in zip(order, chances, strict=True)]
        for node in order[:1] if copier else order:
            yield finding(
                "DUPLICATE_UPDATE",
                round_index,
                text,
                confidence=1.0 if cosine == 1.0 else 0.97,
                node=node,
                numbers=[Number("update.peers.nearest", cosine, median_of_others(nearest, pair))],
                suspects=suspects,
                more={"pair": list(order), "copier": copier},
            )


@shared
def _equal_pairs(history: History, round_index: int) -> list[Pair]:
    """Return pairs of equal updates, except those that none of their senders trained: these did not copy each other."""
    colluding = exact_relations(history, round_index)
    return [
        (nodes[0], other)
        for nodes in equal_updates(history, round_index)
        if nodes[0] not in colluding
        for other in nodes[1:]
    ]


@shared
def _nearly_equal_pairs(history: History, round_index: int) -> dict[Pair, float]:
    """Return pairs of nearly equal updates with their cosine, the copy first if telemetry shows which it is."""
    altered, exact = clients_with_altered_updates(history, round_index), exact_relations(history, round_index)
    pairs: dict[Pair, float] = {}
    for nodes, cosine in nearly_equal_updates(history, round_index).items():
        copies = [node for node in nodes if node in altered and node not in exact]
        originals = [node for node in nodes if node not in altered] or copies[1:]
        if copies and originals:
            pairs |= {(copy, originals[0]): cosine for copy in copies if copy != originals[0]}
        elif altered.isdisjoint(nodes):
            pairs[nodes[0], nodes[1]] = cosine
    return pairs


def _likelier_copier(history: History, round_index: int, pair: Pair) -> Node | None:
    """Return the likelier copy of a pair: its update is not what it trained, or its peer changes between rounds."""
    altered = clients_with_altered_updates(history, round_index) & {*pair} or untrained_among(
        history, round_index, pair
    )
    if len(altered) == 1:
        return next(iter(altered))
    counts = dict.fromkeys(pair, 0)
    for past_round in rounds_until(history, round_index, 10):
        for other in (*_equal_pairs(history, past_round), *_nearly_equal_pairs(history, past_round)):
            for node in pair:
                counts[node] += node in other
    first, second = pair
    if abs(counts[first] - counts[second]) >= 2:
        return max(counts, key=lambda node: counts[node])
    return None


def free_riders(history: History, round_index: int) -> Sequence[Finding]:
    """FREE_RIDER: an update of zeros, or the server's last step sent back."""
    return _free_riders(history, round_index)


@shared
def _free_riders(history: History, round_index: int) -> tuple[Finding, ...]:
    return tuple(_free_rider_findings(history, round_index))


def _free_rider_findings(history: History, round_index: int) -> Iterator[Finding]:
    clients = clients_of(history, round_index)
    failed = failed_calls(history, round_index)  # they sent nothing, whatever was measured until they failed
    idle = [node for node, zero in history.latest("update.zero", round_index).items() if zero and node not in failed]
    for node in idle if len(clients) > 1 and len(idle) <= max(1, COHORT_WIDE_SHARE * len(clients)) else ():
        text = f"{node} sent back the model that it got: its update is exactly zero."
        number = Number("update.norm", 0.0, median_of_others(history.latest("update.norm", round_index), [node]))
        yield finding("FREE_RIDER", round_index, text, confidence=1.0, node=node, numbers=[number])
    steps = peer_statistic(history, round_index, "step")
    if max(steps.values(), default=0.0) <= STEP or transformation(history, round_index) is not None:
        return
    altered = clients_with_altered_updates(history, round_index)
    unaltered = clients_with_trained_updates(history, round_index)
    nearest = peer_statistic(history, round_index, "nearest")
    copies = {node for nodes in equal_updates(history, round_index) for node in nodes}
    for node, cosine in steps.items():
        if node in copies or node in exact_relations(history, round_index):
            continue
        others = [value for other, value in steps.items() if other != node and other not in altered]
        certain = cosine > STEP_UNSEEN and node in altered  # regardless of the others, or if there are none
        if (len(others) < 2 and not certain) or nearest.get(node, 0.0) > cosine + 1e-3:
            continue
        if node in unaltered and (len(others) < FEWEST_UNLIKE or _decides(history, round_index, node)):
            continue  # it may have trained its own last step again
        if node in altered:
            rides = certain or (cosine > STEP and 1 - cosine < STANDS_OUT * (1 - max(others)))
        else:
            rides = cosine > STEP_UNSEEN and max(others) < UNLIKE
        if rides:
            usual = float(np.median(others)) if others else None
            peers = "" if usual is None else f"; its peers have {usual:.2f}"
            text = f"{node} sends the server's last step again (cosine {cosine:.3f}{peers})."
            number = Number("update.peers.step", cosine, usual)
            yield finding("FREE_RIDER", round_index, text, confidence=0.97, node=node, numbers=[number])


def _decides(history: History, round_index: int, node: Node) -> bool:
    """Return whether a client had half of the weight in the last step, so that the step was largely its own update."""
    claims = history.latest("update.samples", round_index)
    return 2 * claims.get(node, 0.0) >= sum(claims.values())
