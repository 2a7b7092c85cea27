# SPDX-License-Identifier: Apache-2.0
"""Answers questions about a run's measurements from SQL, with the same answers as `MemoryStore.history`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedvitals.errors import ConfigError, unknown
from fedvitals.protocols import Node
from fedvitals.records import Event, natural
from fedvitals.stats import FAMILIES, Array, statistics_of
from fedvitals.store import rows
from fedvitals.store.dialect import Database
from fedvitals.store.packing import (
    Numbers,
    Part,
    coordinates_of,
    entries_of,
    numbers_of,
    over_nodes,
    over_rounds,
    slice_of,
    statistic_of,
)
from fedvitals.store.symbols import Names


def check_statistic(family: str, statistic: str) -> None:
    """Raise ConfigError, naming the existing statistics, if the family has no such statistic."""
    if family not in FAMILIES:
        raise ConfigError(unknown("family", family, FAMILIES))
    if statistic not in statistics_of(family):
        raise ConfigError(unknown(f"statistic of family '{family}'", statistic, statistics_of(family)))


def _value(value: float | None) -> float:
    return math.nan if value is None else value


class SqlHistory:
    """A `protocols.History` of one run.

    Every answer is one statement and therefore consistent, even while a training writes.
    """

    def __init__(self, database: Database, run: str, names: Names) -> None:
        self._database = database
        self._names = names
        self._run = run
        self._number: int | None = None
        self._tables: dict[int, tuple[str, ...]] = {}
        self._chunks: dict[str, tuple[int, Numbers]] = {}  # the compacted block that was read last, by family

    def _ask(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement whose first value is this run; none while the store does not know the run."""
        return list(self._each(sql, *values))

    def _each(self, sql: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        if self._number is None:
            self._number = self._names.number(self._run)
        if self._number is not None:
            yield from self._database.each_row(sql, (self._number, *values))

    def rounds(self) -> list[int]:
        # Row by row: for a long run, all rows would take more memory than the rounds.
        return [
            round_index for (round_index,) in self._each("SELECT round FROM run_round WHERE run = ? ORDER BY round")
        ]

    def nodes(self) -> list[Node]:
        rows = self._ask("SELECT s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ?")
        return sorted((row[0] for row in rows), key=natural)

    def layers(self, family: str) -> tuple[str, ...]:
        names = self._ask(
            "SELECT s.text FROM layer AS l JOIN symbol AS s ON s.id = l.name WHERE l.layer_table = ("
            "SELECT layer_table FROM layer_block WHERE run = ? AND family = (SELECT id FROM symbol WHERE text = ?) "
            "ORDER BY arrival DESC LIMIT 1) ORDER BY l.position",
            family,
        )
        return tuple(row[0] for row in names)

    def latest(self, name: str, round_index: int) -> Mapping[Node, float]:
        values = self._ask(
            "SELECT s.text, m.value FROM metric AS m JOIN symbol AS s ON s.id = m.node "
            "WHERE m.run = ? AND m.name = (SELECT id FROM symbol WHERE text = ?) AND m.round = ? AND m.layer IS NULL "
            "ORDER BY m.at, m.arrival",
            name,
            round_index,
        )
        newest = {node: _value(value) for node, value in values}
        return {node: newest[node] for node in sorted(newest, key=natural)}

    def series(self, name: str, node: Node | None) -> tuple[list[int], list[float]]:
        # Without a node, only values of the whole federation, not those of one edge or cluster.
        whole, of_node = 'm.node IS NULL AND m."group" IS NULL', "m.node = (SELECT id FROM symbol WHERE text = ?)"
        values = self._ask(
            # A seek for each round; without `run_round` it would be a walk over all nodes.
            # CROSS JOIN, because SQLite keeps its order and would choose the walk if asked.
            "SELECT m.round, m.value FROM run_round AS r CROSS JOIN metric AS m WHERE r.run = ? AND m.run = r.run "  # noqa: S608
            "AND m.round = r.round AND m.name = (SELECT id FROM symbol WHERE text = ?) "
            f"AND {whole if node is None else of_node} AND m.layer IS NULL ORDER BY m.at, m.arrival",
            name,
            *(() if node is None else (node,)),
        )
        newest = dict(values)
        rounds = sorted(newest)
        return rounds, [_value(newest[round_]) for round_ in rounds]

    def matrix(self, family: str, statistic: str, layer: str) -> tuple[list[int], list[Node], Array]:
        check_statistic(family, statistic)
        blocks = self._ask(
            "SELECT b.arrival, l.position, m.layer, b.entries, b.coordinates, m.numbers FROM layer_block AS b "
            "JOIN layer AS l ON l.layer_table = b.layer_table "
            "JOIN layer_matrix AS m ON m.block = b.arrival AND m.layer IN (-1, l.position) "
            "WHERE b.run = ? AND b.family = (SELECT id FROM symbol WHERE text = ?) "
            "AND l.name = (SELECT id FROM symbol WHERE text = ?) AND l.position < b.layers",
            family,
            layer,
        )
        parts: list[Part] = []
        # Sorted here, since SQL would carry the blobs through its sorter.
        for _, position, stored, count, coordinates, numbers in sorted(blocks, key=lambda row: row[:2]):
            columns = numbers_of(family, numbers, count)[position if stored < 0 else 0]
            parts.append((*coordinates_of(coordinates, count), statistic_of(family, statistic, columns)))
        return over_rounds(parts, self._names.texts)

    def across(self, family: str, statistics: Sequence[str], round_index: int) -> tuple[list[Node], Array]:
        for statistic in statistics:
            check_statistic(family, statistic)
        slices = [
            slice_of(self._layers_of(table), round_index, entries_of(coordinates, details, count), numbers)
            for table, count, coordinates, details, numbers in self._blocks(family, round_index)
        ]
        return over_nodes(family, statistics, self.layers(family), slices, self._names.texts)

    def _blocks(self, family: str, round_: int) -> Iterator[tuple[int, int, bytes, bytes, Numbers]]:
        """Yield the blocks that may contain a round, in order of arrival: table, entries, coordinates, details,
        numbers.
        """
        known, kept = self._chunks.get(family, (-1, None))
        matrices = self._ask(
            "SELECT b.arrival, m.layer, b.layer_table, b.entries, b.coordinates, b.details, m.numbers FROM ("
            "SELECT * FROM layer_block WHERE run = ? AND family = (SELECT id FROM symbol WHERE text = ?) "
            "AND (first_round IS NULL OR (first_round <= ? AND last_round >= ?))"
            ") AS b LEFT JOIN layer_matrix AS m ON m.block = b.arrival AND b.arrival <> ?",
            family,
            round_,
            round_,
            known,
        )
        ordered = sorted(matrices, key=lambda row: (row[0], row[1] or 0))
        for arrival, same in itertools.groupby(ordered, key=lambda row: row[0]):
            parts = list(same)
            _, layer, table, count, coordinates, details, blob = parts[0]
            if kept is not None and arrival == known:
                yield table, count, coordinates, details, kept
            elif blob is not None:
                numbers = np.concatenate([numbers_of(family, row[6], count) for row in parts])
                if layer >= 0:  # compacted: many rounds, whose next one is asked for soon, and it does not change
                    self._chunks[family] = arrival, numbers
                yield table, count, coordinates, details, numbers

    def _layers_of(self, table: int) -> tuple[str, ...]:
        """Return the names in a layer table, which never change; none if the table has not arrived."""
        if table not in self._tables:
            names = self._database.rows(
                "SELECT s.text FROM layer AS l JOIN symbol AS s ON s.id = l.name WHERE l.layer_table = ? "
                "ORDER BY l.position",
                (table,),
            )
            if not names:
                return ()
            self._tables[table] = tuple(row[0] for row in names)
        return self._tables[table]

    def events(self, name: str | None = None, since: int | None = None) -> Sequence[Event]:
        conditions, values = "", list[Any]()
        if name is not None:
            conditions, values = " AND name = ?", [name]
        if since is not None:
            conditions, values = conditions + " AND round >= ?", [*values, since]
        events = self._database.rows(
            f"{rows.select(Event)} WHERE run = ?{conditions} ORDER BY at, arrival", (self._run, *values)
        )
        return rows.from_rows(Event, events)
