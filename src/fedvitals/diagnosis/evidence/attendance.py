# SPDX-License-Identifier: Apache-2.0
"""Which clients took part in a round, did not answer, or belong to a group: shared by the rules about clients.

The `History` of a stored run also has the rounds after the one being examined; nothing here reads them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvitals.diagnosis.history_cutoff import shared
from fedvitals.protocols import History, Node
from fedvitals.records import FAILURES, Event

SERVER = "server"
TRAIN = "train"  # the host's name for the phase in which updates are made
LOOK_BACK = 30  # rounds searched for a client's past
FEW_SAMPLES = 0.1  # of the median client's: fewer samples say little


def rounds_until(history: History, round_index: int, most: int = LOOK_BACK) -> list[int]:
    """Return the newest rounds up to and including this one, ascending."""
    rounds = history.rounds()
    return rounds[: bisect_right(rounds, round_index)][-most:]


@shared
def clients_of(history: History, round_index: int) -> list[Node]:
    """Return the clients that trained or sent an update in a round; edges, clusters and the server are not clients."""
    sent = history.latest("update.norm", round_index)
    return [*sent, *(node for node in history.latest("steps", round_index) if node not in sent)]


@shared
def groups_of(history: History, round_index: int) -> Mapping[Node, str]:
    """Return each client's edge, cluster or ring, as last reported; empty where there are no groups."""
    announcements = [
        event for event in history.events("groups") if event.where.round is None or event.where.round <= round_index
    ]
    members: Mapping[str, Sequence[Node]] = announcements[-1].data if announcements else {}
    return {node: group for group, nodes in members.items() for node in nodes}


def events_in(history: History, round_index: int, *names: str) -> list[Event]:
    """Return the events of these names in one round."""
    return [
        event for event in history.events(None, round_index) if event.name in names and event.where.round == round_index
    ]


def median_of_others(values: Mapping[Node, float], left_out: Collection[Node]) -> float | None:
    """Return the median of a metric over all except these nodes; None if there are no others."""
    others = [value for node, value in values.items() if node not in left_out]
    return float(np.median(others)) if others else None


@shared
def clients_with_few_samples(history: History, round_index: int) -> frozenset[Node]:
    """Return the clients with less than a tenth of the usual samples, and updates at most twice the usual size.

    After one or two steps an update says little about the samples behind it. The server measures the size, so that a
    client cannot hide a large update behind a small number.
    """
    counts = {**history.latest("samples", round_index), **history.latest("update.samples", round_index)}
    norms = {node: norm for node, norm in history.latest("update.norm", round_index).items() if math.isfinite(norm)}
    if not counts or not norms:
        return frozenset()
    fewest, usual = FEW_SAMPLES * float(np.median([*counts.values()])), float(np.median([*norms.values()]))
    return frozenset(
        node for node, count in counts.items() if count < fewest and norms.get(node, math.inf) <= 2 * usual
    )


def values_up_to(series: tuple[list[int], list[float]], round_index: int) -> list[tuple[int, float]]:
    """Return a metric's (round, value) pairs up to and including a round."""
    rounds, values = series
    count = bisect_right(rounds, round_index)
    return [*zip(rounds[:count], values[:count], strict=True)]


def newest_values(series: tuple[list[int], list[float]], round_index: int, most: int) -> list[tuple[int, float]]:
    """Return the last of a metric's (round, value) pairs up to and including a round."""
    rounds, values = series
    last = bisect_right(rounds, round_index)
    first = max(0, last - most)
    return [*zip(rounds[first:last], values[first:last], strict=True)]


@dataclass(frozen=True, slots=True)
class ClientCalls:
    """The rounds in which a client was asked, and whether each call failed."""

    rounds: tuple[int, ...]
    wrong: tuple[bool, ...]


def calls_by_client(history: History, round_index: int, names: Iterable[str]) -> dict[Node, ClientCalls]:
    """Return every client's calls in the newest rounds; a call failed if an event of one of these names reports it."""
    numbers = rounds_until(history, round_index)
    trouble: dict[int, dict[Node, bool]] = {past_round: {} for past_round in numbers}
    wanted = set(names)
    for event in history.events(None, numbers[0]) if numbers else ():
        failed_in_round = trouble.get(event.where.round if event.where.round is not None else -1)
        if failed_in_round is not None and event.where.node is not None and event.name in FAILED_CALL_EVENTS:
            failed_in_round[event.where.node] = failed_in_round.get(event.where.node, False) or event.name in wanted
    by_client: dict[Node, list[tuple[int, bool]]] = {}
    for past_round in numbers:
        answered = dict.fromkeys(clients_of(history, past_round), False)
        for node, bad in (answered | trouble[past_round]).items():
            by_client.setdefault(node, []).append((past_round, bad))
    return {node: ClientCalls(*zip(*client_calls, strict=True)) for node, client_calls in by_client.items()}


FAILED_CALL_EVENTS = tuple(name for name in FAILURES if name != "worker.lost")
"""Events about a client that was asked and returned nothing usable; lost records alone are not a missed answer."""


@shared
def failed_calls(history: History, round_index: int) -> dict[Node, Event]:
    """Return the clients asked to train in a round without a usable update, each with the event that says why.

    A failure in evaluation does not count, nor one of an earlier round that became known only now.
    """
    failed: dict[Node, Event] = {}
    for event in events_in(history, round_index, *FAILED_CALL_EVENTS):
        own_round = event.data.get("round", round_index) == round_index
        if event.where.node is not None and own_round and event.data.get("phase", TRAIN) == TRAIN:
            failed.setdefault(event.where.node, event)
    return failed


def cohort_of(history: History, round_index: int) -> set[Node]:
    """Return all clients that were asked to train in a round, as far as known, including those that failed."""
    asked = {node for data in _train_cohorts(history, round_index) for node in data.get("asked", ())}
    return {*asked, *clients_of(history, round_index), *failed_calls(history, round_index)}


def answered_of(history: History, round_index: int) -> int:
    """Return how many clients sent a usable update, as far as known."""
    cohorts = _train_cohorts(history, round_index)
    if cohorts:
        return len(cohorts[-1].get("answered", ()))
    failed = failed_calls(history, round_index)
    return sum(node not in failed for node in clients_of(history, round_index))


def phases_of(history: History, round_index: int) -> list[Mapping[str, Any]]:
    """Return what a host reported of each phase: its name, and the lists `asked`, `answered`, `failed` and others."""
    return [event.data for event in events_in(history, round_index, "cohort")]


def _train_cohorts(history: History, round_index: int) -> list[Mapping[str, Any]]:
    return [data for data in phases_of(history, round_index) if data.get("phase") == TRAIN]


@shared
def everyone_failed(history: History, round_index: int) -> bool:
    """Return whether several clients were asked to train in a round, and none of them sent a usable update.

    A round of a single client does not count: then the client is the case. False if privacy hides who answered.
    """
    failed = failed_calls(history, round_index)
    if len(failed) < 2:
        return False
    cohorts = _train_cohorts(history, round_index)
    if cohorts:
        return not any(data.get("answered") for data in cohorts)
    # A client's report of its own failure does not outweigh an update that the server has.
    sent = history.latest("update.samples", round_index)
    if any(node not in failed or failed[node].name == "client.failed" for node in sent):
        return False
    if answered_of(history, round_index):
        return False
    if events_in(history, round_index, "aggregation.failed"):
        return True
    # If privacy hides the clients' numbers, their answers are hidden too.
    return any(clients_of(history, past_round) for past_round in reversed(rounds_until(history, round_index)))


def chance_of_failures(wrong: int, asked: int, rate: float) -> float:
    """Return the probability that at least `wrong` of `asked` calls fail if each fails with this rate."""
    if wrong <= 0:
        return 1.0
    return min(1.0, sum(math.comb(asked, k) * rate**k * (1 - rate) ** (asked - k) for k in range(wrong, asked + 1)))
