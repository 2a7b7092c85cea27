# SPDX-License-Identifier: Apache-2.0
"""Reads a run page by page in order of arrival, so that it need not fit into memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from fedvitals.errors import StoreError
from fedvitals.records import Action, Event, Finding, LayerStats, Metric, Record, Snapshot, Span, Transfer
from fedvitals.store import rows
from fedvitals.store.ddl import quoted
from fedvitals.store.packing import entries_of, numbers_of, records_of
from fedvitals.store.read.nodes import placeholders
from fedvitals.store.read.queries import get_run, metric_names, records
from fedvitals.store.read.reader import Reader
from fedvitals.store.schema import TABLE, Table

R = TypeVar("R", bound=Record)
PAGE = 5000  # rows
BLOCKS = 16  # of layer statistics

# What a sink receives from a stored run; sketches and truths are for the detectors and the trials.
KINDS: tuple[type[Record], ...] = (Metric, LayerStats, Transfer, Span, Event, Finding, Action, Snapshot)


def pages(
    reader: Reader, run: str, table: Table, round_: int | None = None, size: int = PAGE, after: int = -1
) -> Iterator[list[rows.Row]]:
    """Yield the rows of a table's view with all its columns, in pages of `size` rows; of one round if given.

    `after`: the arrival after which to start.
    """
    columns = ", ".join(quoted(column.name) for column in table.columns)
    condition = "" if round_ is None else "AND round = ? "
    last = after
    while True:
        page = reader.database.rows(
            f"SELECT {columns} FROM {table.view} WHERE run = ? AND arrival > ? {condition}ORDER BY arrival LIMIT ?",  # noqa: S608
            (run, last, *(() if round_ is None else (round_,)), size),
        )
        if page:
            yield page
        if len(page) < size:
            return
        last = page[-1][0]


def records_in_order(reader: Reader, run: str, round_: int | None = None) -> Iterator[Record]:
    """Yield the run, then its records of all KINDS, round by round as far as they arrived in that order."""
    yield get_run(reader, run)
    streams = [records_of_kind(reader, run, kind, round_) for kind in KINDS]
    yield from heapq.merge(*streams, key=_round_of)


def _round_of(record: Any) -> int:
    return -1 if record.where.round is None else record.where.round


def records_of_kind(
    reader: Reader, run: str, kind: type[R], round_: int | None = None, page: int = PAGE
) -> Iterator[R]:
    """Yield every record of one type (but Run), in order of arrival, `page` at a time; of one round if given."""
    if kind is LayerStats:
        for layers in layer_pages(reader, run, round_):
            yield from layers  # type: ignore[misc]
    else:
        for fetched in pages(reader, run, TABLE[rows.TABLE_OF[kind]], round_, page):
            yield from rows.from_rows(kind, [row[1:] for row in fetched])


def record_pages(
    reader: Reader, run: str, kind: type[R], page: int = PAGE, after: int = -1
) -> Iterator[tuple[int, list[R]]]:
    """Yield the records of one type (but Run and LayerStats) that arrived after `after`, `page` at a time.

    Each page is preceded by the arrival of its last record.
    """
    for fetched in pages(reader, run, TABLE[rows.TABLE_OF[kind]], size=page, after=after):
        yield fetched[-1][0], rows.from_rows(kind, [row[1:] for row in fetched])


def layer_pages(
    reader: Reader, run: str, round_: int | None = None, families: Sequence[str] | None = None
) -> Iterator[list[LayerStats]]:
    """Yield layer statistics, some blocks at a time; of one round and of some families if given.

    The blocks of a run that is being written may be merged during the reading, so such a run is read all at once.
    """
    if get_run(reader, run).finished is None:
        yield [
            stats
            for stats in records(reader, run, LayerStats)
            if round_ in (None, stats.where.round) and (families is None or stats.family in families)
        ]
        return
    number, name = reader.names.number(run) or 0, lambda symbol: reader.names.texts([symbol])[0] if symbol else None
    blocks = reader.database.rows(
        "SELECT b.arrival, f.text, t.text, b.entries, b.coordinates, b.details, b.first_round, b.last_round "
        "FROM layer_block AS b JOIN symbol AS f ON f.id = b.family JOIN symbol AS t ON t.id = b.layer_table "
        "WHERE b.run = ? ORDER BY b.first_round, b.arrival",
        (number,),
    )
    wanted = [
        block
        for block in blocks
        if (families is None or block[1] in families)
        and (round_ is None or block[6] is None or block[6] <= round_ <= block[7])
    ]
    for start in range(0, len(wanted), BLOCKS):
        some = {block[0]: block for block in wanted[start : start + BLOCKS]}
        marks = ", ".join("?" * len(some))
        numbers = reader.database.rows(
            f"SELECT block, layer, numbers FROM layer_matrix WHERE block IN ({marks})",  # noqa: S608
            (*some,),
        )
        parts = {
            block: [row[2] for row in same]
            for block, same in groupby(sorted(numbers, key=itemgetter(0, 1)), itemgetter(0))
        }
        if len(parts) < len(some):
            raise StoreError(f"Run {run} was changed while it was read. Try again.")
        page: list[LayerStats] = []
        for block, (_, family, table, count, coordinates, details, *_) in some.items():
            matrix = np.concatenate([numbers_of(family, blob, count) for blob in parts[block]])
            page += records_of((run, family, table), entries_of(coordinates, details, count), matrix, name)
        page = [stats for stats in page if round_ is None or stats.where.round == round_]
        yield sorted(page, key=_round_of)


def page_of_table(
    reader: Reader, table: Table, wanted: Mapping[str, Any], after: int, limit: int
) -> tuple[tuple[str, ...], list[rows.Row]]:
    """Return the columns of a table of records except `run`, and the first rows that arrived after `after`.

    `wanted`: the texts, or the round, that these columns must have, including `run`.
    """
    columns = tuple(column.name for column in table.columns if column.name != "run")
    conditions, parameters = _conditions(reader, table, wanted)
    page = reader.database.rows(
        f"SELECT {', '.join(map(quoted, columns))} FROM {table.view} WHERE arrival IN (SELECT arrival FROM "  # noqa: S608 - our own words
        f"{table.name} WHERE {conditions} AND arrival > ? ORDER BY arrival LIMIT ?) ORDER BY arrival",
        (*parameters, after, limit),
    )
    return columns, page


def _conditions(reader: Reader, table: Table, wanted: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return conditions that use an index where it helps, else (marked by a plus) the order of arrival."""
    numbers = {key: value if key == "round" else reader.names.number(value) or 0 for key, value in wanted.items()}
    by_index = "name" in wanted or "round" in wanted if table.name == "metric" else "round" in wanted
    conditions, parameters = [f"{'' if by_index else '+'}{key} = ?" for key in numbers], list(numbers.values())
    if table.name == "metric" and "name" not in wanted and by_index:  # the index has the names before the rounds
        names = [reader.names.number(name) or 0 for name in metric_names(reader, wanted["run"])]
        conditions.append(f"name IN ({placeholders(names) or 'NULL'})")
        parameters += names
    return " AND ".join(conditions), parameters
