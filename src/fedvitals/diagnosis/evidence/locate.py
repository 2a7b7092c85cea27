# SPDX-License-Identifier: Apache-2.0
"""Who: which client is faulty, without test data and without being told how many; or that nobody is.

An equality comes first: whether a client sent what it trained. Then evidence, added up over the rounds (`course`), in
views that look side by side: one believes what clients tell of their training, one only what they sent, so that a
client gains nothing by lying in its telemetry; and one looks for a single flipped class, which the others overlook.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedvitals.diagnosis.detectors.copies import duplicates, free_riders
from fedvitals.diagnosis.evidence.attendance import groups_of
from fedvitals.diagnosis.evidence.fault_kinds import ISSUE_OF, WORDS
from fedvitals.diagnosis.evidence.log_odds import Model, shipped
from fedvitals.diagnosis.evidence.trend import CAP, Course
from fedvitals.diagnosis.evidence.update_mismatch import mismatch
from fedvitals.diagnosis.evidence.vital_signs import SIGNS, TELEMETRY
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

WHOLE = 3  # the fewest members of a group that is accused as one
SURE, LIKELY = 0.9, 0.5  # probabilities of a critical finding and of a warning; below, it is a note
CERTAIN = 0.99  # of an equality that does not hold: telemetry itself may be broken
LEARNT = 0.35  # accuracy of the received model under which wrong labels cannot be seen
UNLIKE = 4.0  # score of a client that is different, whether or not that is a fault


class Locator:
    """A detector. `false_alarms`: how many per 100 healthy rounds are allowed, over all rules together."""

    __name__ = "locate"

    def __init__(self, false_alarms: float = 1.0, model: Model | None = None) -> None:
        self._allowed = false_alarms
        self._model = model
        # What the rounds before have told, by history: only so that a long run is not read anew in every round.
        self._courses: weakref.WeakKeyDictionary[History, Course] = weakref.WeakKeyDictionary()

    def __call__(self, history: History, round_index: int) -> Iterator[Finding]:
        course = self.course(history, round_index)
        if course.round != round_index or course.scores is None:
            return
        elsewhere = {found.where.node for rule in (duplicates, free_riders) for found in rule(history, round_index)}
        told = mismatch(history, round_index)
        found = []
        for place, node in enumerate(course.scores.nodes):
            if node in course.named and node not in elsewhere:
                exact = node in course.swapped
                found.append(_exact(course, place, told[node]) if exact else _likely(course, place))
        yield from by_group(found, course.scores.nodes, groups_of(history, round_index))

    def course(self, history: History, round_index: int) -> Course:
        """The run up to this round: gone on with where it was left, or read from its beginning."""
        course = self._courses.get(history)
        if course is None or course.round is None or course.round > round_index:
            course = self._courses[history] = Course(self._model or shipped(), self._allowed)
        for number in history.rounds():
            if number <= round_index and (course.round is None or number > course.round):
                course.take(history, number)
        return course


def _exact(course: Course, place: int, distance: float) -> Finding:
    """Of a client that did not send what it trained; what it sent instead is told by what that looks like."""
    node = course.scores.nodes[place] if course.scores is not None else ""
    since = course.swapped[node]
    text = f"{node} does not send what it trained, since round {since}: most likely {WORDS[course.named[node]]}."
    numbers = [Number("sent against trained", distance, 0.0, of="limit"), *_numbers(course, place, telemetry=False)[:3]]
    return _said(course, node, text, CERTAIN, since, numbers, {"views": ["exact"]})


def _likely(course: Course, place: int) -> Finding:
    """Of a client against which there is enough evidence."""
    node = course.scores.nodes[place] if course.scores is not None else ""
    fired = course.fired(node)
    since = min(course.views[name].began[node] for name in fired)
    kind = WORDS[course.named[node]]
    text = f"{node} is unlike its peers since round {since}: if something is wrong, most likely {kind}."
    evidence = {
        "views": fired,
        "evidence": {name: round(course.views[name].totals[node], 2) for name in fired},
        "limit": {name: round(course.limits[name], 2) for name in fired},
    }
    numbers = _numbers(course, place, telemetry=fired != ["server"])
    return _said(course, node, text, course.model.probability(course.totals(node)), since, numbers, evidence)


def _said(
    course: Course,
    node: Node,
    text: str,
    probability: float,
    since: int,
    numbers: Sequence[Number],
    more: Mapping[str, Any],
) -> Finding:
    kind, chances = course.named[node], course.chances[node]
    order = sorted(chances, key=lambda name: (name != kind, -chances[name]))[:4]
    return finding(
        ISSUE_OF[kind],
        course.round or 0,
        text,
        confidence=probability,
        since=since,
        node=node,
        severity="critical" if probability > SURE else "warning" if probability >= LIKELY else "note",
        numbers=numbers,
        suspects=[Suspect(node, probability, WORDS[kind])],
        more={"verdict": "faulty", "causes": [[name, round(chances[name], 3)] for name in order], **more},
    )


def by_group(found: Sequence[Finding], present: Sequence[Node], groups: Mapping[Node, str]) -> Iterator[Finding]:
    """Members' findings, but one for the group where nearly all of an edge, cluster or ring are accused.

    A ring passes models on, so one ill member makes the others look ill; and an edge may be ill as a whole. Not where
    the accused are everywhere: then it is no matter of groups.
    """
    members: dict[str, list[Node]] = {}
    for node in present:
        if node in groups:
            members.setdefault(groups[node], []).append(node)
    accused = {one.where.node: one for one in found}
    ill = [
        group
        for group, nodes in members.items()
        if len(nodes) >= WHOLE and sum(node in accused for node in nodes) >= len(nodes) - 1
    ]
    ill = ill if 2 * len(ill) <= len(members) else []
    for one in found:
        if groups.get(one.where.node or "") not in ill:
            yield one
    for group in ill:
        own = [accused[node] for node in members[group] if node in accused]
        worst = max(own, key=lambda one: one.confidence)
        text = f"Nearly all of {group} are unlike the others: {', '.join(one.where.node or '' for one in own)}."
        suspects = sorted((s for one in own for s in one.suspects), key=lambda s: -s.score)
        yield replace(
            worst,
            where=replace(worst.where, node=None, group=group),
            message=f"{text} {worst.message}",
            suspects=tuple(suspects),
        )


def _numbers(course: Course, place: int, *, telemetry: bool) -> list[Number]:
    """The signs that stand out most, over the last participations, with what is usual among the peers."""
    assert course.scores is not None  # noqa: S101 - there is a finding, so there are scores
    assert course.vitals is not None  # noqa: S101
    lasting, values = course.scores.lasting[place], course.vitals.values
    known = np.isfinite(values[place])
    order = [i for i in np.argsort(-np.abs(lasting)) if known[i] and (telemetry or SIGNS[i] not in TELEMETRY)]
    return [
        Number(SIGNS[i], float(values[place, i]), float(np.nanmedian(values[:, i])), float(lasting[i]))
        for i in order[:4]
    ]


# -- what is said of every client -------------------------------------------------------------------------------------

LOCATE = Locator()
DETECTORS: tuple[Detector, ...] = (LOCATE,)


def suspicion(history: History, round_index: int) -> dict[Node, float]:
    """Every client's sum of evidence, the largest of all views: the order in which to look at them."""
    course = LOCATE.course(history, round_index)
    return {node: max(course.totals(node).values()) + CAP * (node in course.swapped) for node in course.clients}


def probability(history: History, round_index: int) -> dict[Node, float]:
    """Every client's probability of being faulty, as it would be stated now."""
    course = LOCATE.course(history, round_index)
    stated = {node: course.model.probability(course.totals(node)) for node in course.clients}
    return stated | dict.fromkeys(course.swapped, CERTAIN)


def verdicts(history: History, round_index: int) -> dict[Node, str]:
    """healthy, different, not yet decidable, or faulty; of every client seen so far.

    Wrong labels show only against a model that has learnt something: before that nobody is called healthy. Whether it
    has is known by the clients' own samples, or else by the accuracy that the host told before this round. Nobody is
    called healthy either where updates are transformed on their way and evidence abstains.
    """
    course = LOCATE.course(history, round_index)
    told = [value for number, value in zip(*history.series("accuracy", None), strict=True) if number < round_index]
    learnt = course.accuracy >= LEARNT or (bool(told) and told[-1] >= LEARNT)
    decidable = learnt and not course.abstains
    said = dict.fromkeys(course.clients, "healthy" if decidable else "not yet decidable")
    if course.scores is not None and learnt:
        unlike = np.abs(course.scores.lasting).max(axis=1)
        said |= {node: "different" for node, most in zip(course.scores.nodes, unlike, strict=True) if most > UNLIKE}
    likely = [node for node in course.named if course.model.probability(course.totals(node)) >= LIKELY]
    return said | dict.fromkeys(course.named, "different") | dict.fromkeys((*likely, *course.swapped), "faulty")
