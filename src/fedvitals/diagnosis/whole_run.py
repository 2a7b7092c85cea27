# SPDX-License-Identifier: Apache-2.0
"""While the whole run has a problem with a cause of its own, clients are not accused of its consequences.

Weights that explode or are NaN, or clients that all drift apart, make healthy clients look like attackers: their
updates point anywhere. A client that was accused before the cause appeared may be the cause itself, and stays accused.
So does one whose data or updates prove the accusation, whatever the run has.
"""

from __future__ import annotations

from fedvitals.protocols import Node
from fedvitals.records import Finding

CONSEQUENCES = frozenset(
    {
        *("BYZANTINE", "DUPLICATE_UPDATE", "STALE_UPDATE", "FREE_RIDER", "FROZEN_LAYER"),
        *("INPUT_NOISE", "LABEL_NOISE", "LABEL_FLIP", "BATCH_NORM_STATISTICS"),
    }
)
"""Issues inferred from how a client's training and updates compare with others'."""
PROVEN = frozenset({"data", "exact"})  # views that compare data or test equalities, which no cause imitates
OPPOSED = "opposed"  # the relation that is not an equality: two groups of a model that is lost pull against each other
CAUSES = frozenset({"CLIENT_DRIFT", "VANISHING_GRADIENT", "EXPLODING_GRADIENT", "BATCH_NORM_STATISTICS", "NAN_WEIGHTS"})
# Causes that no client can be accused of having caused, with the accusations that they explain from their first round.
NOT_BY_CLIENTS = {"POOR_INITIALISATION": CONSEQUENCES, "DEAD_UNITS": frozenset({"FROZEN_LAYER"})}
BLAMED_AT_ONCE = 2  # rounds after another cause began in which a client may still be accused of having caused it
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
            if _is_cause(finding):
                since = finding.evidence.get("since")  # a third-party detector may write anything
                began = min(round_index, since) if isinstance(since, int) else round_index
                first, newest = self._rounds.get(issue, (began, round_index))
                self._rounds[issue] = first if round_index - newest <= STANDS else began, round_index
            return False
        accused = self._accused.get(node, round_index)
        causes = () if issue not in CONSEQUENCES or _is_proven(finding) else self._rounds
        if any(self._explains(cause, issue, accused, round_index) for cause in causes):
            return True
        self._accused.setdefault(node, round_index)
        return False

    def _explains(self, cause: str, issue: str, accused: int, round_index: int) -> bool:
        """Return whether a lasting cause began clearly before a client was first accused."""
        first, newest = self._rounds[cause]
        explained, wait = NOT_BY_CLIENTS.get(cause), 0
        if explained is None:
            explained, wait = CONSEQUENCES, BLAMED_FOR_NAN if cause == "NAN_WEIGHTS" else BLAMED_AT_ONCE
        return issue in explained and accused - first >= wait and round_index - newest <= STANDS


def _is_cause(finding: Finding) -> bool:
    """Return whether a finding is a cause in the whole run; a note is none where clients have no part in it."""
    if finding.where.group is not None:
        return False
    return finding.issue in CAUSES or (finding.issue in NOT_BY_CLIENTS and finding.severity != "note")


def _is_proven(finding: Finding) -> bool:
    """Return whether an accusation rests on data or on an equality."""
    views = finding.evidence.get("views")
    proven = isinstance(views, list | tuple) and any(view in views for view in PROVEN)
    return proven and finding.evidence.get("relation") != OPPOSED
