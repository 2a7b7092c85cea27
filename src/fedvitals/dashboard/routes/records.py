# SPDX-License-Identifier: Apache-2.0
"""Route of records as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from fedvitals.dashboard.answers import answer
from fedvitals.dashboard.asgi import HttpError, Request, Response, Router
from fedvitals.dashboard.routes.parameters import RunPath
from fedvitals.store.read.paging import page_of_table
from fedvitals.store.read.reader import Reader
from fedvitals.store.schema import TABLE, Table

router = Router("records")
Kind = Literal["metric", "event", "span", "transfer", "finding", "action", "snapshot"]
LARGEST = 2**53  # the largest integer that JSON and a browser count exactly


@dataclass(frozen=True, slots=True)
class Records:
    """A page of records of one kind."""

    kind: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    next: int | None  # `after` of the next page; None: this was the last one


@router.get("/api/runs/{run}/records", Records)
def records(
    request: Request,
    run: RunPath,
    kind: Kind = "metric",
    round_: Annotated[int, Meta(extra={"name": "round"}, ge=0, le=LARGEST)] | None = None,
    node: Annotated[str, Meta(max_length=300)] | None = None,
    name: Annotated[str, Meta(max_length=300, description="Of a metric, event or span.")] | None = None,
    after: Annotated[int, Meta(ge=0, le=LARGEST)] = 0,
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200,
) -> Response:
    """Rows of one kind in order of arrival, a page at a time."""
    wanted = {"round": round_, "node": node, "name": name}
    table = TABLE[kind]
    known = {column.name for column in table.columns}
    chosen = {key: value for key, value in wanted.items() if value is not None}
    if not known.issuperset(chosen):
        foreign = next(key for key in chosen if key not in known)
        raise HttpError(422, f"A {kind} has no {foreign}, so none can be chosen by it. Leave «{foreign}» out.")
    return answer(request, run, _page, table, chosen, after, limit)


def _page(reader: Reader, run: str, table: Table, chosen: dict[str, Any], after: int, limit: int) -> Records:
    columns, page = page_of_table(reader, table, {"run": run, **chosen}, after, limit)
    rows = tuple(tuple(_readable(value) for value in row) for row in page)
    more = len(page) == limit
    return Records(table.name, columns, rows, int(page[-1][0]) if more else None)


def _readable(value: Any) -> Any:
    return f"{len(value)} bytes" if isinstance(value, bytes | memoryview) else value
