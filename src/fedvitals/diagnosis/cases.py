# SPDX-License-Identifier: Apache-2.0
"""Group findings into cases: one case per problem, with its history, its alternatives and its consequences.

A detector reports a problem again in every round in which it sees it, and several detectors may have different names
for the same problem. Findings of one issue and place are a strand; strands about the training of one client (or one
group) that overlap in time are one case. It is named after the best-supported issue; the others are its alternatives. A
case of the whole run that a lost model explains is listed under the case of the client that lost it.

A finding after more than `QUIET_ROUNDS` participations without one does not open a new case; it counts as a return.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedvitals import html_display as html
from fedvitals.certainty import certainty
from fedvitals.diagnosis.evidence.attendance import SERVER
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF
from fedvitals.diagnosis.issues.table import ISSUES_BY_CODE, SEVERITIES, Issue, how_sure
from fedvitals.protocols import History, Node
from fedvitals.records import Finding

QUIET_ROUNDS = 5  # rounds with the node but without a finding, after which a new finding counts as a return
UNTIL_BACK = ("DROP_OUT",)  # issues of absent clients: reported in every round until the client is back
OF_ONE_ROUND = ("STALLED",)  # issues that end with their round
UNLIKELY = 0.05  # alternatives below this probability are left out
MODEL_LOST = ("NAN_WEIGHTS", "NAN_UPDATE", "NAN_GRADIENT")
# Issues of a client that can lose the model, if certain enough.
DAMAGING, CERTAIN = ("BYZANTINE", "WRONG_LEARNING_RATE", "NAN_UPDATE", "NAN_GRADIENT"), 0.9
LOST = ("DIVERGENCE", "WEIGHT_EXPLOSION", "NAN_WEIGHTS", "EXPLODING_GRADIENT")
ONLY_UNUSUAL = frozenset({"GRADIENT_SCALE"})  # issues that say that a number is unusual, not what it harms
# Issues of the whole run that follow from a model that is being lost.
CONSEQUENCES = frozenset(
    {
        *("NAN_WEIGHTS", "NAN_GRADIENT", "WEIGHT_EXPLOSION", "DIVERGENCE", "OSCILLATION", "PLATEAU", "SLOW_PROGRESS"),
        *("CLIENT_DRIFT", "EXPLODING_GRADIENT", "VANISHING_GRADIENT", "DEAD_UNITS", "SATURATED_UNITS"),
        "GRADIENT_SCALE",
        *("GROUP_LEFT_BEHIND", "BATCH_NORM_STATISTICS", "POOR_INITIALISATION", "OVERFITTING"),
    }
)
# Issues of a client that inputs on another scale explain, if these were measured on its samples.
OF_INPUTS, INPUTS = frozenset({"BATCH_NORM_STATISTICS"}), frozenset({"INPUT_SCALE", "INPUT_NOISE"})
Attendance = Mapping[Node | None, Sequence[int]]
"""The rounds in which each node took part, ascending; None: all rounds of the run."""

CaseKey = tuple[str, Node | None, str | None, str | None]
CASE_TITLES = ("severity", "where", "what", "sure", "when")  # the columns a display shows of a case, see `case_cells`


@dataclass(frozen=True, slots=True)
class Case:
    """One problem of a client, a group, a layer or the whole run, over all rounds in which it was found."""

    issue: str  # the best supported
    node: Node | None
    group: str | None
    layer: str | None
    severity: str  # the worst of its findings
    confidence: float  # of the newest finding
    since: int | None  # when it began, as far as known
    first: int | None  # the round of the first finding
    last: int | None  # the round of the last finding
    rounds: tuple[int, ...]  # with a finding
    confidences: tuple[float, ...]  # in these rounds
    still_there: bool  # seen in the node's last participation; for a group or the run, in the last rounds
    returned: int  # how often it came back after more than QUIET_ROUNDS
    newest: Finding  # the newest of the best-supported issue
    alternatives: tuple[tuple[str, float], ...] = ()  # other issues that it may be, with their probabilities
    keys: tuple[CaseKey, ...] = ()  # of its strands, in order of arrival
    cause: CaseKey | None = None  # the key of the case that caused it

    @property
    def key(self) -> CaseKey:
        """Return a key that stays the same when another issue becomes the best supported."""
        return self.keys[0] if self.keys else (self.issue, self.node, self.group, self.layer)

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

    @property
    def alternatives_in_words(self) -> str:
        """Return the alternatives in words: «or LABEL_NOISE 21 %, BYZANTINE 6 %»; empty if there are none."""
        others = ", ".join(f"{issue} {certainty(chance)}" for issue, chance in self.alternatives)
        return f"or {others}" if others else ""

    def __str__(self) -> str:
        what = f"{self.issue}, {how_sure(self.issue, self.confidence)}; {self.timeline}"
        what += f"; {self.alternatives_in_words}" if self.alternatives else ""
        return f"{'  follows from it: ' if self.cause else ''}{self.severity}: {self.newest.message} ({what})"

    def _repr_html_(self) -> str:
        return html.display(html.table(CASE_TITLES, [case_cells(self)]))


def case_cells(case: Case) -> tuple[str, ...]:
    """Return a case as the cells of a table with `CASE_TITLES`."""
    return (
        case.severity,
        case.place,
        f"{case.issue}: {case.newest.message}",
        how_sure(case.issue, case.confidence),
        case.timeline,
    )


def record_attendance(
    attendance: dict[Node | None, list[int]], history: History, round_index: int, with_findings: Container[Node | None]
) -> None:
    """Add a round to the attendance of every node that trained or sent an update in it.

    For a node without findings only its newest round is kept, as cases only count the rounds after a finding.
    """
    for node in (None, *{**history.latest("steps", round_index), **history.latest("update.norm", round_index)}):
        if node is None or node in with_findings:
            attendance.setdefault(node, []).append(round_index)
        else:
            attendance[node] = [round_index]


def key_of(finding: Finding) -> CaseKey:
    """Return the key that findings of one case share. A client keeps its cases when it moves to another cluster."""
    where = finding.where
    return finding.issue, where.node, where.group if where.node is None else None, where.layer


class CaseFindings:
    """What a case needs of its findings, of which there may be one per round; only the newest is kept whole.

    A server holds it for as long as someone views the run: 16 bytes a round.
    """

    def __init__(self) -> None:
        self.rounds, self.confidences = array("q"), array("d")  # ascending; the highest of each round
        self._outside: float | None = None  # the highest confidence of findings that belong to no round
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
        best = self._raise(round_index, finding.confidence)
        held = None if self.newest is None else self.newest.where.round
        if held is None or (best and round_index is not None and round_index >= held):
            self.newest = finding

    def _raise(self, round_index: int | None, confidence: float) -> bool:
        """Record a confidence; return whether it is the highest of its round so far."""
        if round_index is None:
            best = self._outside is None or confidence >= self._outside
            self._outside = confidence if best else self._outside
            return best
        place = bisect_left(self.rounds, round_index)  # usually at the end
        if place == len(self.rounds) or self.rounds[place] != round_index:
            self.rounds.insert(place, round_index)
            self.confidences.insert(place, confidence)
            return True
        best = confidence >= self.confidences[place]
        self.confidences[place] = confidence if best else self.confidences[place]
        return best


def group_findings(
    findings: Iterable[Finding], known: dict[CaseKey, CaseFindings] | None = None
) -> dict[CaseKey, CaseFindings]:
    """Return what each case needs of these findings, given in order of arrival; added to `known`."""
    by_case = {} if known is None else known
    for finding in findings:
        by_case.setdefault(key_of(finding), CaseFindings()).add(finding)
    return by_case


def cases(findings: Iterable[Finding], attendance: Attendance | None = None) -> list[Case]:
    """Return one case per problem, worst first: by severity, then confidence, then first round.

    The consequences of a case follow right after it. Without `attendance`, every node counts as present in every round
    up to that of the newest finding.
    """
    return cases_from(group_findings(findings), attendance)


def cases_from(by_case: Mapping[CaseKey, CaseFindings], attendance: Attendance | None = None) -> list[Case]:
    """Return the same for findings that are already grouped."""
    present = dict(attendance or {})
    last = max((same.rounds[-1] for same in by_case.values() if same.rounds), default=-1)
    present.setdefault(None, range(last + 1))
    strands = {key: _strand(key, same, present) for key, same in by_case.items()}
    return _causes_first([_merged(same, present) for same in _overlapping(strands, present)])


def _strand(case_key: CaseKey, findings: CaseFindings, attendance: Attendance) -> Case:
    """Return the findings of one issue and place as a case."""
    rounds, newest = tuple(findings.rounds), findings.newest
    if newest is None:
        raise ValueError("A case has at least one finding.")
    issue, node, group, layer = case_key
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
        rounds=rounds,
        confidences=tuple(findings.confidences),
        still_there=_still_there(issue, node, rounds, attendance) and not newest.evidence.get("over"),
        returned=_returns(node, rounds, attendance),
        newest=newest,
        keys=(case_key,),
    )


def _attended(node: Node | None, attendance: Attendance) -> Sequence[int]:
    return attendance.get(node) or attendance[None]


def _still_there(issue: str, node: Node | None, rounds: Sequence[int], attendance: Attendance) -> bool:
    """Return whether a problem was seen when its node last took part.

    A problem of the whole run must have been seen in one of its last rounds, because some signs are measured seldom.
    """
    attended = _attended(None if issue in UNTIL_BACK else node, attendance)
    after = len(attended) - bisect_right(attended, rounds[-1]) if rounds else 0
    if issue in OF_ONE_ROUND:
        return after == 0
    return after == 0 or (node in (None, SERVER) and after <= QUIET_ROUNDS)


def _returns(node: Node | None, rounds: Sequence[int], attendance: Attendance) -> int:
    attended = _attended(node, attendance)
    return sum(_between(attended, earlier, later) > QUIET_ROUNDS for earlier, later in pairwise(rounds))


# -- one case per problem ---------------------------------------------------------------------------------------------


def _overlapping(strands: Mapping[CaseKey, Case], attendance: Attendance) -> list[list[Case]]:
    """Group strands into problems: about the training of the same client or group, at the same time.

    System failures (crashes, time-outs), findings of users' own detectors, and notes stay cases of their own.
    """
    together: list[list[Case]] = []
    by_subject: dict[tuple[Node | None, str | None], list[Case]] = {}
    for strand in strands.values():
        facts = strand.issue_entry.family in ("system", "user") or not is_trouble(strand)
        if facts or strand.node == SERVER or (strand.node, strand.group) == (None, None):
            together.append([strand])
        else:
            by_subject.setdefault((strand.node, strand.group), []).append(strand)
    for (node, _), same in by_subject.items():
        attended, last = _attended(node, attendance), None
        for strand in sorted(same, key=_first_round):
            if last is None or _between(attended, last, _first_round(strand)) > QUIET_ROUNDS:
                together.append([])
            together[-1].append(strand)
            last = max(last or 0, strand.last or 0)
    order = {key: place for place, key in enumerate(strands)}
    return [sorted(same, key=lambda strand: order[strand.key]) for same in together]


def _merged(strands: Sequence[Case], attendance: Attendance) -> Case:
    """Return the strands of one problem as one case."""
    candidates = _unexplained(strands)
    chances = _chances(candidates)
    heading = min(
        candidates, key=lambda strand: (not strand.still_there, _rank_now(strand), -chances.get(strand.issue, 0))
    )
    others = sorted(((i, p) for i, p in chances.items() if i != heading.issue and p >= UNLIKELY), key=lambda o: -o[1])
    rounds, confidences = heading.rounds, heading.confidences
    if len(strands) > 1:
        highest: dict[int, float] = {}
        for strand in strands:
            for round_index, confidence in zip(strand.rounds, strand.confidences, strict=True):
                highest[round_index] = max(confidence, highest.get(round_index, 0.0))
        rounds = tuple(sorted(highest))
        confidences = tuple(highest[round_index] for round_index in rounds)
    return replace(
        heading,
        severity=min((strand.severity for strand in strands), key=severity_rank),
        since=min((strand.since for strand in strands if strand.since is not None), default=None),
        first=rounds[0] if rounds else None,
        last=rounds[-1] if rounds else None,
        rounds=rounds,
        confidences=confidences,
        still_there=any(strand.still_there for strand in strands),
        returned=_returns(heading.node, rounds, attendance),
        alternatives=tuple(others),
        keys=tuple(strand.key for strand in strands),
    )


def _unexplained(strands: Sequence[Case]) -> Sequence[Case]:
    """Return the strands without those that the measured inputs of the client explain."""
    measured = any(strand.issue in INPUTS and strand.still_there and _is_of_data(strand.newest) for strand in strands)
    return [s for s in strands if s.issue not in OF_INPUTS or s.confidence == 1] if measured else strands


def _is_of_data(finding: Finding) -> bool:
    views = finding.evidence.get("views")
    return isinstance(views, list | tuple) and "data" in views


def _chances(strands: Sequence[Case]) -> dict[str, float]:
    """Return the probability of each issue that a problem may be.

    Rules count with their confidence. The learnt evidence gives the chances of all kinds; only its newest finding
    counts, because it supersedes the earlier ones.
    """
    seen_last = [strand for strand in strands if strand.still_there] or strands
    weights: dict[str, float] = {}
    learnt = [strand for strand in seen_last if _causes(strand)]
    for strand in seen_last:
        if strand not in learnt:
            weights[strand.issue] = max(strand.confidence, weights.get(strand.issue, 0.0))
    if learnt:
        newest = max(learnt, key=_last_round)
        for issue, chance in _causes(newest):
            weights[issue] = weights.get(issue, 0.0) + newest.confidence * chance
    total = sum(weights.values())
    return {issue: weight / total for issue, weight in weights.items()} if total > 0 else {}


def _causes(strand: Case) -> list[tuple[str, float]]:
    """Return the issues and chances given by the newest finding of learnt evidence; empty for a rule."""
    causes = strand.newest.evidence.get("causes")
    known = []
    for cause in causes if isinstance(causes, list | tuple) else ():
        kind, chance = cause if isinstance(cause, list | tuple) and len(cause) == 2 else (None, None)
        if kind in ISSUE_OF and isinstance(chance, int | float):
            known.append((ISSUE_OF[str(kind)], float(chance)))
    return known


# -- what follows from what -------------------------------------------------------------------------------------------


def _causes_first(every_case: Sequence[Case]) -> list[Case]:
    """Return the cases worst first, each consequence right after its cause.

    A case that causes a critical case of the run is critical itself, because it is losing the model.
    """
    culprits = [case for case in every_case if is_trouble(case) and _may_lose_the_model(case)]
    following: dict[CaseKey, list[Case]] = {}
    for case in sorted(every_case, key=_worst_first):
        cause = min((c for c in culprits if _follows(case, c)), key=_first_to_lose, default=None)
        if cause is not None:
            following.setdefault(cause.key, []).append(replace(case, cause=cause.key))
    below = {case.key for same in following.values() for case in same}
    roots = [
        replace(case, severity="critical") if _loses_the_model(following.get(case.key, ())) else case
        for case in every_case
        if case.key not in below
    ]
    return [later for case in sorted(roots, key=_worst_first) for later in _with_consequences(case, following)]


def _may_lose_the_model(case: Case) -> bool:
    if _of_run(case):
        return case.issue == "NAN_WEIGHTS"
    critical = case.severity == "critical" and case.issue_entry.family != "system"  # a crash does not lose the model
    return critical or (case.issue in DAMAGING and case.confidence > CERTAIN)


def _loses_the_model(consequences: Sequence[Case]) -> bool:
    return any(_of_run(case) and case.severity == "critical" for case in consequences)


def _with_consequences(case: Case, following: Mapping[CaseKey, Sequence[Case]]) -> list[Case]:
    return [case, *(later for below in following.get(case.key, ()) for later in _with_consequences(below, following))]


def _follows(case: Case, cause: Case) -> bool:
    """Return whether a case is a consequence of one that loses the model: it began no earlier, and during it."""
    began, lost = _first_round(case), _first_round(cause)
    if case.key == cause.key or not lost <= began <= _last_round(cause) + QUIET_ROUNDS:
        return False
    if not _of_run(case):  # every client that trains a model of NaN looks odd
        learnt = case.issue_entry.family == "client" and not case.issue_entry.exact
        return learnt and cause.issue in MODEL_LOST and began > lost
    if case.issue == "NAN_WEIGHTS":
        named = {suspect.node for suspect in case.newest.suspects}
        return not _of_run(cause) and (not named or cause.node in named)
    return case.issue in (CONSEQUENCES if cause.severity == "critical" else LOST)


def _of_run(case: Case) -> bool:
    return case.node in (None, SERVER) and case.group is None


def _first_to_lose(case: Case) -> tuple[bool, int, float]:
    return _of_run(case), _first_round(case), -case.confidence


def _first_round(case: Case) -> int:
    since = case.since if case.since is not None else case.first
    return -1 if since is None else since


def _last_round(case: Case) -> int:
    return -1 if case.last is None else case.last


def _rank_now(case: Case) -> int:
    return severity_rank(case.newest.severity)


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


def harm_rank(case: Case) -> tuple[bool, bool, float]:
    """Return the rank among equally severe cases: harm to the learning comes before failures of the system, and both
    before a number that is only unusual; then the surest.
    """
    return case.issue in ONLY_UNUSUAL, case.issue_entry.family == "system", -case.confidence


def _worst_first(case: Case) -> tuple[int, bool, bool, float, int]:
    return severity_rank(case.severity), *harm_rank(case), case.first if case.first is not None else -1


def notes_in_words(count: int) -> str:
    """Return the line that replaces notes, which are shown on request only."""
    return f"{count} note{'s are' if count != 1 else ' is'} not shown"
