# SPDX-License-Identifier: Apache-2.0
"""The server's real time in a round, attributed completely to parts."""

from __future__ import annotations

import time

from fedvitals.protocols import Observer


class Stopwatch:
    """Attributes the time since the last lap to a part of `fedvitals.time_parts`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._parts: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._at
        self._at = now

    def report(self, observer: Observer) -> None:
        """Report the seconds of each part to the observer."""
        for part, seconds in self._parts.items():
            observer.spent(part, seconds)
