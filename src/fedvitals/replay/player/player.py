# SPDX-License-Identifier: Apache-2.0
"""Runs recorded rounds of a lab run again, by the lab itself: the same engine, the same faults, the same corrections.

What the monitor prescribed and shut out at the time is read from the tape. Nothing else is: all updates are computed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fedvitals.errors import ConfigError, StoreError
from fedvitals.lab import experiment as lab_experiment
from fedvitals.lab.actions import Ward
from fedvitals.lab.engines.engine import FLOWER, Engine, one_thread
from fedvitals.lab.engines.site import Site
from fedvitals.lab.experiment import Experiment
from fedvitals.lab.federation import Federation, Server
from fedvitals.lab.run import one_round, prepared
from fedvitals.lab.taped import OPTIMIZER
from fedvitals.protocols import Message, NullObserver, WorkerObserver
from fedvitals.records import Action, Where
from fedvitals.replay.tape.digests import Tensors, mark_of
from fedvitals.replay.tape.journal import Entry
from fedvitals.replay.tape.reader import TapeReader
from fedvitals.replay.tape.retention import came_of, finite


@dataclass
class Played:
    """A round that was run again."""

    number: int
    before: dict[str, Tensors] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    after: dict[str, Tensors] = field(default_factory=dict)
    after_notes: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def message(self, node: str) -> Message | None:
        return next((one for one in self.messages if one.node == node), None)

    def entry(self) -> Entry:
        """As the tape would have recorded it."""
        came = [came_of(m, None if m.tensors is None else mark_of(m.tensors)) for m in self.messages]
        before = {name: mark_of(tensors) for name, tensors in self.before.items()}
        after = {name: mark_of(tensors) for name, tensors in self.after.items()}
        notes = (self.notes, self.after_notes)
        return Entry(self.number, before, notes[0], tuple(came), after, notes[1], finite(self.metrics))


class Playback(NullObserver):
    """An observer that answers as the monitor did, and hears what a tape would."""

    def __init__(self, tape: TapeReader | None, watcher: WorkerObserver | None = None) -> None:
        self._tape, self._watcher = tape, watcher
        self.recorder = self
        self.played = Played(-1)
        self._left_out: tuple[int, frozenset[str]] = -1, frozenset()

    def prescribed(self, number: int) -> Sequence[Action]:
        if self._tape is None or number not in self._tape.rounds:
            return ()
        return [action_of(told) for told in self._tape.entry(number).notes.get("actions", ())]

    def updates(self, number: int, updates: Mapping[str, Any]) -> Sequence[Action]:
        if self._left_out[0] != number:  # asked for each batch of updates, and read once
            known = self._tape is not None and number in self._tape.rounds
            came = self._tape.entry(number).came if self._tape is not None and known else ()
            self._left_out = number, frozenset(one.node for one in came if not one.used)
        out = self._left_out[1]
        return [Action(Where("", number), 0.0, "", "exclude", node) for node in updates if node in out]

    def for_worker(self) -> WorkerObserver:
        return NullObserver() if self._watcher is None else self._watcher  # not this one: it holds all that was played

    # -- as a TapeRecorder

    def describe(self, *_: Any) -> None: ...
    def gate(self, *_: Any) -> None: ...

    def begin(self, number: int, state: Mapping[str, Tensors], notes: Mapping[str, Any]) -> None:
        self.played = Played(number, dict(state), dict(notes))

    def messages(self, _: int, messages: Sequence[Message]) -> None:
        self.played.messages += [_kept(message) for message in messages]

    def end(self, _: int, state: Mapping[str, Tensors], notes: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self.played.after, self.played.after_notes, self.played.metrics = dict(state), dict(notes), dict(metrics)


class Player:
    """Opened for a tape; closed by leaving its `with`. `workers`: as many as you like, the bits are the same.

    `device`: another than it was recorded on, where that one is not here: the bits may differ then.
    `experiment`: needed where the tape has no description of it, because parts of it are objects of the user's own.
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
        told = tape.setting.told
        if tape.setting.host != "lab" or "engine" not in told:
            raise ConfigError(
                f"The run '{tape.setting.run}' is of host '{tape.setting.host or 'unknown'}': only runs of the lab can "
                "be run again here."
            )
        self.described = experiment_of(tape, experiment)  # as it was written: before its faults set it up
        self.data = data if data is not None else told.get("data")
        self.site = prepared(self.described, self.data) if site is None else site
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
        wanted = self.workers if workers is None else workers
        if wanted not in self._engines:
            told = self.tape.setting.told
            device = self._device or str(told.get("device", "cpu"))
            name = "sequential" if told["engine"] == FLOWER else str(told["engine"])  # by the promise of that engine
            precision = "float32" if device == "cpu" else str(told.get("precision", "float32"))
            self._engines[wanted] = Engine(self.site, name, wanted, device, precision)
        return self._engines[wanted]

    def server(self, number: int) -> Server:
        """All that was known before a round: read, or run again from the nearest state that can be."""
        start = self.start(number)
        server = self.stored(start)
        for played in self.rounds(start, number - 1, server, examined=False):
            del played
        return server

    def start(self, number: int) -> int:
        start = self.tape.nearest(number)
        if start is None:
            raise StoreError(
                f"Round {number} cannot be run again: no whole state before it is on the tape any more. A larger "
                "budget keeps more: fv.Tape(budget=...)."
            )
        return start

    def stored(self, number: int) -> Server:
        """From the tape, as it is; the first one of all from the seed."""
        if number == 0 and self.tape.begins_from_seed:
            self.engine().restore_optimizers({})
            return Server(self.site.layout.flat(self.site.module))
        return self.restored(self.tape.state(number), self.tape.notes(number))

    def restored(self, state: Mapping[str, Tensors], notes: Mapping[str, Any]) -> Server:
        """Of a round's beginning as a tape has it, or as `Played` does."""
        flat = {name: flattened(tensors) for name, tensors in state.items()}
        kept = {name.removeprefix(OPTIMIZER): t for name, t in flat.items() if name.startswith(OPTIMIZER)}
        self.engine().restore_optimizers(kept)
        past = sorted((name for name in flat if name.startswith("past/")), key=lambda name: int(name[5:]))
        return Server(
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
        server: Server,
        *,
        examined: bool = True,
        observer: Playback | None = None,
        workers: int | None = None,
    ) -> Iterator[Played]:
        """Run them again from a server that is at the beginning of the first; it is moved along."""
        watching = Playback(self.tape) if observer is None else observer
        federation = Federation(self.site, self.engine(workers), watching, server)
        ward, model = Ward(self.experiment, watching), copy.deepcopy(self.site.module)
        for number in range(first, last + 1):
            with one_thread():
                one_round(federation, ward, number, model, examined=examined)
            yield watching.played

    def round(self, number: int, *, examined: bool = False, observer: Playback | None = None) -> Played:
        """One round, from its own beginning."""
        with contextlib.closing(
            self.rounds(number, number, self.server(number), examined=examined, observer=observer)
        ) as rounds:  # type: ignore[type-var]
            return next(rounds)


def experiment_of(tape: TapeReader, given: Experiment | None) -> Experiment:
    """The experiment on the tape; or the one that is given, if it is the same."""
    told = tape.setting.told
    if given is not None:
        if given.digest() != told.get("digest"):
            raise ConfigError("The experiment that was given is not the one that was recorded: their digests differ.")
        return given
    text = told.get("experiment")
    if text is None:
        raise ConfigError(
            "Parts of this experiment are objects of the user's own (a model, data), which no tape can hold: give it "
            "again, fv.open_replay(run, experiment=...)."
        )
    return lab_experiment.read(text)


def action_of(told: Mapping[str, Any]) -> Action:
    fields = {key: value for key, value in told.items() if key != "where"}
    return Action(Where(**told["where"]), **fields)


def flattened(tensors: Tensors) -> Tensor:
    if [*tensors] == [""]:
        return tensors[""].clone()
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def _kept(message: Message) -> Message:
    losses = None if message.losses is None else message.losses.clone()
    return Message(
        message.node, message.tensors, message.weight, message.used, message.group, message.start, losses, message.error
    )
