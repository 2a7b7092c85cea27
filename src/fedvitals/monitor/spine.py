# SPDX-License-Identifier: Apache-2.0
"""The four parts that all other parts of a monitor work with, wired to each other."""

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
    """What the spine needs from a `Lifecycle`."""

    def open(self) -> None:
        """Begin the run, unless it has begun or ended."""
        ...

    def writer(self) -> Writer | None:
        """Return the run's writer, opening the run if needed; None if the run ended before anything happened."""
        ...


@dataclass(frozen=True, slots=True)
class Spine:
    """A run's context, its scopes, the emission of its records, and the guard against errors of our own."""

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
        """Wire the parts of one run.

        `lifecycle` returns the object that opens it, and is first called at the first event.
        """
        context = RunContext(run, policy)
        threads = ClientThreads(context)
        emission = Emission(context, threads, lambda: lifecycle().writer())
        scopes = Scopes(context, threads, emission.emit, lambda: lifecycle().open())
        return cls(context, scopes, emission, Guard(context, threads, scopes, emission, strict=strict))
