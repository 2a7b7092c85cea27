# SPDX-License-Identifier: Apache-2.0
"""`fedvitals bench`: the figures of the README, measured here and now."""

from __future__ import annotations

import importlib
from typing import Any

import click

from fedvitals.cli.options import json_option, print_json

PARTS = ("kernel", "overhead", "gsc", "store", "wire", "start", "soak")
LONG = ("overhead", "gsc", "soak")  # these say how far they are


@click.command()
@click.argument("part", type=click.Choice(PARTS), required=False)
@click.option("--quick", is_flag=True, help="Fewer repeats and smaller sizes: a smoke test, not a figure to quote.")
@json_option
def command(part: str | None, quick: bool, as_json: bool) -> None:
    """Measure what fedvitals costs on this machine: all parts, or one of them.

    Everything is compared in one run, interleaved, and given as a ratio with its spread.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for name in [part] if part else PARTS:
        click.echo(f"bench {name} ...", err=True)
        results[name] = _measure(name, quick)
        if not as_json:
            _print(name, results[name])
    if as_json:
        print_json("bench", results)


def _measure(part: str, quick: bool) -> list[dict[str, Any]]:
    def tell(text: str) -> None:
        click.echo(f"  {text}", err=True)

    measure = getattr(importlib.import_module(f"fedvitals.trials.bench_{part}"), f"bench_{part}")
    rows: list[dict[str, Any]] = measure(quick=quick, tell=tell) if part in LONG else measure(quick=quick)
    return rows


def _print(part: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedvitals.cli.screen import number

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=None, pad_edge=False, title=part, title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numeric else "left")
    for row in rows:
        cells = [row.get(column) for column in columns]
        table.add_row(*("" if c is None else number(c) if isinstance(c, int | float) else str(c) for c in cells))
    Console().print(table, "")
