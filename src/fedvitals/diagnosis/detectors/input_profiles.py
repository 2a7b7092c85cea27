# SPDX-License-Identifier: Apache-2.0
"""Detector of trained-in triggers: updates that change inputs which the others' updates do not.

It uses updates alone, so that a client gains nothing by false reports. Labels that differ from client to client also
make profiles differ, all of them about equally: so a few clients are named only if there is a gap between them and all
others of the round. If most clients have only a few classes, those with the same classes are alike and the others
differ, and nobody is named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from fedvitals.diagnosis.detectors.changed_clients import located_clients
from fedvitals.diagnosis.evidence.attendance import groups_of, rounds_until
from fedvitals.diagnosis.evidence.equal_updates import peer_statistic
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import WORDS
from fedvitals.diagnosis.evidence.faulty_clients import LOCATOR
from fedvitals.diagnosis.evidence.label_counts import label_counts
from fedvitals.diagnosis.evidence.suspect_data import examine_data
from fedvitals.diagnosis.evidence.transformed_updates import transformation
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

ALIKE, APART = "update.inputs_alike", "update.inputs_apart"


@dataclass(frozen=True, slots=True)
class _Sign:
    """The value from which clients stand out, by how much and how often, and the fewest such clients."""

    name: str
    limit: float
    gap: float
    times: float
    fewest: int
    text: str


SIGNS = (
    _Sign(
        ALIKE,
        0.75,
        0.2,
        1.0,
        2,
        "single out the same inputs as another client's (cosine {value:.2f}), and nobody else's do",
    ),
    _Sign(APART, 1.3, 0.4, 2.0, 1, "move few inputs of the first dense layer {times:.2g} times as much as the others'"),
)
# Median entropy of the squared changes of the head's rows, as a share of the largest: below it, most clients have few
# classes only. Two of ten give 0.6, Dirichlet 0.1 0.58 to 0.76, Dirichlet 0.5 from 0.76 on.
MIXED = 0.75
FEWEST_LABELS = (
    2.5  # effective number of labels that the median client reports; Dirichlet 0.1 gives about 2, 0.3 about 4
)
MOST = 0.4  # of the clients: more are a population of their own
FEWEST = 4  # clients: fewer have no majority to compare with
STREAK = 4  # consecutive participations in which a client stands out
FIRST = 6  # participation in which a client is first judged
ONE_CLASS = 0.4  # of a client's samples
EQUAL = 0.9  # likeness of accomplices that do not report one class; of healthy clients in small federations up to 0.86
CONFIDENCE = 0.9


def trained_in_triggers(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE: a client's updates move few inputs far more than the others', or the same ones as an accomplice's.

    Clients named by another rule are left out, and so are groups whose members continue each other's models. Clients
    that are alike need reports of one common class, the trigger's target, or profiles that are nearly equal; those that
    describe inputs of their own are alike for that reason, and always need the common class.
    """
    outstanding = _outstanding(history, round_index)
    if not outstanding or groups_of(history, round_index) or transformation(history, round_index) is not None:
        return
    named = located_clients(history, round_index) | exact_relations(history, round_index).keys()
    trend, data = LOCATOR.trend_up_to(history, round_index), examine_data(history, round_index)
    alike = [node for node, sign in outstanding.items() if sign.name == ALIKE]
    same_class = _teaching_same_class(history, round_index, alike)
    for node, sign in outstanding.items():
        since = _since(history, round_index, node)
        if since is None or node in named or node in data.suspects:
            continue
        values = history.latest(sign.name, round_index)
        value, others = values[node], max(v for other, v in values.items() if other not in outstanding)
        if sign.name == ALIKE and node not in same_class and (node in data.group or value < EQUAL):
            continue
        if node not in data.group and trend.is_explained(node):
            continue
        words = sign.text.format(value=value, times=math.exp(value))
        yield finding(
            "BYZANTINE",
            round_index,
            f"Since round {since}, the updates of {node} {words}: as where a trigger is trained in.",
            confidence=CONFIDENCE,
            since=since,
            node=node,
            severity="warning",
            numbers=[Number(sign.name, value, others)],
            suspects=[Suspect(node, CONFIDENCE, WORDS["backdoor"])],
            more={"causes": [["backdoor", 0.9], ["little_is_enough", 0.1]]},
        )


def _since(history: History, round_index: int, node: Node) -> int | None:
    """Return the first of the consecutive rounds up to now in which a client stood out; None if they are too few."""
    own = [r for r in rounds_until(history, round_index) if node in history.latest(ALIKE, r)]
    since = None
    for count, past_round in enumerate(reversed(own), start=1):
        if node not in _outstanding(history, past_round):
            break
        since = past_round if count >= STREAK else None
    return since if len(own) >= FIRST else None


def _teaching_same_class(history: History, round_index: int, nodes: Collection[Node]) -> set[Node]:
    """Return those of these clients that report the same label as another for a large part of their samples."""
    by_label: dict[str, set[Node]] = defaultdict(set)
    for node, own in label_counts(history, round_index).histograms.items():
        if node in nodes and own:
            label = max(own, key=lambda label: own[label])
            if own[label] >= ONE_CLASS * sum(own.values()) > 0:
                by_label[label].add(node)
    return {node for same in by_label.values() if len(same) > 1 for node in same}


def _has_few_labels(history: History, round_index: int) -> bool:
    """Return whether most clients report hardly more than two labels: with Adam, all rows of the head move anyway."""
    labels = label_counts(history, round_index)
    reported = [labels.entropy(node) for node in labels.nodes]
    return bool(reported) and math.exp(median(reported)) < FEWEST_LABELS


@shared
def _outstanding(history: History, round_index: int) -> Mapping[Node, _Sign]:
    """Return the clients that stand out in a round, with the sign that shows it."""
    outliers: dict[Node, _Sign] = {}
    entropies = peer_statistic(history, round_index, "class_entropy")
    if not entropies or median(entropies.values()) < MIXED or _has_few_labels(history, round_index):
        return outliers
    for sign in SIGNS:
        values = history.latest(sign.name, round_index)
        ranked = sorted(values, key=lambda node: -values[node])
        for count in range(sign.fewest, int(MOST * len(ranked)) + 1 if len(ranked) >= FEWEST else 0):
            last, following = values[ranked[count - 1]], values[ranked[count]]
            if last >= max(sign.limit, following + sign.gap, sign.times * following):
                outliers = {**dict.fromkeys(ranked[:count], sign), **outliers}
                break
    return outliers


DETECTORS: tuple[Detector, ...] = (trained_in_triggers,)
