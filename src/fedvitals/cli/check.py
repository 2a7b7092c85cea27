# SPDX-License-Identifier: Apache-2.0
"""`fedvitals check RUN`: all detectors once more, on what the store has, and what differs from what they said live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli import case_cards
from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.screen import new_console, shown
from fedvitals.diagnosis.issues.table import how_sure
from fedvitals.plural import counted

if TYPE_CHECKING:
    from fedvitals.diagnosis.cases import Case
    from fedvitals.diagnosis.compare import FindingsDifference
    from fedvitals.records import Finding

ROWS = 20  # of each list


@click.command(
    epilog="Exit code: 1 if there is a case of severity warning or critical, or if the run could not be fully examined "
    "(a detector failed, records were lost, a client trained outside of any round, more than a tenth of the "
    "client-rounds or the newest rounds could not be judged); 0 if not; 2 for wrong use."
)
@click.option("--notes", is_flag=True, help="Also findings that never were more than a note.")
@run_options
def command(run: str | None, notes: bool, store: str | None, as_json: bool) -> int:
    """Examine a stored run again with this version's detectors.

    Their findings are compared with the stored ones. Nothing is written. RUN is a run's id, the beginning of one, or a
    name (its newest run); without it, the newest run of all.
    """
    from fedvitals.diagnosis.abstentions import examination
    from fedvitals.diagnosis.cases import cases, is_trouble
    from fedvitals.diagnosis.compare import compare_findings
    from fedvitals.diagnosis.examine import DETECTORS, compares_clients, examine
    from fedvitals.diagnosis.gaps import MonitorFailure, statement
    from fedvitals.records import Finding
    from fedvitals.store.read import queries
    from fedvitals.views.gaps import examination_of
    from fedvitals.views.labels import labels_of

    failures: list[MonitorFailure] = []
    messages: list[str] = []

    def note(error: Exception, who: str) -> None:
        failures.append(MonitorFailure(who, type(error).__name__))
        messages.append(f"{who} failed: {error!r}")

    with opened_run(store, run) as (reader, chosen):
        stored = queries.records(reader, chosen, Finding)
        fresh = examine(reader.history(chosen), failed=note)
        examined = examination(reader.history(chosen)) if compares_clients(DETECTORS) else None
        missing = examination_of(reader, chosen, failures, examined=examined).gaps
        attendance, labels = queries.attendance(reader, chosen), labels_of(reader, chosen)
    every_case, difference = cases(fresh, attendance), compare_findings(stored, fresh)
    fresh_cases = [case for case in every_case if notes or is_trouble(case)]
    hidden = len(every_case) - len(fresh_cases)
    for message in dict.fromkeys(messages):
        click.echo(f"fedvitals: {message}", err=True)
    if as_json:
        shown_cases = [case_cards.as_json(case) for case in fresh_cases]
        report = {"run": chosen, "detectors": len(DETECTORS), "cases": shown_cases, "difference": difference}
        report |= {"examined": case_cards.examined_as_json(examined), "hidden_notes": hidden}
        print_json("check", report | {"failed": messages, "not_judged": missing})
    else:
        _print(fresh_cases, difference, len(DETECTORS), labels)
        click.echo(statement(len(DETECTORS), missing, examined, silent=not fresh_cases))
        case_cards.print_hidden_notes(new_console(), hidden, "--notes")
    return int(any(is_trouble(case) for case in fresh_cases) or bool(missing))


def _print(fresh_cases: list[Case], difference: FindingsDifference, detectors: int, labels: Mapping[str, str]) -> None:
    console = new_console()
    console.print(f"Examined again by {detectors} detectors: {case_cards.counted(fresh_cases)}\n")
    case_cards.print_list(console, fresh_cases, ROWS, labels)
    if fresh_cases:
        console.print()
    if difference.own:
        console.print(f"{difference.own} stored findings are by detectors of your own, and were left aside.")
    if not difference:
        console.print(f"Nothing differs from the store, which has {counted(difference.same, 'record')} of findings.")
        return
    console.print(f"The same as stored: {counted(difference.same, 'record')} of findings. What differs:")
    _list(console, "only now", difference.only_now)
    _list(console, "only stored", difference.only_stored)
    _list(console, "in other words or numbers", difference.changed)


def _list(console: Any, title: str, findings: tuple[Finding, ...]) -> None:
    if not findings:
        return
    console.print(f"  {title}: {len(findings)}")
    for finding in findings[:ROWS]:
        place = finding.where.node or finding.where.group or "the whole run"
        words = f"round {finding.where.round}, {place}: {finding.issue}, {how_sure(finding.issue, finding.confidence)}"
        console.print(f"    {shown(words)}: {shown(finding.message)}", soft_wrap=True)
