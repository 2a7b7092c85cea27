# SPDX-License-Identifier: Apache-2.0
"""Finds what no reader can read in a SQLite file: tables that are not as declared, and contents of a wrong type.

SQLite accepts any type in any column and does not check the bytes of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from fedvitals.errors import StoreError
from fedvitals.store.ddl import quoted, views
from fedvitals.store.dialect import SQLITE, Database
from fedvitals.store.schema import TABLES, VERSION, Column, Table

_STORED_AS = {"key": "integer", "symbol": "integer", "integer": "integer", "real": "real", "text": "text",
              "json": "text", "blob": "blob"}  # fmt: skip
_LISTS = ("tables", "suspects", "nodes", "shape")  # columns with a JSON list; all others have a JSON object
_PLACES = ("round", "step", "first_round", "last_round")  # `doctor.misnumbered` reports more about these


def missing_structure(database: Database, version: int) -> list[str]:
    """Return the tables, columns, indexes and views that a store of this version should have but lacks."""
    missing = []
    tables = [table for table in TABLES if table.since <= version]
    for table in tables:
        columns = [column.name for column in table.columns if column.since <= version]
        there = [row[1] for row in database.rows(f"PRAGMA table_info({table.name})")]
        if sorted(there) != sorted(columns):
            missing.append(f"table {table.name}")
        wanted = [*table.indexes, *(names for since, names in table.later if since <= version)]
        indexes = {row[1] for row in database.rows(f"PRAGMA index_list({table.name})")}
        names = [f"{table.name}_by_{'_'.join(columns)}" for columns in wanted]
        missing += [f"index {name}" for name in names if name not in indexes]
    if version == VERSION:
        declared = dict(database.rows("SELECT name, sql FROM sqlite_master WHERE type = 'view'"))
        missing += [f"view {name}" for name, sql in views(SQLITE).items() if declared.get(name) != sql]
    return missing


def unreadable(database: Database, version: int) -> Iterator[tuple[Table, Column, list[int]]]:
    """Yield the columns with rows that have content of the wrong type, with the numbers of these rows."""
    for table in TABLES:
        for column in table.columns:
            if max(table.since, column.since) <= version:
                rows = {*_wrong_types(database, table, column), *_wrong_texts(database, table, column)}
                if rows:
                    yield table, column, sorted(rows)


def _wrong_types(database: Database, table: Table, column: Column) -> list[int]:
    if column.name in _PLACES:
        return []
    name, types = quoted(column.name), f"'{_STORED_AS[column.type]}'" + (", 'null'" if column.null else "")
    sql = f"SELECT rowid FROM {table.name} WHERE TYPEOF({name}) NOT IN ({types})"  # noqa: S608 - our own words only
    return [row[0] for row in database.rows(sql)]


def _wrong_texts(database: Database, table: Table, column: Column) -> list[int]:
    """Return the rows whose text is not UTF-8, or is not a JSON object or list where it should be."""
    if _STORED_AS[column.type] != "text":
        return []
    name = quoted(column.name)
    sql = f"SELECT rowid, CAST({name} AS BLOB) FROM {table.name} WHERE TYPEOF({name}) = 'text'"  # noqa: S608
    wrong, kind = [], list if column.name in _LISTS else dict
    for number, content in database.rows(sql):
        try:
            text = content.decode()
            if column.type == "json" and not isinstance(json.loads(text), kind):
                wrong.append(number)
        except (ValueError, RecursionError):
            wrong.append(number)
    return wrong


def replace_unreadable(database: Database, version: int) -> str:
    """Make every row readable again, removing rows that cannot be. Returns a sentence on what was done."""
    replaced = removed = 0
    for table, column, rows in [*unreadable(database, version)]:
        name, numbers = quoted(column.name), [(number,) for number in rows]
        if column.type == "text":
            sql = f"SELECT rowid, CAST({name} AS BLOB) FROM {table.name} WHERE rowid = ?"  # noqa: S608
            texts = [(str(content or b"", "utf-8", "replace"), number)
                     for row in numbers for number, content in database.rows(sql, row)]  # fmt: skip
            try:
                database.many(f"UPDATE {table.name} SET {name} = ? WHERE rowid = ?", texts)  # noqa: S608
            except StoreError:  # of two names that are now the same
                texts = [(f"{text} (damaged name {number})", number) for text, number in texts]
                database.many(f"UPDATE {table.name} SET {name} = ? WHERE rowid = ?", texts)  # noqa: S608
            replaced += len(rows)
        elif column.type == "json" or column.null:
            content = "NULL" if column.type != "json" else "'[]'" if column.name in _LISTS else "'{}'"
            database.many(f"UPDATE {table.name} SET {name} = {content} WHERE rowid = ?", numbers)  # noqa: S608
            replaced += len(rows)
        else:
            database.many(f"DELETE FROM {table.name} WHERE rowid = ?", numbers)  # noqa: S608
            removed += len(rows)
    parts = [f"replaced {replaced} texts and values that could not be read"] if replaced else []
    parts += [f"removed {removed} rows that could not be read"] if removed else []
    sentence = " and ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""
