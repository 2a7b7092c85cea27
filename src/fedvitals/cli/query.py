# SPDX-License-Identifier: Apache-2.0
"""`fedvitals query`: read-only SQL on a store."""

from __future__ import annotations

import sys

import click

from fedvitals.cli.options import print_json, store_options
from fedvitals.cli.screen import WIDE, new_console, new_table, shown


@click.command(
    epilog="Tables and views: docs/schema.md. Example: "
    "\"SELECT node, round, value FROM metrics WHERE name = 'update.norm' ORDER BY value DESC LIMIT 5\""
)
@click.argument("sql")
@click.option(
    "--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Largest number of rows to print."
)
@store_options
def command(sql: str, limit: int, store: str | None, as_json: bool) -> None:
    """Run one SQL SELECT on a store; nothing can be changed this way."""
    from fedvitals.store import open_reader
    from fedvitals.store.read.ask import query

    with open_reader(store) as reader:
        answer = query(reader, sql, limit)
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    if as_json:
        print_json("query", {"columns": answer.columns, "rows": rows, "more": answer.more})
        return
    table = new_table()
    for column in answer.columns:
        table.add_column(shown(column))
    for row in answer.rows:
        table.add_row(*(_cell(value) for value in row))
    # A pipe has no width: text cut there would be lost to the reader.
    new_console(width=None if sys.stdout.isatty() else WIDE).print(table)
    if answer.more:
        click.echo(f"Only the first {limit} rows are shown; --limit asks for more.", err=True)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    return shown(f"{value:.6g}" if isinstance(value, float) else str(value))
