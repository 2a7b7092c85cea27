# SPDX-License-Identifier: Apache-2.0
"""Reads a run as plain tables, those of docs/schema.md with layer statistics unpacked, for export to other tools."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedvitals.records import LayerStats
from fedvitals.stats import FAMILIES, STATISTICS
from fedvitals.store.ddl import quoted
from fedvitals.store.read.paging import layer_pages, pages
from fedvitals.store.read.queries import get_run, layer_families, layer_tables
from fedvitals.store.read.reader import Reader
from fedvitals.store.rows import Row
from fedvitals.store.schema import LAYER_STATISTICS, TABLES, Table

PLAIN = {"key": "integer", "symbol": "text", "integer": "integer", "real": "real", "text": "text", "json": "text",
         "blob": "blob"}  # fmt: skip
PLACE = {"run": "text", "round": "integer", "node": "text", "step": "integer", "group": "text", "at": "real",
         "family": "text", "layer": "text"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A table of a run, with its rows in batches."""

    name: str
    columns: Mapping[str, str]  # to «integer», «real», «text» or «blob»
    batches: Iterable[Sequence[Row]]


def plain_tables(reader: Reader, run: str, round_: int | None = None) -> Iterator[PlainTable]:
    """Yield every table of the run, including empty ones; of one round if given.

    Families with the nine sums are in `layer_statistics`; each other family has its own table, `layer_<family>`.
    """
    for table in TABLES:
        columns = {column.name: PLAIN[column.type] for column in table.columns}
        if table.name in ("run", "mark"):
            yield PlainTable(table.view, columns, [_whole(reader, run, table)])
        elif table.name == "layer":
            yield PlainTable(table.view, columns, [_layers(reader, run, table)])
        elif table.view:
            yield PlainTable(table.view, columns, pages(reader, run, table, round_))
    present = layer_families(reader, run)
    summed = [family for family in present if FAMILIES[family].columns is STATISTICS]
    statistics = dict.fromkeys(LAYER_STATISTICS, "real")
    batches = _unpacked(reader, run, round_, summed, LAYER_STATISTICS)
    yield PlainTable("layer_statistics", PLACE | statistics, batches)
    for family in present:
        if family not in summed:
            own = FAMILIES[family].columns
            batches = _unpacked(reader, run, round_, [family], own)
            # `update.peers` has its own column «step», which is no coordinate.
            named = [f"{family.rpartition('.')[2]}_{name}" if name in PLACE else name for name in own]
            yield PlainTable(f"layer_{family.replace('.', '_')}", PLACE | dict.fromkeys(named, "real"), batches)


def _whole(reader: Reader, run: str, table: Table) -> list[Row]:
    """Return the rows of a small table at once: it has no order of arrival."""
    columns = ", ".join(quoted(column.name) for column in table.columns)
    key = "id" if table.name == "run" else "run"
    return reader.database.rows(f"SELECT {columns} FROM {table.view} WHERE {key} = ?", (run,))  # noqa: S608


def _layers(reader: Reader, run: str, table: Table) -> list[Row]:
    columns = ", ".join(quoted(column.name) for column in table.columns)
    digests = [known.digest for known in get_run(reader, run).tables]
    rows: list[Row] = []
    for digest in digests:
        sql = f"SELECT {columns} FROM {table.view} WHERE layer_table = ? ORDER BY position"  # noqa: S608
        rows += reader.database.rows(sql, (digest,))
    return rows


def _unpacked(
    reader: Reader, run: str, round_: int | None, families: Sequence[str], statistics: Sequence[str]
) -> Iterator[list[Row]]:
    names = {digest: table.names for digest, table in layer_tables(reader).items()}
    for page in layer_pages(reader, run, round_, families) if families else ():
        yield [row for stats in page for row in _rows(stats, names.get(stats.table, ()), statistics)]


def _rows(stats: LayerStats, names: Sequence[str], statistics: Sequence[str]) -> Iterator[Row]:
    where = stats.where
    place = (where.run, where.round, where.node, where.step, where.group, stats.at, stats.family)
    with np.errstate(all="ignore"):
        columns = [stats.get(statistic).tolist() for statistic in statistics]
    for name, *values in zip(names, *columns, strict=False):
        yield (*place, name, *(_number(value) for value in values))


def _number(value: Any) -> float | None:
    """Return NaN as NULL, as everywhere in the store."""
    return None if math.isnan(value) else value
