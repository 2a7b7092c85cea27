# SPDX-License-Identifier: Apache-2.0
"""Build findings: each says what is wrong, where, since when, with what confidence, and on which numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvitals.diagnosis.cause_levels import cause_levels
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.protocols import Node
from fedvitals.records import Finding, Suspect, Where


@dataclass(frozen=True, slots=True)
class Number:
    """One number behind a finding, with the usual value: that of its peers now, or its own before."""

    name: str  # of the metric, as in the catalogue
    value: float
    usual: float | None = None
    score: float | None = None  # distance from the usual value, in robust standard deviations, signed
    of: str = "peers"  # the origin of `usual`: «peers», «own past», «first rounds», «limit»


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
    """Return a finding of this round. The caller that runs the detector fills in the run's name and the time.

    `since`: the round in which the problem began, as far as known. `more`: evidence specific to the issue, as JSON.
    """
    issue_entry = ISSUES_BY_CODE[issue]
    evidence: dict[str, Any] = {
        "since": round_index if since is None else since,
        "numbers": [
            {"name": n.name, "value": n.value, "usual": n.usual, "score": n.score, "of": n.of} for n in numbers
        ],
        **(more or {}),
    }
    if causes := [cause for cause in evidence.get("causes", ()) if _is_chance(cause)]:
        evidence["levels"] = cause_levels(confidence, causes, evidence.get("views", ()))
    # A step may come from a client's claims, and a store accepts no integer beyond 64 bits.
    where = Where("", round_index, node, step if step is not None and abs(step) < 1 << 63 else None, layer, group)
    level = issue_entry.severity if severity is None else severity
    # The caller also fills in the time: the same history must give the same finding.
    return Finding(where, 0.0, issue, level, min(max(confidence, 0.0), 1.0), message, evidence, tuple(suspects))


def _is_chance(cause: Any) -> bool:
    """Return whether this is a kind of fault with its chance, since a third-party detector may write anything."""
    known = isinstance(cause, list | tuple) and len(cause) == 2 and isinstance(cause[0], str)
    return known and isinstance(cause[1], int | float)
