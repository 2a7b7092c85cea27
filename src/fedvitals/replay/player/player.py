# SPDX-License-Identifier: Apache-2.0
"""Run recorded rounds of a lab run again, by the lab itself: the same engine, the same faults, the same corrections.

The corrections the monitor prescribed and the clients it excluded are read from the tape. All updates are computed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import experiment as lab_experiment
from fedvitals.lab.corrections import CorrectionApplier
from fedvitals.lab.engines.engine import FLOWER, Engine, single_threaded
from fedvitals.lab.engines.site import Site
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.run import prepare_site, run_round
from fedvitals.lab.tape_recording import OPTIMIZER
from fedvitals.protocols import Message, NullObserver, WorkerObserver
from fedvitals.records import Action, Where
from fedvitals.replay.tape.digests import Tensors, bytes_of, state_digest_of, state_digests_of
from fedvitals.replay.tape.journal import RoundEntry
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.replay.tape.retention import finite_or_none, reply_entry_of


@dataclass
class ReplayedRound:
    """A round that was run again."""

    number: int
    before: dict[str, Tensors] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    after: dict[str, Tensors] = field(default_factory=dict)
    after_notes: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def message(self, node: str) -> Message | None:
        """Return a client's message; None if it sent none."""
        return next((message for message in self.messages if message.node == node), None)

    @property
    def bytes(self) -> int:
        """Return how many bytes its states and updates hold."""
        return bytes_of(*self.before.values(), *self.after.values(), *(m.tensors or {} for m in self.messages))

    def entry(self) -> RoundEntry:
        """Return the round as the tape would have recorded it."""
        came = [reply_entry_of(m, None if m.tensors is None else state_digest_of(m.tensors)) for m in self.messages]
        before, after = state_digests_of(self.before), state_digests_of(self.after)
        metrics = finite_or_none(self.metrics)
        return RoundEntry(self.number, before, self.notes, tuple(came), after, self.after_notes, metrics)


class PlaybackObserver(NullObserver):
    """An observer that prescribes what the monitor prescribed then, and collects what a tape would record."""

    def __init__(self, tape: TapeReader | None, watcher: WorkerObserver | None = None) -> None:
        self._tape, self._watcher = tape, watcher
        self.recorder = self
        self.played = ReplayedRound(-1)
        self._left_out: tuple[int, frozenset[str]] = -1, frozenset()

    def prescribed(self, round_index: int) -> Sequence[Action]:
        if self._tape is None or round_index not in self._tape.rounds:
            return ()
        return [action_of(action) for action in self._tape.entry(round_index).actions]

    def updates(self, round_index: int, updates: Mapping[str, Any]) -> Sequence[Action]:
        if self._left_out[0] != round_index:  # asked for each batch of updates, and read once
            known = self._tape is not None and round_index in self._tape.rounds
            came = self._tape.entry(round_index).came if self._tape is not None and known else ()
            self._left_out = round_index, frozenset(reply.node for reply in came if not reply.used)
        out = self._left_out[1]
        return [Action(Where("", round_index), 0.0, "", "exclude", node) for node in updates if node in out]

    def for_worker(self) -> WorkerObserver:
        return NullObserver() if self._watcher is None else self._watcher  # not this one: it holds all that was played

    # -- as a TapeRecorder

    def describe(self, *_: Any) -> None: ...
    def gate(self, *_: Any) -> None: ...

    def begin(self, round_index: int, state: Mapping[str, Tensors], notes: Mapping[str, Any]) -> None:
        self.played = ReplayedRound(round_index, dict(state), dict(notes))

    def messages(self, _: int, messages: Sequence[Message]) -> None:
        self.played.messages += [_without_notes(message) for message in messages]

    def end(self, _: int, state: Mapping[str, Tensors], notes: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self.played.after, self.played.after_notes, self.played.metrics = dict(state), dict(notes), dict(metrics)


class Player:
    """Runs rounds of a lab run's tape again; use it in a `with` block. Any number of `workers` gives the same bits.

    `device`: to use instead of the recorded one where that is missing; bits may differ then. `experiment`: needed where
    the tape has no description of it, because parts of it are the user's own objects.
    """

    def __init__(
        self,
        tape: TapeReader,
        *,
        experiment: Experiment | None = None,
        data: str | Path | None = None,
        workers: int | None = 1,
        device: str | None = None,
        site: Site | None = None,
    ) -> None:
        self.tape = tape
        settings = tape.setting.description
        if tape.setting.host != "lab" or "engine" not in settings:
            raise ConfigError(
                f"The run '{tape.setting.run}' is of host '{tape.setting.host or 'unknown'}': only runs of the lab can "
                "be run again here."
            )
        self.described = experiment_of(tape, experiment)  # as it was written: before its faults set it up
        self.data = data if data is not None else settings.get("data")
        self.site = prepare_site(self.described, self.data) if site is None else site
        self.experiment = self.site.experiment
        self._device = device
        self.workers, self._engines = workers, dict[int | None, Engine]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def engine(self, workers: int | None = None) -> Engine:
        """Return the engine for this many workers, created on first use."""
        wanted = self.workers if workers is None else workers
        if wanted not in self._engines:
            settings = self.tape.setting.description
            device = self._device or str(settings.get("device", "cpu"))
            # Flower's nodes train as «sequential» does, to the last bit.
            name = "sequential" if settings["engine"] == FLOWER else str(settings["engine"])
            precision = "float32" if device == "cpu" else str(settings.get("precision", "float32"))
            self._engines[wanted] = Engine(self.site, name, wanted, device, precision)
        return self._engines[wanted]

    def server(self, round_index: int) -> ServerState:
        """Return the server's state before a round: read, or run again from the nearest stored state."""
        start = self.start(round_index)
        server = self.stored(start)
        for played in self.rounds(start, round_index - 1, server, examined=False):
            del played
        return server

    def start(self, round_index: int) -> int:
        """Return the round from whose stored state this round can be run again. Raises StoreError if there is none."""
        return self.tape.start_of(round_index, "A larger budget keeps more: fv.Tape(budget=...).")

    def stored(self, round_index: int) -> ServerState:
        """Return the stored state before a round; the very first one is created from the seed."""
        if round_index == 0 and self.tape.begins_from_seed:
            self.engine().restore_optimizers({})
            return ServerState(self.site.layout.flat(self.site.module))
        return self.restored(self.tape.state(round_index), self.tape.notes(round_index))

    def restored(self, state: Mapping[str, Tensors], notes: Mapping[str, Any]) -> ServerState:
        """Return the server of a round's initial state as a tape, or a `ReplayedRound`, has it."""
        flat = {name: flattened(tensors) for name, tensors in state.items()}
        kept = {name.removeprefix(OPTIMIZER): t for name, t in flat.items() if name.startswith(OPTIMIZER)}
        self.engine().restore_optimizers(kept)
        past = sorted((name for name in flat if name.startswith("past/")), key=lambda name: int(name[5:]))
        return ServerState(
            flat["model"],
            {name.removeprefix("memory/"): t for name, t in flat.items() if name.startswith("memory/")},
            copy.deepcopy(dict(notes.get("notes", {}))),
            float.fromhex(str(notes.get("clock", "0x0p+0"))),
            [flat[name] for name in past],
        )

    def rounds(
        self,
        first: int,
        last: int,
        server: ServerState,
        *,
        examined: bool = True,
        observer: PlaybackObserver | None = None,
        workers: int | None = None,
    ) -> Iterator[ReplayedRound]:
        """Run rounds again from a server at the beginning of the first and yield each; the server is moved along."""
        watching = PlaybackObserver(self.tape) if observer is None else observer
        federation = Federation(self.site, self.engine(workers), watching, server)
        corrections, model = CorrectionApplier(self.experiment, watching), copy.deepcopy(self.site.module)
        for round_index in range(first, last + 1):
            with single_threaded():
                run_round(federation, corrections, round_index, model, evaluate=examined)
            yield watching.played

    def round(
        self, round_index: int, *, examined: bool = False, observer: PlaybackObserver | None = None
    ) -> ReplayedRound:
        """Return one round, run again from its own beginning."""
        with contextlib.closing(
            self.rounds(round_index, round_index, self.server(round_index), examined=examined, observer=observer)
        ) as rounds:  # type: ignore[type-var]
            return next(rounds)


def experiment_of(tape: TapeReader, experiment: Experiment | None) -> Experiment:
    """Return the experiment on the tape, or the given one if it is the same."""
    settings = tape.setting.description
    if experiment is not None:
        if experiment.digest() != settings.get("digest"):
            raise ConfigError("The experiment that was given is not the one that was recorded: their digests differ.")
        return experiment
    text = settings.get("experiment")
    if text is None:
        raise ConfigError(
            "Parts of this experiment are objects of the user's own (a model, data), which no tape can hold: give it "
            "again, fv.open_replay(run, experiment=...)."
        )
    return lab_experiment.read(text)


def action_of(action: Mapping[str, Any]) -> Action:
    """Return an action from its recorded fields."""
    fields = {key: value for key, value in action.items() if key != "where"}
    return Action(Where(**action["where"]), **fields)


def flattened(tensors: Tensors) -> Tensor:
    """Return a state as one flat vector."""
    if [*tensors] == [""]:
        return tensors[""].clone()
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def _without_notes(message: Message) -> Message:
    losses = None if message.losses is None else message.losses.clone()
    return replace(message, losses=losses, notes=None)
