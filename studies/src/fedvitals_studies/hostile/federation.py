# SPDX-License-Identifier: Apache-2.0
"""A small federation in which one client's telemetry may be hostile, and the verdicts on the others.

    honest = federate(seed=3)
    hostile = federate(seed=3, kind="framing")
    changed_verdicts(honest, hostile)           # empty: the hostile telemetry changed nothing about anybody else

The updates are the same in both: only the telemetry of one client differs. Another client really is faulty, so that
there is something to hide, and something to be confused with.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

import fedvitals as fv
from fedvitals.records import Event, Finding, Record
from fedvitals.testing import MemorySink
from fedvitals.transport.sender import Sender
from fedvitals.transport.sink_writer import SENDER
from fedvitals_studies.hostile.telemetry import Attacker

ROUNDS, CLIENTS, STEPS = 8, 8, 4
HOSTILE, ILL = "c0", "c3"
ILLNESSES = ("none", "nan", "scaled", "negated", "noise", "zero")
MOVED = 0.05  # by which a probability may change

Verdict = tuple[str, str | None, str]
"""Issue, node and severity of a finding."""


@dataclass(slots=True)
class Outcome:
    """The result of a run: the largest probability of each verdict, and the clients named for their telemetry."""

    verdicts: dict[Verdict, float]
    refused: set[str | None]
    errors: list[str] = field(default_factory=list)  # of the monitor itself
    rounds: int = 0  # number of closed rounds
    kinds: list[str] = field(default_factory=list)  # of the attacks, round by round


def federate(
    seed: int, kind: str | None = None, *, illness: str = "nan", rounds: int = ROUNDS, privacy: int = 2
) -> Outcome:
    """Train and return the outcome. `kind`: of the attacks («any»: another one in each round); None: honest."""
    torch.manual_seed(seed)
    shared = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    centres = torch.randn(3, 8) * 2
    nodes = [f"c{i}" for i in range(CLIENTS)]
    sink = MemorySink()
    outcome = Outcome({}, set())
    with fv.Monitor(None, sinks=[sink], machine=False, privacy=privacy) as monitor:
        monitor.host.describe("study", {})
        attacker = Attacker(HOSTILE, [node for node in nodes if node != HOSTILE], monitor.run.id, seed)
        for number in range(rounds):
            monitor.host.round_begin(number, shared)
            updates = {}
            for node in nodes:
                sent = time.time()
                payload, update = _train(monitor, node, shared, centres)
                monitor.exchange(node, sent, sent, sent, time.time())
                messages = [payload]
                if node == HOSTILE and kind is not None:
                    attack = attacker.attack(payload, None if kind == "any" else kind)
                    messages = [*attack.messages]
                    outcome.kinds.append(attack.kind)
                elif len(attacker.captured) < 20:
                    attacker.captured.append(payload)
                for message in messages:
                    monitor.host.absorb(message, Sender(node, monitor.run.id))
                updates[node] = _ill(update, illness) if node == ILL and number >= 2 else update
                monitor.updates(number, {node: updates[node]})
            with torch.no_grad():
                usable = [u for u in updates.values() if all(part.isfinite().all() for part in u)]
                for place, parameter in enumerate(shared.parameters()):
                    parameter.add_(torch.stack([update[place] for update in usable]).mean(0))
            monitor.host.round_end(number, shared, {"loss": 1 / (1 + number)})
    return _summarise(sink, outcome)


def _train(
    monitor: fv.Monitor, node: str, shared: nn.Module, centres: torch.Tensor
) -> tuple[bytes, list[torch.Tensor]]:
    """Return a client's telemetry and its update."""
    model = copy.deepcopy(shared)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = torch.randint(0, 3, (64,))
    inputs = centres[labels] + torch.randn(64, 8)
    worker = replace(monitor.host.for_worker(), round=None)
    with worker.client(node, model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = slice(16 * step, 16 * step + 16)
            functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    update = [(new - old).detach() for new, old in zip(model.parameters(), shared.parameters(), strict=True)]
    return worker.payload(most=32 << 10), update


def _ill(update: list[torch.Tensor], illness: str) -> list[torch.Tensor]:
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda part: part,
        "nan": lambda part: torch.full_like(part, torch.nan),
        "scaled": lambda part: 50 * part,
        "negated": lambda part: -3 * part,
        "noise": torch.randn_like,
        "zero": torch.zeros_like,
    }
    return [changes[illness](part) for part in update]


def is_own_error(record: Record) -> TypeGuard[Event]:
    """Whether the monitor itself failed; a client may report the same of its own."""
    return isinstance(record, Event) and record.name == "monitor.error" and not record.source.startswith(SENDER)


def _summarise(sink: MemorySink, outcome: Outcome) -> Outcome:
    for finding in sink.of(Finding):
        key = (finding.issue, finding.where.node, finding.severity)
        outcome.verdicts[key] = max(outcome.verdicts.get(key, 0.0), finding.confidence)
    outcome.refused = {event.where.node for event in sink.events("telemetry.refused")}
    outcome.errors = [record.message for record in sink.records if is_own_error(record)]
    outcome.rounds = len(sink.metrics("time.round"))
    return outcome


def changed_verdicts(honest: Outcome, hostile: Outcome) -> list[tuple[Verdict, float, float]]:
    """Return the verdicts about honest clients and the whole run that differ, with their probabilities in both runs."""
    keys: Iterable[Verdict] = {*honest.verdicts, *hostile.verdicts}
    changed = []
    for key in keys:
        before, after = honest.verdicts.get(key, 0.0), hostile.verdicts.get(key, 0.0)
        if key[1] != HOSTILE and (abs(before - after) > MOVED or not (before and after)):
            changed.append((key, before, after))
    return sorted(changed, key=str)


def largest_move(honest: Outcome, hostile: Outcome) -> float:
    """Return by how much a probability about anybody but the hostile client changed at most."""
    keys = [key for key in {*honest.verdicts, *hostile.verdicts} if key[1] != HOSTILE]
    return max((abs(honest.verdicts.get(key, 0.0) - hostile.verdicts.get(key, 0.0)) for key in keys), default=0.0)


def findings_about_hostile(honest: Outcome, hostile: Outcome) -> set[str]:
    """Return the issues that are reported for the hostile client only because it lies."""
    return {issue for issue, node, _ in {*hostile.verdicts} - {*honest.verdicts} if node == HOSTILE}
