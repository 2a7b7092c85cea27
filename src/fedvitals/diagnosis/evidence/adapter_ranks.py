# SPDX-License-Identifier: Apache-2.0
"""Clients whose low-rank adapters have another rank than most: their updates differ in size, so they are not peers."""

from __future__ import annotations

from collections import Counter

from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node


@shared
def clients_of_other_rank(history: History, round_index: int) -> frozenset[Node]:
    """Return the clients of a round whose adapters do not have the most common rank; empty if all have the same."""
    ranks = {**history.latest("adapter.rank", round_index), **history.latest("update.adapter_rank", round_index)}
    if len(set(ranks.values())) < 2:
        return frozenset()
    common = Counter(ranks.values()).most_common(1)[0][0]
    return frozenset(node for node, rank in ranks.items() if rank != common)
