# SPDX-License-Identifier: Apache-2.0
"""Compare the update the server received with the one the client says it trained.

The two are equal unless the update was changed after training (scaled, negated, replaced, copied, or stale). A client
that falsifies its telemetry is not caught.
"""

from __future__ import annotations

import math

from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node

MISMATCH_LIMIT = 0.01  # relative difference of two equal sizes; none of 323,377 healthy client-rounds had as much
COHORT_WIDE_SHARE = 1 / 3  # of a cohort: more clients than are faulty in any federation that still learns


@shared
def update_mismatches(history: History, round_index: int) -> dict[Node, float]:
    """Return the relative difference for each client.

    It is in size, or in the sums of the layer that differs most (`differs`). A model of half precision rounds each
    value by up to 0.4 %, which is less than `MISMATCH_LIMIT`. If the sums of all trained layers agree, sizes may still
    differ, because the update holds more than was trained, such as running statistics of batch norm.
    """
    drift, differs = history.latest("weight.drift", round_index), history.latest("update.differs", round_index)
    return {
        node: differs[node]
        if differs.get(node, 1.0) <= MISMATCH_LIMIT
        else max(_size_difference(norm, drift[node]), differs.get(node, 0.0))
        for node, norm in history.latest("update.norm", round_index).items()
        if 0 < drift.get(node, 0.0) < math.inf and 0 < norm < math.inf
    }


def _size_difference(norm: float, drift: float) -> float:
    """Return the absolute logarithm of a ratio, even if the ratio itself overflows or underflows a float."""
    ratio = norm / drift
    return abs(math.log(ratio) if 0 < ratio < math.inf else math.log(norm) - math.log(drift))


@shared
def clients_with_altered_updates(history: History, round_index: int) -> set[Node]:
    """Return the clients whose update differs from what they trained.

    Returns an empty set when many clients differ, because then the transport alters updates (compression, clipping,
    averaging).
    """
    mismatches = update_mismatches(history, round_index)
    altered = {node for node, distance in mismatches.items() if distance > MISMATCH_LIMIT}
    return altered if len(altered) <= max(1, COHORT_WIDE_SHARE * len(mismatches)) else set()


@shared
def clients_with_trained_updates(history: History, round_index: int) -> set[Node]:
    """Return the clients whose update is what they trained."""
    return {node for node, distance in update_mismatches(history, round_index).items() if distance <= MISMATCH_LIMIT}
