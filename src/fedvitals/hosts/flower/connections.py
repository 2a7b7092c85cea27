# SPDX-License-Identifier: Apache-2.0
"""Which SuperNodes are connected, according to Flower: the grid's node list, and error replies for unavailable nodes.

A node missing from the list is no longer asked, so nothing else would ever reveal its absence. Only changes are
reported, as `client.disconnected` and `client.connected`: at a round's end, or at once if a strategy asks for the list
repeatedly, because it waits for more nodes and the round may never end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fedvitals.hosts.flower.reply_envelope import node_name

WAITING = 3  # consecutive list requests without a message: the strategy waits for nodes
Report = Callable[..., Any]  # an event: level, name, message; node= and data= by name


class NodeConnections:
    """Tracks which nodes of a run are away."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._known: set[str] = set()
        self._away: set[str] = set()
        self._listed: set[str] | None = None  # in the newest list
        self._chosen_from: set[str] | None = None  # the list that this round's clients were chosen from
        self._lists = 0  # since a node was asked

    def listed(self, ids: Iterable[int]) -> None:
        """Update from the grid's list of connected nodes."""
        self._listed = {node_name(node_id) for node_id in ids}
        self._lists += 1
        if self._lists >= WAITING:
            self._compare(self._listed)

    def asked(self, node: str) -> None:
        """Note that a node is asked, and from which list it was chosen."""
        self._known.add(node)
        self._lists = 0
        if self._chosen_from is None and self._listed is not None:
            self._chosen_from = set(self._listed)

    def unavailable(self, node: str) -> None:
        """Note that Flower answered for an unavailable node; the reply itself is reported as such."""
        self._away.add(node)
        for older in (self._listed, self._chosen_from):
            if older is not None:
                older.discard(node)

    def answered(self, node: str) -> None:
        """Note that a node has answered."""
        if node in self._away:
            self._back(node)

    def round_ends(self) -> None:
        """Report nodes that are missing from this round's list, and those that are back."""
        listed, self._chosen_from = self._chosen_from, None
        if listed is not None:
            self._compare(listed)

    def _compare(self, listed: set[str]) -> None:
        for node in sorted(self._away & listed):
            self._back(node)
        for node in sorted(self._known - listed - self._away):
            self._away.add(node)
            self._report("warning", "client.disconnected", f"{node} is no longer connected.", node=node)
        self._known |= listed

    def _back(self, node: str) -> None:
        self._away.discard(node)
        self._report("info", "client.connected", f"{node} is connected again.", node=node)
