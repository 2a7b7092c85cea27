# SPDX-License-Identifier: Apache-2.0
"""Which clients took part in one round's training or evaluation, and how it ended for each: the event `cohort`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedvitals.monitor.host import HostObserver
from fedvitals.monitor.progress import Awaited

NODES_IN_EVENT = 200  # nodes in one event


@dataclass
class PhaseParticipation:
    """Which clients did what in one round's training or evaluation."""

    asked: dict[str, None] = field(default_factory=dict)
    answered: dict[str, None] = field(default_factory=dict)
    failed: dict[str, None] = field(default_factory=dict)
    late: dict[str, None] = field(default_factory=dict)
    busy: dict[str, None] = field(default_factory=dict)


def report(host: HostObserver, name: str, phase: PhaseParticipation) -> None:
    """Report a phase that is over by the event `cohort`, whose data lists the nodes of each kind."""
    lists = {kind: [*getattr(phase, kind)] for kind in ("asked", "answered", "failed", "late", "busy")}
    counts = ", ".join(f"{len(nodes)} {kind}" for kind, nodes in lists.items() if nodes or kind == "asked")
    data = {"phase": name, **{kind: nodes[:NODES_IN_EVENT] for kind, nodes in lists.items()}}
    host.event("info", "cohort", f"{name}: {counts}.", data=data)


class Request(Protocol):
    """A request to a client that is on its way."""

    node: str
    phase: str
    sent: float  # seconds since the epoch


def awaited(pending: Sequence[Request]) -> Awaited | None:
    """Return the clients that owe an answer, with the phase of the newest request; None where nobody does."""
    if not pending:
        return None
    phase = pending[-1].phase
    return Awaited(phase, {request.node: request.sent for request in pending if request.phase == phase})
