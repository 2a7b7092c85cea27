# SPDX-License-Identifier: Apache-2.0
"""How far the training is: the open round, its phase, and when anything last happened.

Updated by the training's own threads in a few assignments, without a lock, and read by `stall_watch`.
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
    """The phase that a round waits for, and the clients that have not finished it.

    Each client has the time when it was asked or began (seconds since the epoch). Without clients, the server itself is
    working.
    """

    phase: str
    since: Mapping[str, float] = field(default_factory=dict)
    asked: bool = True  # by a message; False: they work in this process


class Progress:
    """The progress of one run. Times are those of `time.monotonic`.

    `lengths`: of the newest rounds, in seconds. `silences`: their longest stretches without an event, by phase. Neither
    includes the first round, in which everything is loaded, nor a round that stalled after one that did not.
    """

    def __init__(self) -> None:
        self.round_index: int | None = None  # while a round is open
        self.began = self.moved_at = time.monotonic()
        self.phase = ""
        self.stalled = False  # whether the open round was reported as stalled
        self.lengths: deque[float] = deque(maxlen=NEWEST)
        self.silences: dict[str, deque[float]] = {}
        self._parts: list[str] = []  # the server's own work in progress, innermost last
        self._silences_now: dict[str, float] = {}  # of the open round
        self.rounds = 0  # completed rounds
        self._stalled_before = False

    def begin_round(self, round_index: int) -> None:
        """Note that a round begins."""
        self.began = self.moved_at = time.monotonic()
        self.phase, self.stalled = "", False
        self._parts, self._silences_now = [], {}
        self.round_index = round_index

    def end_round(self) -> None:
        """Note that the open round, if any, ends."""
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
        """Note that something happened; `phase`: the phase that the round enters, if known."""
        now = time.monotonic()
        silence, self.moved_at = now - self.moved_at, now
        if silence > self._silences_now.get(self.phase, 0.0):
            self._silences_now[self.phase] = silence
        self.phase = self.phase if phase is None else phase

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context for a part of the server's own work."""
        before, parts = self.phase, self._parts
        self.moved(name)
        parts.append(name)
        try:
            yield
        finally:
            parts.remove(name)
            self.moved(before)

    def awaited(self) -> Awaited | None:
        """Return the server's own work in progress; None if there is none."""
        parts = self._parts[-1:]
        return Awaited(parts[0]) if parts else None

    def skip(self, seconds: float) -> None:
        """Exclude a stretch in which this whole process was suspended."""
        self.began += seconds
        self.moved_at += seconds
