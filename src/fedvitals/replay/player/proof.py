# SPDX-License-Identifier: Apache-2.0
"""Prove that a run is what its tape says: compute every round again and compare all digests.

What was stored of the rounds under test cannot be read meanwhile, so that the proof computes what it claims to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedvitals.errors import ConfigError
from fedvitals.replay.player.comparison import Mismatch, deviation, first_mismatch
from fedvitals.replay.player.loop_player import LoopPlayer
from fedvitals.replay.player.player import Player, ReplayedRound
from fedvitals.replay.tape.digests import first_difference
from fedvitals.replay.tape.journal import RoundEntry
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.replay.tape.tape import machine_description

TOLERANCE = 1e-3
"""Relative, of a layer's norm: where bits cannot be the same. One round from equal states; see docs/replay.md."""


@dataclass
class Proof:
    """The result of a proof. `exact`: whether bits were compared; otherwise `deviation` is the largest relative
    difference of a layer's norm.
    """

    run: str
    first: int
    last: int
    start: int  # from which stored state it was computed
    exact: bool = True
    why: str | None = None  # it was not exact
    proved: list[int] = field(default_factory=list)
    unrecorded: list[int] = field(default_factory=list)  # of which the tape lost something: run again, and not proved
    seconds: float = 0.0
    deviation: float = 0.0
    tolerance: float = 0.0
    mismatch: Mismatch | None = None
    begun: str = "the seed"  # what it was computed from
    remark: str | None = None  # what else is to be known

    @property
    def holds(self) -> bool:
        """Return whether nothing differs."""
        return self.mismatch is None


def verify(
    player: Player | LoopPlayer,
    first: int | None = None,
    last: int | None = None,
    *,
    node: str | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[int], None] = lambda _: None,
) -> Proof:
    """Compute rounds again and compare them with the recording. `node`: compare only this client's updates."""
    tape = player.tape
    rounds = tape.rounds
    if not rounds:
        raise ConfigError(f"The tape of '{tape.setting.run}' has no finished round yet: there is nothing to prove.")
    first, last = rounds[0] if first is None else first, rounds[-1] if last is None else last
    for round_index in (first, last):
        tape.entry(round_index)  # an error that says which rounds there are
    begins = player.start(first)
    why = _why_not_exact(tape)
    proof = Proof(tape.setting.run, first, last, begins, why is None, why, tolerance=0.0 if why is None else tolerance)
    if begins != 0 or not tape.begins_from_seed:
        proof.begun = f"the state stored before round {begins}"
    began, wrong = time.perf_counter(), None
    with tape.sealed(first, last):
        server: Any = player.stored(begins)
        alone: dict[str, Any] = {"node": node} if isinstance(player, LoopPlayer) else {}
        for played in player.rounds(begins, last, server, **alone):
            if played.number < first:
                continue
            recorded = played.number in tape.rounds
            entry = _only_node(tape.entry(played.number) if recorded else RoundEntry(played.number, {}), node)
            if not recorded or entry.lost or not (entry.after or node):
                proof.unrecorded.append(played.number)
                wrong = None
                continue
            wrong = _mismatch_of(proof, entry, _only_node(played.entry(), node), tape)
            progress(played.number)
            if wrong is not None:
                break
            proof.proved.append(played.number)
    proof.seconds = time.perf_counter() - began
    if isinstance(player, LoopPlayer) and player.averaged is not None:
        proof.remark = f"No aggregate() was given; this average fits: {player.averaged}."
    proof.mismatch = None if wrong is None else _with_values(wrong, tape, played)
    return proof


def _only_node(entry: RoundEntry, node: str | None) -> RoundEntry:
    if node is None:
        return entry
    return RoundEntry(entry.round, {}, came=tuple(came for came in entry.came if came.node == node), lost=entry.lost)


def _mismatch_of(proof: Proof, recorded: RoundEntry, replayed: RoundEntry, tape: TapeReader) -> Mismatch | None:
    wrong = first_mismatch(recorded, replayed, tape.setting.layers)
    if proof.exact or wrong is None:
        return wrong
    proof.deviation = max(proof.deviation, deviation(recorded, replayed))
    return wrong if proof.deviation > proof.tolerance else None


def _why_not_exact(tape: TapeReader) -> str | None:
    """Return why bits cannot be compared on this machine; None if they can."""
    if tape.setting.description.get("device", "cpu") != "cpu":
        return "it was computed on CUDA, whose sums may come in another order"
    here = machine_description()
    for name, was in tape.setting.machine.items():
        if here.get(name) != was:
            return f"it was recorded with {name} {was}, and this is {here.get(name)}"
    return None


def _with_values(wrong: Mismatch, tape: TapeReader, played: ReplayedRound) -> Mismatch:
    """Return the mismatch with the first element that differs, where the tape has the recorded tensors."""
    if wrong.layer is None:
        return wrong
    if wrong.node is not None:
        recorded, message = tape.update(wrong.round, wrong.node), played.message(wrong.node)
        replayed = None if message is None else message.tensors
    else:
        after = wrong.what.startswith("state after")
        round_index = wrong.round + 1 if after else wrong.round
        known = tape.has_state(round_index)
        recorded = tape.state(round_index)["model"] if known else None
        replayed = (played.after if after else played.before).get("model")
    if recorded is None or replayed is None or recorded.keys() != replayed.keys():
        return wrong
    difference = first_difference(recorded, replayed)
    return wrong if difference is None else wrong.at(difference)
