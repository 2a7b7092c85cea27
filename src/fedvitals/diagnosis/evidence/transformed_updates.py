# SPDX-License-Identifier: Apache-2.0
"""Recognise runs whose updates are transformed between training and aggregation: compressed, quantised or pruned.

Rules that compare an update with the training behind it, and evidence learnt on unaltered updates, do not apply to such
a run, so they abstain. Either the host states the transformation (the event `updates.transformed`, which no client may
send), or it is recognised from measurements: most clients' updates differ from what the same clients trained, or
consist mostly of zeros although their gradients do not. A minority never counts: a few clients that send something
other than they trained are what detectors look for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedvitals.diagnosis.evidence.attendance import clients_of, rounds_until
from fedvitals.diagnosis.evidence.update_mismatch import COHORT_WIDE_SHARE, update_mismatches
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.diagnosis.medians import column_medians
from fedvitals.protocols import History, Node

TRANSFORMED = "updates.transformed"  # the event by which a host states it
FEWEST_CLIENTS = 4  # in a smaller cohort, clients of earlier rounds are counted as well
LOOK_BACK = 5  # rounds searched for further clients
REMEMBERED, FEWEST_ROUNDS = 20, 3  # newest rounds, and how many of them must be transformed
ROUNDED = 1e-5  # relative difference in size above which an update was rounded in transit; unaltered: about 1e-7
MOSTLY_ZEROS = 0.5  # share of zeros in a typical layer, beyond the zeros of its gradients


@dataclass(frozen=True, slots=True)
class Transformation:
    """How many of the compared clients sent a transformed update, and how that was recognised."""

    transformed: int
    compared: int
    sparse: bool  # recognised by zeros; otherwise by the difference between the received and the trained update
    stated: bool = False  # stated by the host, rather than recognised


@shared
def transformation(history: History, round_index: int) -> Transformation | None:
    """Return how the updates of this round are transformed; None if most arrive as trained, or nothing is known.

    More than half of the compared clients must agree, and more than a third of all, so that no minority can silence the
    detectors, even if only its telemetry arrives; in this round, or in most of the earlier rounds.
    """
    if _is_stated(history, round_index):
        return Transformation(0, 0, sparse=False, stated=True)
    return _recognised(history, round_index) or _recognised_before(history, round_index)


def _recognised_before(history: History, round_index: int) -> Transformation | None:
    """Return the transformation of most of the earlier rounds.

    Once a model has converged, little is left of updates that a transformation could change, so it only shows for a few
    clients.
    """
    rounds = rounds_until(history, round_index - 1, REMEMBERED)
    earlier = [seen for past_round in rounds if (seen := _recognised(history, past_round)) is not None]
    return earlier[-1] if len(earlier) >= FEWEST_ROUNDS and 2 * len(earlier) > len(rounds) else None


@shared
def _recognised(history: History, round_index: int) -> Transformation | None:
    for sparse, sign in ((False, _differing), (True, _mostly_zeros)):
        clients = _over_rounds(history, round_index, sign)
        transformed = sum(clients.values())
        if holds_for_most(clients) and transformed > COHORT_WIDE_SHARE * len(clients_of(history, round_index)):
            return Transformation(transformed, len(clients), sparse)
    return None


def _is_stated(history: History, round_index: int) -> bool:
    """Return whether the host has stated that individual updates are transformed.

    Differential privacy applied to the mean by the server leaves each client's update unchanged.
    """
    stated = [event.data for event in history.events(TRANSFORMED) if (event.where.round or 0) <= round_index]
    return any(
        "stated" in data or "compression" in data or data.get("privacy", {}).get("kind") == "client_dp"
        for data in stated
    )


@shared
def most_differ(history: History, round_index: int) -> bool:
    """Return whether most of the comparable clients sent something other than they trained, however few they are."""
    return holds_for_most(_over_rounds(history, round_index, _differing))


def holds_for_most(clients: Mapping[Node, bool]) -> bool:
    """Return whether a sign holds for more than half of the clients, and for at least two."""
    return sum(clients.values()) >= max(2, len(clients) // 2 + 1)


def _over_rounds(
    history: History, round_index: int, sign: Callable[[History, int], dict[Node, bool]]
) -> dict[Node, bool]:
    """Return the sign of each client in this round.

    If there are too few clients, also those of other clients in the newest earlier rounds.
    """
    clients = sign(history, round_index)
    if not clients or len(clients) >= FEWEST_CLIENTS:
        return clients
    for earlier in reversed(rounds_until(history, round_index - 1, LOOK_BACK)):
        clients = sign(history, earlier) | clients
    return clients


@shared
def _differing(history: History, round_index: int) -> dict[Node, bool]:
    """Return whether each client's update differs from what it trained, for clients for which both are known."""
    return {node: distance > ROUNDED for node, distance in update_mismatches(history, round_index).items()}


@shared
def _mostly_zeros(history: History, round_index: int) -> dict[Node, bool]:
    """Return whether most values of each client's update are zeros that its gradients do not explain.

    The median over the changed layers, so that an embedding of which a client uses few rows counts as one layer. Dead
    units, and inputs that are always 0, also leave zeros in the gradient. If no gradient is known, all zeros count.
    """
    clients = set(clients_of(history, round_index))
    nodes, sums = history.across("update", ("l2", "sparsity"), round_index)
    rows = [i for i, node in enumerate(nodes) if node in clients]
    if not rows:
        return {}
    changed, unexplained = sums[rows, :, 0] > 0, np.nan_to_num(sums[rows, :, 1])
    if history.layers("gradient") == history.layers("update"):
        owners, gradients = history.across("gradient", ("sparsity",), round_index)
        place = {node: i for i, node in enumerate(owners)}
        known = [(here, place[nodes[i]]) for here, i in enumerate(rows) if nodes[i] in place]
        if known:
            here, there = zip(*known, strict=True)
            unexplained[list(here)] -= np.nan_to_num(gradients[list(there), :, 0])
    medians = column_medians(np.where(changed, unexplained, np.nan).T)
    any_changed, mostly = np.asarray(changed.any(axis=1)), medians > MOSTLY_ZEROS
    return {nodes[i]: bool(mostly[row]) for row, i in enumerate(rows) if any_changed[row]}
