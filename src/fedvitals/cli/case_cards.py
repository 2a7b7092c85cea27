# SPDX-License-Identifier: Apache-2.0
"""Prints a case: one line in a list, a card with numbers, causes and remedies, or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedvitals.cli.screen import new_table, number, shown, sparkline, with_unit
from fedvitals.diagnosis.issues.table import how_sure

if TYPE_CHECKING:
    from fedvitals.diagnosis.abstentions import Examined
    from fedvitals.diagnosis.cases import Case
    from fedvitals.records import Action, Event

COLOURS = {"critical": "bold red", "warning": "yellow", "note": "dim"}
TRACEBACK = 12  # number of last lines
WIDEST = 300  # characters of a line of it
KEY = ("issue", "node", "group", "layer")
NO_LABELS: Mapping[str, str] = MappingProxyType({})


def print_list(
    console: Any, cases: Sequence[Case], most: int | None = None, labels: Mapping[str, str] = NO_LABELS
) -> None:
    """Print one line per case, and its message. `labels`: of nodes, see `views.labels`."""
    from fedvitals.views.case_sentences import sure
    from fedvitals.views.cause_levels import levels_in_words
    from fedvitals.views.labels import place_of

    for case in cases[:most]:
        words = f"{shown(place_of(case, labels))}: {case.issue}, {sure(case)} sure, {case.timeline}"
        below = "  [dim]follows from it:[/dim] " if case.cause is not None else ""
        console.print(f"{below}{_coloured(case.severity)}  {words}", soft_wrap=True)
        console.print(f"          {shown(case.newest.message)}", soft_wrap=True)
        if levels := levels_in_words(case):
            console.print(f"          [dim]{shown(levels)}[/dim]", soft_wrap=True)
        if case.alternatives:
            console.print(f"          [dim]{shown(case.alternatives_in_words)}[/dim]", soft_wrap=True)
    if most is not None and len(cases) > most:
        console.print(f"[dim]          and {len(cases) - most} more[/dim]")


def counted(cases: Sequence[Case]) -> str:
    """Count the troubles as the dashboard does: «5 findings (3 consequences), 4 still there»."""
    below, there = sum(case.cause is not None for case in cases), sum(case.still_there for case in cases)
    text = f"[bold]{len(cases)} finding{'s' * (len(cases) != 1)}[/bold]"
    text += f" ({below} consequence{'s' * (below != 1)})" if below else ""
    return f"{text}, {there} still there"


def print_hidden_notes(console: Any, count: int, how: str) -> None:
    """Print one line that says how many notes there are, and how to see them; nothing without any."""
    from fedvitals.diagnosis.cases import notes_in_words

    if count:
        console.print(f"[dim]{notes_in_words(count)}: {how}[/dim]", soft_wrap=True)


def print_card(
    console: Any,
    case: Case,
    actions: Iterable[Action] = (),
    failure: Event | None = None,
    labels: Mapping[str, str] = NO_LABELS,
) -> None:
    """Print everything about one case: what, where, since when, how sure, evidence, causes, remedies, refutation."""
    from fedvitals.views.cases import more_of, text_of
    from fedvitals.views.cause_levels import levels_in_words
    from fedvitals.views.labels import named, place_of

    known = case.issue_entry
    console.print(f"{_coloured(case.severity)}  [bold]{case.issue}[/bold]: {shown(known.title)}", soft_wrap=True)
    for title, text in (
        ("what", case.newest.message),
        ("where", place_of(case, labels)),
        ("when", case.timeline),
        ("how sure", _how_sure(case)),
        ("of what", levels_in_words(case)),
        ("or else", case.alternatives_in_words.removeprefix("or ")),
        ("follows", "" if case.cause is None else f"from {case.cause[0]} of {case.cause[1] or 'the run'}"),
    ):
        if not text:
            continue
        console.print(f"  {title:9} {shown(text)}", soft_wrap=True)
    if failure is not None:
        _print_failure(console, failure)
    numbers = _numbers(case)
    if numbers is not None:
        console.print("  evidence")
        console.print(numbers)
    for name, value in more_of(case):
        console.print(f"  {shown(name.replace('_', ' ')):9} {shown(text_of(value))}", soft_wrap=True)
    for suspect in case.newest.suspects:
        who = shown(named(suspect.node, labels))
        console.print(
            f"  suspect   {who} ({how_sure(case.issue, suspect.score)}) {shown(suspect.reason)}",
            soft_wrap=True,
        )
    _enumerate(console, "likely causes", known.causes)
    _enumerate(console, "what to do", known.remedies)
    if known.refutation:
        console.print(f"  proved wrong by: {shown(known.refutation)}", soft_wrap=True)
    for action in actions:
        action_text = (
            f"{action.status}: {action.kind.replace('_', ' ')} {action.target or ''} (round {action.where.round})"
        )
        console.print(f"  action    {shown(action_text)}", soft_wrap=True)
    console.print()


def _print_failure(console: Any, failure: Event) -> None:
    """Print the error's own message and the last lines of its traceback, as far as privacy let them leave."""
    from fedvitals.views.cases import traceback_of

    first, *rest = failure.message.splitlines() or [""]
    console.print(f"  {'error':9} {shown(first[:WIDEST])}", soft_wrap=True)
    for line in rest[:TRACEBACK]:
        console.print(f"  {'':9} {shown(line[:WIDEST])}", soft_wrap=True)
    lines = traceback_of(failure)
    if not lines:
        console.print("  traceback [dim]none was kept: that needs Monitor(tracebacks=True) and privacy level 3[/dim]")
        return
    left = len(lines) - TRACEBACK
    console.print("  traceback" + (f" [dim](its last {TRACEBACK} lines of {len(lines)})[/dim]" if left > 0 else ""))
    for line in lines[-TRACEBACK:]:
        console.print(f"    {shown(line[:WIDEST])}", soft_wrap=True)


def _coloured(severity: str) -> str:
    colour = COLOURS.get(severity)
    return f"[{colour}]{severity:8}[/{colour}]" if colour else f"{severity:8}"


def _how_sure(case: Case) -> str:
    from fedvitals.views.case_sentences import sure

    trend = (
        f"  {sparkline(case.confidences, unit='share')}  first {how_sure(case.issue, case.confidences[0])}"
        if len(case.confidences) > 1
        else ""
    )
    exact = ", an exact test" if case.issue_entry.exact else ""
    return f"{sure(case)}{exact}{trend}"


def _numbers(case: Case) -> Any:
    from rich.padding import Padding

    from fedvitals.views.cases import numbers_of
    from fedvitals.views.findings import number_row

    numbers = numbers_of(case)
    if not numbers:
        return None
    table = new_table("number", ">value", ">usual", "of", ">σ")
    for row in numbers:
        known = number_row(row, case)
        usual = "" if known.raw_usual is None else with_unit(known.raw_usual, known.unit)
        away = "" if known.score is None else number(known.score)
        table.add_row(shown(known.title), with_unit(known.raw_value, known.unit), usual, usual and known.of, away)
    return Padding(table, (0, 0, 0, 4))


def _enumerate(console: Any, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        console.print(f"  {title}")
        for place, sentence in enumerate(sentences, 1):
            console.print(f"    {place}. {shown(sentence)}", soft_wrap=True)


def examined_as_json(examined: Examined | None) -> dict[str, Any] | None:
    """Return what was examined, and which parts were not judged; None if that is not known."""
    from fedvitals.diagnosis.abstentions import NOT_JUDGED

    if examined is None:
        return None
    reasons = {
        rule: {"client_rounds": count, "reason": NOT_JUDGED[rule]} for rule, count in examined.not_judged.items()
    }
    return {
        "clients": examined.clients,
        "first_round": examined.first,
        "last_round": examined.last,
        "client_rounds": examined.client_rounds,
        "not_judged_share": examined.share,
        "not_judged": reasons,
    }


def as_json(case: Case, actions: Iterable[Action] = (), failure: Event | None = None) -> dict[str, Any]:
    """Return the case with what the table of issues says about it, and the error behind it if there is one."""
    from fedvitals.views.cases import traceback_of

    known, newest = case.issue_entry, case.newest
    return {
        "issue": case.issue,
        "title": known.title,
        "family": known.family,
        "severity": case.severity,
        "confidence": case.confidence,
        "node": case.node,
        "group": newest.where.group,
        "layer": case.layer,
        "step": newest.where.step,
        "since": case.since,
        "first": case.first,
        "last": case.last,
        "rounds": case.rounds,
        "confidences": case.confidences,
        "still_there": case.still_there,
        "alternatives": [{"issue": issue, "probability": chance} for issue, chance in case.alternatives],
        "follows_from": None if case.cause is None else dict(zip(KEY, case.cause, strict=True)),
        "returned": case.returned,
        "message": newest.message,
        "evidence": newest.evidence,
        "suspects": newest.suspects,
        "symptom": known.symptom,
        "causes": known.causes,
        "remedies": known.remedies,
        "refutation": known.refutation,
        "reference": known.reference,
        "exact": known.exact,
        "actions": list(actions),
        "error": None
        if failure is None
        else {
            "event": failure.name,
            "round": failure.where.round,
            "message": failure.message,
            "traceback": traceback_of(failure),
        },
    }
