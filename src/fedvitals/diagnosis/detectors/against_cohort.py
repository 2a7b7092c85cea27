# SPDX-License-Identifier: Apache-2.0
"""Detector of updates that point against all others, or have become many times as large as before.

It needs only updates: if all other clients pull in the same direction with similar strength, and continue to, one that
pulls in the opposite direction, or many times as hard as before, is identified by that alone. It named no client in
15,500 healthy rounds of the fault bank's `healthy-tune`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

import numpy as np

from fedvitals.diagnosis.detectors.changed_clients import changed_loss_clients, located_clients
from fedvitals.diagnosis.evidence.attendance import rounds_until
from fedvitals.diagnosis.evidence.described_data import data_sketches
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import WORDS
from fedvitals.diagnosis.evidence.faulty_clients import LOCATOR
from fedvitals.diagnosis.evidence.label_counts import label_counts, predicts_texts
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.evidence.update_mismatch import clients_with_trained_updates
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

FEWEST = 4  # clients: fewer have no majority to compare with
REVERSED = -0.4  # cosine to the others, up to which an update points the other way
AGREEING = 0.2  # cosine of each of the others, above which they agree
SCALED = 4.0  # times its own usual size among the others
SIMILAR = 3.0  # ratio of the largest to the smallest of the others
OTHER_LABELS = 0.5  # share of a client's labels that differ from the others': it pulls towards classes of its own
PAST = 2  # earlier rounds of a client that establish its usual size


@dataclass(frozen=True, slots=True)
class _Place:
    """A client's update relative to the others of its round."""

    cosine: float  # to the mean direction of the others
    size: float  # as a multiple of the others' median
    others_agree: bool
    others_similar: bool

    @property
    def is_reversed(self) -> bool:
        return self.others_agree and self.cosine <= REVERSED


def against_cohort(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE: updates that are reversed, or have become far larger.

    If the client trained what it sent, LABEL_NOISE or WRONG_LEARNING_RATE. Reported in the second such round, since one
    odd round may be chance. Clients named by another rule are left out.
    """
    places = [(r, _places(history, r)) for r in rounds_until(history, round_index)] if history.rounds() else []
    if not places or not places[-1][1]:
        return
    odd = {}
    for node, now in places[-1][1].items():
        own = [(r, by_node[node]) for r, by_node in places if node in by_node]
        streak = [*takewhile(lambda at: at[1].is_reversed, reversed(own))]
        usual, grown = _size_before(own)
        if len(streak) > 1:
            odd[node] = _reversed(now, streak[-1][0])
        elif len(grown) > 1:
            odd[node] = _scaled(now, grown[0], usual)
    if not odd:
        return
    named = located_clients(history, round_index) | exact_relations(history, round_index).keys()
    trend, data = LOCATOR.trend_up_to(history, round_index), data_sketches(history, round_index)
    trained, losses = clients_with_trained_updates(history, round_index), changed_loss_clients(history, round_index)
    for node, oddity in odd.items():
        if node in named or trend.is_explained(node) or (oddity.is_reversed and node in losses):
            continue
        by_training = node in trained and (oddity.is_reversed or _may_be_training(history, node, oddity, round_index))
        issue, kind = oddity.trained_as if by_training else ("BYZANTINE", oddity.kind)
        if issue == "LABEL_NOISE" and (
            predicts_texts(history, round_index)
            or (
                data.labels_unchanged_since(node, oddity.since)
                and (
                    _agreed_before(history, node, oddity.since)
                    or label_counts(history, round_index).distance_to_others(node) > OTHER_LABELS
                )
            )
        ):
            continue  # it trains as before, on other data than the others
        yield finding(
            issue,
            round_index,
            f"The update of {node} {oddity.text}.{_how(by_training=by_training, is_own=node in trained)}",
            confidence=0.9,
            since=oddity.since,
            node=node,
            severity="warning",
            numbers=[oddity.number],
            suspects=[Suspect(node, 0.9, WORDS[kind])],
            more={"causes": [[kind, 0.7], [oddity.kind if by_training else "gaussian", 0.3]]},
        )


@dataclass(frozen=True, slots=True)
class _Oddity:
    """What is odd about an update, since when, and the issue if the client trained it or did not."""

    text: str
    since: int
    number: Number
    kind: str
    trained_as: tuple[str, str]  # issue, kind
    is_reversed: bool


def _may_be_training(history: History, node: Node, oddity: _Oddity, round_index: int) -> bool:
    """Return whether learning rate, momentum, steps or gradients may explain how much a client's update grew.

    They may if they explain at least half of it, or are unknown.
    """
    explained = 1.0
    for name in ("optimizer.learning_rate", "optimizer.momentum", "steps", "gradient.norm"):
        rounds, values = history.series(name, node)
        own = [(r, v) for r, v in zip(rounds, values, strict=True) if r <= round_index and math.isfinite(v)]
        before, now = ([v for r, v in own if (r < oddity.since) == is_past] for is_past in (True, False))
        if name == "optimizer.momentum":  # with momentum m, steps add up to 1 / (1 - m); not every optimiser has it
            before, now = ([1 / max(1 - v, 1e-3) for v in part] or [1.0] for part in (before, now))
        if not before or not now or min(before) <= 0:
            return True
        explained *= max(1.0, max(now) / median(before))
    growth = oddity.number.value / (oddity.number.usual or math.inf)
    return 2 * explained >= growth


def _agreed_before(history: History, node: Node, since: int) -> bool:
    """Return whether a client's updates once pointed where the others' did.

    If they never did, labels that have not changed may never have been right.
    """
    before = [_places(history, past_round) for past_round in history.rounds() if past_round < since]
    return sum(node in places and places[node].cosine >= AGREEING for places in before) >= PAST


def _how(*, by_training: bool, is_own: bool) -> str:
    if not is_own:
        return ""
    changed = " Its learning rate, steps and gradients do not explain that: it was changed after they were made."
    return " It trained it so." if by_training else changed


def _reversed(now: _Place, since: int) -> _Oddity:
    text = f"points against those of all others (cosine {now.cosine:.2f}), who agree"
    number = Number("update.peers.cosine", now.cosine, AGREEING, of="limit")
    return _Oddity(text, since, number, "sign_flip", ("LABEL_NOISE", "label_noise"), is_reversed=True)


def _scaled(now: _Place, since: int, usual: float) -> _Oddity:
    text = f"is {now.size / usual:.2g} times as large, compared with the others', as it used to be"
    number = Number("update.norm, of the others' median", now.size, usual, of="own past")
    trained_as = ("WRONG_LEARNING_RATE", "wrong_learning_rate")
    return _Oddity(text, since, number, "scaling", trained_as, is_reversed=False)


def _size_before(own: Sequence[tuple[int, _Place]]) -> tuple[float, list[int]]:
    """Return a client's usual relative size, and the rounds since which it is many times that.

    There are none unless at least two rounds precede them and all later ones are as large.
    """
    comparable = [(r, place.size) for r, place in own if place.others_similar]
    before: list[float] = []
    for _, size in comparable:
        if before and not max(before) / SIMILAR <= size <= SIMILAR * min(before):
            break
        before.append(size)
    after = comparable[len(before) :]
    if len(before) < PAST or not after:
        return math.nan, []
    usual = median(before)
    return usual, [r for r, _ in after] if min(size for _, size in after) > SCALED * usual else []


@shared
def _places(history: History, round_index: int) -> Mapping[Node, _Place]:
    """Return every client's update relative to the others; empty if too few are known, or updates are transformed."""
    norms = {n: v for n, v in history.latest("update.norm", round_index).items() if 0 < v < np.inf}
    if len(norms) < FEWEST or transformation(history, round_index):
        return {}
    nodes, columns = history.across("update.peers", ("cosine",), round_index)
    if not nodes or not columns.size:
        return {}
    cosines = {node: float(value) for node, value in zip(nodes, columns[:, 0, 0], strict=True) if node in norms}
    if len(cosines) < len(norms) or not all(map(np.isfinite, cosines.values())):
        return {}
    places = {}
    for node, norm in norms.items():
        others = [other for other in norms if other != node]
        sizes = [norms[other] for other in others]
        places[node] = _Place(
            cosines[node],
            norm / median(sizes),
            others_agree=min(cosines[other] for other in others) >= AGREEING,
            others_similar=max(sizes) <= SIMILAR * min(sizes),
        )
    return places


DETECTORS: tuple[Detector, ...] = (against_cohort,)
