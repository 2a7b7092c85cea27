# SPDX-License-Identifier: Apache-2.0
"""`fedvitals show RUN`: the run's health card."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import json_option, print_json, store_option

if TYPE_CHECKING:
    from fedvitals.report.card import Card
    from fedvitals.store.reader import Reader

ROWS = 8  # of clients and layers, unless --all


@click.command()
@click.argument("run")
@click.option("--node", help="One node's history instead of the card.")
@click.option("--all", "everything", is_flag=True, help="Every client and layer, not only those that stand out most.")
@store_option
@json_option
def command(run: str, node: str | None, everything: bool, store: str | None, as_json: bool) -> None:
    """Show a run's vital signs, and the clients and layers that stand out, those first.

    RUN is a run's id, the beginning of one, or a name (its newest run).
    """
    from fedvitals.report.card import health_card
    from fedvitals.store import open_reader, queries

    with open_reader(store) as reader:
        chosen = queries.find_run(reader, run)
        if node is not None:
            _show_node(reader, chosen, node, as_json)
            return
        card = health_card(reader, chosen)
    if as_json:
        print_json("show", card)
    else:
        _print(card, everything)


def _print(card: Card, everything: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _head(console, card)
    console.print(_signs(card))
    rows = None if everything else ROWS
    if card.clients:
        console.print(_clients(card, rows))
    if card.layers:
        console.print(_layers(card, rows))
    _events(console, card)
    if card.absent:
        console.print("[bold]Not measured[/bold]")
        for names, needs in card.absent.items():
            console.print(f"  {names}: [dim]needs {needs}[/dim]", soft_wrap=True)


def _head(console: Any, card: Card) -> None:
    from rich.markup import escape

    from fedvitals.cli.screen import number, plain, seconds

    run, summary = card.run, card.summary
    state = "finished" if run.finished else "open"
    began = time.strftime("%d %b %Y %H:%M", time.localtime(run.started))
    console.print(f"[bold]{escape(plain(run.name))}[/bold]  {run.id}  {state}, begun {began}, {seconds(summary.seconds)}")
    console.print(f"{summary.rounds} rounds, {summary.clients} clients, {run.host}; privacy level {card.privacy}")
    cost = "" if card.cost_percent is None else f"; measuring took {number(card.cost_percent)} % of the rounds' time"
    console.print(f"records lost: {summary.lost}{cost}")
    console.print("Health: not judged, since no detector is installed. Below: what stands out, for your own eyes.\n")


def _signs(card: Card) -> Any:
    from rich.table import Table

    from fedvitals.cli.screen import number, sparkline

    table = Table(box=None, pad_edge=False, title="Vital signs", title_justify="left", title_style="bold")
    for title in ("sign", "of"):
        table.add_column(title)
    for title in ("first", "now"):
        table.add_column(title, justify="right")
    table.add_column("course")
    table.add_column("unit", style="dim")
    for sign in card.signs:
        unit = "" if sign.unit == "1" else sign.unit
        first, now = number(sign.values[0]), number(sign.values[-1])
        table.add_row(sign.name, sign.of, first, now, sparkline(sign.values), unit)
    return table


def _clients(card: Card, rows: int | None) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from fedvitals.cli.screen import number, plain

    shown = card.clients[:rows]
    title = f"\nClients, those that stand out first ({len(shown)} of {len(card.clients)})"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("client", "stands out"):
        table.add_column(name)
    metrics = ("update.norm", "update.cosine_mean", "fit.accuracy_before", "fit.accuracy_after", "loss", "time.client")
    present = [m for m in metrics if any(m in found for found in card.newest.values())]
    for name in present:
        table.add_column(name, justify="right")
    for client in shown:
        values = card.newest.get(client.name, {})
        mark = f"{number(client.score)}×  {client.why}" if client.score >= 3 else f"{number(client.score)}×"
        style = "bold" if client.score >= 5 else ""
        table.add_row(escape(plain(client.name)), mark, *(number(values.get(m)) for m in present), style=style)
    return table


def _layers(card: Card, rows: int | None) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from fedvitals.cli.screen import plain

    shown = card.layers[:rows]
    title = f"\nLayers, those that changed most first ({len(shown)} of {len(card.layers)})"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("layer")
    table.add_column("what changed")
    for layer in shown:
        table.add_row(escape(plain(layer.name)), layer.why)
    return table


def _events(console: Any, card: Card) -> None:
    from rich.markup import escape

    from fedvitals.cli.screen import plain

    if not card.events:
        return
    console.print(f"\n[bold]Warnings and errors[/bold] (newest of {len(card.events)})")
    for event in card.events[-5:]:
        place = " ".join(str(part) for part in (f"round {event.where.round}", event.where.node) if part)
        console.print(f"  {event.level}  {escape(plain(place))}: {escape(plain(event.message)[:200])}", soft_wrap=True)
    console.print()


def _show_node(reader: Reader, run: str, node: str, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedvitals.cli.screen import number, plain, sparkline
    from fedvitals.errors import ConfigError, unknown
    from fedvitals.store import queries

    known = reader.history(run).nodes()
    if node not in known:
        raise ConfigError(unknown("node", node, known))
    found = queries.node_history(reader, run, node)
    if as_json:
        print_json("show", {"node": node, "metrics": found})
        return
    table = Table(box=None, pad_edge=False, title=plain(node), title_justify="left", title_style="bold")
    table.add_column("metric")
    for title in ("first", "now"):
        table.add_column(title, justify="right")
    table.add_column("course")
    for name, (_, values) in found.items():
        table.add_row(name, number(values[0]), number(values[-1]), sparkline(values))
    Console(highlight=False).print(table)
