# SPDX-License-Identifier: Apache-2.0
"""What the detectors examined, and which client-rounds they could not judge, with the reason.

A client-round is judged if the client's update was seen as trained and compared with those of enough peers; failing
that, if its losses and the size of its update were compared with its own past. Some exact rules (NaN, crashes, a frozen
layer) check every client-round, but their silence alone is not an all-clear.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedvitals.diagnosis.evidence.attendance import (
    FAILED_CALL_EVENTS,
    clients_of,
    clients_with_few_samples,
    events_in,
)
from fedvitals.diagnosis.evidence.different_classes import trains_different_classes
from fedvitals.diagnosis.evidence.own_past import compared_with_own_past
from fedvitals.diagnosis.evidence.scores import FEWEST
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.plural import counted
from fedvitals.protocols import History, Node
from fedvitals.records import Metric, Where, is_client

LOOKED_AT = "diagnosis.client_rounds"  # metric of a round: the number of client-rounds
SHARE = "diagnosis.not_judged"  # metric of a round: share of these that were not judged
NOT_JUDGED = {
    "masked": "updates are aggregated securely, and the server sees no single one",
    "unseen": "no update was seen: the loop does not pass them to `monitor.updates`, or the host hides them",
    "transformed": "updates are compressed, clipped, noised or otherwise changed on the way, so that the rules for "
    "untouched updates mean nothing, and too little is known yet of the clients' own past",
    "unmeasured": "neither the directions of updates nor training were measured",
    "few_samples": "they train on less than a tenth of the usual number of samples, after which an update says little, "
    "and too little is known yet of their own past",
    "different_classes": "most clients train on hardly more than one class, so that updates differ for that reason, "
    "and too little is known yet of the clients' own past",
    "few_clients": f"fewer than {FEWEST} clients took part, too few to compare one with the others, and too little "
    "is known yet of their own past",
}
"""Rule → why it leaves client-rounds unjudged. Its metric is `diagnosis.not_judged.` and its name."""
ACCEPTED = 0.1  # largest share of unjudged client-rounds with which a run still counts as examined
NEWEST = 3  # rounds: if no client was judged in these, earlier judgements do not make up for it
NOTHING = "no client has completed a round"
TRAINING = ("gradient.norm", "fit.loss_before", "fit.loss_after")  # the training metrics that are compared


@dataclass(frozen=True, slots=True)
class Abstention:
    """Clients that are not judged in a round, and the rule of `NOT_JUDGED` that applies."""

    rule: str
    nodes: tuple[Node, ...]

    @property
    def reason(self) -> str:
        """Return the reason in words."""
        return NOT_JUDGED[self.rule]


@shared
def abstentions(history: History, round_index: int) -> list[Abstention]:
    """Return which clients are not judged in a round and why, each at most once; empty if all are judged."""
    clients = clients_of(history, round_index)
    if len(clients) == 1 and sum(map(is_client, history.nodes())) == 1:
        return []  # one model that trains alone (`fv.watch`): there is nothing to compare
    # A client that failed has no update to judge, and its failure is reported anyway.
    failed = {event.where.node for event in events_in(history, round_index, *FAILED_CALL_EVENTS)}
    unseen = sorted(set(clients) - failed - set(history.latest("update.norm", round_index)))
    stated = [Abstention("masked" if _is_masked(history) else "unseen", tuple(unseen))] if unseen else []
    seen = [node for node in clients if node not in failed.union(unseen)]
    if not seen:
        return stated
    rule = _uncomparable(history, round_index, len(clients))
    if rule is not None:
        own = compared_with_own_past(history, round_index)
        others = tuple(node for node in seen if node not in own)
        return [*stated, Abstention(rule, others)] if others else stated
    unmeasured = [node for node in seen if node not in _measured(history, round_index)]
    stated += [Abstention("unmeasured", tuple(unmeasured))] if unmeasured else []
    few = clients_with_few_samples(history, round_index) - {*unmeasured}
    few -= compared_with_own_past(history, round_index) if few else frozenset()
    small = tuple(node for node in seen if node in few)
    return [*stated, Abstention("few_samples", small)] if small else stated


def _uncomparable(history: History, round_index: int, clients: int) -> str | None:
    """Return the rule by which the updates of a round cannot be compared with each other; None if they can."""
    if transformation(history, round_index):
        return "transformed"
    if clients < FEWEST:
        return "few_clients"
    return "different_classes" if trains_different_classes(history, round_index) else None


def _is_masked(history: History) -> bool:
    return any("secure_aggregation" in event.data for event in history.events("updates.transformed"))


@shared
def _measured(history: History, round_index: int) -> frozenset[Node]:
    """Return the clients whose update direction or training was measured in this round."""
    directions, _ = history.across("update.peers", ("cosine",), round_index)
    return frozenset(directions).union(*(history.latest(name, round_index) for name in TRAINING))


def unjudged_clients(history: History, round_index: int) -> set[Node]:
    """Return the clients that are not judged in a round."""
    return {node for abstention in abstentions(history, round_index) for node in abstention.nodes}


@dataclass(frozen=True, slots=True)
class Examined:
    """What the detectors examined in a run, and how much of it they could not judge."""

    clients: int
    first: int | None  # round
    last: int | None
    client_rounds: int
    not_judged: Mapping[str, int] = field(default_factory=dict)  # rule of `NOT_JUDGED` → client-rounds
    newest_judged: bool = True  # whether any client was judged in the newest rounds

    @property
    def share(self) -> float:
        """Return the share of client-rounds that were not judged."""
        return sum(self.not_judged.values()) / self.client_rounds if self.client_rounds else 0.0

    @property
    def sufficient(self) -> bool:
        """Return whether enough was judged for silence to mean that nothing is wrong."""
        return self.client_rounds > 0 and self.share <= ACCEPTED and self.newest_judged

    @property
    def scope(self) -> str:
        """Return what was examined, in words: «10 clients in rounds 0 to 19, 200 client-rounds»."""
        if self.first is None or not self.client_rounds:
            return NOTHING
        rounds = f"round {self.first}" if self.first == self.last else f"rounds {self.first} to {self.last}"
        return f"{counted(self.clients, 'client')} in {rounds}, {counted(self.client_rounds, 'client-round')}"

    @property
    def gaps(self) -> tuple[str, ...]:
        """Return what was not judged and why, in words, the largest part first; empty if everything was judged."""
        if not self.client_rounds:
            return (NOTHING,)
        rules = sorted(self.not_judged, key=lambda rule: -self.not_judged[rule])
        return tuple(f"{self._part(self.not_judged[rule])}, because {NOT_JUDGED[rule]}" for rule in rules)

    def _part(self, count: int) -> str:
        of = counted(self.client_rounds, "client-round")
        if count == self.client_rounds:
            return f"none of the {of} was fully judged"
        return f"{count} of {of} ({100 * count / self.client_rounds:.2g} %) were not fully judged"

    def __str__(self) -> str:
        return f"{self.scope}; {'; '.join(self.gaps) if self.gaps else 'all judged'}" if self.client_rounds else NOTHING


class ExaminationCounts:
    """Counts what the detectors examine, round by round."""

    def __init__(self) -> None:
        self._clients: set[Node] = set()
        self._first: int | None = None
        self._last: int | None = None
        self._client_rounds = 0
        self._not_judged: Counter[str] = Counter()
        self._newest: deque[bool] = deque(maxlen=NEWEST)  # whether any client was judged

    def add(self, history: History, round_index: int) -> Iterator[Metric]:
        """Count a round, and return its metrics, whose run is still to be filled in."""
        clients, stated = clients_of(history, round_index), abstentions(history, round_index)
        count, unjudged = len(clients), sum(len(abstention.nodes) for abstention in stated)
        self._clients.update(clients)
        self._first = round_index if self._first is None else min(self._first, round_index)
        self._last = round_index if self._last is None else max(self._last, round_index)
        self._client_rounds += count
        if count:
            self._newest.append(unjudged < count)
        by_rule = {abstention.rule: len(abstention.nodes) for abstention in stated}
        self._not_judged.update(by_rule)
        return _metrics(round_index, count, unjudged, by_rule)

    def examined(self) -> Examined:
        """Return what was examined so far."""
        newest = not self._newest or any(self._newest)
        return Examined(
            len(self._clients), self._first, self._last, self._client_rounds, dict(self._not_judged), newest
        )


def _metrics(round_index: int, count: int, unjudged: int, by_rule: Mapping[str, int]) -> Iterator[Metric]:
    where = Where("", round_index)
    yield Metric(where, 0.0, LOOKED_AT, float(count))
    if count:
        yield Metric(where, 0.0, SHARE, unjudged / count)
    for rule, clients in by_rule.items():
        yield Metric(where, 0.0, f"{SHARE}.{rule}", float(clients))


def examination(history: History, rounds: Sequence[int] | None = None) -> Examined:
    """Return what the detectors examine in these rounds of a history (default: all)."""
    counts = ExaminationCounts()
    for round_index in history.rounds() if rounds is None else rounds:
        list(counts.add(history, round_index))
    return counts.examined()
