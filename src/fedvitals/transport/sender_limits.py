# SPDX-License-Identifier: Apache-2.0
"""How much one sender may bring to a run: the one place where this is counted, for every host.

A sender is a machine that may lie: a Flower node, a process that reports by OTLP, a client of a user's own transport.
Each is counted by itself, so that whoever brings too much loses its own telemetry and nobody else's. Sizes and numbers
of records are compared with what is left before a payload is expanded.

    a message                1 MiB, or less where the host says so (Flower: 32 KiB, or 1 % of a larger reply)
    a round                  4 MiB, 5,000 records, 200 events; after 10 refused messages the rest is not read
    the run                  200 names of metrics, 200 other names (layers, spans, events), 50 layer tables with
                             100,000 layers in all

Names and tables that somebody else has brought already are free. All senders together may bring 20,000 names of
metrics, 20,000 other names and 5,000 tables; of senders beyond 10,000, those that came first are forgotten.
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

MESSAGE_BYTES = 1 << 20  # of one message, where its host does not say less
ROUND_BYTES, ROUND_RECORDS, ROUND_EVENTS = 4 << 20, 5_000, 200
ROUND_REFUSALS = 10  # messages; further ones of the round are refused unread
ROUND_REPORTS = 3  # of what was refused or left out, with the reason; the rest is counted at the round's end
MESSAGE_SOURCES = 4  # processes that made the records
METRIC_NAMES, OTHER_NAMES = 200, 200
NAME_CHARACTERS = 200
TABLES, LAYERS = 50, 100_000
TABLES_OF_ALL = 5_000  # a hundred senders would have to use up what they may bring
TABLES_OF_RUN = 1_000  # of the run's own models and worker processes, which are no senders
NAMES_OF_ALL = 20_000  # of metrics, and as many others; likewise
SENDERS = 10_000  # of which anything is remembered; the first is then forgotten, and begins anew

MESSAGE = replace(LIMITS, bytes=MESSAGE_BYTES, records=ROUND_RECORDS, cells=100_000)
"""What the payload of a sender may hold at most; a client keeps to it when it writes one."""


Entry = TypeVar("Entry")


@dataclass(slots=True)
class _Use:
    """What a sender has used: in its newest round, and in the run."""

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
    """Counts what each sender has brought to a run. Not safe for several threads at a time."""

    def __init__(self) -> None:
        self._uses: dict[Node, _Use] = {}
        self._unreported: dict[Node, int] = {}
        self._names: dict[bool, set[str]] = {True: set(CATALOG), False: {CLIENT}}  # of metrics; others
        self._most = {of_metric: len(known) + NAMES_OF_ALL for of_metric, known in self._names.items()}

    def _use(self, node: Node) -> _Use:
        return entry_of_sender(self._uses, node, _Use)

    def message_limits(self, node: Node, round_index: int | None, size: int, budget: int) -> Limits:
        """Count a message of `size` bytes, and return what a payload in it may hold; RecordError if it may hold none.

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

    def report(self, node: Node, round_index: int | None, *, whole: bool) -> bool:
        """Count a message that was refused (`whole`) or of which something was left out.

        Returns whether that is to be reported at once, with its reason.
        """
        use = self._use(node).in_round(round_index)
        use.refusals += whole
        use.reports += 1
        if use.reports > ROUND_REPORTS:
            self._unreported[node] = self._unreported.get(node, 0) + 1
        return use.reports <= ROUND_REPORTS

    def take_unreported(self) -> dict[Node, int]:
        """Return how many messages of each sender were counted and not reported since the last time."""
        counts, self._unreported = self._unreported, {}
        return counts

    def charge_tables(
        self, node: Node | None, tables: Mapping[str, LayerTable], known: Collection[str], own: Collection[str]
    ) -> None:
        """Count the tables of a payload that are new to the run, or raise a RecordError if they are too many.

        `known`: digests of all tables of the run; `own`: of those that no sender brought. `node`: None, the payload
        comes from a worker process of our own.
        """
        if node is None:
            if len({*own, *tables}) > TABLES_OF_RUN:
                raise RecordError(f"A payload brings layer tables beyond the {TABLES_OF_RUN} that a run may have.")
            return
        new = [table for digest, table in tables.items() if digest not in known]
        if not new:
            return
        use = self._use(node)
        count, layers = use.tables + len(new), use.layers + sum(len(table.layers) for table in new)
        if count > TABLES or layers > LAYERS:
            raise RecordError(
                f"Telemetry of '{node}' brings layer tables beyond the {TABLES} (with {LAYERS} layers in all) that one "
                "client may have."
            )
        if len(known) + len(new) > TABLES_OF_ALL:
            raise RecordError(f"Telemetry of '{node}' brings a layer table beyond the {TABLES_OF_ALL} of a run.")
        use.tables, use.layers = count, layers

    def admitted(self, node: Node, round_index: int | None, records: Sequence[Record]) -> list[Record]:
        """Count the records, and return those that the sender may still bring."""
        use = self._use(node).in_round(round_index)
        kept: list[Record] = []
        for record in records:
            is_event = isinstance(record, Event)
            if use.records >= ROUND_RECORDS or (is_event and use.events >= ROUND_EVENTS):
                continue
            use.records += 1
            use.events += is_event
            if not isinstance(record, Run) and self._names_admitted(use, record):
                kept.append(record)
        return kept

    def admits_name(self, node: Node, name: str) -> bool:
        """Whether a metric's name is known, or one of the new names that this sender may still bring."""
        return self._admits(self._use(node), name, of_metric=True)

    def _names_admitted(self, use: _Use, record: Record) -> bool:
        if isinstance(record, Metric) and not self._admits(use, record.name, of_metric=True):
            return False
        others = [record.name] if isinstance(record, Span | Event) else []
        if not isinstance(record, Run) and record.where.layer is not None:
            others.append(record.where.layer)
        return all(self._admits(use, name, of_metric=False) for name in others)

    def _admits(self, use: _Use, name: str, *, of_metric: bool) -> bool:
        known = self._names[of_metric]
        if name in known:
            return True
        if use.names[of_metric] >= (METRIC_NAMES if of_metric else OTHER_NAMES) or len(name) > NAME_CHARACTERS:
            return False
        if len(known) >= self._most[of_metric]:
            return False
        known.add(name)
        use.names[of_metric] += 1
        return True


def entry_of_sender(entries: dict[Node, Entry], node: Node, make: Callable[[], Entry]) -> Entry:
    """Return what is remembered of a sender, made anew if it is nothing; of too many senders, forget the first."""
    if node not in entries:
        if len(entries) >= SENDERS:
            entries.pop(next(iter(entries)))
        entries[node] = make()
    return entries[node]


def check_sources(node: Node, records: Sequence[Telemetry]) -> None:
    """Raise a RecordError if the records of a message say that they were made by many processes.

    What has been delivered is remembered for each of them.
    """
    sources = {record.source for record in records}
    if len(sources) > MESSAGE_SOURCES:
        raise RecordError(
            f"The records of a message of '{node}' have {len(sources)} sources; {MESSAGE_SOURCES} are the limit."
        )
