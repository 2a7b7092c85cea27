# SPDX-License-Identifier: Apache-2.0
"""A federation that reuses recorded updates instead of training: each client's recorded change is added to the model it
is given.

Everything else is the lab's own code: who is asked, which corrections apply, how edges and the server average.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab.corrections import CorrectionApplier
from fedvitals.lab.engines.engine import AnyEngine, single_threaded
from fedvitals.lab.engines.site import Site
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.federation import Federation, ServerState
from fedvitals.lab.run import Round, run_round
from fedvitals.protocols import Message, NullObserver
from fedvitals.records import Action, Where
from fedvitals.replay.counterfactual.change import CHANGE_FINDING, WhatIfChange, recorded_actions
from fedvitals.replay.player.player import flattened
from fedvitals.replay.tape.reader import TapeReader


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """What a client sent in a recorded round, and what it was trained from; both flat, on the CPU."""

    node: Node
    state: Tensor
    start: Tensor
    samples: int
    group: str | None = None

    def on(self, start: Tensor, weights: int, factor: float = 1.0) -> Tensor:
        """Return its change added to another start; on its own start, exactly the bits that it sent."""
        state, own = self.state.to(start.device), self.start.to(start.device)
        if factor == 1 and torch.equal(start, own):
            return state.clone()
        change = state - own
        if factor != 1:
            change[:weights] *= factor
        return start + change


RecordedUpdates = Mapping[Node, RecordedUpdate]


def recorded_updates_of(messages: Sequence[Message], server: ServerState) -> dict[Node, RecordedUpdate]:
    """Return the updates that were aggregated. `server`: as it was before the round."""
    updates = {}
    for message in messages:
        if message.tensors is not None and message.used:
            state, start = flattened(message.tensors), start_tensor(server, message.start)
            updates[message.node] = RecordedUpdate(message.node, state, start, int(message.weight), message.group)
    return updates


def start_tensor(server: ServerState, name: str) -> Tensor:
    """Return the state of the server that a client was trained from."""
    start = server.model if name == "model" else server.memory[name.removeprefix("memory/")]
    return start.cpu()


def copy_of_server(server: ServerState) -> ServerState:
    """Return a copy of the server that can be moved along independently."""
    memory = {name: tensor.clone() for name, tensor in server.memory.items()}
    return ServerState(server.model, memory, copy.deepcopy(server.notes), server.clock, [*server.past])


def groups_of_round(tape: TapeReader, round_index: int) -> list[str]:
    """Return the edges, rings or clusters that took part in a round."""
    return sorted({came.group for came in tape.entry(round_index).came if came.group is not None})


class ChangeObserver(NullObserver):
    """An observer that prescribes the recorded corrections and those of a change."""

    def __init__(self, tape: TapeReader, first: int, change: WhatIfChange | None = None) -> None:
        self._tape, self._first, self.change = tape, first, WhatIfChange() if change is None else change

    def prescribed(self, round_index: int) -> Sequence[Action]:
        answered = () if self.change.no_faults else recorded_actions(self._tape, self._first, round_index)
        return [*answered, *self.change.actions(round_index)]

    def updates(self, round_index: int, updates: Mapping[Node, object]) -> Sequence[Action]:
        """Return the recorded exclusions; none where the change removes the faults behind them."""
        if self.change.no_faults or round_index not in self._tape.rounds:
            return ()
        out = {came.node for came in self._tape.entry(round_index).came if not came.used}
        return [Action(Where("", round_index), 0.0, "", "exclude", node) for node in updates if node in out]

    def refused(self, action: Action, why: str) -> None:
        if action.finding == CHANGE_FINDING:
            raise ConfigError(f"«{self.change.text}» cannot be done here: {why}")


class ReusingFederation(Federation):
    """A federation that plays rounds with recorded updates.

    `recorded_updates`: of the next round. `factor`: of each client's change, like a learning rate in first order.
    """

    def __init__(self, site: Site, engine: AnyEngine, observer: NullObserver, server: ServerState) -> None:
        if getattr(site.experiment.aggregator, "needs_training", False):
            raise ConfigError(
                f"The aggregator {type(site.experiment.aggregator).__name__} needs more of clients than the updates "
                "on the tape: train again, by fork(player, round, change, store=...)."
            )
        super().__init__(site, engine, observer, server)
        self.recorded_updates: RecordedUpdates = {}
        self.factor = 1.0
        self._corrections, self._model = CorrectionApplier(site.experiment, observer), copy.deepcopy(site.module)

    def train(self, tasks: Iterable[Task], *, timed: bool = True) -> Iterator[Update]:
        corrections, weights = self.corrections, self.site.layout.weights
        tasks = [task for task in map(corrections.adjust_task, tasks) if task.nodes]
        if timed and self.journey_planner.network is not None:
            self.server.clock = self.journey_planner.plan_round(self.round, tasks, self.server.clock).ends
        for task in tasks:
            for node in task.nodes:
                recorded = self.recorded_updates.get(node)
                if recorded is None or corrections.is_quarantined(node, task.group):
                    continue
                state = recorded.on(task.start, weights, self.factor)
                update = Update(node, state, task.start, recorded.samples, task.group, steps=1)
                yield corrections.adjust_update(update, task.start, weights)

    def play(self, round_index: int, updates: RecordedUpdates, *, examined: bool) -> Round:
        """Play one round with its recorded updates."""
        self.recorded_updates = updates
        with single_threaded():
            return run_round(self, self._corrections, round_index, self._model, evaluate=examined)
