# SPDX-License-Identifier: Apache-2.0
"""Reads events of a run in ways that `queries.events` does not cover: by node, failures, the newest of each node."""

from __future__ import annotations

from collections.abc import Sequence

from fedvitals.records import FAILURES, Event
from fedvitals.store import rows
from fedvitals.store.read.nodes import placeholders
from fedvitals.store.read.reader import Reader


def events_of_node(reader: Reader, run: str, node: str, names: Sequence[str] = (), *, limit: int) -> list[Event]:
    """Return a node's newest events, the newest first; with `names`, only events of these names."""
    numbers = [reader.names.number(name) or 0 for name in names]
    condition = f"AND name IN ({placeholders(names)}) " if names else ""
    events = reader.database.rows(
        f"{rows.select(Event)} WHERE arrival IN (SELECT arrival FROM event WHERE run = ? AND node = ? {condition}"  # noqa: S608 - our own words
        "ORDER BY at DESC, arrival DESC LIMIT ?) ORDER BY at DESC, arrival DESC",
        (reader.names.number(run) or 0, reader.names.number(node) or 0, *numbers, limit),
    )
    return rows.from_rows(Event, events)


def failures(reader: Reader, run: str, round_index: int | None = None) -> list[tuple[str, str, int]]:
    """Return node, name and round of each event that means a failure (`records.FAILURES`); of one round if given."""
    condition, parameters = ("", ()) if round_index is None else ("AND e.round = ? ", (round_index,))
    return reader.database.rows(
        "SELECT node.text, name.text, e.round FROM event AS e JOIN symbol AS name ON name.id = e.name "  # noqa: S608 - our own words
        "JOIN symbol AS node ON node.id = e.node WHERE e.run = (SELECT id FROM symbol WHERE text = ?) "
        f"{condition}AND name.text IN ({placeholders(FAILURES)}) AND e.round IS NOT NULL",
        (run, *parameters, *FAILURES),
    )


def newest_event_arrival(reader: Reader, name: str) -> tuple[int | None, bool]:
    """Return the arrival of the store's newest event, and whether the store has ever used that event name."""
    ((arrival, symbol),) = reader.database.rows(
        "SELECT MAX(arrival), (SELECT id FROM symbol WHERE text = ?) FROM event", (name,)
    )
    return arrival, symbol is not None


def newest_event_of_each_node(reader: Reader, run: str, name: str) -> list[Event]:
    """Return, for each node with events of that name, the event that arrived last."""
    events = reader.database.rows(
        f"{rows.select(Event)} WHERE arrival IN (SELECT MAX(arrival) FROM event WHERE run = ? AND name = ? "  # noqa: S608 - our own words
        "AND node IS NOT NULL GROUP BY node)",
        (reader.names.number(run) or 0, reader.names.number(name) or 0),
    )
    return rows.from_rows(Event, events)


def rounds_of_events(reader: Reader, run: str, name: str) -> dict[str, tuple[int, int]]:
    """Return, for each node, the first and the last round with an event of that name."""
    rounds = reader.database.rows(
        "SELECT node.text, MIN(e.round), MAX(e.round) FROM event AS e JOIN symbol AS node ON node.id = e.node "
        "WHERE e.run = ? AND e.name = ? AND e.round IS NOT NULL GROUP BY node.text",
        (reader.names.number(run) or 0, reader.names.number(name) or 0),
    )
    return {node: (first, last) for node, first, last in rounds}
