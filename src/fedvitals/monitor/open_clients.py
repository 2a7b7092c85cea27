# SPDX-License-Identifier: Apache-2.0
"""Clients that are training, and clients that have ended whose results are still on a device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedvitals.monitor.guard import Guard
from fedvitals.probes.results import Results
from fedvitals.resources.capture import Recording
from fedvitals.scope import Scope

if TYPE_CHECKING:
    from fedvitals.probes.pending_results import PendingResults
    from fedvitals.probes.session import ClientSession
    from fedvitals.resources.client_memory import OpenMemory
    from fedvitals.resources.phases import StepClock


@dataclass(slots=True)
class OpenClient:
    """An open client: how to close it, and what it has gathered."""

    scope: Scope
    token: Token[Scope | None]
    began: float = field(default_factory=time.perf_counter)
    at: float = field(default_factory=time.time)
    session: ClientSession | None = None  # if the client has a model
    pending: PendingResults | None = None  # the results, while they are still on a device
    clock: StepClock | None = None
    memory: OpenMemory | None = None
    recording: Recording | None = None  # of single operators
    tables: Mapping[str, str] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)
    results: Results = field(default_factory=Results)
    attributes: dict[str, Any] = field(default_factory=dict)  # attributes of its Span
    memory_metrics: Mapping[str, float] | None = None


class UnsettledClients:
    """Clients that have ended and are reported in their order once their results have arrived from a device."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._waiting: deque[tuple[Scope, PendingResults, Callable[[], None]]] = deque()
        self._lock = threading.RLock()

    def append(self, scope: Scope, pending: PendingResults, report: Callable[[], None]) -> None:
        """Add a client.

        `report` must not refer to objects of the user: a model or an optimiser would outlive its client.
        """
        self._waiting.append((scope, pending, report))

    def clear(self) -> None:
        """Drop them without a report."""
        with self._lock:
            for _, pending, _ in self._waiting:
                pending.discard()
            self._waiting.clear()

    def settle(self, *, wait: bool) -> None:
        """Report all of them, or, unless `wait`, those whose results have arrived.

        Errors are raised after the last report.
        """
        with self._lock, contextlib.ExitStack() as reports:
            due = []
            while self._waiting and (wait or not self._waiting[0][1].awaits_device):
                due.append(self._waiting.popleft())
            for scope, _, report in reversed(due):  # an exit stack calls the last one first
                reports.callback(self._guard, "reporting a client", report, scope)
