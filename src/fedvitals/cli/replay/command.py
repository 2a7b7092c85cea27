# SPDX-License-Identifier: Apache-2.0
"""`fedvitals replay RUN`: the debugger on a run's tape, and the proof that the tape is the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedvitals.cli.options import opened_run, print_json, run_options
from fedvitals.cli.replay import flower as replay_flower
from fedvitals.cli.screen import size

if TYPE_CHECKING:
    from fedvitals.replay.debugger.debugger_output import DebuggerOutput
    from fedvitals.replay.debugger.session import Session


@click.command(epilog="Exit code: 1 if --verify finds a difference, 0 if not, 2 for wrong use or nothing to read.")
@click.option("--verify", is_flag=True, help="Execute rounds again, and check by digests that every bit is the same.")
@click.option("--rounds", metavar="3-9", help="With --verify: only these rounds.")
@click.option("--round", "number", type=int, help="Start at this round.")
@click.option("--node", help="Open this client; with --verify, check only its updates.")
@click.option("--pdb", is_flag=True, help="Execute the client --node in round --round again under Python's debugger.")
@click.option("--tape", type=click.Path(), help="At a Flower client's site: the folder of its own tape.")
@click.option("--phase", default="train", show_default=True, help="With --tape: the kind of the message.")
@click.option(
    "--app", type=click.Path(), help="Flower runs: the app's folder. Its code is executed; needed with --tape."
)
@click.option(
    "--strategy", metavar="MODULE:NAME", help="Flower runs: the function that makes the strategy, to aggregate again."
)
@click.option("--loop", metavar="MODULE:NAME", help="Plain loops: the object with restore() and train().")
@click.option(
    "--workers", type=int, default=1, show_default=True, help="Worker processes; the bits do not depend on it."
)
@click.option("--data", type=click.Path(), help="Folder of the data set, if it was moved.")
@click.option("--script", metavar="FILE", help="Read commands from a file; - is standard input.")
@click.option("-c", "commands", multiple=True, metavar='"goto 12; into c7"', help="Execute these commands; repeatable.")
@run_options
def command(
    run: str | None,
    verify: bool,
    rounds: str | None,
    number: int | None,
    node: str | None,
    pdb: bool,
    tape: str | None,
    phase: str,
    app: str | None,
    strategy: str | None,
    loop: str | None,
    workers: int,
    data: str | None,
    script: str | None,
    commands: tuple[str, ...],
    store: str | None,
    as_json: bool,
) -> int:
    """Step through a recorded run, verify it, or change it.

    Rounds and clients can be inspected, executed again bit for bit, and executed under other settings. RUN is a run's
    id, the beginning of one, or a name (its newest run); without it, the newest run of all. Without a terminal and
    without commands this prints what can be replayed, and how.
    """
    from fedvitals.cli.replay.prompt import ProgressBar, lines_of
    from fedvitals.replay.debugger.session import open_replay

    if pdb and (number is None or node is None):
        raise click.UsageError("--pdb needs --round and --node: whose training, and of which round.")
    if rounds is not None and not verify:
        raise click.UsageError("--rounds goes with --verify; the debugger begins at --round.")
    run = run or _newest(store, tape)
    if tape is not None:
        options: dict[str, Any] = {"debugger": pdb, "as_json": as_json, "phase": phase, "store": store}
        client_rerun = replay_flower.rerun(run, tape, number, node, app, **options)
        return int(verify and client_rerun.holds is False)
    lines = lines_of(script, commands)
    with open_replay(run, store, data=data, workers=workers, loop=loop) as session, ProgressBar(session, quiet=as_json):
        if session.tape.setting.host == "flower" and (verify or pdb or app or strategy):
            first, last = _span(rounds, number)
            own = {"node": node, "app": app, "strategy": strategy}
            wrong = replay_flower.verify(session, first, last, as_json, **own)
            return wrong if verify else 0
        if verify:
            return _verify(session, rounds, number, node, as_json)
        if pdb and number is not None and node is not None:
            return _debug(session, number, node, loop)
        place = _place(session, number, node)
        if lines or script is not None:
            _script(session, lines, as_json)
        elif as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _overview(session, place, as_json)
        else:
            _prompt(session)
    return 0


def _place(session: Session, number: int | None, node: str | None) -> DebuggerOutput | None:
    if number is not None:
        session.goto(number)
    if node is not None:
        session.into(node)
    return session.where() if number is not None or node is not None else None


def _overview(session: Session, place: DebuggerOutput | None, as_json: bool) -> None:
    covered = session.overview()
    if not as_json:
        click.echo(str(covered if place is None else place))
        return
    coverage = [
        {"round": entry.round, "how": entry.how, "stored": entry.stored, "since": entry.since, "updates": entry.updates,
         "answers": entry.answers}
        for entry in session.tape.coverage()
    ]  # fmt: skip
    overview: dict[str, Any] = {"run": session.run.id, "name": session.run.name, "host": session.tape.setting.host}
    overview |= {"bytes": session.tape.bytes, "size": size(session.tape.bytes), "coverage": coverage}
    print_json("replay", overview | ({} if place is None else {"place": place.as_json()}))


def _prompt(session: Session) -> None:
    from fedvitals.cli.replay.prompt import Prompt
    from fedvitals.replay.debugger.commands import Interpreter

    click.echo(str(session.overview()))
    session.last = None
    Prompt(Interpreter(session, _draw)).loop()


def _script(session: Session, lines: list[str], as_json: bool) -> None:
    from fedvitals.cli.replay.prompt import results
    from fedvitals.replay.debugger.commands import Interpreter

    answers: list[dict[str, Any]] = []
    for line, result in results(Interpreter(session, _draw), lines, named=True):
        if as_json:
            answer = {"text": result} if isinstance(result, str) else result.as_json()
            answers.append({"command": line, **answer})
        elif str(result):
            click.echo(str(result))
    if as_json:
        print_json("replay", answers)


def _draw(picture: DebuggerOutput, path: Path) -> None:
    from fedvitals.plot.replay import draw

    draw(picture, path)


def _newest(store: str | None, tape: str | None) -> str:
    if tape is not None:
        raise click.UsageError(
            "With --tape, name the run: a client's site has no store in which to look up the newest."
        )
    with opened_run(store, None) as (_, newest):
        return newest


def _span(rounds: str | None, number: int | None) -> tuple[int | None, int | None]:
    from fedvitals.replay.debugger.commands import parse_rounds

    return parse_rounds(rounds) if rounds is not None else (number, number)


def _verify(session: Session, rounds: str | None, number: int | None, node: str | None, as_json: bool) -> int:
    from fedvitals.replay.debugger import result_output

    first, last = _span(rounds, number)
    proof = session.verify(first, last, node=node)
    if as_json:
        fields = {name: getattr(proof, name) for name in proof.__dataclass_fields__}
        print_json("replay", fields | {"holds": proof.holds})
    else:
        click.echo(str(result_output.show_proof(proof, node)))
    return 0 if proof.holds else 1


def _debug(session: Session, number: int, node: str, loop: str | None) -> int:
    """Open Python's debugger at the client's first step (lab) or at the user's `train` (plain loop)."""
    import bdb
    import contextlib
    import pdb  # noqa: T100 - requested by the user

    from fedvitals.replay.player.loop_player import LoopPlayer, load_loop
    from fedvitals.replay.player.trace import trace_client

    if loop is not None:
        parts = load_loop(loop)

        def train(who: str, state: Any, at: int) -> Any:  # the clients before it are also run again
            if (who, at) != (node, number):
                return parts.train(who, state, at)
            sent = pdb.runcall(parts.train, who, state, at)
            if sent is None:  # left with «q», which runcall does not report
                raise bdb.BdbQuit
            return sent

        player = LoopPlayer(session.tape, parts.restore, train, getattr(parts, "aggregate", None))
        with contextlib.suppress(bdb.BdbQuit):
            player.round(number, node=node)
        return 0
    debugger = pdb.Pdb()

    def at_step(step: int) -> None:
        if step == 0:
            click.echo(f"{node}, round {number}, before its first optimiser step. `up` leads to the lab's training.")
            debugger.set_trace()

    with contextlib.suppress(bdb.BdbQuit):  # «q» leaves it
        trace_client(session.player, number, node, on_step=at_step)
    return 0
