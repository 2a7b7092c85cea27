# SPDX-License-Identifier: Apache-2.0
"""Detectors of clients that do not answer: they left, are not connected, or lose their messages.

Three kinds of evidence, each with its own threshold. A statement of the host (a node is not connected) is a finding at
once and until the client is back. Events that healthy clients also have now and then (being away when asked, losing a
message) become a finding only when they happen to a client too often to be chance, given the rate of the others. A
client that is missing silently is a finding only if all others take part in every round and the cohort shrank without
it: under partial participation, not being asked is not a drop-out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fedvitals.diagnosis.evidence.attendance import (
    calls_by_client,
    chance_of_failures,
    cohort_of,
    events_in,
    everyone_failed,
    rounds_until,
)
from fedvitals.diagnosis.finding import Number, finding
from fedvitals.diagnosis.gaps import OUTSIDE_ROUND
from fedvitals.diagnosis.history_cutoff import state_of
from fedvitals.protocols import History, Node
from fedvitals.records import Event, Finding, Suspect

CHANCE = 1e-5  # of so many failed calls of a client, at the others' rate; every round tests every client again
FEWEST = 2  # failed calls in a row before a finding
UNKNOWN = 50  # successful calls assumed in advance, because a few rounds do not establish a rate
USUAL = 0.1  # rate of the others from which failures are normal for the network, and a note is enough
SILENT_ROUNDS = 3  # silent rounds, while all others take part
STEADY = 0.8  # share of the newest cohorts' clients that took part in all of them
MOST_SUSPECTS = 20
MOST_PARTITIONS = 1 << 53  # a client may report any number


def drop_outs(history: History, round_index: int) -> Iterator[Finding]:
    """DROP_OUT: a client that is not connected, that repeatedly is not there when asked, or that used to take part and
    no longer does.
    """
    attendance = attendance_up_to(history, round_index)
    stated = {
        node: connection.away_since
        for node, connection in connections(history, round_index).items()
        if connection.away_since is not None
    }
    silent = {node: last for node, last in _silent_clients(history, round_index).items() if node not in stated}
    successors = attendance.successors({*stated, *silent})
    yield from _disconnected(history, round_index, {n: since for n, since in stated.items() if n not in successors})
    for drop_out in frequent_failures(
        history, round_index, "DROP_OUT", "was asked and was not there", "client.dropped_out", until_back=True
    ):
        if drop_out.where.node not in stated:
            yield drop_out
    for node, last in silent.items():
        if node not in successors:
            text = f"{node} took part in every round up to round {last}, and in none since."
            number = Number("clients", 0.0, 1.0, of="own past")
            yield finding("DROP_OUT", round_index, text, confidence=0.9, since=last + 1, node=node, numbers=[number])
    for node, successor in successors.items():
        if attendance.is_new(successor):
            text = f"{node} is back as {successor}: both say that they are {attendance.clients[node].identity}."
            yield finding("DROP_OUT", round_index, text, confidence=0.9, node=node, severity="note")


def lost_messages(history: History, round_index: int) -> Iterator[Finding]:
    """COMMUNICATION_FAILURE: updates of a client that never arrive, or cannot be read."""
    yield from frequent_failures(
        history, round_index, "COMMUNICATION_FAILURE", "sent an update that did not arrive", "update.lost"
    )


def frequent_failures(
    history: History, round_index: int, issue: str, did: str, name: str, *, until_back: bool = False
) -> Iterator[Finding]:
    """Report clients to which an event happens far more often than to the others, this round included.

    `until_back`: also in rounds in which the client is not asked, until one of its calls succeeds.
    """
    since_when = rounds_until(history, round_index)[:1] if until_back else [round_index]
    if not since_when or not history.events(name, since_when[0]) or everyone_failed(history, round_index):
        return
    calls = calls_by_client(history, round_index, (name,))
    wrong = {node: sum(client_calls.wrong) for node, client_calls in calls.items()}
    asked = {node: len(client_calls.wrong) for node, client_calls in calls.items()}
    # The rate of the others excludes those that fail as often: two clients that left must not hide each other.
    for node, client_calls in calls.items():
        asked_now = until_back or client_calls.rounds[-1] == round_index
        if not client_calls.wrong[-1] or not asked_now or wrong[node] < FEWEST:
            continue
        rate = wrong[node] / asked[node]
        others = [other for other in calls if other != node and wrong[other] < 0.7 * rate * asked[other]]
        usual = (sum(wrong[other] for other in others) + 1) / (sum(asked[other] for other in others) + UNKNOWN)
        chance = min(chance_of_failures(sum(client_calls.wrong[-n:]), n, usual) for n in range(1, asked[node] + 1))
        if chance > CHANCE or (len(others) < len(calls) / 2):
            continue
        since = client_calls.rounds[client_calls.wrong.index(True)]
        text = f"{node} {did} in {wrong[node]} of its last {asked[node]} calls; the others in {100 * usual:.1f} %."
        yield finding(
            issue,
            round_index,
            text,
            confidence=1 - max(chance, 1e-3),
            since=since,
            node=node,
            severity="note" if usual > USUAL else None,
            numbers=[Number(name, rate, usual)],
        )


# -- what the host states ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Connection:
    """Whether a client is connected, according to its host."""

    away_since: int | None = None
    back: tuple[int, int] | None = None  # the first round of the absence before, and the round of the return

    def follow(self, event: Event, round_index: int) -> None:
        """Apply the next event about the client."""
        if event.name == "client.connected":
            if self.away_since is not None:
                self.back, self.away_since = (self.away_since, round_index), None
        elif self.away_since is None:
            # Reconnected, but away as soon as it was asked: it was never really back.
            again = self.back is not None and round_index - self.back[1] <= 1
            self.away_since = self.back[0] if again and self.back is not None else round_index


def connections(history: History, round_index: int) -> dict[Node, Connection]:
    """Return the connection of each client that was away at some time, according to the host, up to this round."""
    stated = [
        event
        for name in ("client.disconnected", "client.dropped_out", "client.connected")
        for event in history.events(name)
        # The lab's clients that miss a call have no code: the lab asks them again.
        if event.name != "client.dropped_out" or "code" in event.data
    ]
    known: dict[Node, Connection] = {}
    for event in sorted(stated, key=lambda event: (event.where.round or 0, event.at)):
        if event.where.node is not None and (event.where.round or 0) <= round_index:
            known.setdefault(event.where.node, Connection()).follow(event, event.where.round or 0)
    return known


def _disconnected(history: History, round_index: int, away: Mapping[Node, int]) -> Iterator[Finding]:
    """Report disconnected clients one by one, or as one case if more than half are disconnected."""
    if not away or everyone_failed(history, round_index):
        return
    known = {*attendance_up_to(history, round_index).clients, *away}
    if len(away) > max(2, len(known) / 2):
        text = f"{len(away)} of {len(known)} clients are not connected."
        suspects = [Suspect(node, 1.0, f"since round {since}") for node, since in [*away.items()][:MOST_SUSPECTS]]
        since = min(away.values())
        yield finding("DROP_OUT", round_index, text, confidence=1.0, since=since, suspects=suspects)
        return
    returned = {node for node, connection in connections(history, round_index).items() if connection.back is not None}
    for node, since in away.items():
        usual = len(returned - {node}) / max(len(known) - 1, 1)
        text = f"{node} has not been connected since round {since}, as the server reports."
        severity = "note" if usual > USUAL else None  # where clients come and go, this is not an alarm
        number = Number("clients", 0.0, 1.0, of="own past")
        yield finding(
            "DROP_OUT", round_index, text, confidence=1.0, since=since, node=node, severity=severity, numbers=[number]
        )


# -- silently missing clients -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ClientRounds:
    """The rounds in which one client was asked, as positions in the run: the first, the last, and how many."""

    first: int
    last: int
    count: int = 0
    identity: str = ""  # what it claims to be, in words: «partition 3»; empty if it claims nothing


class Attendance:
    """Which clients were asked in which rounds, and since when clients are missing; filled round by round, in order."""

    def __init__(self) -> None:
        self.clients: dict[Node, ClientRounds] = {}
        self.missing: dict[Node, int] = {}  # the last round of clients that are silently missing
        self._rounds: list[int] = []
        self._sizes: list[int] = []  # of the cohorts
        self._newest: list[set[Node]] = []  # the newest cohorts, in which a client may be missing, and the one before

    def follow(self, round_index: int, cohort: set[Node], identities: Mapping[Node, str]) -> None:
        """Add the next round's cohort, and what its clients claim to be."""
        place = len(self._rounds)
        self._rounds.append(round_index)
        self._sizes.append(len(cohort))
        self._newest = [*self._newest[-SILENT_ROUNDS:], cohort]
        for node in cohort:
            self.missing.pop(node, None)
            seen = self.clients.setdefault(node, ClientRounds(place, place))
            seen.last, seen.count = place, seen.count + 1
            seen.identity = identities.get(node, seen.identity)
        if len(self._newest) > SILENT_ROUNDS:
            self.missing |= dict.fromkeys(self._newly_missing(), self._rounds[place - SILENT_ROUNDS])

    def successors(self, nodes: Collection[Node]) -> dict[Node, Node]:
        """Return the nodes that were replaced, each with the newest node that claims the same identity.

        A replacement appears after the last round of the node it replaces: a client that is already there cannot take
        the place of one that is away.
        """
        by_identity: dict[str, list[Node]] = {}
        for node, seen in self.clients.items() if nodes else ():
            if seen.identity:
                by_identity.setdefault(seen.identity, []).append(node)
        later = {
            node: [same for same in by_identity.get(own.identity, ()) if self.clients[same].first > own.last]
            for node in nodes
            if (own := self.clients.get(node)) is not None
        }
        return {node: same[-1] for node, same in later.items() if same}

    def is_new(self, node: Node) -> bool:
        """Return whether a client took part in the newest round for the first time."""
        return self.clients[node].first == len(self._rounds) - 1

    @property
    def newest_round(self) -> int | None:
        """The last round added."""
        return self._rounds[-1] if self._rounds else None

    def _newly_missing(self) -> list[Node]:
        """Return clients that took part until the newest rounds, if all others take part in every round."""
        before, *newest = self._newest
        steady, present = set.intersection(*newest), set.union(*newest)
        absent = before - present
        if not absent or len(absent) >= len(steady) or len(steady) < STEADY * len(present):
            return []
        return [node for node in absent if self._is_missed(node)]

    def _is_missed(self, node: Node) -> bool:
        """Return whether a client took part in all rounds, was not replaced, and is not away by the others' chance."""
        own = self.clients[node]
        rounds = own.last - own.first + 1
        smallest_before = min(self._sizes[max(own.first, own.last - 9) : own.last + 1])
        if own.count < 0.9 * rounds or max(self._sizes[-SILENT_ROUNDS:]) >= smallest_before:
            return False  # a cohort of the same size: another client was asked instead
        others = [c for other, c in self.clients.items() if other != node and other not in self.missing]
        asked = sum(len(self._rounds) - other.first for other in others)
        away = asked - sum(other.count for other in others)
        return chance_of_failures(SILENT_ROUNDS, SILENT_ROUNDS, (away + 1) / (asked + UNKNOWN)) <= CHANCE


def attendance_up_to(history: History, round_index: int) -> Attendance:
    """Return the attendance of all rounds up to this one."""
    attendance = state_of(history, Attendance)
    newest = attendance.newest_round
    if newest is not None and newest > round_index:
        attendance = Attendance()  # an earlier round is examined again
        newest = None
    for past_round in history.rounds():
        if past_round <= round_index and (newest is None or past_round > newest):
            identities = {
                event.where.node: identity
                for event in events_in(history, past_round, "client.partition")
                if event.where.node is not None and (identity := _identity(event))
            }
            attendance.follow(past_round, cohort_of(history, past_round), identities)
    return attendance


def _identity(event: Event) -> str:
    """Return what a client claims to be, in words; empty if it claims nothing that can be compared."""
    partition, digest = event.data.get("partition"), event.data.get("name_digest")
    if type(partition) is int and 0 <= partition < MOST_PARTITIONS:
        return f"partition {partition}"
    return f"of one name ({digest})" if isinstance(digest, str) and re.fullmatch("[0-9a-f]{16}", digest) else ""


def _silent_clients(history: History, round_index: int) -> dict[Node, int]:
    """Return the silently missing clients, each with the last round in which it took part."""
    missing = attendance_up_to(history, round_index).missing
    if not missing:
        return {}
    departed = _departed(history, round_index)
    departed |= {event.where.node for event in history.events(OUTSIDE_ROUND)}  # it never was part of a round
    return {node: last for node, last in missing.items() if node not in departed}


def _departed(history: History, round_index: int) -> set[Node | None]:
    """Return the clients that left the federation as planned and have not rejoined it."""
    newest: dict[Node | None, tuple[int, bool]] = {}
    for left, name in ((False, "client.joined"), (True, "client.left")):
        for event in history.events(name):
            number = event.where.round
            if number is not None and number <= round_index:
                newest[event.where.node] = max(newest.get(event.where.node, (-1, False)), (number, left))
    return {node for node, (_, left) in newest.items() if left}
