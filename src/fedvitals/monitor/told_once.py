# SPDX-License-Identifier: Apache-2.0
"""Leaves out what a client's processes tell again: its labels, and what its data look like.

A process that meets a client for the first time tells both; told once by another, that is enough.
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
# Of each event: what is left out with it, and the parts by which two of them are equal.
REPEATED = {"labels": (LABELS, ("histogram",)), "data": (DATA, ("inputs", "labels", "samples"))}


class ToldOnce:
    """Remembers of each client what was told last."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, Node], tuple[Any, ...]] = {}

    def without_repeats(self, records: list[Telemetry]) -> list[Telemetry]:
        """Return the records without those that only repeat what was told."""
        repeated: dict[tuple[str, ...], set[Node]] = {}
        for record in records:
            if not isinstance(record, Event) or record.name not in REPEATED or record.where.node is None:
                continue
            names, parts = REPEATED[record.name]
            told = tuple(record.data.get(part) for part in parts)
            if None not in told and self._told.get((record.name, record.where.node)) == told:
                repeated.setdefault(names, set()).add(record.where.node)
            self._told[record.name, record.where.node] = told
        for names, nodes in repeated.items():
            records = [kept for record in records for kept in _without(record, names, nodes)]
        return records


def _without(telemetry: Telemetry, names: Sequence[str], nodes: Container[Node | None]) -> Iterator[Telemetry]:
    """What is left of it without these names of these nodes: single records, which keep their numbers, if less."""
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
