# SPDX-License-Identifier: Apache-2.0
"""How far the training is: the open round, its phase, and when anything last happened.

Noted by the training's own threads in a few assignments, without a lock, and read by `stall_watch`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedvitals.diagnosis.usual_length import NEWEST

TRAIN = "train"


@dataclass(frozen=True, slots=True)
class Awaited:
    """Whom a round waits for: a phase, and the clients that have not finished it, each with the time when they were
    asked or began (seconds since the epoch). Without clients, the server itself is at work.
    """

    phase: str
    since: Mapping[str, float] = field(default_factory=dict)
    asked: bool = True  # by a message; False: they work in this process


class Progress:
    """Times are those of `time.monotonic`.

    `lengths`: of the newest rounds, in seconds. `silences`: their longest stretches without an event, by phase. Neither
    has the first round, in which everything is loaded, nor a round that stalled after one that did not.
    """

    def __init__(self) -> None:
        self.round_index: int | None = None  # while a round is open
        self.began = self.moved_at = time.monotonic()
        self.phase = ""
        self.stalled = False  # whether the open round was reported
        self.lengths: deque[float] = deque(maxlen=NEWEST)
        self.silences: dict[str, deque[float]] = {}
        self._parts: list[str] = []  # the server's own work that is under way, the innermost last
        self._silences_now: dict[str, float] = {}  # of the open round
        self.rounds = 0  # that have ended
        self._stalled_before = False

    def begin_round(self, round_index: int) -> None:
        """A round begins."""
        self.began = self.moved_at = time.monotonic()
        self.phase, self.stalled = "", False
        self._parts, self._silences_now = [], {}
        self.round_index = round_index

    def end_round(self) -> None:
        """The open round ends, if there is one."""
        if self.round_index is None:
            return
        self.moved()
        self.round_index = None
        unusual = self.rounds == 0 or (self.stalled and not self._stalled_before)
        self.rounds += 1
        self._stalled_before = self.stalled
        if not unusual:
            self.lengths.append(self.moved_at - self.began)
            for phase, silence in self._silences_now.items():
                self.silences.setdefault(phase, deque(maxlen=NEWEST)).append(silence)

    def moved(self, phase: str | None = None) -> None:
        """Something happened; `phase`: what the round is at from now on, where that is known."""
        now = time.monotonic()
        silence, self.moved_at = now - self.moved_at, now
        if silence > self._silences_now.get(self.phase, 0.0):
            self._silences_now[self.phase] = silence
        self.phase = self.phase if phase is None else phase

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A stretch of the server's own work."""
        before, parts = self.phase, self._parts
        self.moved(name)
        parts.append(name)
        try:
            yield
        finally:
            parts.remove(name)
            self.moved(before)

    def awaited(self) -> Awaited | None:
        """The server's own work that is under way; None where there is none."""
        parts = self._parts[-1:]
        return Awaited(parts[0]) if parts else None

    def skip(self, seconds: float) -> None:
        """Leave out a stretch in which this whole process did not run."""
        self.began += seconds
        self.moved_at += seconds
