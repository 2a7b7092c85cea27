# SPDX-License-Identifier: Apache-2.0
"""Builds and wires all parts of one monitored run; users see it through `Monitor`, hosts through `HostObserver`."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedvitals.diagnosis.corrections.correction_trials import CorrectionTrials
from fedvitals.diagnosis.corrections.policy import CorrectionPolicy
from fedvitals.diagnosis.evidence.unusable_updates import UnusableUpdateCheck
from fedvitals.diagnosis.history_cutoff import LOOK_BACK
from fedvitals.monitor.arrivals import Arrivals
from fedvitals.monitor.clients import Clients
from fedvitals.monitor.earlier_scales import earlier_scales
from fedvitals.monitor.findings import RunFindings
from fedvitals.monitor.lifecycle import Lifecycle, Outputs, close_at_exit, machine_sampler
from fedvitals.monitor.losses import LostRecords
from fedvitals.monitor.progress import Progress
from fedvitals.monitor.rounds import Rounds
from fedvitals.monitor.spine import Spine
from fedvitals.monitor.stall_watch import StallWatch
from fedvitals.monitor.taping import RunTape
from fedvitals.probes.results import Results
from fedvitals.protocols import Detector, Sink
from fedvitals.records import Run
from fedvitals.resources.capture import Capture
from fedvitals.resources.time_ledger import Ledger
from fedvitals.store import MemoryStore
from fedvitals.transport.privacy import PrivacyPolicy

if TYPE_CHECKING:
    from fedvitals.probes.backends import AnyInstruments

logger = logging.getLogger("fedvitals")


class MonitoredRun:
    """One run, from its first event to its end. Opens nothing before that event; closed at exit if nobody closes it.

    The parameters are those of `Monitor`, checked and resolved. `again`: the store may already have the run.
    `chosen_privacy`: level, cohort and tracebacks as the user chose them, since a host may set others.
    """

    def __init__(
        self,
        run: Run,
        store: str | os.PathLike[str] | None,
        policy: PrivacyPolicy,
        kit: AnyInstruments,
        detectors: Sequence[Detector],
        cure: CorrectionPolicy,
        *,
        sinks: Sequence[Sink],
        tape: Any,
        capture: Capture | None,
        profile: bool,
        machine: bool,
        strict: bool,
        again: bool,
        chosen_privacy: tuple[int | None, int, bool | None],
    ) -> None:
        # The lambda refers to this object, which keeps it alive while the run is open so that it can be closed at exit.
        self.spine = spine = Spine.of(run, policy, strict=strict, lifecycle=lambda: self.lifecycle)
        self.kit, self.cure, self.chosen_privacy = kit, cure, chosen_privacy
        self.lost = LostRecords(spine, store)
        memory = MemoryStore(rounds=LOOK_BACK)
        self.care = CorrectionTrials(run.id, cure, spine.emission.emit, functools.partial(memory.history, run.id))
        earlier = lambda: earlier_scales(store, spine.context.run)  # noqa: E731 - by then its layers are known
        self.findings = RunFindings(spine, memory, detectors, self.lost, self.care.add_finding, earlier)
        self.tape = RunTape(tape, store, spine)
        self.outputs = Outputs(store, sinks, spine, self.findings, self.tape, profile=profile, again=again)
        sampler = machine_sampler(spine) if machine else None
        self.progress = Progress()
        self.watch = StallWatch(spine, self.progress, self.findings.take if detectors else None)
        self.lifecycle = Lifecycle(
            spine, self.lost, self.outputs.open, tape=self.tape, machine=sampler, watch=self.watch
        )
        self.ledger = Ledger() if profile else None
        self.arrivals = Arrivals(spine, self.lost, kit, self.ledger, capture)
        self.rounds = Rounds(spine, self.lost, kit, self.arrivals, self.ledger, policy.cohort)
        joining = (kit.updates.add, self.rounds.joined, self.rounds.joined_stack)
        self.clients = Clients(
            spine,
            self.tape.loop,
            lambda: kit,
            *joining,
            profile=profile,
            capture=capture,
            defers=lambda: self.rounds.open is not None,
        )
        self.watch.sources += [self.clients.awaited, self.arrivals.awaited]
        self.unusable = UnusableUpdateCheck()
        self._before_close: list[Callable[[], None]] = []
        self._asked = self._closed = self._ended = self._warned = False
        self._lock = threading.Lock()
        close_at_exit(self)

    @property
    def run(self) -> Run:
        """The run's record as it is now."""
        return self.spine.context.run

    @property
    def has_closing_host(self) -> bool:
        """Whether a host wants to be called before the run ends."""
        return bool(self._before_close)

    @property
    def last_round(self) -> int | None:
        """The number of the round that is open, or was open last."""
        return self.spine.scopes.last_round

    def silence(self) -> None:
        """Measure but record nothing: of several processes that train a client together, another one reports.

        Does nothing once the run has begun.
        """
        if self.spine.emission.writer is None:
            self.outputs.silence()
            self.lifecycle.silence()

    def before_close(self, work: Callable[[], None]) -> None:
        """Call `work` before the run ends, since a host may have a round open."""
        self._before_close.append(work)

    def asked(self) -> bool:
        """Note that the host asks which corrections are in force. Returns whether it has asked before."""
        before, self._asked = self._asked, True
        return before

    def has_ended(self) -> bool:
        """Return whether the run was closed; using its monitor afterwards warns once that nothing is recorded."""
        if self._ended and not self._warned:
            self._warned = True
            logger.warning(
                "Run %s was closed: its monitor records nothing of what happens from here on. Close it after the last "
                "round, or make a new fv.Monitor for what follows.",
                self.run.id,
            )
        return self._ended

    def end_round(self, model: Any = None, metrics: Any = None, state: Any = None) -> None:
        """Close the open round, if any, and record its results. The tape keeps `state` of it."""
        model_results = self.rounds.measure_model(model)
        try:
            self.clients.settle()
        finally:
            self._close_round(model_results, metrics, state)

    def _close_round(self, model_results: Callable[[], Results] | None, metrics: Any, state: Any) -> None:
        opened = self.rounds.close()
        self.progress.end_round()
        if opened is None:
            return

        def end() -> None:
            self.rounds.finish(opened, model_results, metrics or {})
            if self.cure.automatic and not self.asked():
                # Corrections are applied by the host; a plain loop that never asks for them applies none.
                why = "Nothing is corrected by itself: this host does not ask what to do."
                remedy = 'Call monitor.corrections().apply(updates) before you average, or take cure="suggest".'
                self.spine.emission.record.event(opened.scope, "warning", "cure.unasked", f"{why} {remedy}")

        number = opened.scope.round or 0
        self.spine.guard(f"closing round {number}", end)
        self.spine.guard("taping a round", lambda: self.tape.loop.round_end(number, state, metrics or {}))

    def discard_open(self) -> None:
        """Close the open round and its clients without recording anything of them."""
        self.clients.abandon()
        self.arrivals.forget()
        opened = self.rounds.close()
        if opened is not None:
            self.spine.scopes.leave(opened.scope, opened.token)

    def close(self) -> None:
        """End the run: close its scopes, write its records, remove hooks and threads.

        A second call does nothing, nor does a call in a process that was forked while the run was open.
        """
        if self.lifecycle.is_of_parent:  # before any lock, which may be held by a thread that the fork did not copy
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for work in self._before_close:
            self.spine.guard("ending a host's round", work)
        self.clients.end_all()
        self.end_round()
        self.lifecycle.close()
        self._ended = True
