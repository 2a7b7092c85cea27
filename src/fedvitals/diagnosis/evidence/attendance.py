# SPDX-License-Identifier: Apache-2.0
"""Who took part in a round, who was asked in vain, who belongs together: what the rules about single clients share.

A `History` of a stored run also knows the rounds after the one that is examined; nothing in here looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedvitals.protocols import History, Node
from fedvitals.records import FAILURES, Event

SERVER = "server"
LOOK_BACK = 30  # rounds in which the past of a client is looked for


def rounds_until(history: History, round_index: int, most: int = LOOK_BACK) -> list[int]:
    """The newest rounds up to and with this one, ascending."""
    return [past_round for past_round in history.rounds() if past_round <= round_index][-most:]


def clients_of(history: History, round_index: int) -> list[Node]:
    """Who trained or sent an update in a round; edges, clusters and the server are none of them."""
    sent = history.latest("update.norm", round_index)
    return [*sent, *(node for node in history.latest("steps", round_index) if node not in sent)]


def groups_of(history: History, round_index: int) -> Mapping[Node, str]:
    """Each client's edge, cluster or ring, as last told; empty where there are none."""
    announcements = [
        event for event in history.events("groups") if event.where.round is None or event.where.round <= round_index
    ]
    members: Mapping[str, Sequence[Node]] = announcements[-1].data if announcements else {}
    return {node: group for group, nodes in members.items() for node in nodes}


def labels_of(history: History, round_index: int) -> Mapping[Node, Mapping[str, int]]:
    """How many samples of each label each client has, as it told last: it is told when it changes."""
    return {
        event.where.node: event.data["histogram"]
        for event in history.events("labels")
        if event.where.node is not None and (event.where.round or 0) <= round_index and event.data.get("histogram")
    }


def events_in(history: History, round_index: int, *names: str) -> list[Event]:
    """The events of these names in one round."""
    return [
        event for event in history.events(None, round_index) if event.name in names and event.where.round == round_index
    ]


def value_before(history: History, name: str, node: Node | None, round_index: int) -> tuple[int, float] | None:
    """A node's newest value of a metric before a round, with its round."""
    for past_round in reversed(rounds_until(history, round_index - 1)):
        if node is None:
            break
        value = history.latest(name, past_round).get(node)
        if value is not None:
            return past_round, value
    return None


def values_up_to(series: tuple[list[int], list[float]], round_index: int) -> list[tuple[int, float]]:
    """A metric's values over the rounds, without what came later."""
    return [(past_round, value) for past_round, value in zip(*series, strict=True) if past_round <= round_index]


@dataclass(frozen=True, slots=True)
class ClientCalls:
    """How a client answered when it was asked: the rounds of its calls, and whether each went wrong."""

    rounds: tuple[int, ...]
    wrong: tuple[bool, ...]


def calls_by_client(
    history: History, round_index: int, names: Iterable[str], most: int = LOOK_BACK
) -> dict[Node, ClientCalls]:
    """Every client's calls in the newest rounds; those went wrong that an event of one of these names tells of."""
    numbers = rounds_until(history, round_index, most)
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
"""Events about a client that was asked, and from whom nothing of use came; its records alone are no answer missed."""


def chance_of_failures(wrong: int, asked: int, rate: float) -> float:
    """The probability that so many or more of these calls go wrong, if each does with this rate."""
    if wrong <= 0:
        return 1.0
    return min(1.0, sum(math.comb(asked, k) * rate**k * (1 - rate) ** (asked - k) for k in range(wrong, asked + 1)))
