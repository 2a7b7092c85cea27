# SPDX-License-Identifier: Apache-2.0
"""While the whole run has a problem with a cause of its own, clients are not accused of its consequences.

Weights that explode or are NaN, or clients that all drift apart, make healthy clients look like attackers: their
updates point anywhere. A client that was accused before the cause appeared may be the cause itself, and stays accused.
"""

from __future__ import annotations

from fedvitals.protocols import Node
from fedvitals.records import Finding

CAUSES = frozenset({"CLIENT_DRIFT", "VANISHING_GRADIENT", "EXPLODING_GRADIENT", "BATCH_NORM_STATISTICS", "NAN_WEIGHTS"})
CONSEQUENCES = frozenset(
    {
        *("BYZANTINE", "DUPLICATE_UPDATE", "STALE_UPDATE", "FREE_RIDER", "FROZEN_LAYER"),
        *("INPUT_NOISE", "LABEL_NOISE", "LABEL_FLIP", "BATCH_NORM_STATISTICS"),
    }
)
"""Issues inferred from how a client's training and updates compare with others', rather than from its data."""
BLAMED_AT_ONCE = 2  # rounds after a cause appeared in which a client may still be accused of having caused it
BLAMED_FOR_NAN = 1  # the same for a global model with NaN: from the next round on, nobody can train anything else
STANDS = 2  # rounds without a finding, after which a cause has ended


class WholeRunCauses:
    """Remembers which findings of a run concern the whole run, and which accusations these explain."""

    def __init__(self) -> None:
        self._rounds: dict[str, tuple[int, int]] = {}  # issue → its first and its newest round, while it lasts
        self._accused: dict[Node, int] = {}  # client → the round of its first finding

    def explain(self, finding: Finding, round_index: int) -> bool:
        """Return whether a finding is only a consequence of the whole run's problem; else remember it."""
        node, issue = finding.where.node, finding.issue
        if node is None:
            if issue in CAUSES and finding.where.group is None:
                first, newest = self._rounds.get(issue, (round_index, round_index))
                self._rounds[issue] = first if round_index - newest <= STANDS else round_index, round_index
            return False
        if issue in CONSEQUENCES and self._stands(self._accused.get(node, round_index), round_index):
            return True
        self._accused.setdefault(node, round_index)
        return False

    def _stands(self, accused: int, round_index: int) -> bool:
        """Return whether a lasting cause appeared clearly before a client was first accused."""
        return any(
            accused - first >= (BLAMED_FOR_NAN if issue == "NAN_WEIGHTS" else BLAMED_AT_ONCE)
            and round_index - newest <= STANDS
            for issue, (first, newest) in self._rounds.items()
        )
