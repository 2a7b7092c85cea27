# SPDX-License-Identifier: Apache-2.0
"""Sends hostile payloads to a host, among honest clients, and counts the outcomes."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedvitals.measurements import stamped
from fedvitals.records import Metric, Record, Span, Where
from fedvitals.resources.memory import resident_bytes
from fedvitals.transport.wire.payload import encode
from fedvitals_studies.hostile.hosts import AttackedHost
from fedvitals_studies.hostile.telemetry import ATTACKS, Attacker

LIARS, HONEST = 20, 5
ATTACKS_A_ROUND = 8  # per liar
FLOODS = 1000  # one in this many attacks is a flood: one takes as long to create as hundreds of others
CHEAP = tuple(kind for kind in ATTACKS if kind != "flooding")


@dataclass(slots=True)
class AttackCounts:
    """The outcomes of the payloads. Times in seconds, memory in bytes."""

    host: str
    payloads: Counter[str] = field(default_factory=Counter)  # by kind of attack
    unread: int = 0  # because ten messages of the same sender and round had been refused
    senders: int = LIARS
    rounds: int = 0
    crashes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of the monitor
    longest: float = 0.0  # longest call: a message or the end of a round
    longest_processor: float = 0.0
    refusals: int = 0
    honest_refused: int = 0
    honest_missing: int = 0  # rounds in which an honest client's loss did not arrive
    unnamed: int = (
        0  # liars of the last round that were never refused: plain numbers, as OTLP takes them, may be possible
    )
    resident: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of hostile payloads sent."""
        return sum(self.payloads.values())

    @property
    def failures(self) -> list[str]:
        """What must not have happened."""
        lost = [f"{self.honest_missing} losses of honest clients did not arrive"] if self.honest_missing else []
        refused = [f"{self.honest_refused} messages of honest clients were refused"] if self.honest_refused else []
        return [*self.crashes, *self.errors, *lost, *refused]

    def call(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call, time it, and keep what it raises."""
        began, processor = time.perf_counter(), time.thread_time()
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - the study counts them
            self.crashes.append(f"{type(error).__name__}: {error}")
        self.longest = max(self.longest, time.perf_counter() - began)
        self.longest_processor = max(self.longest_processor, time.thread_time() - processor)


def attack_host(host: AttackedHost, payloads: int, seed: int, *, strangers: bool = False) -> AttackCounts:
    """Send at least `payloads` hostile payloads. `strangers`: in each round from new senders."""
    counts = AttackCounts(f"{host.name}, new senders in each round" if strangers else host.name)
    honest = [str(1 + i) for i in range(HONEST)]
    attackers = _attackers(host, honest, seed, 0)
    marks = [payloads // 4, payloads // 2, 3 * payloads // 4, payloads]
    attacks, number = 0, 0
    while counts.count < payloads:
        if strangers and number:
            attackers = _attackers(host, honest, seed, number)
            counts.senders += LIARS
        counts.call(host.begin, number)
        for attacker in attackers:
            own = _honest_payload(attacker.node, host.run, number, f"own-{number}")
            for _ in range(ATTACKS_A_ROUND):
                kind = "flooding" if attacks % FLOODS == 0 else attacker.random.choice(CHEAP)
                attacks += 1
                attack = attacker.attack(own, kind)
                attacker.captured = attacker.captured[-5:]
                for message in attack.messages:
                    counts.unread += not host.reads(attacker.node)
                    counts.call(host.send, attacker.node, message, _envelope(attacker))
                counts.payloads[kind] += len(attack.messages)
        for node in honest:
            own = _honest_payload(node, host.run, number, f"{node}-{number}")
            counts.call(host.send, node, own)
            for attacker in attackers:
                attacker.captured = [*attacker.captured[-5:], own]
        counts.call(host.end, number)
        number += 1
        while marks and counts.count >= marks[0]:
            marks.pop(0)
            host.monitor.flush()
            gc.collect()
            counts.resident.append(resident_bytes() or 0)
    counts.rounds = number
    _count(counts, host, honest, {attacker.node for attacker in attackers})
    return counts


def _attackers(host: AttackedHost, honest: list[str], seed: int, number: int) -> list[Attacker]:
    first = 1000 + LIARS * number
    return [Attacker(str(first + i), honest, host.run, seed * 1_000_003 + first + i) for i in range(LIARS)]


def _envelope(attacker: Attacker) -> dict[str, float] | None:
    """Return, in one case of ten, times that no clock shows."""
    if attacker.random.random() < 0.9:
        return None
    return {attacker.random.choice(("received", "replied", "started", "cpu")): attacker.number()}


def _honest_payload(node: str, run: str, number: int, source: str) -> bytes:
    """Return an honest client's report on a round."""
    where, now = Where(run, None, node), time.time()
    values = {"gradient.norm": 1.0, "steps": 10.0, "loss": 1 / (1 + number) + 0.001 * int(node), "weight.norm": 2.0}
    metrics = [Metric(where, now, name, value) for name, value in values.items()]
    records: list[Record] = [
        *metrics,
        Span(where, now, "client", 0.001, "0" * 32, "0" * 16, attributes={"failed": False}),
    ]
    return encode([stamped(record, source, i) for i, record in enumerate(records)])


def _count(counts: AttackCounts, host: AttackedHost, honest: list[str], liars: set[str]) -> None:
    sink = host.sink
    host.monitor.flush()
    counts.errors = [*sink.errors]
    counts.refusals = sum(sink.refusals.values())
    counts.honest_refused = sum(sink.refusals[node] for node in honest)
    counts.honest_missing = sum(max(0, counts.rounds - sink.losses[node]) for node in honest)
    counts.unnamed = sum(not sink.refusals[node] for node in liars)
