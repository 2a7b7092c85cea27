# SPDX-License-Identifier: Apache-2.0
"""Keeps records in dictionaries: the history that live detectors read, with the same answers as the SQL store."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedvitals.errors import RecordError
from fedvitals.measurements import Measurements, Telemetry, single_records
from fedvitals.protocols import Node, Sink
from fedvitals.records import Event, LayerTable, Metric, Run, Truth, natural
from fedvitals.stats import Array
from fedvitals.store.deliveries import Intervals, fresh
from fedvitals.store.packing import (
    Entries,
    LayerMatrices,
    Numbers,
    Part,
    block_of,
    in_blocks,
    layer_matrices,
    over_nodes,
    over_rounds,
    slice_of,
    statistic_of,
)
from fedvitals.store.read.history import check_statistic
from fedvitals.store.rows import as_stored, check, to_json

R = TypeVar("R")
Newest = dict[Node | None, tuple[float, float]]  # node → (at, value)
Block = tuple[str, Entries, Numbers]  # layer table, and what it holds of one round


@dataclass(slots=True)
class _Memory:
    """What is known of one run."""

    rounds: set[int] = field(default_factory=set)
    nodes: set[Node] = field(default_factory=set)
    metrics: dict[str, dict[int, Newest]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    of_round: dict[tuple[str, int], list[Block]] = field(default_factory=dict)  # the same, by family and round
    truth: list[Truth] = field(default_factory=list)
    records: dict[type, list[Any]] = field(default_factory=dict)


class MemoryStore(Sink):
    """A sink that remembers. Each write is all or nothing to those who read from other threads.

    It keeps what a `History` shows, of the newest `rounds` of each run where that is given: a training may be longer
    than memory is large. With `everything`, it also keeps each record as it came (for tests).
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
        """Keep a batch; RecordError, after keeping the others, if some of its records cannot be kept."""
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
            if self._window is not None:
                for memory in self._memories.values():
                    self._forget_old(memory, self._window)
        if errors:
            raise RecordError(f"{len(errors)} of {len(records)} records cannot be kept: {errors[0]}") from errors[0]

    def _write_blocks(self, same: Sequence[LayerMatrices]) -> list[Exception]:
        """Keep matrices of one family and round as one block, or one by one where that fails; what still failed."""
        first = same[0]
        try:
            # Packed as on disk: live detectors must see the very numbers that they will see in the stored run.
            block, memory = (first.table, *block_of(same, self._number)), self.memory(first.run)
        except Exception as error:  # noqa: BLE001
            return [error] if len(same) == 1 else [failed for record in same for failed in self._write_blocks([record])]
        memory.blocks.setdefault(first.family, []).append(block)
        if first.round is not None:
            memory.of_round.setdefault((first.family, first.round), []).append(block)
        return []

    @staticmethod
    def _forget_old(memory: _Memory, window: int) -> None:
        """Let go of all rounds but the newest; of a quarter more at once, since each time is a walk over everything."""
        if len(memory.rounds) <= window + window // 4:
            return
        oldest = sorted(memory.rounds)[-window]
        memory.rounds = {number for number in memory.rounds if number >= oldest}
        for by_round in memory.metrics.values():
            for number in [number for number in by_round if number < oldest]:
                del by_round[number]
        memory.events = [event for event in memory.events if event.where.round is None or event.where.round >= oldest]
        for family, blocks in memory.blocks.items():
            memory.blocks[family] = [block for block in blocks if block[1].rounds.max() >= oldest]
        memory.of_round = {place: blocks for place, blocks in memory.of_round.items() if place[1] >= oldest}

    def _write_run(self, run: Run) -> None:
        self.tables.update((table.digest, table) for table in run.tables)
        before = self.runs.get(run.id)
        if before is None or before.source != run.source or run.sequence >= before.sequence:
            self.runs[run.id] = run

    def _write_one(self, memory: _Memory, record: Any) -> None:
        where = record.where
        if isinstance(record, Truth):  # no word of it in what a `History` shows
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
            if where.node is None and where.group is not None:
                return  # about the whole of one edge or cluster, not of the federation
            newest = memory.metrics.setdefault(record.name, {}).setdefault(where.round, {})
            before = newest.get(where.node)
            if before is None or record.at >= before[0]:
                newest[where.node] = (record.at, record.value)

    @staticmethod
    def _write_measurements(memory: _Memory, measured: Measurements) -> None:
        """Keep the newest value of each metric and node, column by column."""
        places = measured.places()
        memory.nodes.update(place.node for place in places if place.node is not None)
        if measured.round is None:
            return
        if places:
            memory.rounds.add(measured.round)
        # What is about the whole of one edge or cluster is not about the federation.
        shown = [node is not None or group is None for node, group in zip(measured.nodes, measured.groups, strict=True)]
        present = measured.present & np.array(shown, np.bool_)[:, None]
        for column, name in enumerate(measured.names):
            rows = np.flatnonzero(present[:, column]).tolist()
            newest = memory.metrics.setdefault(name, {}).setdefault(measured.round, {}) if rows else {}
            for row, value in zip(rows, measured.values[rows, column].tolist(), strict=True):
                before = newest.get(measured.nodes[row])
                if before is None or measured.at >= before[0]:
                    newest[measured.nodes[row]] = (measured.at, value)

    def _number(self, text: str | None) -> int | None:
        if text is None:
            return None
        number = self._symbols.get(text)
        if number is None:
            number = self._symbols[text] = len(self._texts)
            self._texts.append(text)
        return number

    def texts(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of these numbers."""
        return [self._texts[number] for number in numbers]

    def memory(self, run: str) -> _Memory:
        """What is known of a run; nothing, of a run that nobody has written about."""
        memory = self._memories.get(run)
        if memory is None:
            memory = self._memories[run] = _Memory()
        return memory

    def records(self, run: str, kind: type[R]) -> Sequence[R]:
        """Every record of one type, in order of arrival; only with `everything`."""
        with self.lock:
            return list(self.memory(run).records.get(kind, ()))

    def truth_of(self, run: str) -> list[Truth]:
        """What was made ill in a run (by id), for trials only; the twin of `queries.truth_of`."""
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
            return {node: newest[node][1] for node in sorted((n for n in newest if n is not None), key=natural)}

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        with self._store.lock:
            by_round = self._store.memory(self._run).metrics.get(name, {})
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
            events = [
                event
                for event in self._store.memory(self._run).events
                if (name is None or event.name == name)
                and (since is None or (event.where.round is not None and event.where.round >= since))
            ]
        return sorted(events, key=lambda event: event.at)
