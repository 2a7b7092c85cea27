# SPDX-License-Identifier: Apache-2.0
"""The run's tape: opened with the run, fed by the host or by a plain loop, closed once all findings have arrived."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedvitals.loop_tape import LoopTape
from fedvitals.monitor.spine import Spine
from fedvitals.protocols import Sink, TapeRecorder
from fedvitals.records import Record
from fedvitals.scope import current
from fedvitals.store import spill_folder


class RunTape:
    """A tape (`fv.Tape`) of one run, or none. `recorder` takes states once it is open; `loop` records a plain loop's.

    `store`: the store beside which the tape's files lie.
    """

    def __init__(self, tape: Any, store: str | os.PathLike[str] | None, spine: Spine) -> None:
        self._tape, self._store = tape, store
        self._context, self._scopes = spine.context, spine.scopes
        self._emission, self._guard = spine.emission, spine.guard
        self.recorder: TapeRecorder | None = None
        self.loop = LoopTape()

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The tape as a sink, since it keeps the states around findings; () if there is none."""
        return () if self._tape is None else (self._tape,)

    def open(self) -> None:
        """Open the tape, if there is one."""
        if self._tape is not None:
            self._guard("opening the tape", self._open)

    def _open(self) -> None:
        folder = Path("fedvitals.d") if self._store is None else spill_folder(self._store)
        self._tape.open(folder, self._context.run, self._event, self._file, self._context.policy.level, self._settle)
        self.recorder = self._tape
        if self._context.run.host == "torch":
            self.loop.open(self._tape, self._event)

    def flush(self, timeout: float) -> bool:
        """Wait until the tape has everything so far; return whether it did in time."""
        return self.recorder is None or bool(self._guard("flushing the tape", lambda: self._tape.flush(timeout)))

    def close(self) -> None:
        """Close the tape once all findings have arrived."""
        if self.recorder is not None:
            self._guard("ending the tape", lambda: (self._emission.flush(30.0), self._tape.close()))

    def _event(self, level: str, name: str, message: str) -> None:
        """Record an event of the tape itself."""
        self._as_server(lambda: self._emission.record.event(self._scopes.here(), level, name, message))

    def _file(self, record: Record) -> None:
        """Record what the tape keeps, so that the store can list it."""
        self._as_server(lambda: self._emission.emit(record))

    def _as_server(self, work: Callable[[], None]) -> None:
        """Record in the server's name: the tape's own thread acts for no client."""
        token = current.set(self._scopes.of_run(node="server", trace=self._context.trace))
        self._guard("telling of the tape", work)
        current.reset(token)

    def _settle(self) -> None:
        """Wait until the store has this round and what the detectors find in it."""
        if self._flush_own():
            self._flush_own()  # what the detectors found in the meantime

    def _flush_own(self) -> bool:
        return bool(self._guard("flush()", lambda: self._emission.flush(30.0, own=True)))
