# SPDX-License-Identifier: Apache-2.0
"""What a machine that may lie can report: about itself alone, and only from the time when it was asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fedvitals.errors import RecordError
from fedvitals.measurements import run_of
from fedvitals.protocols import Node
from fedvitals.records import Event, LayerStats, Metric, Record, Run, Sketch, Span, node_name
from fedvitals.transport.payload_buffer import LOST
from fedvitals.transport.wire.payload import LIMITS

OF_CLIENTS = (Metric, LayerStats, Span, Event, Sketch)  # what one that may lie can tell, besides its layers' names
OF_SERVERS = (  # events that tell of all, or in our own words of what the server saw of a client
    "aggregation.failed", "cohort", "groups", "initialisation", "initialisation.zero", "client.answered_late",
    "client.busy", "client.unserved", "round.unclosed", "telemetry.refused", "update.late", "update.left_out",
    "updates.approximate",
)  # fmt: skip
ID_CHARACTERS = 64  # of a Span's or sketch's ids: a payload holds a repeated text once, a store with each record


@dataclass(frozen=True, slots=True)
class Sender:
    """Who a payload came from, as the framework knows it: its records may tell of nobody else.

    `run`: what the run is called there, where ours is not known. `group`: the edge, cluster or ring that the host knows
    it to be in; what the payload says of either is ignored.
    """

    node: Node
    run: str
    group: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "node", node_name(self.node))

    def own(self, record: Record, run: str) -> Record:
        """The record as one of the run here; an error if it is another's."""
        if run_of(record) != self.run:
            raise RecordError(f"Telemetry of '{self.node}' is of the run '{run_of(record)[:80]}', not of '{self.run}'.")
        # Its sources are its own: nobody can use up another's sequence numbers.
        record = replace(record, source=f"{self.node}/{record.source}"[:200])
        if isinstance(record, Run):
            return replace(record, id=run)
        if record.where.node not in (None, self.node):
            raise RecordError(f"Telemetry of '{self.node}' tells of another node, '{record.where.node[:80]}'.")
        if not isinstance(record, OF_CLIENTS) or (isinstance(record, Event) and record.name in OF_SERVERS):
            what = record.name if isinstance(record, Event) else type(record).__name__
            raise RecordError(f"Telemetry of '{self.node}' holds '{what}', which is the server's to tell.")
        if isinstance(record, Event) and record.name == "labels" and not _are_counts(record.data.get("histogram")):
            raise RecordError(f"Telemetry of '{self.node}' tells of labels, and its histogram holds no counts.")
        if max(map(len, _ids(record)), default=0) > ID_CHARACTERS:
            raise RecordError(f"Telemetry of '{self.node}' holds an id of more than {ID_CHARACTERS} characters.")
        if record.where.round is not None:  # one that is far ahead would push all others out of the detectors' memory
            raise RecordError(f"Telemetry of '{self.node}' is of round {record.where.round}; only the server counts.")
        own = replace(record, where=replace(record.where, run=run, node=self.node, group=self.group))
        return _loss(own) if isinstance(own, Event) and own.name == LOST else own


def _ids(record: Record) -> tuple[str, ...]:
    """The texts of a record that a store keeps with each record of its kind."""
    if isinstance(record, Span):
        return record.trace, record.id, record.parent or ""
    return (record.digest,) if isinstance(record, Sketch) else ()


def _loss(event: Event) -> Event:
    """What a sender says that it lost, in our words: a finding quotes them."""
    records = event.data.get("records")
    count = min(records, LIMITS.records) if type(records) is int and records > 0 else 1
    return replace(event, message=f"{count} records of a worker found no room.", data={"records": count})


def as_seen(record: Any, seen: tuple[float, float]) -> Record:
    """What a client tells, with times inside of what the server saw: one that lies would bend the charts of all."""
    if isinstance(record, Run):
        return record
    sent, returned = seen
    at = record.at if sent <= record.at <= returned else returned if record.at > returned else sent
    if isinstance(record, Span):
        seconds = record.seconds if math.isfinite(record.seconds) else 0.0
        # No client has a virtual clock: where one says so, the whole run would be shown by it.
        own = {key: value for key, value in record.attributes.items() if key != "clock"}
        return replace(record, at=at, seconds=min(max(seconds, 0.0), returned - at), attributes=own)
    return cast("Record", record if at == record.at else replace(record, at=at))


def _are_counts(counts: Any) -> bool:
    return isinstance(counts, Mapping) and all(type(count) is int and 0 <= count < 1 << 40 for count in counts.values())
