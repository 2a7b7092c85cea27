# SPDX-License-Identifier: Apache-2.0
"""Reads sums of transfers: the database adds them up, since a long run has a million."""

from __future__ import annotations

from typing import Any

from fedvitals.records import is_client
from fedvitals.store.read.reader import Reader

Message = tuple[str, str, str, float, float, int]
"""Sender, receiver, kind, bytes, bytes before compression, number of messages."""


def bytes_since(reader: Reader, run: str, kind: str, since: int) -> tuple[int, int, int] | None:
    """Sum the transfers of a run that arrived after `since`, counting each message once.

    Returns the arrival of the newest, the bytes of all kinds, and those of `kind`; None if nothing arrived.
    """
    # The plus keeps the planner from using the wrong index: new rows are at the end, all rows are under the run. If
    # there is no other run, a walk without an index takes two thirds of the time.
    walk = since or reader.database.rows("SELECT COUNT(*) FROM run") == [(1,)]
    where = "arrival > ? AND +run = ?" if walk else "+arrival > ? AND run = ?"
    ((newest, total, of_kind),) = reader.database.rows(
        # Not grouped by kind, which would sort a million messages.
        "SELECT MAX(arrival), SUM(bytes) FILTER (WHERE bytes > 0), SUM(bytes) FILTER (WHERE kind = "  # noqa: S608 - our own words
        f"(SELECT id FROM symbol WHERE text = ?) AND bytes > 0) FROM transfer WHERE {where}",
        (kind, since, reader.names.number(run) or 0),
    )
    return None if newest is None else (int(newest), int(total or 0), int(of_kind or 0))


def flows_by_round(reader: Reader, run: str, kind: str) -> list[tuple[Any, ...]]:
    """Sum the transfers of a run by round, by whether they are of `kind`, and by whether clients send or receive.

    Returns rows of round, is of that kind, sent by a client, received by a client, bytes, bytes before compression,
    number of messages.
    """
    symbols = reader.database.rows(
        "SELECT id, text FROM symbol WHERE text = 'server' OR text LIKE 'edge-%' OR text LIKE 'cluster-%' "
        "OR text LIKE 'ring-%' OR text LIKE 'star-%'"
    )
    others = ", ".join(str(int(number)) for number, name in symbols if not is_client(name)) or "0"
    return reader.database.rows(
        f"SELECT round, kind = ?, sender NOT IN ({others}), receiver NOT IN ({others}), "  # noqa: S608 - numbers
        "SUM(CASE WHEN bytes > 0 THEN bytes ELSE 0 END), SUM(CASE WHEN raw_bytes > 0 THEN raw_bytes ELSE 0 END), "
        "SUM(CASE WHEN bytes > 0 THEN 1 ELSE 0 END) "
        "FROM transfer WHERE run = ? GROUP BY 1, 2, 3, 4",
        (reader.names.number(kind) or 0, reader.names.number(run) or 0),
    )


def bytes_by_kind(reader: Reader, run: str, first: int, last: int) -> list[tuple[str, float, float, int]]:
    """Sum the transfers of the rounds from `first` to `last` by kind.

    Returns rows of kind, bytes, bytes before compression, number of messages.
    """
    return reader.database.rows(
        "SELECT s.text, SUM(t.bytes), SUM(t.raw_bytes), COUNT(*) FROM transfer AS t JOIN symbol AS s ON s.id = t.kind "
        "WHERE t.run = ? AND t.round BETWEEN ? AND ? GROUP BY s.text",
        (reader.names.number(run) or 0, first, last),
    )


def messages_of_round(reader: Reader, run: str, round_index: int) -> list[Message]:
    """Sum the transfers of one round by sender, receiver and kind."""
    return reader.database.rows(
        "SELECT a.text, b.text, k.text, SUM(t.bytes), SUM(t.raw_bytes), COUNT(*) FROM transfer AS t "
        "JOIN symbol AS a ON a.id = t.sender JOIN symbol AS b ON b.id = t.receiver JOIN symbol AS k ON k.id = t.kind "
        "WHERE t.run = ? AND t.round = ? GROUP BY a.text, b.text, k.text",
        (reader.names.number(run) or 0, round_index),
    )
