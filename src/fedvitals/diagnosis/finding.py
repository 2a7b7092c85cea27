# SPDX-License-Identifier: Apache-2.0
"""How a detector words what it found: every finding says what, where, since when, how sure, and on which numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.protocols import Node
from fedvitals.records import Finding, Suspect, Where


@dataclass(frozen=True, slots=True)
class Number:
    """One number that a finding rests on, beside what is usual: its peers' now, or its own before."""

    name: str  # of the metric, as in the catalogue
    value: float
    usual: float | None = None
    score: float | None = None  # how far from usual, in robust standard deviations, signed
    of: str = "peers"  # what `usual` is taken from: «peers», «own past», «first rounds», «limit»


def finding(
    issue: str,
    round_index: int,
    message: str,
    *,
    confidence: float,
    since: int | None = None,
    node: Node | None = None,
    group: str | None = None,
    layer: str | None = None,
    step: int | None = None,
    severity: str | None = None,
    numbers: Sequence[Number] = (),
    suspects: Sequence[Suspect] = (),
    more: Mapping[str, Any] | None = None,
) -> Finding:
    """A finding of this round. The run's name is filled in by whoever runs the detector, which knows no run.

    `since`: the round in which the trouble began, as far as can be seen. `more`: evidence of the issue's own, JSON.
    """
    issue_entry = ISSUES_BY_CODE[issue]
    evidence: dict[str, Any] = {
        "since": round_index if since is None else since,
        "numbers": [
            {"name": n.name, "value": n.value, "usual": n.usual, "score": n.score, "of": n.of} for n in numbers
        ],
        **(more or {}),
    }
    # What clients say may give any number, and a store takes no larger one.
    where = Where("", round_index, node, step if step is not None and abs(step) < 1 << 63 else None, layer, group)
    level = issue_entry.severity if severity is None else severity
    # The time, too, is filled in by whoever runs the detector: the same history must give the same finding.
    return Finding(where, 0.0, issue, level, min(max(confidence, 0.0), 1.0), message, evidence, tuple(suspects))
