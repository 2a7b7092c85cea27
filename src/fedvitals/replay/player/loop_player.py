# SPDX-License-Identifier: Apache-2.0
"""Runs recorded rounds of a plain loop again, with two functions of the user's own.

    def restore(round, tensors, notes):     # the global model as it was, in whatever the loop trains
        model = Net()
        model.load_state_dict(tensors)
        return model

    def train(node, model, round):          # one client's local training; gives its state
        ...
        return model.state_dict()

    player = LoopPlayer(open_tape("runs.db", run), restore, train)

Before each client the random generators stand where they stood. What a loop remembers besides its global model (a
client's own optimiser, a server's momentum) is not on the tape: `restore`, `train` and `aggregate` must bring it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Never, Self

import torch
from torch import Tensor

from fedvitals.errors import ConfigError, StoreError
from fedvitals.loop_tape import DELTA, RANDOM, random_states, set_random_states, tensors_of
from fedvitals.protocols import Message, Replayable
from fedvitals.replay.player.averages import AverageFinder
from fedvitals.replay.player.player import ReplayedRound
from fedvitals.replay.tape.digests import Tensors, digest_of
from fedvitals.replay.tape.journal import ClientReply, RoundEntry
from fedvitals.replay.tape.reader import TapeReader

Restore = Callable[[int, dict[str, Tensor], Mapping[str, Any]], Any]
Train = Callable[[str, Any, int], Any]
Aggregate = Callable[[dict[str, Tensor], Mapping[str, Tensors], Mapping[str, float]], Mapping[str, Tensor]]
LOOP_DESCRIPTION = "an object (or a module) with restore(round, tensors, notes) and train(node, state, round)"


@dataclass
class LoopState:
    """The global model before round `number`."""

    number: int
    model: Tensors


class LoopPlayer:
    """Runs recorded rounds of a plain loop again. Metrics are not computed, because the tape does not know how.

    `train` returns the client's state (a state_dict or a module), or a pair of it and the losses of its steps, which
    are then compared, too. `aggregate(state, updates, weights)` returns the next global state; without it, plain
    averages are tried, and `averaged` says which of them matched.
    """

    def __init__(self, tape: TapeReader, restore: Restore, train: Train, aggregate: Aggregate | None = None) -> None:
        if tape.setting.description.get("kind") != "loop":
            raise ConfigError(
                f"The run '{tape.setting.run}' is of host '{tape.setting.host or 'unknown'}', not a plain loop: it is "
                "replayed without functions of yours, `fedvitals replay RUN`."
            )
        self.tape, self._restore, self._train, self._aggregate = tape, restore, train, aggregate
        self._averages = AverageFinder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None: ...

    @property
    def averaged(self) -> str | None:
        """Return in words which average gave the recorded states; None: `aggregate` was given, or nothing was
        averaged yet.
        """
        return None if self._aggregate is not None else self._averages.fitting

    @property
    def experiment(self) -> Never:
        raise ConfigError(
            "Of a plain loop only its own training can be run again, as it was: what if, fork and bisect change an "
            "experiment of the lab and measure it. Drop or change a client in your train() or aggregate(), and run "
            "LoopPlayer(...).rounds(first, last, player.server(first))."
        )

    site = experiment

    def start(self, round_index: int) -> int:
        """Return the round from whose stored state this round can be run again. Raises StoreError if there is none."""
        advice = "A larger budget, or a smaller every=, keeps more: fv.Tape(every=1)."
        return self.tape.start_of(round_index, advice)

    def stored(self, round_index: int) -> LoopState:
        """Return the stored state before a round."""
        return LoopState(round_index, self.tape.state(round_index)["model"])

    def server(self, round_index: int) -> LoopState:
        """Return the global model before a round: read, or run again from the nearest stored state."""
        standing = self.stored(self.start(round_index))
        for played in self.rounds(standing.number, round_index - 1, standing):
            del played
        return standing

    def rounds(
        self, first: int, last: int, server: LoopState, *, node: str | None = None, **_: Any
    ) -> Iterator[ReplayedRound]:
        """Run rounds again from the beginning of the first and yield each; `server` is moved along.

        `node`: the only client that matters in the last round; the others are not trained in it.
        """
        numbers = [round_index for round_index in self.tape.rounds if first <= round_index <= last]
        for round_index in numbers:
            entry = self.tape.entry(round_index)
            alone = node if round_index == last else None
            with self._as_it_was():
                messages = [self._client(entry, came, server.model) for came in _replies_of(entry, alone)]
                played = ReplayedRound(round_index, {"model": server.model}, dict(entry.notes), messages)
                if alone is None:  # the generators stand where the last client left them, as they did then
                    if entry.lost or not entry.after:
                        server.model = self._beyond(entry, round_index == numbers[-1], server.model)
                    else:
                        ended, server.model = self._ended(entry, server.model, messages)
                        played.after, played.after_notes = {"model": ended}, dict(entry.after_notes)
                    server.number = round_index + 1
            yield played

    def round(self, round_index: int, *, node: str | None = None, **_: Any) -> ReplayedRound:
        """Return one round, run again from its own beginning; of one client alone, if `node` is given."""
        with contextlib.closing(self.rounds(round_index, round_index, self.server(round_index), node=node)) as rounds:  # type: ignore[type-var]
            return next(rounds)

    # -- one client ---------------------------------------------------------------------------------------------------

    def _client(self, entry: RoundEntry, came: ClientReply, model: Tensors) -> Message:
        copied = {name: tensor.clone() for name, tensor in model.items()}
        state = self._restore(entry.round, copied, entry.notes)
        if RANDOM in came.notes:
            set_random_states(came.notes[RANDOM])
        returned: Any = None
        error: str | None = None
        try:
            returned = self._train(came.node, state, entry.round)
        except Exception as raised:
            if came.error is None:
                raise  # a mistake of the function, until the recording says otherwise
            error = f"{type(raised).__name__}: {raised}"[:1000]
        returned, losses = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        tensors = None if error is not None else _checked(returned, came, entry)
        if losses is None or not came.losses:  # only one of the two told them: they are not compared
            losses = torch.frombuffer(bytearray(came.losses), dtype=torch.float32) if came.losses else None
        return Message(came.node, tensors, came.weight, came.used, came.group, came.start, losses, error, came.notes)

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Use as many threads as were recorded, since sums depend on it, and restore the caller's random generators
        afterwards.
        """
        before, threads = random_states(), torch.get_num_threads()
        torch.set_num_threads(int(self.tape.setting.description.get("threads", threads)))
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            set_random_states(before)

    # -- the aggregation ----------------------------------------------------------------------------------------------

    def _ended(self, entry: RoundEntry, before: Tensors, messages: list[Message]) -> tuple[Tensors, Tensors]:
        """Return the state at the round's end and the one the next round begins with: a loop may aggregate between
        the two.
        """
        recorded, next_digest = entry.after["model"].digest, self._next(entry)
        out = set(entry.after_notes.get("excluded", ()))
        useful = [m for m in messages if m.tensors is not None and m.used and m.node not in out]
        if self._aggregate is not None:
            updates = {m.node: m.tensors for m in useful if m.tensors is not None}
            weights = {m.node: m.weight for m in useful}
            aggregated = tensors_of(self._aggregate({k: t.clone() for k, t in before.items()}, updates, weights))
            if aggregated is None:
                raise ConfigError("aggregate(state, updates, weights) gives the next global state: tensors by name.")
            unchanged = digest_of(before) == recorded and recorded != next_digest
            return (before, aggregated) if unchanged else (aggregated, aggregated)
        ended = self._averages.find(before, useful, recorded)
        if ended is None:
            ended = self._unexplained(entry, before, messages)
        if next_digest in (None, digest_of(ended)):
            return ended, ended
        return ended, self._averages.find(before, useful, str(next_digest)) or ended

    def _beyond(self, entry: RoundEntry, last: bool, before: Tensors) -> Tensors:
        """Return the state after a round of which the tape lost a part: nobody knows who else took part in it."""
        if last:
            return before
        later = next(round_index for round_index in self.tape.rounds if round_index > entry.round)
        if not self.tape.has_state(later):
            raise StoreError(
                f"The tape lost a part of round {entry.round}, so those after it cannot be run again before its next "
                'stored state. A larger memory= keeps up with faster rounds: fv.Tape(memory="2 GB").'
            )
        return self.tape.state(later)["model"]

    def _next(self, entry: RoundEntry) -> str | None:
        later = next((round_index for round_index in self.tape.rounds if round_index > entry.round), None)
        return None if later is None else self.tape.entry(later).state["model"].digest

    def _unexplained(self, entry: RoundEntry, before: Tensors, messages: list[Message]) -> Tensors:
        """Raise ConfigError if the updates are the recorded ones and no average matches; else return the state
        before.
        """
        same = all(
            (came.mark is None) == (message.tensors is None)
            and (came.mark is None or message.tensors is None or came.mark.digest == digest_of(message.tensors))
            for came, message in zip(entry.came, messages, strict=True)
        )
        if same:
            raise ConfigError(
                f"All updates of round {entry.round} are the recorded ones, but no average of them gives its state "
                f"(tried: {', '.join(self._averages.names)}). Say how this loop aggregates: "
                "LoopPlayer(tape, restore, train, aggregate), with aggregate(state, updates, weights)."
            )
        return before


def load_loop(text: str) -> Replayable:
    """Import the object that `module:name` on the command line names, and check it.

    It is an object with `restore` and `train` (and optionally `aggregate`), or a function without arguments that
    returns one. Without «:» it is the module itself.
    """
    module, _, attribute = text.partition(":")
    if not module:
        raise ConfigError(f"--loop takes module:name, {LOOP_DESCRIPTION}; got '{text}'.")
    here = os.getcwd()  # noqa: PTH109 - as Python itself has it for a script
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        loop_object: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(f"There is no module '{module}' here ({here}) or among what is installed.") from error
        raise
    for part in attribute.split(".") if attribute else ():
        if not hasattr(loop_object, part):
            raise ConfigError(f"'{module}' has no '{attribute}'. --loop takes module:name, {LOOP_DESCRIPTION}.")
        loop_object = getattr(loop_object, part)
    if not hasattr(loop_object, "restore") and callable(loop_object):
        loop_object = loop_object()
    missing = [name for name in ("restore", "train") if not callable(getattr(loop_object, name, None))]
    if missing:
        raise ConfigError(
            f"'{text}' has no function {' and '.join(missing)}. --loop takes module:name, {LOOP_DESCRIPTION}."
        )
    loop: Replayable = loop_object
    return loop


def loop_player(tape: TapeReader, loop: Replayable | str) -> LoopPlayer:
    """Return the player for such an object, or for its name."""
    parts = load_loop(loop) if isinstance(loop, str) else loop
    return LoopPlayer(tape, parts.restore, parts.train, getattr(parts, "aggregate", None))


def _replies_of(entry: RoundEntry, node: str | None) -> tuple[ClientReply, ...]:
    if node is None:
        return entry.came
    came = entry.reply_of(node)
    if came is None:
        nodes = ", ".join(reply.node for reply in entry.came) or "nobody"
        raise ConfigError(f"'{node}' took no part in round {entry.round}. It had: {nodes}.")
    return (came,)


def _checked(returned: Any, came: ClientReply, entry: RoundEntry) -> Tensors:
    tensors = tensors_of(returned)
    if tensors is None:
        difference = came.notes.get("kind") == DELTA
        wanted = "what was sent, differences by name" if difference else "the client's state, a state_dict or a module"
        raise ConfigError(
            f"train('{came.node}', state, {entry.round}) must give {wanted}, or a pair of it and the losses; got "
            f"{type(returned).__name__}."
        )
    return tensors
