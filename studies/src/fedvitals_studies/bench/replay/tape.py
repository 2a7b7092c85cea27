# SPDX-License-Identifier: Apache-2.0
"""One long run of the paper's CNN on tape: its size, whether all of it can be restored, and how fast.

The digits' images are small, and so is the model for them (21,386 weights; the paper's signs need 118,507): a tape's
digests weigh more here than they would there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch

from fedvitals import lab
from fedvitals.monitor.monitor import Monitor
from fedvitals.replay.player.player import Player, ReplayedRound
from fedvitals.replay.tape.digests import state_digest_of
from fedvitals.replay.tape.reader import TapeReader, open_tape
from fedvitals.replay.tape.tape import Tape

Row = dict[str, Any]
Tell = Callable[[str], None]

EVERY = 5  # rounds between two whole states: the tape's default
CLIENTS, ROUNDS, ITERATIONS = 100, 50, 20


@dataclass(frozen=True, slots=True)
class Recorded:
    experiment: lab.Experiment
    tape: TapeReader


def recorded(folder: Path, *, quick: bool, tell: Tell) -> Recorded:
    clients, rounds, iterations = (10, 8, 2) if quick else (CLIENTS, ROUNDS, ITERATIONS)
    experiment = lab.Experiment(
        name="tape of the paper's CNN",
        dataset="digits",
        model="paper_cnn",
        clients=clients,
        rounds=rounds,
        local=lab.Local(iterations=iterations, batch=16, optimizer=lab.adam()),
        evaluation=lab.Evaluation(every=10, local=False),
    )
    folder.mkdir(parents=True, exist_ok=True)

    def progress(done: lab.Round) -> None:
        if done.number % 10 == 9:
            tell(f"tape: round {done.number + 1} of {rounds}, {clients} clients")

    store = folder / "runs.db"
    with Monitor(store, host="lab", tape=Tape(every=EVERY)) as monitor:
        lab.run(experiment, monitor, progress=progress)
    return Recorded(experiment, open_tape(store, monitor.run.id))


def size_of(run: Recorded) -> Row:
    """Return the tape's size over that of every client's model of every round as plain safetensors."""
    tape, e = run.tape, run.experiment
    last = tape.rounds[-1]
    model = tape.update(last, next(came.node for came in tape.entry(last).came if came.mark is not None))
    one = len(safetensors.torch.save({name: t.clone() for name, t in (model or {}).items()}))
    held = sum(file.stat().st_size for file in tape.folder.rglob("*") if file.is_file())
    covered, entries = tape.coverage(), [tape.entry(number) for number in tape.rounds]
    answers = sum(came.mark is not None for entry in entries for came in entry.came)
    again = sum(c.answers for c in covered if c.stored or c.since is not None)
    whole = answers * one
    return {
        "clients": e.clients,
        "rounds": len(covered),
        "bytes": held,
        "journal_bytes": tape.journal.bytes(),
        "whole_bytes": whole,
        "model_bytes": one,
        "percent": 100 * held / whole,
        "states": sum(c.stored for c in covered),
        "updates_stored": sum(c.updates for c in covered),
        "updates_again": again,
        "complete": again == answers == e.clients * e.rounds and not any(entry.lost for entry in entries),
        "said": f"{again:,} of {e.clients * e.rounds:,} updates can be had",
    }


class Clocked(Player):
    """Records how long it reran rounds, and how many."""

    seconds, count = 0.0, 0

    def rounds(self, *arguments: Any, **more: Any) -> Iterator[ReplayedRound]:
        played = super().rounds(*arguments, **more)
        while True:
            began = time.perf_counter()
            one = next(played, None)
            if one is None:
                return
            self.seconds, self.count = self.seconds + time.perf_counter() - began, self.count + 1
            yield one


def jumps(run: Recorded, count: int, tell: Tell) -> Row:
    """Jump to random rounds, each from the tape alone; and check whether the result is what was recorded."""
    rounds = random.Random(0).sample(run.tape.rounds, min(count, len(run.tape.rounds)))  # noqa: S311 - which, not a secret
    began = time.perf_counter()
    with Clocked(TapeReader(run.tape.folder), workers=None) as player:
        player.engine()
        opening = time.perf_counter() - began
        found = []
        for number in rounds:
            tell(f"jump to round {number}")
            player.seconds, player.count = 0.0, 0
            began = time.perf_counter()
            server = player.server(number)
            seconds = time.perf_counter() - began
            views = player.site.layout.views(server.model)
            found.append(
                {
                    "round": number,
                    "seconds": seconds,
                    "beside": seconds - player.seconds,
                    "rerun": player.count,
                    "exact": state_digest_of(views) == run.tape.entry(number).state["model"],
                }
            )
    return {"opening": opening, "jumps": found}
