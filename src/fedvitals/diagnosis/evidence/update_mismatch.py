# SPDX-License-Identifier: Apache-2.0
"""What arrived from a client, held against what it trained by its own telemetry: an equality, not a score.

Equal, unless something is done to an update after training: scaled, turned, replaced, copied, stale. A client that lies
in its telemetry escapes it.
"""

from __future__ import annotations

import math

from fedvitals.protocols import History, Node

MISMATCH_LIMIT = 0.01  # relative difference of two equal sizes; 0 of 323,377 healthy client-rounds had as much
COHORT_WIDE_SHARE = 1 / 3  # of a cohort: more than are faulty in any federation that still learns


def update_mismatches(history: History, round_index: int) -> dict[Node, float]:
    """By how much they differ, as a share: in size, or in the sums of the layer that differs most (`differs`).

    A model of half precision rounds each value by up to 0.4 %, which is less than `NOT_TRAINED`. Where the sums of all
    trained layers agree, sizes may still differ: what was sent holds more, such as running statistics of batch norm.
    """
    drift, differs = history.latest("weight.drift", round_index), history.latest("update.differs", round_index)
    return {
        node: differs[node]
        if differs.get(node, 1.0) <= MISMATCH_LIMIT
        else max(abs(math.log(norm / drift[node])), differs.get(node, 0.0))
        for node, norm in history.latest("update.norm", round_index).items()
        if 0 < drift.get(node, 0.0) < math.inf and 0 < norm < math.inf
    }


def clients_with_altered_updates(history: History, round_index: int) -> set[Node]:
    """Who sent something else than it trained.

    Nobody, where that is so for many: then updates are compressed, clipped or averaged on their way, and it is known.
    """
    mismatches = update_mismatches(history, round_index)
    altered = {node for node, distance in mismatches.items() if distance > MISMATCH_LIMIT}
    return altered if len(altered) <= max(1, COHORT_WIDE_SHARE * len(mismatches)) else set()


def clients_with_trained_updates(history: History, round_index: int) -> set[Node]:
    """Who sent what it trained."""
    return {node for node, distance in update_mismatches(history, round_index).items() if distance <= MISMATCH_LIMIT}
