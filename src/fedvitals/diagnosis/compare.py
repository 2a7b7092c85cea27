# SPDX-License-Identifier: Apache-2.0
"""Compare the findings of two examinations of one run: live and later, or before and after a change of the
detectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE
from fedvitals.records import Finding


@dataclass(frozen=True, slots=True)
class FindingsDifference:
    """Findings that only one side has, or that both have with different texts or numbers (as they are now)."""

    same: int
    only_stored: tuple[Finding, ...]
    only_now: tuple[Finding, ...]
    changed: tuple[Finding, ...]
    own: int  # stored findings of a user's own detectors, which are not compared

    def __bool__(self) -> bool:
        return bool(self.only_stored or self.only_now or self.changed)


def compare_findings(stored: Sequence[Finding], now: Iterable[Finding]) -> FindingsDifference:
    """Return how the stored findings differ from the current ones; times and record ids are ignored."""
    known = [finding for finding in stored if finding.issue in ISSUES_BY_CODE]
    before, after = _by_place(known), _by_place(now)
    both = [(before[place], after[place]) for place in after if place in before]
    changed = tuple(later for earlier, later in both if not _alike(earlier, later))
    return FindingsDifference(
        same=len(both) - len(changed),
        only_stored=tuple(finding for place, finding in before.items() if place not in after),
        only_now=tuple(finding for place, finding in after.items() if place not in before),
        changed=changed,
        own=len(stored) - len(known),
    )


def _by_place(findings: Iterable[Finding]) -> dict[tuple[Any, ...], Finding]:
    placed: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        where = finding.where
        place = (where.round, finding.issue, where.node, where.group, where.layer, where.step)
        copy = 0
        while (*place, copy) in placed:  # a detector may report several findings in one place
            copy += 1
        placed[*place, copy] = finding
    return placed


def _alike(stored: Finding, current: Finding) -> bool:
    same_words = (stored.severity, stored.message) == (current.severity, current.message)
    same_confidence = math.isclose(stored.confidence, current.confidence, abs_tol=1e-9)
    return same_words and same_confidence and _stored(_reasons(stored)) == _stored(_reasons(current))


def _reasons(finding: Finding) -> list[Any]:
    return [finding.evidence, [(suspect.node, suspect.score, suspect.reason) for suspect in finding.suspects]]


def _stored(evidence: Any) -> Any:
    """Return evidence as a store returns it: JSON has no tuples, and non-finite numbers are stored as words."""
    if isinstance(evidence, Mapping):
        return {str(key): _stored(entry) for key, entry in evidence.items()}
    if isinstance(evidence, list | tuple):
        return [_stored(entry) for entry in evidence]
    if hasattr(evidence, "tolist"):  # numpy
        return _stored(evidence.tolist())
    if isinstance(evidence, float) and not math.isfinite(evidence):
        return "NaN" if math.isnan(evidence) else "Infinity" if evidence > 0 else "-Infinity"
    return evidence
