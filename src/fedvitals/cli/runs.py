# SPDX-License-Identifier: Apache-2.0
"""`fedvitals runs`: what is in the store."""

from __future__ import annotations

import time

import click

from fedvitals.cli.options import json_option, print_json, store_option


@click.command()
@store_option
@json_option
def command(store: str | None, as_json: bool) -> None:
    """List the runs of a store, the newest first."""
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
    for title in ("run", "id", "begun", "state"):
        table.add_column(title)
    for title in ("rounds", "clients", "accuracy", "loss", "warnings", "lost", "time"):
        table.add_column(title, justify="right")
    for run in found:
        warnings = sum(run.events.get(level, 0) for level in ("warning", "error", "critical"))
        table.add_row(
            shown(run.name),
            run.id,
            time.strftime("%d %b %H:%M", time.localtime(run.started)),
            "done" if run.finished else "open",
            str(run.rounds),
            str(run.clients),
            number(run.accuracy),
            number(run.loss),
            str(warnings),
            str(run.lost),
            seconds(run.seconds),
        )
    Console().print(table)
