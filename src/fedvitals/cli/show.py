# SPDX-License-Identifier: Apache-2.0
"""`fedvitals show RUN`: the run's health card."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli import case_cards
from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.screen import (
    new_console,
    new_table,
    number,
    print_verdict,
    seconds,
    shown,
    size,
    sparkline,
    with_unit,
)
from fedvitals.plural import counted
from fedvitals.views.metric_titles import metric_title

if TYPE_CHECKING:
    from fedvitals.store.read.reader import Reader
    from fedvitals.views.card import Card
    from fedvitals.views.verdict import Verdict

ROWS = 8  # for clients and layers, unless --all
LONGEST = 30  # characters of a client's name in the table
GIVES = 6  # characters that the column «stands out by» can give up by wrapping its words
COLUMNS = {
    "update.norm": "update",
    "update.cosine_mean": "cosine",
    "fit.accuracy_before": "before",
    "fit.accuracy_after": "after",
    "loss": "loss",
    "time.client_virtual": "time",
    "time.client": "time",
}


@click.command()
@click.option("--node", help="One node's history instead of the card.")
@click.option("--all", "everything", is_flag=True, help="Every client and layer, not only those that stand out most.")
@run_options
def command(run: str | None, node: str | None, everything: bool, store: str | None, as_json: bool) -> None:
    """Show a run's health card.

    It has the verdict, the vital signs over the rounds, and the clients and layers that stand out most.

    RUN is a run's id, the beginning of one, or a name (its newest run); without it, the newest run of all.
    """
    from fedvitals.store.tapes import tape_bytes
    from fedvitals.views.card import health_card
    from fedvitals.views.status import run_states
    from fedvitals.views.verdict import verdict_of

    with opened_run(store, run) as (reader, chosen):
        if node is not None:
            _show_node(reader, chosen, node, as_json)
            return
        card, state, verdict = health_card(reader, chosen), run_states(reader)[chosen], verdict_of(reader, chosen)
    if as_json:
        own = {"cases": [case_cards.as_json(case) for case in card.cases], "tape_bytes": tape_bytes(store, chosen)}
        own |= {"state": state, "verdict": verdict}
        own["examined"] = case_cards.examined_as_json(card.examined)
        print_json("show", {name: getattr(card, name) for name in card.__slots__} | own)
    else:
        _print(card, verdict, state, everything, store)


def _print(card: Card, verdict: Verdict, state: str, everything: bool, store: str | None) -> None:
    console = new_console()
    _head(console, card, state)
    _health(console, card, verdict, store)
    console.print(_signs(card))
    rows = None if everything else ROWS
    if card.clients:
        console.print(_clients(console, card, rows))
    if any(layer.score for layer in card.layers):  # after one round nothing has changed
        console.print(_layers(card, rows))
    _events(console, card)
    if card.absent:
        console.print("[bold]Not measured[/bold]")
        for names, needs in card.absent.items():
            console.print(f"  {shown(names)}: [dim]needs {shown(needs)}[/dim]", soft_wrap=True)
    _how_measured(console, card, store)


def _head(console: Any, card: Card, state: str) -> None:
    run, summary = card.run, card.summary
    began = time.strftime("%d %b %Y %H:%M", time.localtime(run.started))
    console.print(
        f"[bold]{shown(run.name)}[/bold]  {shown(run.id)}  {state}, begun {began}, {seconds(summary.seconds)}"
    )
    cost = "" if card.cost_percent is None else f", measuring took {number(card.cost_percent)} % of the time"
    thinned = f", thinned: {summary.thinned} client-rounds" if summary.thinned else ""
    amount = f"{counted(summary.rounds, 'round')}, {counted(summary.clients, 'client')}"
    console.print(f"{amount}{cost}; lost: {counted(summary.lost, 'record')}{thinned}")


def _how_measured(console: Any, card: Card, store: str | None) -> None:
    """Print how often probes measured, what was allowed to leave a client, and whether there is a tape."""
    from fedvitals.store.tapes import tape_bytes
    from fedvitals.views.card import how_often

    run = shown(card.run.id)
    if card.measured:
        console.print(f"[dim]{shown(how_often(card))}[/dim]", soft_wrap=True)
    level, allowed = card.privacy.split(": ", 1)
    cohort = f" Sums cover at least {card.cohort} clients." if level == "1" and card.cohort is not None else ""
    tracebacks = "" if card.tracebacks is None else f" Tracebacks: {'on' if card.tracebacks else 'off'}."
    console.print(f"[dim]Privacy level {level}: {allowed}.{cohort}{tracebacks}[/dim]", soft_wrap=True)
    tape = tape_bytes(store, card.run.id)
    if tape:
        console.print(f"[dim]On tape, {size(tape)}: `fedvitals replay {run}` runs it again.[/dim]", soft_wrap=True)


def _health(console: Any, card: Card, verdict: Verdict, store: str | None) -> None:
    """Print what the detectors found, each trouble once, worst first; or plainly that none examined the run."""
    from fedvitals.diagnosis.gaps import statement

    where = f" --store {shown(shlex.quote(store))}" if store else ""
    how = f"fedvitals findings {shown(card.run.id)} --notes{where}"
    if not card.detectors and not card.cases:
        judged = f"not judged, no detector was installed; `fedvitals check {shown(card.run.id)}` does so now."
        console.print(f"Health: {judged} Here is what stands out, for your eyes.\n", soft_wrap=True)
        return
    stated = shown(statement(card.detectors, card.gaps, card.examined, silent=not card.cases))
    if not card.cases:
        stated = f"{shown(verdict.headline)} {stated}" if verdict.state == "warming" else stated
        console.print(f"[bold]Health[/bold]: {stated}", soft_wrap=True)
        case_cards.print_hidden_notes(console, card.notes, how)
        console.print()
        return
    print_verdict(console, verdict)
    console.print(f"[bold]Health[/bold]: {case_cards.counted(card.cases)}.")
    case_cards.print_list(console, card.cases, ROWS, card.labels)
    console.print(stated, soft_wrap=True)
    case_cards.print_hidden_notes(console, card.notes, how)
    console.print(
        f"[dim]Why, and what to do: fedvitals findings {shown(card.run.id)} --all{where}[/dim]\n", soft_wrap=True
    )


def _titled(title: str) -> dict[str, Any]:
    return {"title": title, "title_justify": "left", "title_style": "bold"}


def _signs(card: Card) -> Any:
    table = new_table("sign", "of", ">first", ">now", "trend", **_titled("Vital signs"))
    for sign in card.signs:
        first, now = (with_unit(sign.values[i], sign.unit) for i in (0, -1))
        table.add_row(
            metric_title(sign.name), f"[dim]{sign.of}[/dim]", first, now, sparkline(sign.values, unit=sign.unit)
        )
    return table


def _clients(console: Any, card: Card, rows: int | None) -> Any:
    """Return the table of clients: names and scores are never cut; without room, the last columns are dropped."""
    present = [m for m in COLUMNS if any(m in signs for signs in card.newest.values())]
    if "time.client_virtual" in present:  # the clock by which rounds wait
        present = [m for m in present if m != "time.client"]
    table, anywhere = _client_table(card, rows, present), console.options.update(width=10 * console.width)
    while present and console.measure(table, options=anywhere).maximum > console.width + GIVES:
        present.pop()
        table = _client_table(card, rows, present)
    return table


def _client_table(card: Card, rows: int | None, present: list[str]) -> Any:
    from fedvitals.catalog import CATALOG
    from fedvitals.views.short_ids import differing_parts, short

    top = card.clients[:rows]
    title = f"\nClients, those that stand out first ({len(top)} of {max(len(card.clients), card.summary.clients)})"
    names = differing_parts([f"{short(c.name)} {card.labels.get(c.name, '')}".rstrip() for c in top], LONGEST)
    table = new_table(**_titled(title))
    table.add_column("client", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("stands out by")
    for name in present:
        table.add_column(COLUMNS[name], justify="right", no_wrap=True)
    for client, who in zip(top, names, strict=True):
        values = card.newest.get(client.name, {})
        cells = (with_unit(values.get(m), CATALOG[m].unit) for m in present)
        why = client.why if client.score >= 3 else ""
        style = "bold" if client.score >= 5 else ""
        table.add_row(shown(who), number(client.score), why, *cells, style=style)
    clock = "; time: on the virtual clock" if "time.client_virtual" in present else ""
    table.caption = (
        f"update: its size; cosine: to the others' mean; before, after: accuracy on own samples (last 5 rounds){clock}"
    )
    table.caption_justify = "left"
    return table


def _layers(card: Card, rows: int | None) -> Any:
    top = card.layers[:rows]
    title = f"\nLayers, those that changed most first ({len(top)} of {len(card.layers)})"
    table = new_table("layer", "what changed", **_titled(title))
    for layer in top:
        table.add_row(shown(layer.name), layer.why)
    return table


def _events(console: Any, card: Card) -> None:
    from fedvitals.views.labels import named

    if not card.events:
        return
    console.print(f"\n[bold]Warnings and errors[/bold] (newest of {len(card.events)})")
    for event in card.events[-5:]:
        who = named(event.where.node, card.labels) if event.where.node else None
        place = " ".join(str(part) for part in (f"round {event.where.round}", who) if part)
        console.print(f"  {event.level}  {shown(place)}: {shown(event.message[:200])}", soft_wrap=True)
    console.print()


def _show_node(reader: Reader, run: str, node: str, as_json: bool) -> None:
    from fedvitals.catalog import unit_of
    from fedvitals.store.read import queries
    from fedvitals.views.labels import labels_of, named, node_of

    labels = labels_of(reader, run)
    node = node_of(node, reader.history(run).nodes(), labels)
    history = queries.node_history(reader, run, node)
    if as_json:
        print_json("show", {"node": node, "metrics": history})
        return
    table = new_table("metric", ">first", ">now", "trend", **_titled(shown(named(node, labels))))
    for name, (_, values) in history.items():
        table.add_row(
            metric_title(name),
            *(with_unit(values[i], unit_of(name)) for i in (0, -1)),
            sparkline(values, unit=unit_of(name)),
        )
    new_console().print(table)
