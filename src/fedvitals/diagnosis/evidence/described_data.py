# SPDX-License-Identifier: Apache-2.0
"""What clients reported about their data (`probes.data_sketch`), read once: each client's current and earlier data."""

from __future__ import annotations

from fedvitals.data_change import DataChange, DataSketch, OwnData, read_sketch
from fedvitals.diagnosis.history_cutoff import shared, state_of
from fedvitals.protocols import History, Node
from fedvitals.records import Event

EVENT = "data"
SOON = 2  # a change of data counts this many rounds before it shows in what a client trains


class DataSketches:
    """Each client's newest sketch, and what changed since an earlier one."""

    def __init__(self) -> None:
        self.version = 0  # increases with every change
        self.newest: dict[Node, DataSketch] = {}
        self._own: dict[Node, OwnData] = {}
        self._first: dict[Node, int] = {}  # round in which a client first described its data
        self._read: set[tuple[Node, int, float]] = set()

    def update(self, events: list[Event]) -> None:
        """Add what was reported, as the events of that name, oldest first."""
        for event in events:
            node = event.where.node
            key = (node or "", event.where.round or 0, event.at)
            if node is None or key in self._read:
                continue
            self._read.add(key)
            sketch = read_sketch(event.where.round or 0, event.data)
            if sketch is None or _is_repeated(sketch, self.newest.get(node)):
                continue
            self.version += 1
            self._first.setdefault(node, sketch.round)
            self._own.setdefault(node, OwnData()).add(sketch)
            self.newest[node] = sketch

    def change(self, node: Node) -> DataChange | None:
        """Return what changed in a client's data; None if nothing did, or it is unknown."""
        return self._own[node].change if node in self._own else None

    def before(self, node: Node) -> DataSketch | None:
        """Return what a client had before its data changed; None if they did not, or it is not known."""
        return self._own[node].reference if node in self._own else None

    def labels_unchanged_since(self, node: Node, round_index: int) -> bool:
        """Return whether a client's labels are known to be the same as before a round.

        They are if its data did not change around then, or only its inputs did.
        """
        newest = self.newest.get(node)
        if newest is None:
            return False
        if newest.round == self._first[node] or newest.round < round_index - SOON:
            return True
        reference = self._own[node].reference
        if newest.inputs is None:
            return newest.change is not None and newest.change.kind.startswith("input")
        return reference is not None and reference.labels is not None and reference.labels == newest.labels


def _is_repeated(sketch: DataSketch, newest: DataSketch | None) -> bool:
    """Return whether scalars repeat the known ones, sent by a process that had not met the client before."""
    if newest is None or sketch.inputs is not None or sketch.compared:
        return False
    return (sketch.samples, sketch.scalars) == (newest.samples, newest.scalars)


@shared
def data_sketches(history: History, round_index: int) -> DataSketches:
    """Return what clients reported about their data up to a round. The result must not be modified."""
    sketches = state_of(history, DataSketches)
    sketches.update([event for event in history.events(EVENT) if (event.where.round or 0) <= round_index])
    return sketches
