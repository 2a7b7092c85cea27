# SPDX-License-Identifier: Apache-2.0
"""Drop descriptions of a client's data (labels, inputs) that repeat the last one.

Every process that trains a client for the first time describes its data; only the first description is needed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from fedvitals.catalog import CATALOG
from fedvitals.measurements import Measurements, Telemetry
from fedvitals.protocols import Node
from fedvitals.records import Event, Metric, Record

LABELS = ("labels", "label.entropy")  # the event and the metric
DATA = ("data", *(name for name in CATALOG if name.startswith("data.")))
# For each event: the names that are dropped with it, and the fields that decide whether two of them are equal.
REPEATED = {"labels": (LABELS, ("histogram",)), "data": (DATA, ("inputs", "labels", "samples"))}


class RepeatedDescriptions:
    """Remembers the last description of each client's data."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, Node], tuple[Any, ...]] = {}

    def without_repeats(self, records: list[Telemetry]) -> list[Telemetry]:
        """Return the records without descriptions that repeat the last one of the same client."""
        repeated: dict[tuple[str, ...], set[Node]] = {}
        for record in records:
            if not isinstance(record, Event) or record.name not in REPEATED or record.where.node is None:
                continue
            names, parts = REPEATED[record.name]
            description = tuple(record.data.get(part) for part in parts)
            if None not in description and self._last.get((record.name, record.where.node)) == description:
                repeated.setdefault(names, set()).add(record.where.node)
            self._last[record.name, record.where.node] = description
        for names, nodes in repeated.items():
            records = [kept for record in records for kept in _without(record, names, nodes)]
        return records


def _without(telemetry: Telemetry, names: Sequence[str], nodes: Container[Node | None]) -> Iterator[Telemetry]:
    """Yield *telemetry* without the records of these names and nodes, as single records if any are dropped."""
    if not isinstance(telemetry, Measurements):
        records: Iterable[Record] = (telemetry,)
    elif any(name in names for name in telemetry.names) and any(node in nodes for node in telemetry.nodes):
        records = telemetry.records()
    else:
        yield telemetry
        return
    for record in records:
        if not (isinstance(record, Event | Metric) and record.where.node in nodes and record.name in names):
            yield record
