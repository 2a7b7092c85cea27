# SPDX-License-Identifier: Apache-2.0
"""`fedvitals findings RUN`: what was found wrong, worst first, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from fedvitals.cli import case_cards
from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.screen import new_console, print_verdict, shown

if TYPE_CHECKING:
    from fedvitals.diagnosis.abstentions import Examined
    from fedvitals.diagnosis.cases import Case
    from fedvitals.records import Action, Event
    from fedvitals.store.read.reader import Reader

ROWS = 20  # of the list, unless --all
MOST_ROUNDS = 500  # read again for the verdicts
NAMED = 3  # of the clients that are different
UNDECIDABLE = (
    "Not yet decidable: wrong labels only show against a model with an accuracy of 35 %, measured on the clients' own "
    "samples (data= and loss=) or logged by your loop. Tasks without an accuracy, such as regression, stay undecided."
)
WORDS = ("faulty", "different", "not yet decidable", "not judged", "healthy")


@click.command(
    epilog="Exit code: 1 if there is a case of severity warning or critical, or if the run was not fully examined (no "
    "detector looked, a detector or a sink failed, records were lost, a client trained outside of any round, more than "
    "a tenth of the client-rounds or the newest rounds could not be judged); 0 if not; 2 for wrong use."
)
@click.option("--round", "number", type=int, help="The problems of one round, as they were judged in that round.")
@click.option("--node", help="Only the problems of one client or other node, in full.")
@click.option("--all", "everything", is_flag=True, help="Every case in full: numbers, causes, remedies.")
@click.option("--notes", is_flag=True, help="Also findings that never were more than a note; always shown with --node.")
@run_options
def command(
    run: str | None,
    number: int | None,
    node: str | None,
    everything: bool,
    notes: bool,
    store: str | None,
    as_json: bool,
) -> int:
    """List the problems that were found in a run, the worst first.

    RUN is a run's id, the beginning of one, or a name (its newest run); without it, the newest run of all.
    """
    from fedvitals.diagnosis.cases import is_trouble
    from fedvitals.diagnosis.gaps import statement
    from fedvitals.records import Action
    from fedvitals.store.read import queries
    from fedvitals.views.card import detectors_of
    from fedvitals.views.cases import actions_about, failures_of
    from fedvitals.views.gaps import examination_of
    from fedvitals.views.labels import labels_of, node_of
    from fedvitals.views.verdict import verdict_of

    with opened_run(store, run) as (reader, chosen):
        labels = labels_of(reader, chosen)
        node = None if node is None else node_of(node, reader.history(chosen).nodes(), labels)
        every_case = _cases(reader, chosen, number, node)
        cases_listed = [case for case in every_case if notes or node is not None or is_trouble(case)]
        hidden = len(every_case) - len(cases_listed)
        actions = queries.records(reader, chosen, Action)
        described = queries.get_run(reader, chosen)
        installed = detectors_of(described)
        clients = _verdicts(reader, chosen, number, cases_listed)
        errors = failures_of(reader, chosen, cases_listed)
        examination = examination_of(reader, chosen)
        verdict = verdict_of(reader, chosen) if number is None and node is None else None
        examined, missing = examination.examined, examination.gaps
    cards = [(case, actions_about(case, actions), error) for case, error in zip(cases_listed, errors, strict=True)]
    if as_json:
        result = {"run": chosen, "name": described.name, "detectors": installed}
        result |= {"cases": [case_cards.as_json(*card) for card in cards], "clients": clients, "hidden_notes": hidden}
        result |= {"examined": case_cards.examined_as_json(examined), "not_judged": missing}
        print_json("findings", result)
    else:
        if verdict is not None and cases_listed:
            print_verdict(new_console(), verdict)
            click.echo()
        _print(cards, _judged(installed, missing, examined, chosen), labels, full=everything or node is not None)
        if cases_listed:
            click.echo(f"\n{statement(installed, missing, examined, silent=False)}")
        case_cards.print_hidden_notes(new_console(), hidden, "--notes")
        _print_verdicts(clients, node, explain=not missing)
    return int(any(is_trouble(case) for case in cases_listed) or bool(missing) or not installed)


def _judged(installed: int, missing: Sequence[str], examined: Examined | None, run: str) -> str:
    """Return the sentence for a run without findings: an all-clear only if every detector has seen everything."""
    from fedvitals.diagnosis.gaps import statement

    if not installed:
        return f"Not judged: no detector was installed. `fedvitals check {shown(run)}` does so now."
    stated = shown(statement(installed, missing, examined, silent=True))
    return f"{stated} `fedvitals check {shown(run)}` judges what the store has." if missing else stated


def _verdicts(reader: Reader, run: str, number: int | None, listed_cases: list[Case]) -> dict[str, str]:
    """Return the verdict on each client; none for a run so long that reading it all would keep users waiting.

    A client with a case that is more than a note is faulty, whatever the evidence as a whole says: NaN needs no peers.
    """
    from fedvitals.diagnosis.cases import is_trouble
    from fedvitals.diagnosis.evidence.faulty_clients import verdicts
    from fedvitals.views.gaps import gaps_of

    history = reader.history(run)
    rounds = [r for r in history.rounds() if number is None or r <= number]
    try:
        verdict_of = verdicts(history, rounds[-1]) if 0 < len(rounds) <= MOST_ROUNDS else {}
    except Exception as error:  # noqa: BLE001 - a failure of the evidence must not hide findings
        click.echo(f"The verdicts on single clients could not be computed: {type(error).__name__}: {error}", err=True)
        verdict_of = {}
    if gaps_of(reader, run):  # the missing data may have spoken against them
        verdict_of = {
            node: "not yet decidable" if verdict == "healthy" else verdict for node, verdict in verdict_of.items()
        }
    ill = [case.node for case in listed_cases if case.still_there and case.node in verdict_of and is_trouble(case)]
    return verdict_of | {node: "faulty" for node in ill if node is not None}


def _print_verdicts(clients: dict[str, str], node: str | None, *, explain: bool) -> None:
    if node is not None:
        if node in clients:
            click.echo(f"\nVerdict on {node}: {clients[node]}")
        return
    counts = {word: [c for c, verdict in clients.items() if verdict == word] for word in WORDS}
    different = counts["different"]
    named = f" ({', '.join(map(shown, different[:NAMED]))}{', …' if len(different) > NAMED else ''})"
    counts_in_words = [
        f"{len(those)} {word}{named if word == 'different' else ''}" for word, those in counts.items() if those
    ]
    if counts_in_words and len(clients) > 1:
        click.echo(f"\nClients: {', '.join(counts_in_words)}.")
        if explain and counts["not yet decidable"]:
            click.echo(UNDECIDABLE)


def _cases(reader: Reader, run: str, number: int | None, node: str | None) -> list[Case]:
    from fedvitals.errors import ConfigError
    from fedvitals.views.cases import cases_of, concerns

    history = reader.history(run)
    known = history.rounds()
    if number is not None and number not in known:
        there = f"It has rounds {known[0]} to {known[-1]}" if known else "It has none"
        raise ConfigError(f"The run {run} has no round {number}. {there}.")
    selected = cases_of(reader, run, number, notes=True)
    if number is not None:
        selected = [case for case in selected if case.last == number]
    if node is not None:
        selected = [case for case in selected if concerns(case, node)]
    return selected


def _print(
    cards: Sequence[tuple[Case, list[Action], Event | None]],
    judged: str,
    labels: Mapping[str, str],
    *,
    full: bool,
) -> None:
    console = new_console()
    cases = [case for case, _, _ in cards]
    if not cases:
        console.print(judged, soft_wrap=True)
        return
    console.print(f"{case_cards.counted(cases)}\n")
    if full:
        for case, own, failure in cards:
            case_cards.print_card(console, case, own, failure, labels)
        return
    case_cards.print_list(console, cases, ROWS, labels)
    console.print("\n[dim]Numbers, causes and what to do: --all, or --node NAME[/dim]")
