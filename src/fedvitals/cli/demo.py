# SPDX-License-Identifier: Apache-2.0
"""`fedvitals demo`: a real federation falls ill before your eyes."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import click

from fedvitals.cli import case_cards, ui
from fedvitals.cli.options import print_json, store_options
from fedvitals.cli.screen import new_console, number, seconds, shown, sparkline, with_unit
from fedvitals.errors import MissingExtraError
from fedvitals.views.metric_titles import metric_title
from fedvitals.views.units import percent

if TYPE_CHECKING:
    from fedvitals.diagnosis.evidence.outlier_ranking import Outlier
    from fedvitals.diagnosis.live_detectors import FindingList

SIGNS = ("accuracy", "fit.loss_before", "gradient.norm", "update.norm", "update.cosine_mean", "weight.drift")
ROWS = 8  # findings shown at the end


@click.command()
@click.option("--rounds", type=int, help="Rounds of training.  [default: 20]")
@click.option("--clients", type=int, help="Clients of the federation.  [default: 20]")
@click.option("--seed", default=7, show_default=True, help="Random seed; the same seed gives the same run.")
@click.option("--quick", is_flag=True, help="Smaller defaults: 8 rounds, 10 clients.")
@click.option("--no-ui", is_flag=True, help="Do not open the dashboard after the run; the default without a terminal.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the dashboard.  [default: 8321, or the next free]")
@store_options
def command(
    rounds: int | None,
    clients: int | None,
    seed: int,
    quick: bool,
    no_ui: bool,
    port: int | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Train a federation on digits, with one faulty client.

    Twenty clients train on hand-written digits; one gets wrong labels from round 5 on. The demo is a plain PyTorch
    loop with the monitor attached; the run is kept in the store, and the dashboard opens on it.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError("torch", "lab", "The demo") from error
    from fedvitals.diagnosis.evidence.outlier_ranking import rank_outlier_clients
    from fedvitals.lab.data import datasets
    from fedvitals.lab.demo import ILL_CLIENT, ILL_SINCE, DemoSettings, federate
    from fedvitals.monitor.monitor import Monitor
    from fedvitals.store.in_memory import MemoryStore

    usual = (10, 8) if quick else (20, 20)
    chosen = [default if wanted is None else wanted for wanted, default in zip((clients, rounds), usual, strict=True)]
    settings = DemoSettings(clients=chosen[0], rounds=chosen[1], seed=seed)
    datasets.load("digits")  # reports a missing extra before anything is created
    torch.set_num_threads(1)
    memory = MemoryStore()
    began = time.perf_counter()
    config = {"dataset": "digits", "rounds": settings.rounds, "ill": f"{ILL_CLIENT} since round {ILL_SINCE}"}
    target = store or "runs.db"
    with Monitor(target, run="demo", sinks=[memory], seed=seed, config=config) as monitor:
        history = memory.history(monitor.run.id)
        accuracy = 0.0
        kind = _Lines if as_json or not sys.stderr.isatty() else _Live
        with kind(settings.rounds) as view:
            try:
                for number, accuracy in federate(settings, monitor):
                    monitor.flush()
                    view.show(number, accuracy, history, _accused(rank_outlier_clients(history), monitor.findings()))
            except KeyboardInterrupt:
                click.echo(f"\nStopped; what was measured is kept: fedvitals show {monitor.run.id}", err=True)
                raise
        findings = monitor.findings()
        standing = _accused(rank_outlier_clients(history), findings)
    took = time.perf_counter() - began
    if as_json:
        result = {"run": monitor.run.id, "store": target, "accuracy": accuracy, "seconds": took, "stand_out": standing}
        cases = [case_cards.as_json(case) for case in findings.cases]
        print_json("demo", {**result, "cases": cases, "not_judged": findings.gaps})
        return
    _closing(monitor.run.id, store, accuracy, took, standing, findings, settings)
    if not no_ui and sys.stdout.isatty():
        click.echo()
        ui.show(target, run=monitor.run.id, host="127.0.0.1", port=port, open_browser=True)


def _accused(standing: Sequence[Outlier], findings: FindingList) -> list[Outlier]:
    """Return the outliers that have a finding: some client always differs most, and need not be faulty."""
    named = {case.node for case in findings.cases}
    return [client for client in standing if client.name in named]


def _closing(
    run: str, store: str | None, accuracy: float, took: float, standing: Any, findings: Any, settings: Any
) -> None:

    from fedvitals.diagnosis.gaps import statement
    from fedvitals.lab.demo import ILL_CLIENT, ILL_SINCE

    console = new_console()
    option = f" --store {shown(shlex.quote(store))}" if store else ""
    # What a user can type here: scripts/demo runs this from an environment that is not on the path.
    program = "fedvitals" if shutil.which("fedvitals") else shlex.quote(os.path.relpath(sys.argv[0]))
    console.print(
        f"\n[bold]{settings.clients} clients, {settings.rounds} rounds, accuracy {percent(accuracy)}[/bold], "
        f"{took:.0f} s"
    )
    if standing:
        worst = standing[0]
        console.print(
            f"{worst.name} stands out most ({worst.why}), {number(worst.score)}× the spread of the other clients."
        )
    console.print("\n[bold]Findings[/bold]")
    if findings:
        case_cards.print_list(console, findings.cases, ROWS)
        console.print(statement(findings.installed, findings.gaps, findings.examined, silent=False), soft_wrap=True)
        case_cards.print_hidden_notes(console, findings.hidden_notes, f"{program} findings {run} --notes{option}")
    else:
        console.print(str(findings), soft_wrap=True)
    if settings.rounds > ILL_SINCE:
        console.print(f"[dim](The truth: {ILL_CLIENT} has had wrong labels since round {ILL_SINCE}.)[/dim]")
    console.print("\nLook next at")
    for verb, why in (
        (f"ui {run}", "all of it in the browser"),
        (f"report {run}", "all of it as one file"),
        (f"findings {run} --all", "why, and what to do"),
        (f"show {run}", "the run's health card"),
        (f"profile {run}", "where its time, memory and bytes went"),
        (f"show {run} --node {ILL_CLIENT}", "one client's history"),
        ("runs", "all runs of the store"),
        (
            "query \"SELECT round, node, value FROM metrics WHERE name = 'update.cosine_mean' ORDER BY value LIMIT 9\"",
            "anything else, in SQL",
        ),
    ):
        console.print(f"  {program} {verb}{option}   [dim]{why}[/dim]", soft_wrap=True)


class _Lines:
    """Prints a line per round, for logs and pipes."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, round_index: int, accuracy: float, _history: Any, standing: Any) -> None:
        first = f", {standing[0].name} stands out {standing[0].score:.1f}×" if standing else ""
        click.echo(f"round {round_index + 1}/{self._rounds}: accuracy {percent(accuracy)}{first}", err=True)


class _Live:
    """A live view: progress, a sparkline per vital sign, the clients that stand out."""

    def __init__(self, rounds: int) -> None:
        from rich.live import Live

        self._rounds, self._began = rounds, time.perf_counter()
        self._live = Live(console=new_console(stderr=True), refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, round_index: int, accuracy: float, history: Any, standing: Any) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        from fedvitals.views.card import vital_sign

        done = round_index + 1
        left = (time.perf_counter() - self._began) / done * (self._rounds - done)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"round {done}/{self._rounds}", ProgressBar(self._rounds, done, width=30), f"accuracy {percent(accuracy)}",
            f"{seconds(left)} left" if done < self._rounds else "done",
        )  # fmt: skip
        signs = Table.grid(padding=(0, 2))
        for name in SIGNS:
            sign = vital_sign(history, name)
            if sign.values:
                signs.add_row(
                    metric_title(name),
                    sparkline(sign.values, unit=sign.unit),
                    with_unit(sign.values[-1], sign.unit),
                    f"[dim]{sign.of}[/dim]",
                )
        clients = Table.grid(padding=(0, 2))
        for client in standing[:4]:
            bar = "█" * min(20, max(1, round(client.score)))
            clients.add_row(client.name, bar, f"{number(client.score)}×", client.why if client.score >= 3 else "")
        self._live.update(Group(head, "", "[bold]vital signs[/bold]", signs, "", "[bold]stands out[/bold]", clients))
