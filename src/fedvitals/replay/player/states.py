# SPDX-License-Identifier: Apache-2.0
"""States and updates of any round: read where the tape has them, run again where it does not, and cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fedvitals.errors import ConfigError, StoreError
from fedvitals.loop_tape import DELTA
from fedvitals.replay.player.loop_player import LoopPlayer
from fedvitals.replay.player.player import Player, ReplayedRound
from fedvitals.replay.player.trace import ClientTrace, trace_client
from fedvitals.replay.tape.digests import Tensors
from fedvitals.replay.tape.journal import ClientReply
from fedvitals.replay.tape.reader import TapeReader

MEMORY = 1 << 30  # bytes of rounds that were run again
TRACES = 4
T = TypeVar("T", bound=Tensors)

Progress = Callable[[int, int, int], None]
"""A round that was run again, the first and the last of those that are."""


class ReplayStates:
    """Provides states, updates and traces of a recorded run. `player` is called when something must be run again."""

    def __init__(self, tape: TapeReader, player: Callable[[], Player | LoopPlayer], progress: Progress) -> None:
        self.tape, self._make, self.progress = tape, player, progress
        self._player: Player | LoopPlayer | None = None
        self._played: OrderedDict[int, ReplayedRound] = OrderedDict()
        self._traces: OrderedDict[tuple[int, str], ClientTrace] = OrderedDict()
        self.rerun_rounds = 0  # rounds that were run again so far

    @property
    def player(self) -> Player | LoopPlayer:
        """Return the player, created when it is first needed: reading a tape needs neither data nor an engine."""
        if self._player is None:
            self._player = self._make()
        return self._player

    def close(self) -> None:
        """Release the player and all cached rounds."""
        if self._player is not None:
            self._player.close()
        self._player = None
        self._played.clear()
        self._traces.clear()

    def state(self, round_index: int) -> Mapping[str, Tensors]:
        """Return the whole state before a round; also for the round after the last."""
        if round_index in self._played:
            return self._played[round_index].before
        if self.tape.has_state(round_index):
            return self.tape.state(round_index)
        if round_index - 1 in self.tape.rounds and not self._goes_back(round_index):
            return self.play(round_index - 1).after
        return self.play(round_index).before

    def model(self, round_index: int) -> Tensors:
        """Return the global model before a round."""
        return self.state(round_index)["model"]

    def sent(self, round_index: int, node: str) -> Tensors | None:
        """Return a client's whole model as it arrived; None where nothing did."""
        if self.reply_of(round_index, node).mark is None:
            return None
        if round_index not in self._played:
            recorded = self.tape.update(round_index, node)
            if recorded is not None:
                return recorded
        message = self.play(round_index).message(node)
        return None if message is None else message.tensors

    def update(self, round_index: int, node: str) -> dict[str, Tensor] | None:
        """Return what a client changed: what it sent minus what it was given; None where nothing arrived."""
        sent = self.sent(round_index, node)
        if sent is None:
            return None
        if self.reply_of(round_index, node).notes.get("kind") == DELTA:  # a loop that sends changes
            return dict(sent)
        state = self.state(round_index)
        start = state.get(self.reply_of(round_index, node).start, state["model"])
        if any(name not in start or start[name].shape != tensor.shape for name, tensor in sent.items()):
            raise StoreError(
                f"The update of {node} in round {round_index} does not fit the model that it was trained from."
            )
        return {name: tensor - start[name] for name, tensor in sent.items()}

    def required_update(self, round_index: int, node: str) -> dict[str, Tensor]:
        """Return what a client changed. Raises ConfigError where nothing arrived."""
        return required(self.update(round_index, node), round_index, node)

    def reply_of(self, round_index: int, node: str) -> ClientReply:
        """Return a client's recorded reply. Raises ConfigError if it took no part."""
        return self.tape.entry(round_index).required_reply(node)

    def play(self, round_index: int) -> ReplayedRound:
        """Return a round, run again from the nearest known state."""
        if round_index in self._played:
            self._played.move_to_end(round_index)
            return self._played[round_index]
        self.tape.entry(round_index)  # an error that says which rounds there are
        first, server = self.begin(round_index)
        for played in self.player.rounds(first, round_index, server, examined=False):
            self.rerun_rounds += 1
            self.progress(played.number, first, round_index)
            self._keep(played)
        return self._played[round_index]

    def begin(self, round_index: int) -> tuple[int, Any]:
        """Return the nearest round up to this one from which it can be run again, and its initial state."""
        near = self._at_hand(round_index)
        if near is None or not isinstance(self.player, Player) or not self._is_nearest(near[0], round_index):
            start = self.player.start(round_index)
            return start, self.player.stored(start)
        return near[0], self.player.restored(near[1], near[2])

    def trace(self, round_index: int, node: str, step: int = 0) -> ClientTrace:
        """Return a client's local steps; the requested one with its tensors."""
        self.reply_of(round_index, node)
        player = self.player
        if not isinstance(player, Player):
            raise ConfigError(
                "The steps of a plain loop are your own code's: look at them with Python's debugger, "
                f"`fedvitals replay RUN --round {round_index} --node {node} --loop module:name --pdb`."
            )
        known = self._traces.get((round_index, node))
        if known is None or (step not in known.kept and step < len(known.steps)):
            first = 0 if known is None else step
            known = trace_client(player, round_index, node, first=first, begin=self.begin(round_index))
            self._traces[round_index, node] = known
        self._traces.move_to_end((round_index, node))
        while len(self._traces) > TRACES:
            self._traces.popitem(last=False)
        return known

    def _is_nearest(self, near: int, round_index: int) -> bool:
        try:
            return near >= self.player.start(round_index)
        except StoreError:  # thinned away: what is at hand is all there is
            return True

    def _at_hand(self, round_index: int) -> tuple[int, Mapping[str, Tensors], Mapping[str, Any]] | None:
        for near in range(round_index, -1, -1):
            if near in self._played:
                return near, self._played[near].before, self._played[near].notes
            before = self._played.get(near - 1)
            if before is not None and not self._goes_back(near):
                return near, before.after, before.after_notes
        return None

    def _goes_back(self, round_index: int) -> bool:
        """Return whether a correction restored an earlier model before this round, so that it does not begin where
        the last ended.
        """
        return round_index in self.tape.rounds and self.tape.entry(round_index).goes_back

    def _keep(self, played: ReplayedRound) -> None:
        self._played[played.number] = played
        self._played.move_to_end(played.number)
        while len(self._played) > 1 and sum(round_.bytes for round_ in self._played.values()) > MEMORY:
            self._played.popitem(last=False)


def required(tensors: T | None, round_index: int, node: str) -> T:
    """Return the tensors that a client sent. Raises ConfigError where there are none."""
    if tensors is None:
        raise ConfigError(f"Nothing of use came from {node} in round {round_index}:  clients  says why.")
    return tensors
