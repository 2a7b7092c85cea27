# SPDX-License-Identifier: Apache-2.0
"""`fedvitals bisect RUN --good 8 --bad 20`: which clients brought a run from its good path, and since which round."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.screen import new_console, new_table, shown
from fedvitals.errors import MissingExtraError

if TYPE_CHECKING:
    from fedvitals.replay.counterfactual.bisect import BisectResult


@click.command(
    epilog="Exit code: 0, whether or not culprits were found; 2 for wrong use or a run that cannot be run again."
)
@click.option("--good", type=int, required=True, metavar="ROUND", help="A round in which the run was still good.")
@click.option("--bad", type=int, required=True, metavar="ROUND", help="A later round in which it was not.")
@click.option(
    "--metric",
    type=click.Choice(["loss", "accuracy"]),
    help="Metric to judge by. Default: both; the one that became worse is shown.",
)
@click.option(
    "--until", metavar="CONDITION", help="Condition that must hold again in the bad round, such as 'accuracy >= 0.8'."
)
@click.option("--data", type=click.Path(file_okay=False), help="Folder of the data set, if it was moved.")
@click.option("--workers", type=int, default=1, show_default=True, help="Worker processes.")
@run_options
def command(
    run: str | None,
    good: int,
    bad: int,
    metric: str | None,
    until: str | None,
    data: str | None,
    workers: int,
    store: str | None,
    as_json: bool,
) -> None:
    """Find the clients that spoiled a run, and since which round.

    It searches for the smallest set of clients without whom the run stays good, and for their first bad round.

    RUN is a run of the lab with a tape: its id, the beginning of one, or a name (its newest run); without
    it, the newest run of all. Rounds are executed again without some of the clients; every attempt is printed.
    """
    try:
        from fedvitals.replay.counterfactual import bisect
        from fedvitals.replay.debugger import conditions
        from fedvitals.replay.player.player import Player
        from fedvitals.replay.tape.reader import open_tape
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "lab", "Running rounds again") from error
    condition = None if until is None else conditions.parse(until)
    chosen, suspects = _suspects(store, run, good, bad)
    with Player(open_tape(store, chosen), data=data, workers=workers) as player:
        culprit = bisect.bisect(
            player,
            good,
            bad,
            metric=metric,
            until=condition,
            suspects=suspects,
            progress=lambda text: click.echo(text, err=True),
        )
    if as_json:
        print_json("bisect", culprit)
    else:
        _print(culprit, store)


def _suspects(store: str | None, run: str | None, good: int, bad: int) -> tuple[str, list[str]]:
    """Return the selected run, and the clients that its findings of these rounds name."""
    from fedvitals.records import Finding
    from fedvitals.store.read import queries

    with opened_run(store, run) as (reader, chosen):
        findings = [f for f in queries.records(reader, chosen, Finding) if good < (f.where.round or 0) <= bad]
    named = [node for f in findings for node in (f.where.node, *(suspect.node for suspect in f.suspects)) if node]
    return chosen, [*dict.fromkeys(named)]


def _print(culprit: BisectResult, store: str | None) -> None:
    from fedvitals.replay.shares import metric_in_words

    console = new_console()
    table = new_table("without", "from round", f"{culprit.metric} in round {culprit.bad}")
    table.add_row("nobody (recorded)", "", metric_in_words(culprit.metric, culprit.recorded))
    for attempt in culprit.tries:
        table.add_row(
            shown(", ".join(attempt.without)), str(attempt.first), metric_in_words(culprit.metric, attempt.value)
        )
    console.print(table)
    console.print(f"\n[bold]{shown(str(culprit))}[/bold]")
    console.print(f"[dim]Restored means: {shown(culprit.criterion)}.[/dim]")
    if culprit.clients:
        option = "" if store is None else f" --store {shown(shlex.quote(store))}"
        console.print(
            f"[dim]Look at it:  fedvitals replay {shown(culprit.run)}{option} -c 'goto {culprit.round}'[/dim]",
            soft_wrap=True,
        )
