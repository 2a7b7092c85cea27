# SPDX-License-Identifier: Apache-2.0
"""`fedvitals replay` of Flower runs: the aggregation at the server, and a client's message at the client's own site."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import opened_run, print_json
from fedvitals.errors import FedvitalsError

if TYPE_CHECKING:
    from fedvitals.hosts.flower.rerun.client import Rerun
    from fedvitals.replay.debugger.session import Session

AT_THE_SITE = (
    "What a client was sent lies at its own site: --tape FOLDER, as client_mod(tape=FOLDER) or FEDVITALS_TAPE said it. "
    "Here, at the server, aggregations can be run again: without --node."
)


def rerun(
    run: str,
    folder: str,
    number: int | None,
    node: str | None,
    app: str | None,
    *,
    debugger: bool,
    as_json: bool,
    phase: str = "train",
    store: str | None = None,
) -> Rerun:
    """Rerun one client's message through its own app, and compare the reply with the recorded one."""
    from fedvitals.hosts.flower.rerun.client import rerun_client
    from fedvitals.hosts.flower.tape.entries import ClientTapeFolder

    if number is None or node is None:
        raise click.UsageError("For a client's tape, name the message: --round 12 --node ID.")
    known = ClientTapeFolder(Path(folder)).runs()
    name = run if run in known or f"flower-{run}" in known else _by_store(run, store) or run
    client_rerun = rerun_client(folder, number, node, app=app, debugger=debugger, run=name, phase=phase)
    if as_json:
        fields = {key: getattr(client_rerun, key) for key in client_rerun.__dataclass_fields__ if key != "reply"}
        print_json("replay", fields)
    else:
        click.echo(str(client_rerun))
        if client_rerun.traceback and not debugger:
            click.echo(client_rerun.traceback.rstrip())
    return client_rerun


def _by_store(run: str, store: str | None) -> str | None:
    """Return the name by which clients know a run that has a different name in the store."""
    from fedvitals.store.read import queries

    with contextlib.suppress(FedvitalsError), opened_run(store, run) as (reader, chosen):
        flower_config = queries.get_run(reader, chosen).config.get("flower")
        number = flower_config.get("run") if isinstance(flower_config, dict) else None
        return None if number is None else f"flower-{number}"
    return None


def verify(
    session: Session,
    first: int | None,
    last: int | None,
    as_json: bool,
    *,
    node: str | None = None,
    app: str | None = None,
    strategy: str | None = None,
) -> int:
    """Rerun the strategy's aggregation of these rounds (by default all with recorded updates) and compare."""
    from fedvitals.hosts.flower.rerun.app import strategy_of
    from fedvitals.hosts.flower.rerun.client import replay_aggregation

    if node is not None:
        raise click.UsageError(AT_THE_SITE)
    app_settings: dict[str, Any] = session.tape.setting.description.get("app") or {}
    chosen = None
    if app is not None or strategy is not None:
        chosen = strategy_of(Path(app or "."), app_settings, strategy)
    proofs = [replay_aggregation(session.tape, number, chosen) for number in _rounds(session, first, last)]
    if as_json:
        shown = [
            {key: getattr(proof, key) for key in proof.__dataclass_fields__ if key != "arrays"} for proof in proofs
        ]
        print_json("replay", [{**proof, "holds": own.holds} for proof, own in zip(shown, proofs, strict=True)])
    else:
        for proof in proofs:
            click.echo(str(proof))
    return int(not all(proof.holds for proof in proofs))


def _rounds(session: Session, first: int | None, last: int | None) -> list[int]:
    if first is not None:
        return [*range(first, (first if last is None else last) + 1)]
    whole = [
        coverage.round
        for coverage in session.tape.coverage()
        if coverage.updates and coverage.updates == _sent(session, coverage.round)
    ]
    if not whole:
        raise click.UsageError(
            "The tape has all updates of no round: fv.Tape(every=1, updates=3, durable=True) keeps them."
        )
    return whole


def _sent(session: Session, number: int) -> int:
    return sum(came.mark is not None for came in session.tape.entry(number).came)
