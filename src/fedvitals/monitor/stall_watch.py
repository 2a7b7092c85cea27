# SPDX-License-Identifier: Apache-2.0
"""A thread beside the training that signals that the run is alive, and reports a round that stands still.

A round stands still when it is longer than the run's own rounds let expect (`diagnosis.usual_length`) and nothing has
happened for longer than is usual in its phase. The thread reads what the training notes in `Progress`, takes no lock
that the training holds while it works, and ends with the run. It cannot run while C code holds the interpreter's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fedvitals.catalog import ALIVE
from fedvitals.diagnosis.detectors.stalls import STALLED, stall_finding, stall_words
from fedvitals.diagnosis.usual_length import UsualLength, usual_length
from fedvitals.monitor.progress import Awaited, Progress
from fedvitals.monitor.spine import Spine
from fedvitals.records import Finding
from fedvitals.resources.periodic_thread import PeriodicThread
from fedvitals.resources.stack_requests import StackRequests
from fedvitals.resources.thread_stacks import thread_stacks
from fedvitals.transport.privacy import WORDS

BEAT = 10.0  # seconds between two signs of life
PERIOD = 0.25  # seconds between two checks
PAUSE = 5.0  # seconds without a check, after which the whole process is taken to have been suspended
SHORTEST = 5.0  # seconds: a shorter round is not called stalled
OF_USUAL_ROUND = 0.9  # share of a usual round in which nothing has happened
OF_LONGEST_SILENCE = 1.7  # times the longest silence seen in this phase
NEW_PHASE = 4.0  # usual rounds, for a phase not seen before
AGAIN = 2.0  # times as long until a round that is still stalled is reported again
NODES_IN_EVENT = 200

AwaitedSource = Callable[[], Awaited | None]


class StallWatch:
    """Watches one run from `start` to `stop`; repeated calls have no effect.

    `sources` return whom the round waits for; the first that knows decides. `on_finding` is called with findings, on
    this thread; None: only the sign of life is recorded.
    """

    def __init__(self, spine: Spine, progress: Progress, on_finding: Callable[[Finding], None] | None) -> None:
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard, self._progress = spine.emission, spine.guard, progress
        self._on_finding = on_finding
        self.sources: list[AwaitedSource] = [progress.awaited]
        self._thread = PeriodicThread("fedvitals-watch", PERIOD, self._work)
        self._due = 0.0  # seconds of the open round after which it is reported again
        self._requests: StackRequests | None = None  # for the stack traces of clients in other processes
        self._answers: dict[str, dict[str, str]] = {}  # the answers already reported

    def start(self) -> None:
        """Start the thread, unless it was started or stopped before."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._thread.stop()
        if self._requests is not None:
            self._guard("removing requests", self._requests.close)

    def _work(self, ticks: Iterator[None]) -> None:
        beat = looked = time.monotonic()
        for _ in ticks:
            now = time.monotonic()
            if now - looked > PAUSE:
                self._progress.skip(now - looked)
            looked = now
            if now - beat >= BEAT:
                beat = now
                self._guard("telling that the run is alive", self._tell_alive)
            if self._on_finding is not None:
                self._guard("watching for stalls", self.look)

    def _tell_alive(self) -> None:
        here = self._scopes.round or self._scopes.of_run()
        self._emission.record.metric(replace(here, node="server"), ALIVE, 1.0)

    def look(self) -> None:
        """Report the open round if it stands still."""
        progress = self._progress
        number, began, moved_at = progress.round_index, progress.began, progress.moved_at
        usual = None if number is None else usual_length([*progress.lengths])
        if number is None or usual is None:
            return
        now = time.monotonic()
        elapsed, silent = now - began, now - moved_at
        due = 0.0
        if progress.stalled:
            due = 0.0 if self._has_new_answers() else self._due
        if elapsed >= max(usual.limit, SHORTEST, due) and silent >= self._usual_silence(progress.phase, usual):
            if not progress.stalled:
                self._ask()
            progress.stalled, self._due = True, max(due, AGAIN * elapsed)
            self._report(number, elapsed, silent, usual)

    def _ask(self) -> None:
        """Ask clients in other processes of this machine for their stack traces; answers are reported on arrival."""
        if self._may_tell_clients_code():
            self._requests = self._requests or StackRequests(self._context.trace)
            self._answers = {}
            self._requests.ask()

    def _has_new_answers(self) -> bool:
        before, self._answers = self._answers, {} if self._requests is None else self._requests.answers()
        return self._answers.keys() > before.keys()

    def _may_tell_clients_code(self) -> bool:
        return self._context.policy.level >= WORDS and self._context.policy.tracebacks

    def _usual_silence(self, phase: str, usual: UsualLength) -> float:
        """Return the seconds without an event after which a phase is unusually silent."""
        seen = self._progress.silences.get(phase)
        if not seen:
            return NEW_PHASE * usual.seconds
        return max(OF_USUAL_ROUND * usual.seconds, OF_LONGEST_SILENCE * max([*seen]))

    def _report(self, round_index: int, elapsed: float, silent: float, usual: UsualLength) -> None:
        awaited = next(filter(None, (source() for source in self.sources)), Awaited(""))
        now = time.time()
        nodes = sorted(awaited.since.items(), key=lambda entry: entry[1])[:NODES_IN_EVENT]
        stall: dict[str, Any] = {
            "round": round_index,
            "seconds": elapsed,
            "silent_seconds": silent,
            "usual_seconds": usual.seconds,
            "phase": awaited.phase,
            "asked": awaited.asked,
            "awaited": {node: max(0.0, now - since) for node, since in nodes},
            "waiting_since": nodes[0][1] if nodes else now - silent,
            "stacks": self._stacks(),
        }
        scope = replace(self._scopes.of_run(), round=round_index)
        self._emission.record.event(scope, "warning", STALLED, stall_words(stall), stall)
        if self._on_finding is not None:
            self._on_finding(stall_finding(stall))

    def _stacks(self) -> dict[str, dict[str, str]]:
        """Return the stack traces of this process's threads; if clients train in it, only if their text may be kept."""
        threads = self._scopes.client_threads()
        if threads and not self._may_tell_clients_code():
            return {}
        return {"server": thread_stacks(first=threads), **self._answers}
