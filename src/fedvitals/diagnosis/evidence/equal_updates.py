# SPDX-License-Identifier: Apache-2.0
"""Clients of one round that sent the same update, exactly or nearly, without having shared a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of, groups_of
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import (
    COHORT_WIDE_SHARE,
    clients_with_altered_updates,
    clients_with_trained_updates,
)
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node

COPY, COPY_UNSEEN = 0.94, 0.998  # cosine of a copy to its peer's: with telemetry that contradicts it, and without
STANDS_OUT = 0.5  # of the distance from 1 of the next nearest
UNLIKE = 0.9  # upper limit for the others' cosines if there is no telemetry

Alike = tuple[Node, ...]


@shared
def equal_updates(history: History, round_index: int) -> list[Alike]:
    """Return the clients that sent bitwise equal updates, one tuple per update.

    Members of an edge that share a model send the same: an update sent by all of a group, except those that did not
    send what they trained, is left out.
    """
    twins = history.latest("update.duplicates", round_index)
    if not twins:
        return []
    norms = history.latest("update.norm", round_index)
    clients, groups = clients_of(history, round_index), groups_of(history, round_index)
    if groups and len(twins) > len(clients) / 2:
        return []  # groups whose members average at each step, and so send the same
    altered = clients_with_altered_updates(history, round_index)
    by_norm: dict[float, list[Node]] = {}
    for node in twins:
        by_norm.setdefault(norms.get(node, 0.0), []).append(node)
    alike: list[Alike] = []
    for nodes in by_norm.values():
        own = {groups.get(node) for node in nodes}
        members = [node for node in clients if groups.get(node) in own and node not in altered]
        if len(nodes) > 1 and (len(own) > 1 or None in own or set(members) != set(nodes)):
            alike.append(tuple(nodes))
    return alike


@shared
def nearly_equal_updates(history: History, round_index: int) -> dict[Alike, float]:
    """Return the clients whose updates are nearly equal, with the cosine.

    Clients with the same few classes are nearly as alike (cosines up to 0.99 were observed), so telemetry must show
    that one of them sent something other than it trained. Without telemetry, the pair must be closer than that, in a
    round where no other pair is close, and never within a group, whose members pass models on. Empty if updates are
    transformed on their way, because coarse values make honest updates alike.
    """
    values = peer_statistic(history, round_index, "nearest")
    if max(values.values(), default=0.0) <= COPY or transformation(history, round_index) is not None:
        return {}
    altered, groups = clients_with_altered_updates(history, round_index), groups_of(history, round_index)
    unaltered = clients_with_trained_updates(history, round_index)
    # Clients that send the server's step back are nearer to it than to each other.
    steps = peer_statistic(history, round_index, "step")
    by_cosine: dict[float, list[Node]] = {}
    for node, value in values.items():
        if value > COPY and steps.get(node, 0.0) <= value:
            by_cosine.setdefault(value, []).append(node)
    rest = [value for value in values.values() if value <= COPY]
    next_best = max(rest, default=0.0)
    lonely = bool(rest) and len(rest) >= 2 * COHORT_WIDE_SHARE * len(values) and float(np.median(rest)) < UNLIKE
    alike: dict[Alike, float] = {}
    for value, nodes in by_cosine.items():
        if len(nodes) > 1 and not altered.isdisjoint(nodes):
            if 1 - value < STANDS_OUT * (1 - next_best) or value > COPY_UNSEEN:
                alike[tuple(nodes)] = value
        elif len(nodes) == 2 and value > COPY_UNSEEN and lonely and not unaltered.issuperset(nodes):
            apart = groups.get(nodes[0]) is None or groups.get(nodes[0]) != groups.get(nodes[1])
            alike |= {(nodes[0], nodes[1]): value} if apart else {}
    return alike


@shared
def peer_statistic(history: History, round_index: int, statistic: str) -> Mapping[Node, float]:
    """Return a statistic that compares each client's update with the others of its round."""
    nodes, values = history.across("update.peers", (statistic,), round_index)
    if not nodes or not values.size:
        return {}
    return {node: float(value) for node, value in zip(nodes, values[:, 0, 0], strict=True) if np.isfinite(value)}
