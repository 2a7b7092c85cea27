# SPDX-License-Identifier: Apache-2.0
"""Writes the commands that replay, fork or bisect a round in a terminal, with names quoted for the shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fedvitals.dashboard.pages.tape_index import DAMAGED, DIGESTS, RoundCoverage
from fedvitals.diagnosis.cases import Case
from fedvitals.store import DEFAULT, Target, store_target
from fedvitals.views.cases import concerns

PLAIN = re.compile(r"[\w.\-]+", re.ASCII)  # names that need no quoting in a session's own command line

NEEDS = {"krum": " faulty=1", "multi_krum": " faulty=1"}  # arguments that these rules require


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what it does."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Here:
    """A round of a run; `node`: the selected client, and whether it answered in this round."""

    run: str
    store: Target
    host: str
    round: int
    node: str | None = None
    answered: bool = False

    @property
    def replay(self) -> str:
        """Return the command; a plain loop's must name what restores a state and trains: `fv.open_replay(loop=...)`."""
        own = "" if self.host in ("lab", "flower") else " --loop MODULE:NAME"
        return f"fedvitals replay {shlex.quote(self.run)}{_where(self.store)}{own}"


def commands_of(here: Here, coverage: RoundCoverage, cases: Sequence[Case]) -> tuple[Command, ...]:
    """Return what can be done with this round, and with the selected client; empty if nothing can."""
    if here.host == "flower":
        return _of_flower(here)
    if coverage.kind in (DIGESTS, DAMAGED):
        return ()
    node, number = here.node, here.round
    commands = [
        Command("verify this round exactly", f"{here.replay} --verify --rounds {number}-{number}"),
        Command("step through it", f"{here.replay} -c {shlex.quote(f'goto {number}')}"),
    ]
    if node and here.answered:
        inside = f"-c {shlex.quote(f'goto {number}; into {node}')}"
        careful = f"--round {number} --node {shlex.quote(node)}"
        text = f"{here.replay} {inside if PLAIN.fullmatch(node) else careful}"
        commands[-1] = Command(f"step through the training of {node}", text)
    if here.host != "lab":
        return tuple(commands)
    if node and PLAIN.fullmatch(node):
        session = shlex.quote(f"goto {number}; fork drop {node}")
        commands.append(Command(f"run it again from here without {node}, as a new run", f"{here.replay} -c {session}"))
    bisect = _bisect(here, cases)
    return tuple(commands) if bisect is None else (*commands, bisect)


def _of_flower(here: Here) -> tuple[Command, ...]:
    """Return the server's commands for here; a client's own data, and what it was sent, are at its site."""
    who, number = shlex.quote(here.node) if here.node else "NODE", here.round
    site = f"fedvitals replay {shlex.quote(here.run)} --tape FOLDER --round {number} --node {who} --pdb"
    return (
        Command("put the recorded updates together again", f"{here.replay} --verify --rounds {number}-{number}"),
        Command("at the client's own site: its message again, under a debugger", site),
    )


def _bisect(here: Here, cases: Sequence[Case]) -> Command | None:
    """Return the command that bisects from the last healthy round, as far as findings show."""
    about = [case for case in cases if here.node is None or concerns(case, here.node)]
    begun = [case.first if case.since is None else case.since for case in about]
    good = max(0, min((round_index for round_index in begun if round_index is not None), default=here.round) - 1)
    if not about or good >= here.round:
        return None
    text = f"fedvitals bisect {shlex.quote(here.run)}{_where(here.store)} --good {good} --bad {here.round}"
    return Command("find the first round and the clients that made it go wrong", text)


def what_if_command(run: str, store: Target, number: int, drop: Sequence[str], rule: str) -> str:
    """Return the command that asks the same what-if question in a terminal."""
    plain = [node for node in drop if PLAIN.fullmatch(node)]
    parts = [f"drop {', '.join(plain)}"] if plain else []
    parts += [f"aggregator {rule}{NEEDS.get(rule, '')}"] if rule != "recorded" and PLAIN.fullmatch(rule) else []
    clauses = " and ".join(parts) or "drop CLIENT"
    session = shlex.quote(f"goto {number}; whatif {clauses}")
    return f"fedvitals replay {shlex.quote(run)}{_where(store)} -c {session}"


def _where(store: Target) -> str:
    """Return the option for the store; none for a database, whose address may contain a password."""
    target = store_target(store)
    return "" if isinstance(target, str) or str(target) == DEFAULT else f" --store {shlex.quote(str(target))}"
