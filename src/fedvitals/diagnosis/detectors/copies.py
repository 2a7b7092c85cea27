# SPDX-License-Identifier: Apache-2.0
"""Detectors of updates that were not trained: a copy of a peer's update, or the server's own last step, possibly with
noise.

From two equal updates it cannot be seen who copied. The pair is reported, and one client is named only where something
else distinguishes the two: a peer that changes from round to round, or telemetry that contradicts what the client sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of, groups_of, median_of_others, rounds_until
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

COPY, COPY_UNSEEN = 0.94, 0.998  # cosine of a copy to its peer's: where telemetry tells that it was not trained, else
STEP, STEP_UNSEEN = 0.94, 0.99  # the same of the server's last step, sent back
STANDS_OUT = 0.5  # of the distance from 1 that the next nearest have
UNLIKE = 0.9  # up to which the others' must stay where telemetry tells nothing

Pair = tuple[Node, Node]


def duplicates(history: History, round_index: int) -> Sequence[Finding]:
    """DUPLICATE_UPDATE: pairs of clients that send the same, or nearly the same, update."""
    return _duplicates(history, round_index)


@shared
def _duplicates(history: History, round_index: int) -> tuple[Finding, ...]:
    return tuple(_duplicate_findings(history, round_index))


def _duplicate_findings(history: History, round_index: int) -> Iterator[Finding]:
    pairs = dict.fromkeys(_equal_pairs(history, round_index), 1.0) or _nearly_equal_pairs(history, round_index)
    nearest = _peer_statistic(history, round_index, "nearest")
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
    """Return pairs of equal updates; not within groups all of whose members send the same, as edges that share a
    model do.
    """
    twins = history.latest("update.duplicates", round_index)
    if not twins:
        return []
    norms = history.latest("update.norm", round_index)
    clients, groups = clients_of(history, round_index), groups_of(history, round_index)
    if groups and len(twins) > len(clients) / 2:
        return []  # groups whose members average with each other at each step, and then send the same
    classes: dict[float, list[Node]] = {}
    for node in twins:
        classes.setdefault(norms.get(node, 0.0), []).append(node)
    pairs: list[Pair] = []
    for alike in classes.values():
        own = {groups.get(node) for node in alike}
        if len(own) == 1 and None not in own and len(alike) == sum(groups.get(node) in own for node in clients):
            continue
        pairs += [(alike[0], other) for other in alike[1:]]
    return pairs


@shared
def _nearly_equal_pairs(history: History, round_index: int) -> dict[Pair, float]:
    """Return pairs of nearly equal updates, with their cosine.

    Clients with the same few classes are nearly as alike (cosines of 0.99 were seen), so one of the pair must have sent
    something else than it trained, by its telemetry. Without telemetry, the pair must be closer than that, in a round
    where nobody else is close, and never inside a group, whose members pass models on. Nothing is returned where
    updates are transformed on their way: coarse values make honest updates alike.
    """
    values = _peer_statistic(history, round_index, "nearest")
    if max(values.values(), default=0.0) <= COPY or transformation(history, round_index) is not None:
        return {}
    altered, groups = clients_with_altered_updates(history, round_index), groups_of(history, round_index)
    unaltered = clients_with_trained_updates(history, round_index)
    # What several send back is nearer to the server's step than to each other.
    steps = _peer_statistic(history, round_index, "step")
    alike: dict[float, list[Node]] = {}
    for node, value in values.items():
        if value > COPY and steps.get(node, 0.0) <= value:
            alike.setdefault(value, []).append(node)
    rest = [value for value in values.values() if value <= COPY]
    next_best = max(rest, default=0.0)
    lonely = bool(rest) and len(rest) >= 2 * COHORT_WIDE_SHARE * len(values) and float(np.median(rest)) < UNLIKE
    pairs: dict[Pair, float] = {}
    for value, nodes in alike.items():
        copies = [node for node in nodes if node in altered]
        originals = [node for node in nodes if node not in altered] or copies[1:]
        if copies and originals and (1 - value < STANDS_OUT * (1 - next_best) or value > COPY_UNSEEN):
            pairs |= {(copy, originals[0]): value for copy in copies if copy != originals[0]}
        elif len(nodes) == 2 and value > COPY_UNSEEN and lonely and not unaltered.issuperset(nodes):
            apart = groups.get(nodes[0]) is None or groups.get(nodes[0]) != groups.get(nodes[1])
            pairs |= {(nodes[0], nodes[1]): value} if apart else {}
    return pairs


def _likelier_copier(history: History, round_index: int, pair: Pair) -> Node | None:
    """Return the likelier copy of a pair: its update is not what it trained, or its peer changes from round to
    round; else None.
    """
    altered = [node for node in pair if node in clients_with_altered_updates(history, round_index)]
    if len(altered) == 1:
        return altered[0]
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
    idle = [node for node, zero in history.latest("update.zero", round_index).items() if zero]
    for node in idle if len(clients) > 1 and len(idle) <= max(1, COHORT_WIDE_SHARE * len(clients)) else ():
        text = f"{node} sent back the model that it got: its update is exactly zero."
        number = Number("update.norm", 0.0, median_of_others(history.latest("update.norm", round_index), [node]))
        yield finding("FREE_RIDER", round_index, text, confidence=1.0, node=node, numbers=[number])
    steps = _peer_statistic(history, round_index, "step")
    if max(steps.values(), default=0.0) <= STEP or transformation(history, round_index) is not None:
        return
    altered = clients_with_altered_updates(history, round_index)
    unaltered = clients_with_trained_updates(history, round_index)
    nearest = _peer_statistic(history, round_index, "nearest")
    for node, cosine in steps.items():
        others = [value for other, value in steps.items() if other != node and other not in altered]
        if len(others) < 2 or node in unaltered or nearest.get(node, 0.0) > cosine + 1e-3:
            continue
        if node in altered:
            rides = cosine > STEP and 1 - cosine < STANDS_OUT * (1 - max(others))
        else:
            rides = cosine > STEP_UNSEEN and max(others) < UNLIKE
        if rides or (cosine > STEP_UNSEEN and node in altered):
            usual = float(np.median(others))
            text = f"{node} sends the server's last step again (cosine {cosine:.3f}; its peers have {usual:.2f})."
            number = Number("update.peers.step", cosine, usual)
            yield finding("FREE_RIDER", round_index, text, confidence=0.97, node=node, numbers=[number])


@shared
def _peer_statistic(history: History, round_index: int, statistic: str) -> Mapping[Node, float]:
    """Return a statistic of each client's update compared with the others of its round."""
    nodes, values = history.across("update.peers", (statistic,), round_index)
    if not nodes or not values.size:
        return {}
    return {node: float(value) for node, value in zip(nodes, values[:, 0, 0], strict=True) if np.isfinite(value)}
