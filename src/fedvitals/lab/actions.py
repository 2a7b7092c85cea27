# SPDX-License-Identifier: Apache-2.0
"""Corrections, applied by the lab: what an observer prescribes for a round becomes settings of that round.

Nothing is changed for good. What is not prescribed any more is gone in the next round, and checkpoints in memory take
the federation back.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import ConfigError
from fedvitals.lab import toml
from fedvitals.lab.engines.work import Node, Task, Update
from fedvitals.lab.experiment import AGGREGATORS, Experiment, kinds_of
from fedvitals.lab.local import Clip, Local
from fedvitals.lab.topologies.asynchronous import NOTE as FLIGHTS
from fedvitals.lab.topologies.asynchronous import version
from fedvitals.lab.topologies.clustered import Clustered
from fedvitals.protocols import Observer
from fedvitals.records import Action

if TYPE_CHECKING:
    from fedvitals.lab.federation import Server


class CannotApplyError(ConfigError):
    """A correction that this federation has no place for."""


@dataclass
class Orders:
    """What is in force in one round; as made, nothing is."""

    quarantined: set[str] = field(default_factory=set)  # clients and groups
    factors: dict[Node, float] = field(default_factory=dict)  # of a client's weight
    samples: dict[Node, int] = field(default_factory=dict)  # instead of what it claims
    longest: float | None = None  # norm of an update
    server_rate: float = 1.0
    local: Local | None = None  # instead of the experiment's
    stop_at_nonfinite: bool = False
    aggregator: Any = None  # instead of the experiment's
    another_cohort: bool = False

    def shut_out(self, node: Node, group: str | None) -> bool:
        return node in self.quarantined or (group is not None and group in self.quarantined)

    def task(self, task: Task) -> Task:
        """As these orders want it. Where members exchange as they train, one in quarantine must not train with them;

        where they do not, it trains on, unheard: so that it is seen when it is well again.
        """
        nodes = task.nodes
        if task.exchange is not None:
            nodes = tuple(node for node in nodes if not self.shut_out(node, task.group))
        iterations = task.iterations
        if iterations is not None and self.local is not None and self.local.iterations is not None:
            iterations = min(iterations, self.local.iterations)
        return dataclasses.replace(
            task, nodes=nodes, iterations=iterations, local=self.local, stop_at_nonfinite=self.stop_at_nonfinite
        )

    def update(self, update: Update, start: Tensor, weights: int) -> Update:
        """Its weight and its length, in place."""
        if update.node in self.samples:
            update.samples = self.samples[update.node]
        if update.node in self.factors:
            update.samples = max(1, round(update.samples * self.factors[update.node]))
        if self.longest is not None:
            self._shorten(update.state[:weights], start[:weights], self.longest)
        return update

    def _shorten(self, state: Tensor, start: Tensor, longest: float) -> None:
        """What is not finite stays what it is: others shall see it."""
        change = state - start
        norm = torch.linalg.vector_norm(change)
        if not state.is_cpu:  # by a mask: nobody waits for a device to tell how long it is
            state.copy_(torch.where(norm > longest, start + change * (longest / norm), state))
        elif float(norm) > longest:
            state.copy_(start + change * (longest / float(norm)))

    def model(self, before: Tensor, after: Tensor, weights: int) -> Tensor:
        """The server's step, by its rate."""
        if self.server_rate == 1:
            return after
        step = (after[:weights] - before[:weights]) * self.server_rate
        return torch.cat((before[:weights] + step, after[weights:]))


def quarantine(orders: Orders, action: Action, _: Experiment) -> None:
    orders.quarantined.add(_target(action))


def reweight(orders: Orders, action: Action, _: Experiment) -> None:
    node = _target(action)
    if "samples" in action.arguments:
        orders.samples[node] = int(action.arguments["samples"])
    else:
        orders.factors[node] = orders.factors.get(node, 1.0) * _positive(action, "factor")


def clip_updates(orders: Orders, action: Action, _: Experiment) -> None:
    orders.longest = _positive(action, "norm")


def clip_gradients(orders: Orders, action: Action, experiment: Experiment) -> None:
    limit, present = _positive(action, "limit"), _local(orders, experiment)
    if present.clip is not None and present.clip.by == "tensor" and present.clip.limit <= limit:
        raise CannotApplyError(f"Gradients are clipped already, each tensor to {present.clip.limit:g}.")
    orders.local = msgspec.structs.replace(present, clip=Clip(limit, "tensor"))


def stop_client_at_nonfinite(orders: Orders, _: Action, __: Experiment) -> None:
    orders.stop_at_nonfinite = True


def client_rate(orders: Orders, action: Action, experiment: Experiment) -> None:
    present = _local(orders, experiment)
    rate = present.optimizer.learning_rate * _positive(action, "factor")
    orders.local = msgspec.structs.replace(
        present, optimizer=msgspec.structs.replace(present.optimizer, learning_rate=rate)
    )


def shorten_local_training(orders: Orders, action: Action, experiment: Experiment) -> None:
    present, factor = _local(orders, experiment), _positive(action, "factor")
    if present.iterations is not None:
        orders.local = msgspec.structs.replace(present, iterations=max(1, round(present.iterations * factor)))
    elif (present.epochs or 1) > 1:
        orders.local = msgspec.structs.replace(present, epochs=max(1, round((present.epochs or 1) * factor)))
    else:
        raise CannotApplyError("Clients train for one epoch: local training by epochs cannot be shorter.")


def server_rate(orders: Orders, action: Action, experiment: Experiment) -> None:
    _one_model(experiment)
    orders.server_rate *= _positive(action, "factor")


def robust_aggregator(orders: Orders, action: Action, experiment: Experiment) -> None:
    _one_model(experiment)
    table = {key: value for key, value in action.arguments.items() if key in ("fraction", "faulty", "keep")}
    rule = toml.described("aggregator", {"kind": action.arguments.get("rule"), **table}, kinds_of(AGGREGATORS))
    msgspec.structs.replace(experiment, aggregator=rule)  # refuses it where too few updates come together
    orders.aggregator = rule


def resample(orders: Orders, _: Action, experiment: Experiment) -> None:
    if experiment.participation == 1:
        raise CannotApplyError("All clients are asked in every round: there is no other cohort.")
    orders.another_cohort = True


def roll_back(orders: Orders, action: Action, experiment: Experiment) -> None:
    """Done by `restore` alone."""


KINDS: Mapping[str, Callable[[Orders, Action, Experiment], None]] = {
    function.__name__: function
    for function in (
        quarantine,
        reweight,
        clip_updates,
        clip_gradients,
        stop_client_at_nonfinite,
        client_rate,
        shorten_local_training,
        server_rate,
        robust_aggregator,
        resample,
        roll_back,
    )
}


class Ward:
    """What a run needs to follow prescriptions: its orders, and checkpoints in memory."""

    def __init__(self, experiment: Experiment, observer: Observer, *, saved: bool = False) -> None:
        self._experiment, self._observer, self._saved = experiment, observer, saved
        self._kept: dict[int, Server] = {}
        self._known: set[str] = set()  # whose checkpoint has been gone back to already

    def follow(self, actions: Iterable[Action], number: int, server: Server) -> Orders:
        """The orders for a round, and the server taken back where that is one of them."""
        orders = Orders()
        for action in actions:
            if action.kind == "checkpoint":
                if self._saved:
                    raise ConfigError(
                        "A run that is saved (checkpoint=) cannot be corrected by itself: what is in force is no part "
                        'of its state, and would be lost when it is resumed. Use Monitor(cure="suggest").'
                    )
                self._checkpoint(action.arguments["keep"], number - 1, server)
                continue
            try:
                self._apply(orders, action, server)
            except ConfigError as error:
                self._observer.refused(action, str(error))
        return orders

    def _apply(self, orders: Orders, action: Action, server: Server) -> None:
        apply = KINDS.get(action.kind)
        if apply is None:
            raise CannotApplyError(f"The lab does not know '{action.kind}'. Known: {', '.join(KINDS)}.")
        apply(orders, action, self._experiment)
        name = str(action.arguments.get("id", action.at))  # one in force for many rounds goes back once
        if "restore" in action.arguments and name not in self._known:
            self._restore(int(action.arguments["restore"]), server)
            self._known.add(name)

    def _checkpoint(self, keep: Sequence[int], number: int, server: Server) -> None:
        now = copy.copy(server)
        now.model, now.memory, now.past = server.model.clone(), dict(server.memory), list(server.past)
        now.notes = copy.deepcopy(server.notes)
        self._kept[number] = now
        self._kept = {held: state for held, state in self._kept.items() if held in keep}

    def _restore(self, number: int, server: Server) -> None:
        """All but the clock and who is under way: time does not go back."""
        if number not in self._kept:
            held = ", ".join(map(str, sorted(self._kept))) or "none"
            raise CannotApplyError(f"There is no checkpoint of round {number} any more. Kept: {held}.")
        then = self._kept[number]
        flying = {key: tensor for key, tensor in server.memory.items() if key.startswith(version(""))}
        under_way = {key: note for key, note in server.notes.items() if key == FLIGHTS}
        server.model, server.past = then.model.clone(), list(then.past)
        server.memory = {k: t for k, t in then.memory.items() if not k.startswith(version(""))} | flying
        server.notes = {k: n for k, n in copy.deepcopy(then.notes).items() if k != FLIGHTS} | under_way


def _local(orders: Orders, experiment: Experiment) -> Local:
    return experiment.local if orders.local is None else orders.local


def _one_model(experiment: Experiment) -> None:
    if isinstance(experiment.topology, Clustered):
        raise CannotApplyError(
            "Clusters have models of their own, by a rule of their own: there is no one server step."
        )


def _target(action: Action) -> str:
    if action.target is None:
        raise CannotApplyError(f"'{action.kind}' needs a target: a client or a group.")
    return action.target


def _positive(action: Action, name: str) -> float:
    value = action.arguments.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CannotApplyError(f"'{action.kind}' needs '{name}', finite and above 0; got {value!r}.")
    return float(value)
