# SPDX-License-Identifier: Apache-2.0
"""Reads spans and transfers of some rounds, so that a page need not read all of a long run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from fedvitals.records import Span, Transfer
from fedvitals.store import rows
from fedvitals.store.read.reader import Reader

R = TypeVar("R", Span, Transfer)
_COUNT = "SELECT COUNT(*), MAX(arrival) FROM {} WHERE run = ? AND round BETWEEN ? AND ?"


def count_spans(reader: Reader, run: str, round_index: int) -> int:
    """Count the spans of one round."""
    ((count,),) = reader.database.rows(
        "SELECT COUNT(*) FROM span WHERE run = ? AND round = ?", (reader.names.number(run) or 0, round_index)
    )
    return int(count)


def count_between(reader: Reader, run: str, kind: type[Span | Transfer], first: int | None, last: int | None) -> object:
    """Return a value that changes when a span or transfer of the rounds from `first` to `last` arrives."""
    sql = _COUNT.format(rows.TABLE_OF[kind])
    return reader.database.rows(sql, (reader.names.number(run) or 0, first, last))


def records_between(reader: Reader, run: str, kind: type[R], first: int, last: int) -> Sequence[R]:
    """Return the spans or transfers of the rounds from `first` to `last`, in order of arrival."""
    records = reader.database.rows(
        f"{rows.select(kind)} WHERE run = ? AND round BETWEEN ? AND ? ORDER BY arrival", (run, first, last)
    )
    return rows.from_rows(kind, records)


def spans_of_node(reader: Reader, run: str, node: str, first: int, last: int) -> list[Span]:
    """Return a node's spans in the rounds from `first` to `last`, and those of the rounds as a whole."""
    spans = reader.database.rows(
        f"{rows.select(Span)} WHERE arrival IN (SELECT arrival FROM span WHERE run = ? AND round >= ? AND round <= ? "  # noqa: S608 - our own words
        "AND (node = ? OR node IS NULL)) ORDER BY arrival",
        (reader.names.number(run) or 0, first, last, reader.names.number(node) or 0),
    )
    return rows.from_rows(Span, spans)


def groups_of_spans(reader: Reader, run: str, round_index: int) -> list[tuple[str, str]]:
    """Return the group and the node of each node whose spans in a round have a group."""
    return reader.database.rows(
        'SELECT DISTINCT g.text, n.text FROM span AS s JOIN symbol AS g ON g.id = s."group" '
        "JOIN symbol AS n ON n.id = s.node WHERE s.run = ? AND s.round = ?",
        (reader.names.number(run) or 0, round_index),
    )
