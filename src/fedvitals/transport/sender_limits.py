# SPDX-License-Identifier: Apache-2.0
"""How much one sender may deliver to a run: the only place where this is counted, for every host.

A sender is a machine that may lie: a Flower node, a process that reports by OTLP, a client of a user's own transport.
Each is counted by itself, so that one that sends too much only loses its own telemetry. Sizes and numbers of records
are compared with the remaining quota before a payload is expanded.

    a message                1 MiB, or less where the host says so (Flower: 32 KiB, or 1 % of the larger
                             of request and reply); of 64 processes
    a round                  4 MiB, 5,000 records, 200 events; after 10 refused messages the rest is not read
    the run                  200 names of metrics, 200 other names (layers, spans, events), 50 layer tables with
                             100,000 layers in all

Names and tables that another sender has already delivered are free, and so are layer names that a table contains. All
senders together may deliver 20,000 names of metrics, 20,000 other names and 5,000 tables; beyond 10,000 senders, the
earliest are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fedvitals.catalog import CATALOG
from fedvitals.errors import RecordError
from fedvitals.measurements import Telemetry
from fedvitals.protocols import Node
from fedvitals.records import Event, LayerTable, Metric, Record, Run, Span
from fedvitals.time_parts import CLIENT
from fedvitals.transport.wire.fields import Limits
from fedvitals.transport.wire.payload import LIMITS

MESSAGE_BYTES = 1 << 20  # of one message, unless its host sets less
ROUND_BYTES, ROUND_RECORDS, ROUND_EVENTS = 4 << 20, 5_000, 200
ROUND_REFUSALS = 10  # messages; further ones of the round are rejected unread
ROUND_REPORTS = 3  # of rejected or left-out records, with the reason; the rest is counted at the round's end
MESSAGE_SOURCES = 64  # processes that made the records, such as the ranks of one client
METRIC_NAMES, OTHER_NAMES = 200, 200
NAME_CHARACTERS, LAYER_NAME_CHARACTERS = 200, 512
TABLES, LAYERS = 50, 100_000
TABLES_OF_ALL = 5_000  # a hundred senders would have to use up their quotas
TABLES_OF_RUN = 1_000  # of the run's own models and worker processes, which are not senders
NAMES_OF_ALL = 20_000  # of metrics, and as many others; as above
SENDERS = 10_000  # senders remembered; beyond this the first is forgotten, and starts anew

MESSAGE = replace(LIMITS, bytes=MESSAGE_BYTES, records=ROUND_RECORDS, cells=100_000)
"""The limits of a sender's payload; a client observes them when it writes one."""


Entry = TypeVar("Entry")


class LeftOut:
    """Counts rejected records by reason, and keeps the first of each with the name that it concerns."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, tuple[Record, str]] = {}

    def add(self, reason: str, record: Record, name: str) -> None:
        """Count a record. `name`: how to refer to it as an example of the reason."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, (record, name))

    @property
    def total(self) -> int:
        """The number of records left out."""
        return sum(self.counts.values())


@dataclass(slots=True)
class _Use:
    """A sender's usage, in its newest round and in the run."""

    round: int | None = None
    bytes: int = 0
    records: int = 0
    events: int = 0
    refusals: int = 0
    reports: int = 0
    names: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # of metrics; others
    tables: int = 0
    layers: int = 0

    def in_round(self, round_index: int | None) -> _Use:
        if self.round != round_index:
            self.round, self.bytes, self.records, self.events, self.refusals, self.reports = round_index, 0, 0, 0, 0, 0
        return self


class SenderQuotas:
    """Counts what each sender has delivered to a run. Not thread-safe."""

    def __init__(self) -> None:
        self._uses: dict[Node, _Use] = {}
        self._unreported: dict[tuple[Node, bool], int] = {}
        self._tables: set[str] = set()  # tables whose layer names are known
        self._layers: set[str] = set()
        self._names: dict[bool, set[str]] = {True: set(CATALOG), False: {CLIENT}}  # of metrics; others
        self._most = {of_metric: len(known) + NAMES_OF_ALL for of_metric, known in self._names.items()}

    def _use(self, node: Node) -> _Use:
        return entry_of_sender(self._uses, node, _Use)

    def message_limits(self, node: Node, round_index: int | None, size: int, budget: int) -> Limits:
        """Count a message of `size` bytes, and return the limits of a payload in it; RecordError if none is allowed.

        `budget`: bytes that this message may have.
        """
        use = self._use(node).in_round(round_index)
        if use.refusals >= ROUND_REFUSALS:
            raise RecordError(
                f"{ROUND_REFUSALS} messages of '{node}' were refused in this round; the rest is not read."
            )
        if size > min(budget, MESSAGE_BYTES):
            raise RecordError(
                f"Telemetry of '{node}' has {size:,} bytes; {min(budget, MESSAGE_BYTES):,} are its limit."
            )
        use.bytes += size
        if use.bytes > ROUND_BYTES:
            raise RecordError(f"Telemetry of '{node}' has more than the {ROUND_BYTES:,} bytes of a round.")
        return replace(MESSAGE, records=ROUND_RECORDS - use.records)

    def report(self, node: Node, round_index: int | None, *, whole: bool, amount: bool = False) -> bool:
        """Count a message that was rejected (`whole`) or of which something was left out.

        `amount`: it broke no rule, but exceeded the quota. Returns whether to report it at once, with its reason.
        """
        use = self._use(node).in_round(round_index)
        use.refusals += whole
        use.reports += 1
        if use.reports > ROUND_REPORTS:
            self._unreported[node, amount] = self._unreported.get((node, amount), 0) + 1
        return use.reports <= ROUND_REPORTS

    def take_unreported(self) -> dict[tuple[Node, bool], int]:
        """Return how many messages were counted but not reported since the last call, by sender and `amount`."""
        counts, self._unreported = self._unreported, {}
        return counts

    def charge_tables(
        self, node: Node | None, tables: Mapping[str, LayerTable], known: Collection[str], own: Collection[str]
    ) -> None:
        """Count the tables of a payload that are new to the run; RecordError if they are too many.

        `known`: digests of all tables of the run; `own`: those that no sender delivered. `node`: None if the payload
        comes from a worker process of our own.
        """
        if node is None:
            if len({*own, *tables}) > TABLES_OF_RUN:
                raise RecordError(f"A payload brings layer tables beyond the {TABLES_OF_RUN} that a run may have.")
            return
        new = [table for digest, table in tables.items() if digest not in known]
        use = self._use(node)
        count, layers = use.tables + len(new), use.layers + sum(len(table.layers) for table in new)
        if new and (count > TABLES or layers > LAYERS):
            raise RecordError(
                f"Telemetry of '{node}' brings layer tables beyond the {TABLES} (with {LAYERS} layers in all) that one "
                "client may have."
            )
        if new and len(known) + len(new) > TABLES_OF_ALL:
            raise RecordError(f"Telemetry of '{node}' brings a layer table beyond the {TABLES_OF_ALL} of a run.")
        use.tables, use.layers = count, layers
        for digest in tables.keys() - self._tables:
            self._tables.add(digest)
            self._layers.update(layer.name for layer in tables[digest].layers)

    def admitted(
        self, node: Node, round_index: int | None, records: Sequence[Record], left_out: LeftOut
    ) -> list[Record]:
        """Count the records, and return those within the sender's quota; the others are added to `left_out`."""
        use = self._use(node).in_round(round_index)
        kept: list[Record] = []
        for record in records:
            if isinstance(record, Run):
                continue
            is_event = isinstance(record, Event)
            if use.records >= ROUND_RECORDS:
                left_out.add(f"beyond the {ROUND_RECORDS:,} records of a round", record, name_of(record))
                continue
            if is_event and use.events >= ROUND_EVENTS:
                left_out.add(f"beyond the {ROUND_EVENTS} events of a round", record, name_of(record))
                continue
            use.records += 1
            use.events += is_event
            excess = self._excess(use, record)
            if excess is None:
                kept.append(record)
            else:
                left_out.add(excess[0], record, excess[1])
        return kept

    def excess_name(self, node: Node, name: str) -> str | None:
        """Return the limit that a metric's name exceeds; None if it is known or within the sender's quota."""
        return self._excess_name(self._use(node), name, "metric")

    def _excess(self, use: _Use, record: Record) -> tuple[str, str] | None:
        """Return the limit that a record's names exceed, and the name that does; None if all are within the quota."""
        names = [(name_of(record), "metric" if isinstance(record, Metric) else "other")]
        names = names if isinstance(record, Metric | Span | Event) else []
        if not isinstance(record, Run) and record.where.layer is not None:
            names.append((record.where.layer, "layer"))
        for name, kind in names:
            limit = self._excess_name(use, name, kind)
            if limit is not None:
                return limit, name
        return None

    def _excess_name(self, use: _Use, name: str, kind: str) -> str | None:
        of_metric = kind == "metric"
        known = self._names[of_metric]
        if name in known or (kind == "layer" and name in self._layers):
            return None
        words = "metric names" if of_metric else "names of layers, spans or events"
        characters = LAYER_NAME_CHARACTERS if kind == "layer" else NAME_CHARACTERS
        most = METRIC_NAMES if of_metric else OTHER_NAMES
        if len(name) > characters:
            return f"with {words} of more than {characters} characters"
        if use.names[of_metric] >= most:
            return f"with new {words} beyond the {most} that one client may bring"
        if len(known) >= self._most[of_metric]:
            return f"with new {words} beyond the {NAMES_OF_ALL:,} that all clients together may bring"
        known.add(name)
        use.names[of_metric] += 1
        return None


def name_of(record: Record) -> str:
    """Return a name for a record in a sentence: a metric's, span's or event's name, or its kind."""
    return record.name if isinstance(record, Metric | Span | Event) else type(record).__name__


def entry_of_sender(entries: dict[Node, Entry], node: Node, make: Callable[[], Entry]) -> Entry:
    """Return the entry of a sender, created if missing; with too many senders, the first one is dropped."""
    if node not in entries:
        if len(entries) >= SENDERS:
            entries.pop(next(iter(entries)))
        entries[node] = make()
    return entries[node]


def check_sources(node: Node, records: Sequence[Telemetry]) -> None:
    """Raise a RecordError if the records of a message claim to come from too many processes.

    Deliveries are remembered for each of them.
    """
    sources = {record.source for record in records}
    if len(sources) > MESSAGE_SOURCES:
        raise RecordError(
            f"The records of a message of '{node}' have {len(sources)} sources; {MESSAGE_SOURCES} are the limit."
        )
