# SPDX-License-Identifier: Apache-2.0
"""What a machine that may lie can report: only about itself, and only from when it was asked.

It cannot report anything that the server measures or decides. `sender_limits` counts how much one sender may deliver.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fedvitals.catalog import CATALOG
from fedvitals.data_change import read_sketch
from fedvitals.errors import RecordError
from fedvitals.measurements import run_of
from fedvitals.protocols import Node
from fedvitals.records import Event, LayerStats, Metric, Record, Run, Sketch, Span, Where, client_name, printable
from fedvitals.stats import LABEL_CLASSES
from fedvitals.time_parts import of_the_whole
from fedvitals.transport.logs import bounded
from fedvitals.transport.payload_buffer import KINDS, LOST, THINNED, thinning_words
from fedvitals.transport.sender_limits import MESSAGE_BYTES, ROUND_RECORDS
from fedvitals.transport.sink_writer import SENDER

OF_CLIENTS = (Metric, LayerStats, Span, Event, Sketch)  # what a sender can report, besides its layers' names

# Metrics of the catalogue that a client measures on itself. The others are the server's: they describe the round, what
# the server saw of the client, or a virtual clock, and a sender that reports one is rejected.
CLIENT_METRICS = frozenset(
    name
    for name in CATALOG
    if name.startswith((
        "accuracy", "batch.", "data.", "fit.", "gradient.", "gpu.", "label.", "local.", "loss", "machine.", "memory.",
        "nonlinearity.", "optimizer.", "perplexity.", "process.", "samples", "scale.", "steps", "throughput.", "tokens",
        "train.", "update.", "weight.",
    ))
) - {
    "gradient.change_round", "update.adapter_change", "update.adapter_rank", "update.base_age",
    "update.differs", "update.factor", "update.samples", "update.staleness",
} | {
    "adapter.rank", "adapter.scale", "model.flops_utilisation", "monitor.cost", "time.client", "time.cpu",
    "time.data", "time.step",
}  # fmt: skip

# Events written by a client's own process; what else a user's code reports becomes `user.*`.
CLIENT_EVENTS = frozenset((
    "budget", "client.failed", "client.partition", "data", "exception", "labels", "layers.sharded", "layers.unfrozen",
    "log", "monitor.error", "stack.unclosed", "stack.unmeasured", LOST, THINNED,
))  # fmt: skip
# Events about all clients, or in our own words about what the server saw of one. A sender that reports one is rejected.
SERVER_EVENTS = frozenset((
    "aggregation.failed", "client.answered_late", "client.busy", "client.clock", "client.connected",
    "client.disconnected", "client.dropped_out", "client.joined", "client.left", "client.unserved", "cohort",
    "data.new", "edge.failed", "groups", "initialisation", "initialisation.zero", "layers.trained",
    "round.failed", "round.stalled", "round.unclosed",
    "season", "secure_aggregation.cut", "secure_aggregation.failed", "sink.lost",
    "telemetry.lost", "telemetry.refused", "telemetry.thinned", "update.late", "update.left_out", "update.lost",
    "update.refused", "updates.approximate", "updates.transformed",
))  # fmt: skip
LEVELS = ("debug", "info", "warning", "error", "critical")
ID_CHARACTERS = 64  # of the ids of a Span or sketch: a payload holds a repeated text once, a store with each record
STEPS = 1 << 40
SKETCH_NUMBERS = 256  # as in `kernels.sketch_hash`, which needs torch
NO_ROUND = -1  # as a Sender's newest round: its records may name no round
_LABEL, _EXCEPTION = re.compile(r"-?\d{1,18}"), re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,99}")


class ForgedRecordError(RecordError):
    """A record made in the name of another node, another run, the server or a future round."""


@dataclass(frozen=True, slots=True)
class Sender:
    """The origin of a message, as the framework knows it: its records may only be about that node.

    `run`: the run's name there, if ours is not known. `group`: the edge, cluster or ring that the host assigns it to;
    what the records say of run and group is ignored. `budget`: bytes of telemetry that this message may have.
    `newest_round`: the newest round that its records may name. None: the newest that has begun, which `monitor.host`
    fills in; before the first, and with NO_ROUND, they may name none.
    """

    node: Node
    run: str
    group: str | None = None
    budget: int = MESSAGE_BYTES
    newest_round: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "node", client_name(self.node))

    def counted_to(self, newest_round: int | None) -> Sender:
        """Return the sender with this newest round, unless it has one."""
        return self if self.newest_round is not None else replace(self, newest_round=newest_round)

    def own(self, record: Record, run: str) -> Record:
        """Return the record as one of the local run, with names that can be shown.

        Raises a ForgedRecordError if it belongs to another node or to the server, and a RecordError if no client
        measures it.
        """
        if run_of(record) != self.run:
            raise ForgedRecordError(
                f"Telemetry of '{self.node}' is of the run {quoted(run_of(record))}, not of '{self.run}'."
            )
        # Its sources are its own, so nobody can use up another's sequence numbers.
        source = f"{SENDER}{self.node}/{record.source}"[:200]
        if isinstance(record, Run):
            return replace(record, id=run, source=source)
        if not isinstance(record, OF_CLIENTS):
            raise self._not_its_own(type(record).__name__)
        self._check_place(record.where)
        layer = None if record.where.layer is None else printable(record.where.layer)
        where = replace(record.where, run=run, node=self.node, group=self.group, layer=layer)
        own = replace(record, where=where, source=source)
        if isinstance(own, Metric | Span | Event) and not own.name.isprintable():
            own = replace(own, name=printable(own.name))
        if isinstance(own, Event):
            return self._event(own)
        self._check_content(own)
        return own

    def _check_place(self, where: Where) -> None:
        # A client does not know whether its name is one that is recorded differently.
        if where.node is not None and self.node not in (where.node, f"{where.node} (client)"):
            raise ForgedRecordError(f"Telemetry of '{self.node}' tells of another node, {quoted(where.node)}.")
        newest = NO_ROUND if self.newest_round is None else self.newest_round
        # A round far ahead would displace all others from the detectors' memory.
        if where.round is not None and not 0 <= where.round <= newest:
            raise ForgedRecordError(f"Telemetry of '{self.node}' is of round {where.round}; only the server counts.")
        if where.step is not None and not 0 <= where.step < STEPS:
            raise RecordError(f"Telemetry of '{self.node}' is of step {where.step}, which no training has.")

    def _check_content(self, own: Metric | LayerStats | Span | Sketch) -> None:
        if isinstance(own, Metric) and own.name in CATALOG and own.name not in CLIENT_METRICS:
            raise self._not_its_own(own.name)
        if isinstance(own, Span) and of_the_whole(own):
            raise self._not_its_own(own.name)
        if isinstance(own, Sketch) and (len(own.values) != SKETCH_NUMBERS or not all(map(math.isfinite, own.values))):
            raise RecordError(f"Telemetry of '{self.node}' holds a sketch that is not {SKETCH_NUMBERS} finite numbers.")
        if max(map(len, _ids(own)), default=0) > ID_CHARACTERS:
            raise RecordError(f"Telemetry of '{self.node}' holds an id of more than {ID_CHARACTERS} characters.")

    def _not_its_own(self, what: str) -> ForgedRecordError:
        return ForgedRecordError(f"Telemetry of '{self.node}' holds {quoted(what)}, which is the server's to tell.")

    def _event(self, event: Event) -> Event:
        """Return the event with a permitted name, a bounded message, and without words where findings quote them."""
        if event.name in SERVER_EVENTS:
            raise self._not_its_own(event.name)
        if event.level not in LEVELS:
            raise RecordError(f"Telemetry of '{self.node}' has an event of the level {quoted(event.level)}.")
        if event.name == LOST:
            return self._loss(event)
        if event.name == THINNED:
            return _thinning(event)
        if event.name == "labels" and _is_too_long(event.data.get("histogram")):
            return self._without_histogram(event)
        if event.name == "labels" and not _are_counts(event.data.get("histogram")):
            raise RecordError(f"Telemetry of '{self.node}' tells of labels, and its histogram holds no counts.")
        if event.name == "data" and read_sketch(event.where.round or 0, event.data) is None:
            raise RecordError(f"Telemetry of '{self.node}' describes data that no samples are like.")
        name = event.name if event.name in CLIENT_EVENTS or event.name.startswith("user.") else f"user.{event.name}"
        data = event.data
        for key in ("exception", "error"):
            if key in data and not (isinstance(data[key], str) and _EXCEPTION.fullmatch(data[key])):
                data = {**data, key: "unnamed error"}
        return replace(event, name=name, message=bounded(event.message), data=data)

    def _without_histogram(self, event: Event) -> Event:
        """Return a label report in our words, without a histogram that has too many classes."""
        classes = len(event.data["histogram"])
        text = f"The label histogram of {self.node} is left out: {classes:,} classes, and {LABEL_CLASSES:,} are taken."
        return replace(event, message=text, data={"classes": classes})

    def _loss(self, event: Event) -> Event:
        """Return a sender's report of its losses, in our words. It only leads to a finding about the sender."""
        records = event.data.get("records")
        count = min(records, ROUND_RECORDS) if type(records) is int and records > 0 else 1
        most = " or more" if count == ROUND_RECORDS else ""
        text = f"{self.node} reports that {count:,}{most} of its records found no room in its messages."
        return replace(event, message=text, data={"records": count, "claimed": True})


def _thinning(event: Event) -> Event:
    """Return a sender's report of what it left out of its message because of the byte limit, in our words."""
    records, kinds = event.data.get("records"), event.data.get("left_out")
    count = min(records, ROUND_RECORDS) if type(records) is int and records > 0 else 1
    known = [kind for kind in KINDS if isinstance(kinds, list | tuple) and kind in kinds]
    data = {"records": count, "left_out": known, "claimed": True}
    return replace(event, level="info", message=thinning_words(count, known), data=data)


def quoted(text: Any, characters: int = 80) -> str:
    """Return a sender's own words for a sentence of ours: in quotation marks, short, on one line, printable."""
    return "'" + printable(str(text)[:characters]).replace("'", "\\'") + "'"


def _ids(record: Record) -> tuple[str, ...]:
    """Return the texts of a record that a store keeps with each record of its kind."""
    if isinstance(record, Span):
        return record.trace, record.id, record.parent or ""
    return (record.digest,) if isinstance(record, Sketch) else ()


def as_seen(record: Any, seen: tuple[float, float]) -> Record:
    """Return a client's record with times within what the server saw: false ones would distort everyone's charts."""
    if isinstance(record, Run):
        return record
    sent, returned = seen
    at = record.at if sent <= record.at <= returned else returned if record.at > returned else sent
    if isinstance(record, Span):
        seconds = record.seconds if math.isfinite(record.seconds) else 0.0
        # No client has a virtual clock: a claim of one would affect how the whole run is shown.
        own = {key: value for key, value in record.attributes.items() if key != "clock"}
        return replace(record, at=at, seconds=min(max(seconds, 0.0), returned - at), attributes=own)
    return cast("Record", record if at == record.at else replace(record, at=at))


def _is_too_long(counts: Any) -> bool:
    return isinstance(counts, Mapping) and len(counts) > LABEL_CLASSES


def _are_counts(counts: Any) -> bool:
    return isinstance(counts, Mapping) and all(
        _LABEL.fullmatch(str(label)) and type(count) is int and 0 <= count < 1 << 40 for label, count in counts.items()
    )
