# SPDX-License-Identifier: Apache-2.0
"""Which clients took part in one round's training or evaluation, and with what outcome: the event `cohort`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedvitals.monitor.host import HostObserver
from fedvitals.monitor.progress import Awaited

NODES_IN_EVENT = 200  # nodes in one event


@dataclass
class PhaseParticipation:
    """The clients' participation in one round's training or evaluation."""

    asked: dict[str, None] = field(default_factory=dict)
    answered: dict[str, None] = field(default_factory=dict)
    failed: dict[str, None] = field(default_factory=dict)
    late: dict[str, None] = field(default_factory=dict)
    busy: dict[str, None] = field(default_factory=dict)


def report(host: HostObserver, name: str, phase: PhaseParticipation) -> None:
    """Report a finished phase by the event `cohort`, whose data lists the nodes by outcome."""
    lists = {kind: [*getattr(phase, kind)] for kind in ("asked", "answered", "failed", "late", "busy")}
    counts = ", ".join(f"{len(nodes)} {kind}" for kind, nodes in lists.items() if nodes or kind == "asked")
    data = {"phase": name, **{kind: nodes[:NODES_IN_EVENT] for kind, nodes in lists.items()}}
    host.event("info", "cohort", f"{name}: {counts}.", data=data)


class Request(Protocol):
    """A request to a client that has not been answered."""

    node: str
    phase: str
    sent: float  # seconds since the epoch


def awaited(pending: Sequence[Request]) -> Awaited | None:
    """Return the clients that owe an answer, with the phase of the newest request; None if there are none."""
    if not pending:
        return None
    phase = pending[-1].phase
    return Awaited(phase, {request.node: request.sent for request in pending if request.phase == phase})
