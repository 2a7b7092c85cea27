# SPDX-License-Identifier: Apache-2.0
"""A cache in front of a history that no longer changes, because walking over rounds asks for the same again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fedvitals.protocols import History
from fedvitals.records import Event


class CachedHistory:
    """A `protocols.History` that asks another one only once for each thing."""

    def __init__(self, history: History) -> None:
        self.rounds, self.nodes, self.layers = cache(history.rounds), cache(history.nodes), cache(history.layers)
        self.latest, self.series, self.matrix = cache(history.latest), cache(history.series), cache(history.matrix)
        self.across = history.across  # large, and each is asked for once
        self._events = cache(history.events)

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        events = self._events(name)
        if since is None:
            return events
        return [event for event in events if event.where.round is not None and event.where.round >= since]
