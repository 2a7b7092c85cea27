# SPDX-License-Identifier: Apache-2.0
"""Group findings into cases: one case per issue and place, with its history.

A detector reports a problem again in every round in which it sees it. A case ends once its node has taken part in more
than `QUIET_ROUNDS` rounds without a finding. A finding after that does not open a new case; it counts as a return of
the old one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE, SEVERITIES, Issue
from fedvitals.protocols import History, Node
from fedvitals.records import Finding

QUIET_ROUNDS = 5  # rounds with the node but without a finding, after which the case counts as over
Attendance = Mapping[Node | None, Sequence[int]]
"""The rounds in which each node took part, ascending; None: all rounds of the run."""

CaseKey = tuple[str, Node | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class Case:
    """One issue of a client, a group, a layer or the whole run, over all rounds in which it was found."""

    issue: str
    node: Node | None
    group: str | None
    layer: str | None
    severity: str  # the worst of its findings
    confidence: float  # of the newest finding
    since: int | None  # when it began, as far as can be known
    first: int | None  # the round of the first finding
    last: int | None  # the round of the last finding
    rounds: tuple[int, ...]  # with a finding
    confidences: tuple[float, ...]  # in these rounds
    still_there: bool
    returned: int  # how often it came back after the case was over
    newest: Finding

    @property
    def issue_entry(self) -> Issue:
        """Return the issue's entry in the table; a minimal one for an issue of a user's own detector."""
        return ISSUES_BY_CODE.get(self.issue) or Issue(self.issue, self.issue, "user", self.severity)

    @property
    def place(self) -> str:
        """Return where the issue is, in words: «client c7, layer 0.weight»."""
        parts = [self.node, f"in {self.newest.where.group}" if self.node and self.newest.where.group else self.group]
        parts.append(None if self.layer is None else f"layer {self.layer}")
        return ", ".join(part for part in parts if part) or "the whole run"

    @property
    def timeline(self) -> str:
        """Return since when, until when and how often it was seen: «since round 5, seen in 4 rounds, still there»."""
        if self.first is None:
            return "in no round"
        words = [f"since round {self.since}" if self.since is not None else f"round {self.first}"]
        words.append(f"seen in {len(self.rounds)} round{'s' if len(self.rounds) != 1 else ''}")
        if self.returned:
            words.append(f"returned {'once' if self.returned == 1 else f'{self.returned} times'}")
        words.append("still there" if self.still_there else f"last in round {self.last}")
        return ", ".join(words)

    def __str__(self) -> str:
        return f"{self.severity}: {self.newest.message} ({self.issue}, {self.confidence:.0%}; {self.timeline})"


def record_attendance(
    attendance: dict[Node | None, list[int]], history: History, round_index: int, with_findings: Container[Node | None]
) -> None:
    """Add a round to the attendance of every node that trained or sent an update in it.

    Of a node without findings only its newest round is kept: cases count the rounds after a finding.
    """
    for node in (None, *{**history.latest("steps", round_index), **history.latest("update.norm", round_index)}):
        if node is None or node in with_findings:
            attendance.setdefault(node, []).append(round_index)
        else:
            attendance[node] = [round_index]


def key_of(finding: Finding) -> CaseKey:
    """Return the key that findings of one case share. A client keeps its cases when it changes its cluster."""
    where = finding.where
    return finding.issue, where.node, where.group if where.node is None else None, where.layer


class CaseFindings:
    """What a case needs of its findings, which may be as many as rounds; of these only the newest is held."""

    def __init__(self) -> None:
        self.confidences: dict[int | None, float] = {}  # by round; of several in one round, the highest
        self.severity = ""
        self.since: int | None = None
        self.newest: Finding | None = None

    def add(self, finding: Finding) -> None:
        """Add the next finding, in order of arrival."""
        round_index, since = finding.where.round, _since(finding)
        if not self.severity or severity_rank(finding.severity) < severity_rank(self.severity):
            self.severity = finding.severity
        if since is not None:
            self.since = since if self.since is None else min(self.since, since)
        before = self.confidences.get(round_index)
        best = before is None or finding.confidence >= before
        if best:
            self.confidences[round_index] = finding.confidence
        held = None if self.newest is None else self.newest.where.round
        if held is None or (best and round_index is not None and round_index >= held):
            self.newest = finding


def group_findings(findings: Iterable[Finding]) -> dict[CaseKey, CaseFindings]:
    """Return what each case needs of these findings, which come in order of arrival."""
    by_case: dict[CaseKey, CaseFindings] = {}
    for finding in findings:
        by_case.setdefault(key_of(finding), CaseFindings()).add(finding)
    return by_case


def cases(findings: Iterable[Finding], attendance: Attendance | None = None) -> list[Case]:
    """Return one case per issue and place, worst first: by severity, then confidence, then first round.

    Without `attendance`, every node counts as present in every round up to that of the newest finding.
    """
    return cases_from(group_findings(findings), attendance)


def cases_from(by_case: Mapping[CaseKey, CaseFindings], attendance: Attendance | None = None) -> list[Case]:
    """Return the same of findings that are grouped already."""
    rounds = [r for same in by_case.values() for r in same.confidences if r is not None]
    present = dict(attendance or {})
    present.setdefault(None, range(max(rounds, default=-1) + 1))
    return sorted((_case(key, same, present) for key, same in by_case.items()), key=_worst_first)


def _case(case_key: CaseKey, findings: CaseFindings, attendance: Attendance) -> Case:
    rounds = sorted(round_index for round_index in findings.confidences if round_index is not None)
    newest = findings.newest
    if newest is None:
        raise ValueError("A case has at least one finding.")
    issue, node, group, layer = case_key
    attended = attendance.get(node) or attendance[None]
    after = len(attended) - bisect_right(attended, rounds[-1]) if rounds else 0
    return Case(
        issue=issue,
        node=node,
        group=group,
        layer=layer,
        severity=findings.severity,
        confidence=newest.confidence,
        since=findings.since,
        first=rounds[0] if rounds else None,
        last=rounds[-1] if rounds else None,
        rounds=tuple(rounds),
        confidences=tuple(findings.confidences[round_index] for round_index in rounds),
        still_there=after <= QUIET_ROUNDS,
        returned=sum(_between(attended, earlier, later) > QUIET_ROUNDS for earlier, later in pairwise(rounds)),
        newest=newest,
    )


def _between(rounds: Sequence[int], first: int, last: int) -> int:
    """Return how many of these rounds lie strictly between `first` and `last`."""
    return max(0, bisect_left(rounds, last) - bisect_right(rounds, first))


def _since(finding: Finding) -> int | None:
    since = finding.evidence.get("since")
    return since if isinstance(since, int) else finding.where.round


def severity_rank(severity: str) -> int:
    """Return the rank of a severity: 0 for the worst; unknown severities come last."""
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)


def is_trouble(case: Case) -> bool:
    """Return whether a case counts as a problem for commands that judge a run; notes do not."""
    return case.severity in ("critical", "warning")


def _worst_first(case: Case) -> tuple[int, float, int]:
    return severity_rank(case.severity), -case.confidence, case.first if case.first is not None else -1
