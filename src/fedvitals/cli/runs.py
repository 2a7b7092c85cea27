# SPDX-License-Identifier: Apache-2.0
"""`fedvitals runs`: what is in the store."""

from __future__ import annotations

import click

from fedvitals.cli.options import json_option, print_json, store_option


@click.command()
@store_option
@json_option
def command(store: str | None, as_json: bool) -> None:
    """List the runs of a store, the newest first. An id begins with the time the run did."""
    from rich.console import Console
    from rich.table import Table

    from fedvitals.cli.screen import number, seconds, shown
    from fedvitals.store import open_reader, queries

    with open_reader(store) as reader:
        found = queries.list_runs(reader)
    if as_json:
        print_json("runs", found)
        return
    if not found:
        click.echo("No runs yet. `fedvitals demo` makes one; the README's ten lines make your own.", err=True)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, min_width=8)
    table.add_column("id", no_wrap=True)
    for title in ("rounds", "clients", "accuracy", "loss", "alerts", "time"):
        table.add_column(title, justify="right")
    for run in found:
        alerts = sum(run.events.get(level, 0) for level in ("warning", "error", "critical")) + run.findings
        lost = f" ({run.lost} lost)" if run.lost else ""
        table.add_row(
            shown(run.name),
            run.id,
            str(run.rounds),
            str(run.clients),
            number(run.accuracy),
            number(run.loss),
            f"{alerts}{lost}",
            seconds(run.seconds) if run.finished else "open",
        )
    Console(highlight=False).print(table)
