# SPDX-License-Identifier: Apache-2.0
"""Who: which client is faulty, without test data and without being told how many; or that nobody is.

Each round's evidence is added up for each client as in Page's CUSUM test: what speaks for health takes away, what
speaks for a fault adds, and who passes a limit is accused. The limits are those at which healthy runs of data and
models that the evidence was not learnt on raise as many alarms as the user allows. Views look side by side, each with
its share of that: one believes what clients tell of their training, one only what they sent, so that a client gains
nothing by lying in its telemetry; and one looks for a single flipped class, which the others overlook.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedvitals.diagnosis.attendance import groups_of
from fedvitals.diagnosis.detect_copies import duplicates, free_riders
from fedvitals.diagnosis.evidence import VIEWS, Model, features, shipped
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.kinds import AFTER_TRAINING, ISSUE_OF, WORDS
from fedvitals.diagnosis.scores import Scorer, Scores
from fedvitals.diagnosis.vitals import ABSOLUTE, SIGNS, TELEMETRY, Vitals, vitals
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect
from fedvitals.stats import Array

# Log-odds added to each round's evidence: what a single healthy-looking round takes away is limited by it.
DRIFT = {"telemetry": 1.5, "server": 1.5, "flip": 3.0}
LEAST, MOST = -3.0, 4.0  # that one round can add
CAP = 20.0  # so that a cured client is believed again before long
# Of the alarms that the user allows; they overlap, and the rest belongs to all other rules together.
SHARES = {"telemetry": 0.35, "server": 0.2, "flip": 0.1}
SMALL, PARTIAL = 12, 0.7  # clients in a cohort; share of the known clients that take part in a round
MANY = 1 / 3  # of a cohort: more than are faulty in any federation that still learns
WHOLE = 3  # the fewest members of a group that is accused as one
REMEMBERED = 6  # participations from which the kind of the fault is told
NOT_TRAINED = 0.01  # relative difference of two sizes that are equal: 0 of 323,377 healthy client-rounds had as much
SURE, LIKELY = 0.9, 0.5  # probabilities of a critical finding and of a warning; below, it is a note
UNTENABLE, PLAIN = 0.1, 0.8  # chances of the kind that was named, and of another, at which the name is changed
CERTAIN = 0.99  # of an equality that does not hold: telemetry itself may be broken
LEARNT = 0.35  # median accuracy of the received model under which wrong labels cannot be seen


@dataclass
class _View:
    totals: dict[Node, float] = field(default_factory=dict)
    began: dict[Node, int] = field(default_factory=dict)  # round since when the total has been above 0
    kinds: dict[Node, list[Array]] = field(default_factory=dict)
    named: dict[Node, str] = field(default_factory=dict)  # what each accused client is accused of
    accused: set[Node] = field(default_factory=set)
    withdrawn: int = 0  # accusations that the following rounds did not bear out


@dataclass
class _Course:
    """What is known of a run up to a round."""

    scorer: Scorer = field(default_factory=Scorer)
    views: dict[str, _View] = field(default_factory=lambda: {name: _View() for name in VIEWS})
    clients: set[Node] = field(default_factory=set)
    round: int | None = None
    rounds: int = 0
    vitals: Vitals | None = None
    scores: Scores | None = None
    accuracy: float = float("nan")  # of the received model, median over the clients
    limits: dict[str, float] = field(default_factory=dict)
    swapped: dict[Node, int] = field(default_factory=dict)  # who sent something else than it trained, and since when


class Locator:
    """A detector. `false_alarms`: how many per 100 healthy rounds are allowed, over all rules together."""

    __name__ = "locate"

    def __init__(self, false_alarms: float = 1.0, model: Model | None = None) -> None:
        self._allowed = false_alarms
        self._model = model
        # What the rounds before have told, by history: only so that a long run is not read anew in every round.
        self._courses: weakref.WeakKeyDictionary[History, _Course] = weakref.WeakKeyDictionary()

    def __call__(self, history: History, round: int) -> Iterator[Finding]:  # noqa: A002 - the domain's word
        course = self.course(history, round)
        if course.round != round or course.scores is None:
            return
        named = {found.where.node for rule in (duplicates, free_riders) for found in rule(history, round)}
        found: list[Finding] = []
        for place, node in enumerate(course.scores.nodes):
            fired = [name for name in VIEWS if node in course.views[name].accused]
            if node in course.swapped and node not in named:
                found.append(self._exact(course, place, node))
            elif fired and node not in named:
                found.append(self._finding(course, place, node, fired))
        yield from by_group(found, course.scores.nodes, groups_of(history, round))

    def course(self, history: History, round: int) -> _Course:  # noqa: A002
        """The run up to this round: gone on with where it was left, or read from its beginning."""
        known = self._courses.get(history)
        course = known if known is not None and known.round is not None and known.round <= round else _Course()
        for number in history.rounds():
            if number <= round and (course.round is None or number > course.round):
                self._take(course, history, number)
        self._courses[history] = course
        return course

    def _take(self, course: _Course, history: History, number: int) -> None:
        model = self._model or shipped()
        seen = vitals(history, number)
        course.round, course.rounds = number, course.rounds + 1
        course.clients |= set(seen.nodes)
        course.vitals, course.scores = seen, course.scorer(seen)
        if course.scores is None:
            return
        accuracy = seen.values[:, SIGNS.index("accuracy_before")]
        course.accuracy = float(np.nanmedian(accuracy)) if np.isfinite(accuracy).any() else float("nan")
        self._compare(course, seen)
        exchanged = exchanging(groups_of(history, number))
        cohort = cohort_of(len(seen.nodes), len(course.clients), exchanged=exchanged)
        for name, view in course.views.items():
            learnt, found = model.views[name], features(course.scores, seen, name)
            gained = np.clip(learnt.evidence(found) + DRIFT[name], LEAST, MOST)
            likely = learnt.likely(found)
            limit = learnt.limit(cohort, self._allowed * SHARES[name]) + self._excess(course, name)
            course.limits[name] = limit
            for place, node in enumerate(seen.nodes):
                _add(view, node, number, float(gained[place]), likely[place], limit)

    def _compare(self, course: _Course, seen: Vitals) -> None:
        """What was sent with what was trained, by the client's own telemetry: an equality, not a score.

        Where it fails for many, updates are changed on their way and everybody knows: compressed, clipped, averaged.
        """
        told = seen.absolute[:, ABSOLUTE.index("told")]
        other = np.flatnonzero(told > NOT_TRAINED)
        struck = {seen.nodes[i] for i in other} if len(other) <= max(1, MANY * np.isfinite(told).sum()) else set()
        for node in seen.nodes:
            if node in struck:
                course.swapped.setdefault(node, course.round or 0)
            else:
                course.swapped.pop(node, None)

    def _excess(self, course: _Course, name: str) -> float:
        """How much higher the limit is because this very run has shown more false alarms than are allowed."""
        allowed = self._allowed * SHARES[name] * course.rounds / 100
        return max(0.0, course.views[name].withdrawn - max(1.0, 2 * allowed))

    def _exact(self, course: _Course, place: int, node: Node) -> Finding:
        """Of a client that did not send what it trained; what it sent instead is told by what that looks like."""
        assert course.scores is not None  # noqa: S101 - asked by the caller
        assert course.vitals is not None  # noqa: S101
        kinds = (self._model or shipped()).views["telemetry"].kinds
        logs = np.sum(course.views["telemetry"].kinds[node], axis=0)
        logs = np.where([kind in AFTER_TRAINING for kind in kinds], logs, -np.inf)
        chances = kinds_of(logs, kinds)
        kind = max(chances, key=lambda name: chances[name])
        since, told = course.swapped[node], float(course.vitals.absolute[place, ABSOLUTE.index("told")])
        text = f"{node} does not send what it trained, since round {since}: most likely {WORDS[kind]}."
        return finding(
            ISSUE_OF[kind],
            course.round or 0,
            text,
            confidence=CERTAIN,
            since=since,
            node=node,
            severity="critical",
            numbers=[
                Number("weight.drift", float(np.exp(-told)), 1.0, of="limit"),
                *_numbers(course.scores, course.vitals, place, telemetry=False)[:3],
            ],
            suspects=[Suspect(node, CERTAIN, WORDS[kind])],
            more={
                "verdict": "faulty",
                "views": ["exact"],
                "causes": [[name, round(chance, 3)] for name, chance in _ordered(chances)[:4] if chance > 0],
            },
        )

    def _finding(self, course: _Course, place: int, node: Node, fired: list[str]) -> Finding:
        assert course.scores is not None  # noqa: S101 - asked by the caller
        assert course.vitals is not None  # noqa: S101
        model = self._model or shipped()
        likeliest = max(fired, key=lambda name: course.views[name].totals[node])
        view = course.views[likeliest]
        logs = np.sum(view.kinds[node], axis=0)
        if fired != ["server"] and course.vitals.absolute[place, ABSOLUTE.index("told")] <= NOT_TRAINED:
            # It sent what it trained: whatever is wrong was wrong before. (The server's view believes no such word.)
            logs = np.where([kind in AFTER_TRAINING for kind in model.views[likeliest].kinds], -np.inf, logs)
        chances = kinds_of(logs, model.views[likeliest].kinds)
        kind = _settled(view.named, node, chances)
        probability = model.probability(_totals(course, node))
        since = min(course.views[name].began[node] for name in fired)
        numbers = _numbers(course.scores, course.vitals, place, telemetry=fired != ["server"])
        text = f"{node} is unlike its peers since round {since}: if something is wrong, most likely {WORDS[kind]}."
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
            more={
                "verdict": "faulty",
                "views": fired,
                "causes": [[name, round(chance, 3)] for name, chance in _ordered(chances)[:4]],
                "evidence": {name: round(course.views[name].totals[node], 2) for name in fired},
                "limit": {name: round(course.limits[name], 2) for name in fired},
            },
        )


def by_group(found: list[Finding], present: Sequence[Node], groups: Mapping[Node, str]) -> Iterator[Finding]:
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


def exchanging(groups: Mapping[Node, str]) -> bool:
    """Whether clients pass their models on to each other within their groups: edges and rings do, clusters do not."""
    return any(not group.startswith("cluster") for group in groups.values())


def cohort_of(present: int, known: int, *, exchanged: bool = False) -> str:
    """Which limits hold: cohorts of these kinds raise false alarms at very different rates."""
    if exchanged:
        return "exchanging"
    if present < PARTIAL * known:
        return "partial"
    return "small" if present <= SMALL else "large"


def _add(view: _View, node: Node, number: int, gained: float, likely: Array, limit: float) -> None:
    before = view.totals.get(node, 0.0)
    total = view.totals[node] = min(CAP, max(0.0, before + gained))
    if total == 0:
        view.kinds[node] = []
        view.began.pop(node, None)
    else:
        view.began.setdefault(node, number)
    view.kinds[node] = [*view.kinds.get(node, []), likely][-REMEMBERED:]
    if total > limit:
        view.accused.add(node)
    elif node in view.accused and total < limit / 2:  # not at the limit itself: a case shall not flicker
        view.accused.discard(node)
        view.named.pop(node, None)
        view.withdrawn += 1


def _totals(course: _Course, node: Node) -> dict[str, float]:
    return {name: view.totals.get(node, 0.0) for name, view in course.views.items()}


def kinds_of(logs: Array, kinds: tuple[str, ...]) -> dict[str, float]:
    """Probability of each kind from summed log-probabilities."""
    shares = np.exp(logs - logs.max())
    return {kind: float(share) for kind, share in zip(kinds, shares / shares.sum(), strict=True)}


def _settled(named: dict[Node, str], node: Node, chances: Mapping[str, float]) -> str:
    """The likeliest kind; but what a client was accused of first stays, unless it has become plainly untenable."""
    likeliest = max(chances, key=lambda kind: chances[kind])
    before = named.get(node)
    if before is None or (chances.get(before, 0.0) < UNTENABLE and chances[likeliest] > PLAIN):
        named[node] = likeliest
    return named[node]


def _ordered(chances: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(chances.items(), key=lambda pair: -pair[1])


def _numbers(scores: Scores, seen: Vitals, place: int, *, telemetry: bool) -> list[Number]:
    """The signs that stand out most, over the last participations, with what is usual among the peers."""
    order = np.argsort(-np.abs(scores.lasting[place]))
    chosen = [i for i in order if telemetry or SIGNS[i] not in TELEMETRY][:4]
    with np.errstate(all="ignore"):
        return [
            Number(
                SIGNS[i],
                float(seen.values[place, i]),
                float(np.nanmedian(seen.values[:, i])) if np.isfinite(seen.values[:, i]).any() else None,
                float(scores.lasting[place, i]),
            )
            for i in chosen
        ]


# -- what is said of every client -------------------------------------------------------------------------------------

LOCATE = Locator()
DETECTORS: tuple[Detector, ...] = (LOCATE,)


def suspicion(history: History, round: int) -> dict[Node, float]:  # noqa: A002
    """Every client's sum of evidence, the larger of both views: the order in which to look at them."""
    course = LOCATE.course(history, round)
    nodes = {node for view in course.views.values() for node in view.totals}
    found = {node: max(view.totals.get(node, 0.0) for view in course.views.values()) for node in nodes}
    return {node: total + CAP * (node in course.swapped) for node, total in found.items()}


def probability(history: History, round: int) -> dict[Node, float]:  # noqa: A002
    """Every client's probability of being faulty, as it would be stated now."""
    course, model = LOCATE.course(history, round), shipped()
    nodes = {node for view in course.views.values() for node in view.totals}
    return {
        node: CERTAIN if node in course.swapped else model.probability(_totals(course, node)) for node in sorted(nodes)
    }


def verdicts(history: History, round: int) -> dict[Node, str]:  # noqa: A002
    """healthy, different, not yet decidable, or faulty; of every client seen so far.

    Wrong labels show only against a model that has learnt something: before that nobody is called healthy.
    """
    course = LOCATE.course(history, round)
    accused = {node for view in course.views.values() for node in view.accused} | set(course.swapped)
    undecidable = not course.accuracy >= LEARNT  # also where it is not known
    said = dict.fromkeys(course.clients, "not yet decidable" if undecidable else "healthy")
    if course.scores is not None and not undecidable:
        unlike = np.abs(course.scores.lasting).max(axis=1)
        said |= {node: "different" for node, most in zip(course.scores.nodes, unlike, strict=True) if most > 4}
    return said | dict.fromkeys(accused, "faulty")
