# SPDX-License-Identifier: Apache-2.0
"""People's own SQL: read-only, on the same connection as everything else that reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedvitals.errors import StoreError
from fedvitals.store.reader import Reader


@dataclass(frozen=True, slots=True)
class Answer:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool  # whether there was more than the limit allowed


def query(reader: Reader, sql: str, limit: int | None = None) -> Answer:
    """The rows that a person's statement finds; StoreError when it is wrong or would change anything."""
    try:
        cursor = reader.database.connection.execute(sql)
        found = cursor.fetchall() if limit is None else cursor.fetchmany(limit + 1)
        columns = tuple(column[0] for column in cursor.description or ())
        cursor.close()  # a statement left open would hold the store's log back from being folded in
    except reader.database.dialect.errors as error:
        what = str(error)
        if any(word in what for word in ("authoriz", "prohibited", "readonly")):
            raise StoreError(
                "Only reading is allowed here, one SELECT at a time, and the store was not changed. "
                f"Got: {sql.strip()[:200]}"
            ) from error
        raise StoreError(f"The query failed: {what}. docs/schema.md lists the views and their columns.") from error
    shown = found if limit is None else found[:limit]
    return Answer(columns, shown, more=len(shown) < len(found))
