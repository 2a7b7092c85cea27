# SPDX-License-Identifier: Apache-2.0
"""The results of one run of the fault bank, and its judgement against the truth: hits, misses, false accusations.

A hit is the right issue on the right node within five participations of the onset (for the whole run: five rounds).
Delays count from 0, the first participation in which the fault occurs; for an intermittent fault, only those in which
it occurs count. Alarms of severity «note» do not count.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from fedvitals_studies.faultbank.accepted import (
    FAMILY_OF,
    OF_THE_WHOLE,
    PAIRED,
    accepted,
    accuses,
    cause_is_right,
    cause_name,
    family_of_cause,
)

WITHIN = 5  # participations (rounds, for the whole run) after the onset
EXCHANGING = frozenset({"rings", "hierarchical"})  # inside a group all clients train on what the culprit sent
SERVER = "server"


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, according to the truth."""

    kind: str
    issue: str
    family: str
    strikes: str  # «clients», «server», «run»
    nodes: Sequence[str]
    since: int
    until: int | None = None
    strength: float | None = None
    affected: float | None = None  # share of the culprit's samples
    every: int | None = None  # it occurs in one of this many rounds
    ramp: int | None = None  # rounds over which it grows

    @property
    def whole(self) -> bool:
        return self.strikes != "clients" or self.kind in OF_THE_WHOLE

    @property
    def accepted(self) -> frozenset[str]:
        return accepted(self.kind, self.issue)


class Alarm(msgspec.Struct, frozen=True, array_like=True):
    """A method's alarm in one round. It is repeated in every round in which the trouble persists."""

    round: int
    issue: str
    node: str | None
    group: str | None
    confidence: float
    severity: str
    view: str | None = None  # «telemetry», «server»: which one raised it
    causes: Sequence[tuple[str, float]] = ()
    message: str | None = None  # only kept for runs of a matrix


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its properties, what was planted, every method's alarms."""

    case: str
    bank: str
    domain: str
    dataset: str
    model: str
    topology: str
    partition: str
    clients: int
    participation: float
    rounds: int
    faults: Sequence[Planted]
    lying: bool
    accuracy: Sequence[float]  # of the global model, per round
    damage: float | None  # percentage points of accuracy below the clean twin, at the end
    present: Mapping[str, Sequence[int]]  # rounds in which a client was called, ascending, whether it answered or not
    groups: Mapping[str, str]
    seconds_rounds: float
    methods: Mapping[str, Sequence[Alarm]]
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    probabilities: Sequence[tuple[float, bool]] = ()  # stated, and whether it was so
    seconds_detectors: float = 0.0
    attack: float | None = None  # success of a backdoor at the end: share of triggered samples classified as its target
    client_rounds: int = 0  # that detectors examined
    not_judged: int = 0  # of these (`diagnosis.abstentions`)
    level: int | None = None  # the privacy level at which it was examined again; None: with all that was recorded
    transformation: str | None = None  # of updates on their way, with «untold» if the monitor was not told
    control: str | None = None  # the group of a healthy run that is no run's twin

    @property
    def clean(self) -> bool:
        return not self.faults

    @property
    def plain(self) -> bool:
        """Whether it counts in the tables of all runs: neither with lies nor examined at a lower privacy level."""
        return not self.lying and self.level is None


@dataclass(frozen=True, slots=True)
class Target:
    """What was to be found: a culprit, or (node None) a trouble of the whole run; and the result."""

    fault: Planted
    node: str | None
    delay: float = math.inf  # until the right issue was named there; infinite: never
    located: float = math.inf  # until the node was named, for any issue; only for a culprit
    view: str | None = None  # of the alarm that hit first
    cause: str | None = None  # for a culprit that was found: as named at the end of the window

    @property
    def hit(self) -> bool:
        return self.delay <= WITHIN

    @property
    def is_located(self) -> bool:
        return self.located <= WITHIN

    @property
    def cause_right(self) -> bool:
        return self.cause is not None and cause_is_right(self.cause, self.fault.kind, self.fault.issue)

    @property
    def family_right(self) -> bool:
        """Whether the named cause is the right one, or at least of the fault's family."""
        if self.cause is None:
            return False
        return self.cause_right or family_of_cause(self.cause) == FAMILY_OF.get(self.fault.kind, self.fault.family)


@dataclass(frozen=True, slots=True)
class Raised:
    """One case as a user sees it: the same issue at the same place, until it has been silent for long."""

    issue: str
    node: str | None
    group: str | None  # only if no node is named
    rounds: Sequence[int]
    verdict: str = "false"  # «true», «false»; «unjudged»: a trouble of the whole after an onset elsewhere
    right: bool = False  # also the right issue

    @property
    def wrong(self) -> bool:
        """Whether it counts against precision if a wrong name on the right client counts as wrong."""
        return self.verdict != "unjudged" and not self.right


@dataclass(frozen=True, slots=True)
class Judgement:
    """One method on one run."""

    outcome: Outcome
    targets: Sequence[Target]
    raised: Sequence[Raised]
    culprits: int  # clients with a fault
    culprits_found: int  # of them, accused at any time after the onset
    wrongly_accused: int  # clients and groups
    healthy_client_rounds: int
    accused_client_rounds: int  # of the healthy ones
    top: int | None  # healthy clients that rank before the best-ranked culprit; None: nothing to rank

    def only(self, targets: Sequence[Target]) -> Judgement:
        """Return the judgement restricted to some of its targets."""
        return replace(self, targets=targets)


def judge(outcome: Outcome, method: str) -> Judgement:
    """Judge a method's alarms on a run."""
    alarms = [_placed(alarm, outcome) for alarm in outcome.methods.get(method, ()) if alarm.severity != "note"]
    alarms.sort(key=lambda alarm: alarm.round)
    raised = [_verdict(case, outcome) for case in _cases(alarms, outcome)]
    culprits = {node for fault in outcome.faults if not fault.whole for node in fault.nodes}
    blamed_groups = {case.group for case in raised if case.group and case.verdict == "true"}
    blamed = {case.node for case in raised if case.node and case.verdict == "true"}
    blamed |= {node for node in culprits if outcome.groups.get(node) in blamed_groups}
    wrong = {(case.node, case.group) for case in raised if case.verdict == "false" and (case.node or case.group)}
    healthy, accused = _client_rounds(outcome, raised)
    return Judgement(
        outcome,
        tuple(_target(fault, node, alarms, raised, outcome) for fault in outcome.faults for node in _struck(fault)),
        raised,
        len(culprits),
        len(culprits & blamed),
        len(wrong),
        healthy,
        accused,
        _rank(outcome.scores.get(method), culprits),
    )


def _struck(fault: Planted) -> Sequence[str | None]:
    return (None,) if fault.whole else fault.nodes


def _placed(alarm: Alarm, outcome: Outcome) -> Alarm:
    """Return the alarm at one place: a node, else a group, else the whole run. An edge named as a node is its group."""
    node, group = alarm.node, alarm.group
    if node == SERVER:
        node, group = None, None
    elif node is not None and node not in outcome.present and node in set(outcome.groups.values()):
        node, group = None, node
    elif node is not None:
        group = None
    return msgspec.structs.replace(alarm, node=node, group=group)


def _cases(alarms: Sequence[Alarm], outcome: Outcome) -> Iterator[Raised]:
    """Yield alarms grouped to cases. One that returns after more than five silent participations is a new one."""
    places: dict[tuple[str, str | None, str | None], list[int]] = {}
    for alarm in alarms:
        places.setdefault((alarm.issue, alarm.node, alarm.group), []).append(alarm.round)
    for (issue, node, group), rounds in places.items():
        lasting = [rounds[0]]
        for at in rounds[1:]:
            if participations(outcome, node, lasting[-1] + 1, at - 1) > WITHIN:
                yield Raised(issue, node, group, tuple(lasting))
                lasting = []
            lasting.append(at)
        yield Raised(issue, node, group, tuple(lasting))


def participations(outcome: Outcome, node: str | None, first: int, last: int) -> int:
    """Return in how many of these rounds (both included) the node was called; for the whole run, their number.

    A client that was never called again is waited for in rounds.
    """
    called = outcome.present.get(node, ()) if node is not None else ()
    if not called or called[-1] < first:
        return max(0, last - first + 1)
    return max(0, bisect_right(called, last) - bisect_left(called, first))


def _strikes(fault: Planted, node: str | None, last: int, outcome: Outcome) -> int:
    """Return how often the fault has occurred by this round: the participations since its onset in which it acts."""
    if fault.every is None:
        return participations(outcome, node, fault.since, last)
    called = outcome.present.get(node, ()) if node is not None else range(outcome.rounds)
    return sum(fault.since <= at <= last and (at - fault.since) % fault.every == 0 for at in called)


def _acts(fault: Planted, node: str | None, at: int, outcome: Outcome) -> bool:
    """Whether a case that begins in this round may be about this fault: it has begun, and is not long over."""
    if at < fault.since:
        return False
    return fault.until is None or participations(outcome, node, fault.until + 1, at) <= WITHIN


def _names(fault: Planted, case: Raised, outcome: Outcome) -> bool:
    """Whether the case names a culprit of this fault, itself or as its group."""
    if case.node is not None:
        return case.node in fault.nodes
    members = {outcome.groups.get(node) for node in fault.nodes}
    return case.group is not None and case.group in members


def _verdict(case: Raised, outcome: Outcome) -> Raised:
    if not outcome.faults:
        return case
    acting = [fault for fault in outcome.faults if _acts(fault, case.node, case.rounds[0], outcome)]
    for_all = [fault for fault in acting if fault.whole]
    named = [fault for fault in acting if fault.strikes == "clients" and _names(fault, case, outcome)]
    # A group only counts as an answer if its members train on one another's work: otherwise the client can be named.
    precise = named if case.group is None or outcome.topology in EXCHANGING else []
    answered = any(case.issue in fault.accepted for fault in (*precise, *for_all))
    if precise or answered:
        return replace(case, verdict="true", right=answered)
    of_the_whole = case.node is None and case.group is None
    paired = any(PAIRED.get(fault.kind) == case.issue for fault in acting)
    if acting and (of_the_whole or named or paired or (for_all and not accuses(case.issue))):
        return replace(case, verdict="unjudged")
    return case


def _target(
    fault: Planted, node: str | None, alarms: Sequence[Alarm], raised: Sequence[Raised], outcome: Outcome
) -> Target:
    """Return when it was found. Only cases that began after the onset count: an earlier accusation is no detection."""
    begun = {(case.issue, case.node, case.group, at) for case in raised if case.verdict == "true" for at in case.rounds}
    delay, located, view = math.inf, math.inf, None
    within: list[Alarm] = []
    for alarm in alarms:
        if (alarm.issue, alarm.node, alarm.group, alarm.round) not in begun or alarm.round < fault.since:
            continue
        here = (
            node is None or alarm.node == node or (alarm.group is not None and alarm.group == outcome.groups.get(node))
        )
        if not here:
            continue
        after = max(0, _strikes(fault, node, alarm.round, outcome) - 1)
        if node is not None:
            located = min(located, after)
        if alarm.issue in fault.accepted and after < delay:
            delay, view = after, alarm.view
        if after <= WITHIN:
            within.append(alarm)
    return Target(fault, node, delay, located, view, None if node is None else _cause(within))


def _cause(alarms: Sequence[Alarm]) -> str | None:
    """Return the cause in the newest of these alarms; of several in one round, in the most certain."""
    if not alarms:
        return None
    newest = max(alarms, key=lambda alarm: (alarm.round, alarm.confidence))
    likeliest = max(newest.causes, key=lambda cause: cause[1], default=(newest.issue, 1.0))
    return cause_name(likeliest[0])


def _client_rounds(outcome: Outcome, raised: Sequence[Raised]) -> tuple[int, int]:
    """Return how many client-rounds were healthy, and in how many of them the client was accused."""
    clients = [fault for fault in outcome.faults if fault.strikes == "clients"]
    struck = {node for fault in clients for node in fault.nodes}
    healthy = {node: frozenset(called) for node, called in outcome.present.items()}
    for node in struck & healthy.keys():
        ill = {at for at in healthy[node] for f in clients if node in f.nodes and _acts(f, node, at, outcome)}
        healthy[node] -= ill
    accused: set[tuple[str, int]] = set()
    for case in raised:
        if case.verdict == "false" and (case.node or case.group):
            members = [case.node] if case.node else [n for n, group in outcome.groups.items() if group == case.group]
            accused |= {(node, at) for node in members for at in case.rounds if at in healthy.get(node, ())}
    return sum(map(len, healthy.values())), len(accused)


def _rank(scores: Mapping[str, float] | None, culprits: set[str]) -> int | None:
    """Return how many healthy clients are suspected at least as much as the most suspected culprit; ties count."""
    if not scores or not culprits or not set(scores) - culprits:
        return None
    known = {node: -math.inf if math.isnan(score) else score for node, score in scores.items()}
    best = max((known.get(node, -math.inf) for node in culprits), default=-math.inf)
    return sum(score >= best for node, score in known.items() if node not in culprits)
