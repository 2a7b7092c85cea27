# SPDX-License-Identifier: Apache-2.0
"""Keeps records in memory: the history that live detectors read, with the same answers as the SQL store.

It keeps the newest `rounds` of a run; of older rounds, only the names of clients and layers. A round of 200 clients and
an MLP takes 0.3 MB: its metrics as arrays, once the following rounds have arrived, and its layer statistics as on disk.
"""

from __future__ import annotations

import itertools
import json
import threading
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedvitals.errors import RecordError
from fedvitals.measurements import Measurements, Telemetry, Transfers, single_records
from fedvitals.protocols import Node, Sink
from fedvitals.records import Event, LayerTable, Metric, Run, Truth, is_client, natural
from fedvitals.stats import FAMILIES, Array
from fedvitals.store.deliveries import Intervals, fresh
from fedvitals.store.packing import (
    Entries,
    LayerMatrices,
    Numbers,
    Part,
    block_of,
    in_blocks,
    in_natural_order,
    layer_matrices,
    over_nodes,
    over_rounds,
    slice_of,
    statistic_of,
)
from fedvitals.store.read.history import check_statistic
from fedvitals.store.rows import as_stored, check, to_json

R = TypeVar("R")
Newest = Mapping[Node | None, tuple[float, float]]  # node → (at, value)
Block = tuple[str, Entries, Numbers]  # the layer table and the block's content for one round


LATE = 16  # rounds by which a value of the run or the server may be late and still be added to a cached series
Placed = tuple[float, int, Event]  # when it happened, its place in the order of arrival, and the event


class _EventIndex:
    """The events of a run by name and by round, oldest first; extends itself with events added to their list later."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self._taken = 0
        self._by_name: dict[str | None, list[Placed]] = {}
        self._by_round: dict[int, list[Placed]] = {}
        self._rounds: list[int] = []

    def __call__(self, name: str | None, since: int | None) -> list[Event]:
        """Return the events of a name (None: all names) from a round on (None: from the beginning)."""
        while self._taken < len(self.events):
            self._add(self.events[self._taken])
        if since is None:
            return [event for _, _, event in self._by_name.get(name, ())]
        recent = [
            placed
            for round_index in self._rounds[bisect_left(self._rounds, since) :]
            for placed in self._by_round[round_index]
            if name is None or placed[2].name == name
        ]
        return [event for _, _, event in sorted(recent)]

    def _add(self, event: Event) -> None:
        placed = (event.at, self._taken, event)
        self._taken += 1
        lists = [self._by_name.setdefault(key, []) for key in (None, event.name)]
        if event.where.round is not None:
            if event.where.round not in self._by_round:
                insort(self._rounds, event.where.round)
            lists.append(self._by_round.setdefault(event.where.round, []))
        for same in lists:
            insort(same, placed)  # usually at the end


class PackedValues(Newest):
    """The newest values of a metric in a completed round, as arrays: a fifth of the memory of a dictionary."""

    __slots__ = ("_at", "_places", "_values")

    def __init__(self, places: dict[Node | None, int], at: Array, values: Array) -> None:
        self._places, self._at, self._values = places, at, values

    def __getitem__(self, node: Node | None) -> tuple[float, float]:
        place = self._places[node]
        return float(self._at[place]), float(self._values[place])

    def __contains__(self, node: object) -> bool:
        return node in self._places

    def __iter__(self) -> Iterator[Node | None]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass(slots=True)
class _Series:
    """A metric of one node over the rounds, and the rounds of all nodes that were known when it was read."""

    first: int | None = None
    known: int = 0
    rounds: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def follow(self, by_round: dict[int, Newest], node: Node | None) -> None:
        """Read the new rounds, and the newest of the earlier ones again; all of them once old rounds were dropped."""
        first = next(iter(by_round), None)
        if first != self.first or len(by_round) < self.known:
            self.known, self.rounds, self.values = 0, [], []
        recent = [*itertools.islice(reversed(by_round), len(by_round) - self.known + LATE)]
        self.first, self.known = first, len(by_round)
        start = bisect_left(self.rounds, min(recent, default=0))
        newest = dict(zip(self.rounds[start:], self.values[start:], strict=True))
        newest.update(
            (round_index, by_round[round_index][node][1]) for round_index in recent if node in by_round[round_index]
        )
        rounds = sorted(newest)
        self.rounds[start:], self.values[start:] = rounds, [newest[round_index] for round_index in rounds]


@dataclass(slots=True)
class _Memory:
    """What the store remembers of one run."""

    rounds: set[int] = field(default_factory=set)
    nodes: set[Node] = field(default_factory=set)
    metrics: dict[str, dict[int, Newest]] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)  # how often newer values of a metric replaced older ones
    events: list[Event] = field(default_factory=list)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    of_round: dict[tuple[str, int], list[Block]] = field(default_factory=dict)  # the same blocks by family and round
    truth: list[Truth] = field(default_factory=list)
    records: dict[type, list[Any]] = field(default_factory=dict)
    series: dict[tuple[str, Node | None], _Series] = field(default_factory=dict)  # of the run and of the server
    unpacked: set[int] = field(default_factory=set)  # rounds with values that are not packed yet
    places: dict[tuple[Node | None, ...], dict[Node | None, int]] = field(default_factory=dict)  # as last packed
    index: _EventIndex | None = None  # index of `events`, built on first use

    def indexed_events(self) -> _EventIndex:
        """Return the index of the events, rebuilt if `events` is now another list."""
        if self.index is None or self.index.events is not self.events:
            self.index = _EventIndex(self.events)
        return self.index

    def newest(self, name: str, round_index: int) -> dict[Node | None, tuple[float, float]]:
        """Return the newest values of a metric in a round, as a dictionary to be modified."""
        by_round = self.metrics.setdefault(name, {})
        values = by_round.get(round_index)
        if not isinstance(values, dict):
            values = by_round[round_index] = dict(values or {})
            self.unpacked.add(round_index)
        return values

    def pack_values(self) -> None:
        """Pack the values of all rounds but the newest, which may still receive values."""
        newest = max(self.unpacked, default=0)
        due = [number for number in self.unpacked if number <= newest - LATE]
        for number in due:
            places: dict[tuple[Node | None, ...], dict[Node | None, int]] = {}
            times: dict[bytes, Array] = {}
            for by_round in self.metrics.values():
                values = by_round.get(number)
                if not isinstance(values, dict):
                    continue
                nodes, columns = tuple(values), np.array([*values.values()]).reshape(-1, 2)
                if nodes not in places:  # the same for most metrics, and often the same as in the previous round
                    places[nodes] = self.places.get(nodes) or {node: i for i, node in enumerate(nodes)}
                at = times.setdefault(columns[:, 0].tobytes(), columns[:, 0].copy())
                by_round[number] = PackedValues(places[nodes], at, columns[:, 1].copy())
            self.places = places
        self.unpacked.difference_update(due)


def _keep_value(memory: _Memory, record: Metric, round_index: int) -> None:
    """Keep a metric's value unless a newer one is known."""
    node = record.where.node
    if node is None and record.where.group is not None:
        return  # about one edge or cluster as a whole, not the federation
    newest = memory.newest(record.name, round_index)
    before = newest.get(node)
    if before is None or record.at >= before[0]:
        newest[node] = (record.at, record.value)
    if before is not None:
        memory.replaced[record.name] = memory.replaced.get(record.name, 0) + 1


class MemoryStore(Sink):
    """A sink that keeps records in memory. Each write is atomic for readers in other threads.

    It keeps what a `History` shows, limited to the newest `rounds` of each run if given, since a training may be longer
    than memory is large. With `everything`, it also keeps each record as it arrived (for tests).
    """

    takes_measurements = True

    def __init__(self, *, everything: bool = False, rounds: int | None = None) -> None:
        self.lock = threading.RLock()
        self.runs: dict[str, Run] = {}
        self.tables: dict[str, LayerTable] = {}
        self._everything = everything
        self._window = rounds
        self._memories: dict[str, _Memory] = {}
        self._delivered: dict[tuple[str, str], Intervals] = {}
        self._symbols: dict[str, int] = {}
        self._texts: list[str] = [""]  # symbols count from 1

    def write(self, records: Sequence[Telemetry], /) -> None:
        """Keep a batch. If some records cannot be kept, the others are kept and RecordError is raised."""
        check(records)
        with self.lock:
            statistics: list[LayerMatrices] = []
            errors: list[Exception] = []
            for record in fresh(single_records(records) if self._everything else records, self._delivered):
                try:
                    if isinstance(record, Run):
                        self._write_run(record)
                        continue
                    if isinstance(record, Measurements):
                        self._write_measurements(self.memory(record.run), record)
                    else:
                        self._write_one(self.memory(record.where.run), record)
                    parts = [*layer_matrices([record])]
                    hash(tuple(part.key for part in parts))  # fails here, for this record alone, if it cannot be kept
                    statistics += parts
                except Exception as error:  # noqa: BLE001 - of this record: the others are kept
                    errors.append(error)
            for _, same in in_blocks(statistics):
                errors += self._write_blocks(same)
            for memory in self._memories.values():
                memory.pack_values()
                if self._window is not None:
                    self._forget_old(memory, self._window)
        if errors:
            raise RecordError(f"{len(errors)} of {len(records)} records cannot be kept: {errors[0]}") from errors[0]

    def note(self, messages: Transfers) -> None:
        """Record who took part in a round, which is all that a `History` shows of messages."""
        with self.lock:
            self._delivered.setdefault((messages.run, messages.source), Intervals()).add_range(
                messages.sequence, messages.sequence + len(messages) - 1
            )
            memory = self.memory(messages.run)
            memory.nodes.update(messages.nodes)
            memory.rounds.update(() if messages.round is None else (messages.round,))

    def _write_blocks(self, same: Sequence[LayerMatrices]) -> list[Exception]:
        """Keep matrices of one family and round as one block, or one by one if that fails. Returns the remaining
        errors.
        """
        first = same[0]
        try:
            # Packed as on disk, so that live detectors see exactly the numbers that they will see in the stored run.
            block, memory = (first.table, *block_of(same, self._number)), self.memory(first.run)
        except Exception as error:  # noqa: BLE001
            return [error] if len(same) == 1 else [failed for record in same for failed in self._write_blocks([record])]
        memory.blocks.setdefault(first.family, []).append(block)
        if first.round is not None:
            memory.of_round.setdefault((first.family, first.round), []).append(block)
        return []

    @staticmethod
    def _forget_old(memory: _Memory, window: int) -> None:
        """Forget all rounds but the newest; a few at a time, since it walks over all events and blocks."""
        if len(memory.rounds) <= window + window // 32:
            return
        oldest = sorted(memory.rounds)[-window]
        gone = [number for number in memory.rounds if number < oldest]
        memory.rounds.difference_update(gone)
        memory.unpacked.difference_update(gone)
        for number in gone:
            for by_round in memory.metrics.values():
                by_round.pop(number, None)
            for family in memory.blocks:
                memory.of_round.pop((family, number), None)
        if any(event.where.round is not None and event.where.round < oldest for event in memory.events):
            memory.events = [
                event for event in memory.events if event.where.round is None or event.where.round >= oldest
            ]
        for family, blocks in memory.blocks.items():  # all entries of a block belong to one round
            memory.blocks[family] = [block for block in blocks if block[1].rounds[0] >= oldest]

    def _write_run(self, run: Run) -> None:
        self.tables.update((table.digest, table) for table in run.tables)
        before = self.runs.get(run.id)
        if before is None or before.source != run.source or run.sequence >= before.sequence:
            self.runs[run.id] = run

    def _write_one(self, memory: _Memory, record: Any) -> None:
        where = record.where
        if isinstance(record, Truth):  # never shown by a `History`
            memory.truth.append(replace(record, data=json.loads(to_json(record.data))))
            if self._everything:
                memory.records.setdefault(Truth, []).append(record)
            return
        if where.round is not None:
            memory.rounds.add(where.round)
        if where.node is not None:
            memory.nodes.add(where.node)
        if self._everything:
            memory.records.setdefault(type(record), []).append(record)
        if isinstance(record, Event):
            memory.events.append(as_stored(record))
        elif isinstance(record, Metric) and where.round is not None and where.layer is None:
            _keep_value(memory, record, where.round)

    @staticmethod
    def _write_measurements(memory: _Memory, measured: Measurements) -> None:
        """Keep the newest value of each metric and node, column by column."""
        nodes = measured.measured_nodes()
        memory.nodes.update(node for node in nodes if node is not None)
        if measured.round is None:
            return
        if nodes:
            memory.rounds.add(measured.round)
        if len({*measured.nodes}) < len(measured.nodes):  # among a node's values, only their order shows which is last
            for record in measured.records():
                if isinstance(record, Metric):
                    _keep_value(memory, record, measured.round)
            return
        # A value about one edge or cluster as a whole is not about the federation.
        shown = [node is not None or group is None for node, group in zip(measured.nodes, measured.groups, strict=True)]
        present = measured.present & np.array(shown, np.bool_)[:, None]
        for column, name in enumerate(measured.names):
            rows = np.flatnonzero(present[:, column]).tolist()
            newest = memory.newest(name, measured.round) if rows else {}
            known = len(newest)
            for row, value in zip(rows, measured.values[rows, column].tolist(), strict=True):
                before = newest.get(measured.nodes[row])
                if before is None or measured.at >= before[0]:
                    newest[measured.nodes[row]] = (measured.at, value)
            if len(newest) - known < len(rows):
                memory.replaced[name] = memory.replaced.get(name, 0) + 1

    def _number(self, text: str | None) -> int | None:
        if text is None:
            return None
        number = self._symbols.get(text)
        if number is None:
            number = self._symbols[text] = len(self._texts)
            self._texts.append(text)
        return number

    def texts(self, numbers: Iterable[int]) -> list[str]:
        """Return the names for these numbers."""
        return [self._texts[number] for number in numbers]

    def memory(self, run: str) -> _Memory:
        """Return what is remembered of a run; empty for a run without records."""
        memory = self._memories.get(run)
        if memory is None:
            memory = self._memories[run] = _Memory()
        return memory

    def records(self, run: str, kind: type[R]) -> Sequence[R]:
        """Return every record of one type, in order of arrival; only with `everything`."""
        with self.lock:
            return list(self.memory(run).records.get(kind, ()))

    def truth_of(self, run: str) -> list[Truth]:
        """Return the planted faults of a run (by id), for trials only; the counterpart of `queries.truth_of`."""
        with self.lock:
            return list(self.memory(run).truth)

    def history(self, run: str) -> MemoryHistory:
        """Return the history of a run, by its id."""
        return MemoryHistory(self, run)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class MemoryHistory:
    """A `protocols.History` of one run in memory."""

    def __init__(self, store: MemoryStore, run: str) -> None:
        self._store = store
        self._run = run

    def rounds(self) -> list[int]:
        with self._store.lock:
            return sorted(self._store.memory(self._run).rounds)

    def nodes(self) -> list[Node]:
        with self._store.lock:
            return sorted(self._store.memory(self._run).nodes, key=natural)

    def layers(self, family: str) -> tuple[str, ...]:
        with self._store.lock:
            blocks = self._store.memory(self._run).blocks.get(family)
            table = self._store.tables.get(blocks[-1][0]) if blocks else None
            return () if table is None else table.names

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        with self._store.lock:
            newest = self._store.memory(self._run).metrics.get(name, {}).get(round_index, {})
            return {node: newest[node][1] for node in in_natural_order(tuple(n for n in newest if n is not None))}

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        with self._store.lock:
            memory = self._store.memory(self._run)
            by_round = memory.metrics.get(name, {})
            if node is None or not is_client(node):
                series = memory.series.setdefault((name, node), _Series())
                series.follow(by_round, node)
                return [*series.rounds], [*series.values]
            rounds = sorted(round_ for round_, newest in by_round.items() if node in newest)
            return rounds, [by_round[round_][node][1] for round_ in rounds]

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        check_statistic(family, statistic)
        parts: list[Part] = []
        with self._store.lock:
            for digest, entries, numbers in self._store.memory(self._run).blocks.get(family, ()):
                table = self._store.tables.get(digest)
                positions = [] if table is None else [i for i, name in enumerate(table.names) if name == layer]
                for i in positions:
                    if i < len(numbers):
                        values = statistic_of(family, statistic, numbers[i])
                        parts.append((entries.rounds, entries.at, entries.nodes, values))
            return over_rounds(parts, self._store.texts)

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        for statistic in statistics:
            check_statistic(family, statistic)
        with self._store.lock:
            tables = self._store.tables
            slices = [
                slice_of(tables[digest].names, round_index, entries, numbers)
                for digest, entries, numbers in self._store.memory(self._run).of_round.get((family, round_index), ())
                if digest in tables
            ]
            return over_nodes(family, statistics, self.layers(family), slices, self._store.texts)

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        with self._store.lock:
            return self._store.memory(self._run).indexed_events()(name, since)

    def changes_of(self, name: str, round_index: int) -> Hashable:
        """Return a value that changes whenever answers about a metric or a family in a round may change."""
        with self._store.lock:
            memory = self._store.memory(self._run)
            if name in FAMILIES:
                return len(memory.of_round.get((name, round_index), ())), len(self._store.tables)
            return len(memory.metrics.get(name, {}).get(round_index, ())), memory.replaced.get(name, 0)
