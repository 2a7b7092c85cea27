# SPDX-License-Identifier: Apache-2.0
"""The states and updates of any round: read where the tape has them, run again where it has not, and kept at hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedvitals.errors import ConfigError, StoreError
from fedvitals.loop_tape import DELTA
from fedvitals.replay.player.loops import LoopPlayer
from fedvitals.replay.player.player import Played, Player
from fedvitals.replay.player.trace import Trace, trace
from fedvitals.replay.tape.digests import Tensors
from fedvitals.replay.tape.journal import Came
from fedvitals.replay.tape.reader import TapeReader

MEMORY = 1 << 30  # bytes of rounds that were run again
TRACES = 4

Progress = Callable[[int, int, int], None]
"""A round that was run again, the first and the last of those that are."""


class Material:
    def __init__(self, tape: TapeReader, player: Callable[[], Player | LoopPlayer], progress: Progress) -> None:
        self.tape, self._make, self.progress = tape, player, progress
        self._player: Player | LoopPlayer | None = None
        self._played: OrderedDict[int, Played] = OrderedDict()
        self._traces: OrderedDict[tuple[int, str], Trace] = OrderedDict()
        self.again = 0  # rounds that were run again so far

    @property
    def player(self) -> Player | LoopPlayer:
        """Made when it is first needed: reading a tape needs neither data nor an engine."""
        if self._player is None:
            self._player = self._make()
        return self._player

    def close(self) -> None:
        if self._player is not None:
            self._player.close()
        self._player = None
        self._played.clear()
        self._traces.clear()

    def state(self, number: int) -> Mapping[str, Tensors]:
        """All that was known before a round; of one round after the last, too."""
        if number in self._played:
            return self._played[number].before
        if self.tape.has_state(number):
            return self.tape.state(number)
        if number - 1 in self.tape.rounds and not self._goes_back(number):
            return self.play(number - 1).after
        return self.play(number).before

    def model(self, number: int) -> Tensors:
        return self.state(number)["model"]

    def sent(self, number: int, node: str) -> Tensors | None:
        """A client's whole model as it arrived; None where nothing did."""
        if self.came(number, node).mark is None:
            return None
        if number not in self._played:
            found = self.tape.update(number, node)
            if found is not None:
                return found
        message = self.play(number).message(node)
        return None if message is None else message.tensors

    def update(self, number: int, node: str) -> dict[str, Tensor] | None:
        """What a client changed: what it sent, less what it was given."""
        sent = self.sent(number, node)
        if sent is None:
            return None
        if self.came(number, node).said.get("kind") == DELTA:  # a loop that sends changes
            return dict(sent)
        state = self.state(number)
        given = state.get(self.came(number, node).start, state["model"])
        if any(name not in given or given[name].shape != tensor.shape for name, tensor in sent.items()):
            raise StoreError(f"The update of {node} in round {number} does not fit the model that it was trained from.")
        return {name: tensor - given[name] for name, tensor in sent.items()}

    def came(self, number: int, node: str) -> Came:
        entry = self.tape.entry(number)
        found = entry.of(node)
        if found is None:
            asked = ", ".join(came.node for came in entry.came) or "nobody"
            raise ConfigError(f"{node} took no part in round {number}. These did: {asked}.")
        return found

    def play(self, number: int) -> Played:
        """A round, run again; those between the nearest known state and it are, too."""
        if number in self._played:
            self._played.move_to_end(number)
            return self._played[number]
        self.tape.entry(number)  # an error that says which rounds there are
        first, server = self.begin(number)
        for played in self.player.rounds(first, number, server, examined=False):
            self.again += 1
            self.progress(played.number, first, number)
            self._keep(played)
        return self._played[number]

    def begin(self, number: int) -> tuple[int, Any]:
        """The nearest round up to this one from whose beginning it can be run again, and that beginning."""
        near = self._at_hand(number)
        if near is None or not isinstance(self.player, Player) or not self._is_nearest(near[0], number):
            start = self.player.start(number)
            return start, self.player.stored(start)
        return near[0], self.player.restored(near[1], near[2])

    def trace(self, number: int, node: str, step: int = 0) -> Trace:
        """A client's steps; the one that is asked for with its tensors."""
        self.came(number, node)
        player = self.player
        if not isinstance(player, Player):
            raise ConfigError(
                "The steps of a plain loop are your own code's: look at them with Python's debugger, "
                f"`fedvitals replay RUN --round {number} --node {node} --loop module:name --pdb`."
            )
        known = self._traces.get((number, node))
        if known is None or (step not in known.kept and step < len(known.steps)):
            first = 0 if known is None else step
            known = trace(player, number, node, first=first, begin=self.begin(number))
            self._traces[number, node] = known
        self._traces.move_to_end((number, node))
        while len(self._traces) > TRACES:
            self._traces.popitem(last=False)
        return known

    def _is_nearest(self, near: int, number: int) -> bool:
        try:
            return near >= self.player.start(number)
        except StoreError:  # thinned away: what is at hand is all there is
            return True

    def _at_hand(self, number: int) -> tuple[int, Mapping[str, Tensors], Mapping[str, Any]] | None:
        for near in range(number, -1, -1):
            if near in self._played:
                return near, self._played[near].before, self._played[near].notes
            before = self._played.get(near - 1)
            if before is not None and not self._goes_back(near):
                return near, before.after, before.after_notes
        return None

    def _goes_back(self, number: int) -> bool:
        """Whether a correction took the run back before this round: then it does not begin where the last one ended."""
        if number not in self.tape.rounds:
            return False
        return any("restore" in a.get("arguments", {}) for a in self.tape.entry(number).notes.get("actions", ()))

    def _keep(self, played: Played) -> None:
        self._played[played.number] = played
        self._played.move_to_end(played.number)
        while len(self._played) > 1 and sum(map(_bytes, self._played.values())) > MEMORY:
            self._played.popitem(last=False)


def _bytes(played: Played) -> int:
    held = [*played.before.values(), *played.after.values(), *(m.tensors or {} for m in played.messages)]
    return sum(t.numel() * t.element_size() for tensors in held for t in tensors.values())
