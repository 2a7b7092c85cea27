# SPDX-License-Identifier: Apache-2.0
"""The four parts that everything in a monitor works with, wired to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from fedvitals.monitor.emission import Emission, Writer
from fedvitals.monitor.guard import Guard
from fedvitals.monitor.run_context import RunContext
from fedvitals.monitor.scopes import ClientThreads, Scopes
from fedvitals.records import Run
from fedvitals.transport.privacy import PrivacyPolicy


class Opening(Protocol):
    """What the spine needs of a `Lifecycle`."""

    def open(self) -> None:
        """Begin the run, unless it has begun or ended."""
        ...

    def writer(self) -> Writer | None:
        """The run's writer, which this opens; None if the run ended before anything happened."""
        ...


@dataclass(frozen=True, slots=True)
class Spine:
    """A run's context, where its training stands, the way out for records, and the guard against our own errors."""

    context: RunContext
    scopes: Scopes
    emission: Emission
    guard: Guard

    @classmethod
    def of(
        cls,
        run: Run,
        policy: PrivacyPolicy,
        *,
        strict: bool,
        lifecycle: Callable[[], Opening],
    ) -> Self:
        """Wire the parts of one run. `lifecycle` returns what opens it, and is first called by the first event."""
        context = RunContext(run, policy)
        threads = ClientThreads(context)
        emission = Emission(context, threads, lambda: lifecycle().writer())
        scopes = Scopes(context, threads, emission.emit, lambda: lifecycle().open())
        return cls(context, scopes, emission, Guard(context, threads, scopes, emission, strict=strict))
