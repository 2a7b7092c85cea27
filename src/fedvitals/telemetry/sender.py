# SPDX-License-Identifier: Apache-2.0
"""What a machine that may lie can tell: of itself alone, nothing that is the server's, and of the time it was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fedvitals.errors import RecordError
from fedvitals.protocols import Node
from fedvitals.records import Event, LayerStats, Metric, Record, Run, Sketch, Span, node_name, run_of

OF_CLIENTS = (Metric, LayerStats, Span, Event, Sketch)  # what one that may lie can tell, besides its layers' names
OF_SERVERS = ("aggregation.failed", "cohort", "groups")  # events that tell of all


@dataclass(frozen=True, slots=True)
class Sender:
    """Who a payload came from, as the framework knows it: its records may tell of nobody else.

    `run`: what the run is called there, where ours is not known.
    """

    node: Node
    run: str

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
        if isinstance(record, Event) and record.name == "labels" and not _is_count(record.data.get("histogram")):
            raise RecordError(f"Telemetry of '{self.node}' tells of labels, and its histogram holds no counts.")
        if record.where.round is not None:  # one that is far ahead would push all others out of the detectors' memory
            raise RecordError(f"Telemetry of '{self.node}' is of round {record.where.round}; only the server counts.")
        return replace(record, where=replace(record.where, run=run, node=self.node))


def as_seen(record: Any, seen: tuple[float, float] | None) -> Record:
    """What a client tells, with times inside of what the server saw: one that lies would bend the charts of all."""
    if seen is None or isinstance(record, Run):
        return cast("Record", record)
    sent, returned = seen
    at = record.at if sent <= record.at <= returned else returned if record.at > returned else sent
    if isinstance(record, Span):
        return replace(record, at=at, seconds=min(max(record.seconds, 0.0), returned - at))
    return cast("Record", record if at == record.at else replace(record, at=at))


def _is_count(told: Any) -> bool:
    return isinstance(told, Mapping) and all(type(count) is int and 0 <= count < 1 << 40 for count in told.values())
