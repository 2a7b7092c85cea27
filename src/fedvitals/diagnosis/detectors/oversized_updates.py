# SPDX-License-Identifier: Apache-2.0
"""Detector of updates several times as large as any other, from clients whose reports do not explain their size.

It uses sizes that the server measures, which any transformation of all updates changes alike. What a client reports of
its training can explain a large update (large gradients, many steps, a learning rate of its own), and leaves it to the
rules for these. A client that scales its update but reports the usual training contradicts itself. In 45 runs of the
fault bank's `tune-wide` no healthy client had twice the size of the next in three consecutive rounds; attackers who
scale by 8 and more had 2 to 15 times the largest of the others in most rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

from fedvitals.diagnosis.detectors.changed_clients import located_clients
from fedvitals.diagnosis.evidence.attendance import rounds_until
from fedvitals.diagnosis.evidence.exact_relations import exact_relations
from fedvitals.diagnosis.evidence.fault_kinds import WORDS
from fedvitals.diagnosis.evidence.faulty_clients import LOCATOR
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import Detector, History, Node
from fedvitals.records import Finding, Suspect

FEWEST = 4  # clients: fewer have no majority to compare with
MOST = 0.4  # of the clients: more are a population of their own
TIMES = 3.0  # times the largest of the others, and times what the client's own report explains
TIMES_UNREPORTED = 4.0  # times the largest of the others, if nothing is reported
RECENT, ODD = 4, 2  # newest participations of a client, and how many of these must be odd
PAST, USUAL = 12, 3  # newest participations, and how many must have been usual for a client of unknown data
LATE = 0.3  # of the run's largest median size: below it, wrong labels alone cause large updates
REPORTED = ("gradient.norm", "steps", "optimizer.learning_rate")  # an update's size is proportional to their product
CONFIDENCE = 0.9


def oversized_updates(history: History, round_index: int) -> Iterator[Finding]:
    """BYZANTINE: updates several times as large as any other, which no report explains.

    In two of the client's last four participations, since an attack may pause. Clients named by another rule are left
    out.
    """
    outstanding = _outstanding(history, round_index)
    odd_rounds = {node: _odd_rounds(history, round_index, node) for node in outstanding}
    if not any(len(odd) >= ODD for odd in odd_rounds.values()):
        return
    named = located_clients(history, round_index) | exact_relations(history, round_index).keys()
    trend, norms = LOCATOR.trend_up_to(history, round_index), history.latest("update.norm", round_index)
    late = median(norms[node] for node in norms if node not in outstanding) < LATE * trend.largest
    for node, times in outstanding.items():
        explained = _reported_size(history, round_index, node, outstanding)
        usual = median(norm for other, norm in norms.items() if other not in outstanding)
        unexplained = (
            times >= TIMES_UNREPORTED and not late and _amount_known(history, round_index, node)
            if explained is None
            else norms[node] > TIMES * explained * usual
        )
        if len(odd_rounds[node]) < ODD or not unexplained or node in named or trend.is_explained(node):
            continue
        since = odd_rounds[node][0]
        yield finding(
            "BYZANTINE",
            round_index,
            f"The update of {node} is {times:.2g} times as large as the largest of the others'"
            f"{'' if explained is None else ', and nothing that it reports of its training explains that'}.",
            confidence=CONFIDENCE,
            since=since,
            node=node,
            severity="warning",
            numbers=[Number("update.norm", norms[node], usual)],
            suspects=[Suspect(node, CONFIDENCE, WORDS["scaling"])],
            more={"causes": [["scaling", 0.8], ["gaussian", 0.2]]},
        )


def _odd_rounds(history: History, round_index: int, node: Node) -> list[int]:
    """Return the newest participations of a client in which it stands out."""
    own = [r for r in rounds_until(history, round_index) if node in history.latest("update.norm", r)][-RECENT:]
    return [r for r in own if node in _outstanding(history, r)]


def _amount_known(history: History, round_index: int, node: Node) -> bool:
    """Return whether a larger amount of training is ruled out, since a client may simply train on more data.

    It is if the client's number of samples is known, or its updates were as large as the others' before.
    """
    if node in history.latest("update.samples", round_index):
        return True
    own = [r for r in rounds_until(history, round_index) if node in history.latest("update.norm", r)]
    return sum(node not in _outstanding(history, r) for r in own[-PAST:]) >= USUAL


def _reported_size(history: History, round_index: int, node: Node, outstanding: Mapping[Node, float]) -> float | None:
    """Return the size of the client's update that its own report implies, as a multiple of the usual one.

    None if it, or all other clients, report nothing about gradients.
    """
    size = 1.0
    for metric in REPORTED:
        values = history.latest(metric, round_index)
        others = [v for other, v in values.items() if other not in outstanding and 0 < v < math.inf]
        if node in values and others:
            size *= max(1.0, values[node] / median(others))
        elif metric == REPORTED[0]:
            return None
    return size


@shared
def _outstanding(history: History, round_index: int) -> Mapping[Node, float]:
    """Return the clients whose updates are far larger than all others', and how many times.

    Fewer times if they claim more samples than any other client.
    """
    norms = {node: v for node, v in history.latest("update.norm", round_index).items() if 0 < v < math.inf}
    claims = history.latest("update.samples", round_index)
    ranked = sorted(norms, key=lambda node: -norms[node])
    for count in range(1, int(MOST * len(ranked)) + 1 if len(ranked) >= FEWEST else 0):
        largest, others = ranked[:count], ranked[count:]
        most = max(claims.get(node, 0.0) for node in others)
        times = {
            node: norms[node] / norms[others[0]] / max(1.0, claims.get(node, 0.0) / most if most > 0 else 1.0)
            for node in largest
        }
        if min(times.values()) >= TIMES:
            return times
    return {}


DETECTORS: tuple[Detector, ...] = (oversized_updates,)
