# SPDX-License-Identifier: Apache-2.0
"""`fedvitals alerts test` and `fedvitals alerts check RUN`: do alerts arrive, and which would a run have sent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import json_option, opened_run, print_json, run_options
from fedvitals.cli.screen import new_console, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedvitals.sinks.alerts.message import Alert
    from fedvitals.sinks.alerts.rules import Rule
    from fedvitals.store.read.reader import Reader

ROWS = 50  # in the list, unless --all
OUTCOMES = {
    "taken": "taken",
    "later": "not taken (a training would try again)",
    "refused": "refused (trying again will not help)",
    "doubt": "no answer (it may have arrived)",
}

_config = click.option("--config", default="alerts.toml", show_default=True, help="The file with rules and channels.")


@click.group()
def command() -> None:
    """Alerts by webhook, e-mail, command or file: see docs/alerts.md."""


@command.command(epilog="Exit code: 1 if a channel did not accept the message, 0 if all did, 2 for wrong use.")
@_config
@click.option("--channel", help="Only this channel.")
@json_option
def test(config: str, channel: str | None, as_json: bool) -> int:
    """Send one test message through every channel, and print whether each accepted it, or why not."""
    from fedvitals.errors import ConfigError, unknown
    from fedvitals.sinks.alerts.channels import DeliveryError
    from fedvitals.sinks.alerts.config import load
    from fedvitals.sinks.alerts.message import Message, harmless

    plan = load(config)
    _remark(plan.rules)
    names = [target.name for target in plan.channels]
    if channel is not None and channel not in names:
        raise ConfigError(unknown("channel", channel, names))
    results: list[dict[str, Any]] = []
    for target in plan.channels:
        if channel not in (None, target.name):
            continue
        click.echo(f"{target.name}: sending, for at most {target.seconds:g} s ...", err=True)
        outcome, why = "taken", ""
        try:
            target.send(Message((), test=os.urandom(8).hex()))
        except DeliveryError as error:
            outcome, why = error.outcome, str(error)
        results.append({"channel": target.name, "kind": type(target).__name__.lower(), "outcome": outcome, "why": why})
    if as_json:
        print_json("alerts test", {"rules": len(plan.rules), "channels": results})
    else:
        for result in results:
            why = f": {result['why']}" if result["why"] else ""
            click.echo(harmless(f"{result['channel']} ({result['kind']}): {OUTCOMES[result['outcome']]}{why}", 500))
    return int(any(result["outcome"] != "taken" for result in results))


@command.command()
@_config
@click.option("--all", "everything", is_flag=True, help=f"Show every alert, not only the first {ROWS}.")
@run_options
def check(run: str | None, config: str, everything: bool, store: str | None, as_json: bool) -> None:
    """List the alerts that a stored run would have sent by these rules, and when; nothing is sent.

    The rules judge it exactly as during training. RUN is a run's id, the beginning of one, or a name (its newest run);
    without it, the newest run of all.
    """
    from fedvitals.sinks.alerts.config import load
    from fedvitals.sinks.alerts.message import alert_json

    plan = load(config, secrets=False)
    _remark(plan.rules)
    with opened_run(store, run) as (reader, chosen):
        alerts = _replayed(reader, chosen, plan.rules, plan.names or ("",))
    if as_json:
        print_json("alerts check", {"run": chosen, "rules": len(plan.rules), "alerts": [alert_json(a) for a in alerts]})
    else:
        _print(alerts, chosen, len(plan.rules), len(alerts) if everything else ROWS)


def _replayed(reader: Reader, run: str, rules: Sequence[Rule], channels: Sequence[str] = ("",)) -> list[Alert]:
    """Return the alerts of a stored run; only the metrics that a rule uses are read."""
    from fedvitals.records import Finding
    from fedvitals.sinks.alerts.evaluation import ATTENDANCE, ROUND_COMPLETE, replay
    from fedvitals.sinks.alerts.rules import Condition
    from fedvitals.store.read import queries
    from fedvitals.store.read.metrics import metrics_of_names

    asked = {rule.when.metric for rule in rules if isinstance(rule.when, Condition)}
    metrics = metrics_of_names(reader, run, sorted({ROUND_COMPLETE, *ATTENDANCE, *asked}))
    return replay(run, rules, metrics, queries.records(reader, run, Finding), _families(), channels)


def _families() -> dict[str, str]:
    from fedvitals.diagnosis.issues.table import ISSUES

    return {issue.code: issue.family for issue in ISSUES}


def _remark(rules: Sequence[Rule]) -> None:
    from fedvitals.sinks.alerts.rules import unknown_names

    for remark in unknown_names(rules, _families()):
        click.echo(f"fedvitals: {remark}", err=True)


def _print(alerts: Sequence[Alert], run: str, rules: int, most: int) -> None:
    console = new_console()
    firing = sum(alert.kind == "firing" for alert in alerts)
    counts = f"{firing} alert{'s' * (firing != 1)}, {len(alerts) - firing} of them resolved"
    console.print(f"[bold]{counts}[/bold], by {rules} rule{'s' * (rules != 1)} on run {shown(run)}")
    colours = {"critical": "red", "warning": "yellow"}
    for alert in alerts[:most]:
        word = alert.kind if alert.kind == "resolved" else alert.severity
        colour = "green" if alert.kind == "resolved" else colours.get(alert.severity, "dim")
        console.print(
            f"  round {alert.round:>4}  [{colour}]{word:<8}[/{colour}]  {shown(alert.message)}  "
            f"[dim]({shown(alert.rule)})[/dim]",
            soft_wrap=True,
        )
    if len(alerts) > most:
        console.print(f"  and {len(alerts) - most} more: --all")
