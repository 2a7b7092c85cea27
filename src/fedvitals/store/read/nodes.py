# SPDX-License-Identifier: Apache-2.0
"""Reads which nodes a run has: its server, its edges, clusters and rings, and its clients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from fedvitals.protocols import Node
from fedvitals.records import is_client
from fedvitals.store.read.reader import Reader

T = TypeVar("T")


def nodes_by_number(reader: Reader, run: str) -> dict[int, str]:
    """Return the names of the nodes that have a record in the run, by their numbers in the store."""
    symbols = reader.database.rows(
        "SELECT s.id, s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ?",
        (reader.names.number(run) or 0,),
    )
    reader.names.learn(symbols)
    return dict(symbols)


def clients_by_number(reader: Reader, run: str) -> dict[int, str]:
    """Return the names of the run's clients by their numbers: without its server, edges, clusters and rings."""
    return {number: name for number, name in nodes_by_number(reader, run).items() if is_client(name)}


def count_clients(reader: Reader, run: str) -> int:
    """Count the clients that have a record in the run."""
    return len(clients_by_number(reader, run))


def has_node(reader: Reader, run: str, node: str) -> bool:
    """Whether the node has a record in the run."""
    rows = reader.database.rows(
        "SELECT 1 FROM run_node WHERE run = ? AND node = ?",
        (reader.names.number(run) or 0, reader.names.number(node) or 0),
    )
    return bool(rows)


def count_trained_clients(reader: Reader, run: str) -> int:
    """Count the clients that trained or sent an update in any round."""
    rows = reader.database.rows(
        "SELECT s.text FROM run_node AS n JOIN symbol AS s ON s.id = n.node WHERE n.run = ? AND EXISTS ("
        "SELECT 1 FROM run_round AS r CROSS JOIN metric AS m WHERE r.run = n.run AND m.run = r.run "
        "AND m.round = r.round AND m.node = n.node AND m.layer IS NULL "
        "AND m.name IN (SELECT id FROM symbol WHERE text IN ('steps', 'update.norm')))",
        (reader.names.number(run) or 0,),
    )
    return sum(is_client(name) for (name,) in rows)


def rounds_attended(reader: Reader, run: str, nodes: Collection[str]) -> dict[Node | None, list[int]]:
    """Return the rounds, ascending, in which each of these nodes reported its steps or sent an update.

    A node that never did is omitted. For few nodes only: each costs one seek per round.
    """
    attended: dict[Node | None, list[int]] = {}
    for part in portions(sorted(nodes)):
        rows = reader.database.each_row(
            # CROSS JOIN, because SQLite keeps its order: one seek for each node and round.
            "SELECT s.text, r.round FROM symbol AS s CROSS JOIN run_round AS r WHERE "  # noqa: S608 - placeholders
            f"s.text IN ({placeholders(part)}) AND r.run = ? AND EXISTS (SELECT 1 FROM metric AS m WHERE m.run = r.run "
            "AND m.name IN (SELECT id FROM symbol WHERE text IN ('steps', 'update.norm')) AND m.round = r.round "
            "AND m.node = s.id AND m.layer IS NULL) ORDER BY s.text, r.round",
            (*part, reader.names.number(run) or 0),
        )
        for node, round_index in rows:
            attended.setdefault(node, []).append(round_index)
    return attended


def placeholders(parameters: Collection[object]) -> str:
    """Return one placeholder for each parameter, separated by commas as in an SQL list."""
    return ", ".join("?" * len(parameters))


def padded(parameters: Sequence[T]) -> list[T]:
    """Return parameters of an IN, the last one repeated until their number is a power of two.

    A connection caches prepared statements by their text. A list that grows with a run would create a new text, and
    another cached statement, each time.
    """
    size = 1 << max(0, len(parameters) - 1).bit_length()
    return [*parameters, *list(parameters[-1:]) * (size - len(parameters))]


def portions(names: Sequence[str], size: int = 500) -> list[Sequence[str]]:
    """Split a list into parts small enough for the parameters of one statement."""
    return [names[start : start + size] for start in range(0, len(names), size)]
