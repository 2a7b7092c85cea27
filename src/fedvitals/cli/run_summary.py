# SPDX-License-Identifier: Apache-2.0
"""What `fedvitals flower run` and `fedvitals nvflare run` print at the end: the run, its findings, what to look at."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvitals.cli import case_cards
from fedvitals.cli.screen import new_console, shown
from fedvitals.errors import FedvitalsError
from fedvitals.plural import counted

if TYPE_CHECKING:
    from fedvitals.store.read.queries import RunSummary


def print_summary(store: str, began: float, host: str, otherwise: str) -> None:
    """Print where the newest run of a host is, what was found in it, and what to look at next.

    `began`: when the command was called; earlier runs do not count. `otherwise`: the sentence to print if there is no
    such run, with `{store}` for the store's name.
    """
    from fedvitals.diagnosis.gaps import statement
    from fedvitals.store import open_reader, store_target
    from fedvitals.store.postgres import address_of
    from fedvitals.store.read import queries
    from fedvitals.views.card import detectors_of
    from fedvitals.views.cases import cases_of
    from fedvitals.views.gaps import examination_of
    from fedvitals.views.labels import labels_of

    console = new_console()
    where = store_target(store)
    store_shown = address_of(where).shown if isinstance(where, str) else store
    try:
        with open_reader(store) as reader:
            done = _newest(reader, began, host)
            cases, labels = ([], {}) if done is None else (cases_of(reader, done.id), labels_of(reader, done.id))
            examination = None if done is None else examination_of(reader, done.id)
            detectors = 0 if done is None else detectors_of(queries.get_run(reader, done.id))
    except FedvitalsError:  # no such store yet
        done = None
    if done is None or examination is None:
        console.print(otherwise.replace("{store}", store_shown), soft_wrap=True)
        return
    console.print(
        f"\n[bold]{shown(done.name)}[/bold]  {shown(done.id)}: {counted(done.rounds, 'round')}, "
        f"{counted(done.clients, 'client')}, in {store_shown}",
        soft_wrap=True,
    )
    if cases:
        case_cards.print_list(console, cases, 8, labels)
    console.print(shown(statement(detectors, examination.gaps, examination.examined, silent=not cases)), soft_wrap=True)
    option = "" if store_shown == str(Path("runs.db").absolute()) else f" --store {shlex.quote(store_shown)}"
    console.print("\nLook next at")
    for verb, why in (
        ("ui", "all of it in the browser"),
        ("findings", "what was found, why, and what to do"),
        ("show", "the run's health card"),
        ("profile", "where its time, memory and bytes went"),
    ):
        console.print(f"  fedvitals {verb} {shown(done.id)}{option}   [dim]{why}[/dim]", soft_wrap=True)


def _newest(reader: Any, began: float, host: str) -> RunSummary | None:
    """Return the run of a host that began last, unless it began before this command."""
    from fedvitals.store.read import queries

    runs = queries.list_runs(reader)
    return next((run for run in runs if run.host == host and run.started >= began - 1.0), None)
