# SPDX-License-Identifier: Apache-2.0
"""Applies the corrections that an observer prescribes for a round of a lab run.

Corrections hold for one round: what is no longer prescribed is gone in the next. Checkpoints in memory allow the
federation to be rolled back.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from fedvitals.diagnosis.corrections.catalog import positive_argument, target_of
from fedvitals.errors import ConfigError
from fedvitals.lab import toml
from fedvitals.lab.aggregators.averages import scaled_step
from fedvitals.lab.aggregators.drift import DriftCorrection
from fedvitals.lab.engines.tasks import Node, Task, Update
from fedvitals.lab.experiment import AGGREGATORS, Experiment, kinds_of
from fedvitals.lab.local import Clip, Local
from fedvitals.lab.privacy import NOTE as SPENT_NOTE
from fedvitals.lab.topologies.asynchronous import NOTE as PENDING_NOTE
from fedvitals.lab.topologies.asynchronous import version_key
from fedvitals.lab.topologies.clustered import Clustered
from fedvitals.protocols import Observer
from fedvitals.records import Action

if TYPE_CHECKING:
    from fedvitals.lab.federation import ServerState

KEPT_NOTES = (PENDING_NOTE, SPENT_NOTE)  # that going back to a checkpoint does not undo


@dataclass
class ActiveCorrections:
    """The corrections in force in one round; none by default."""

    quarantined: set[str] = field(default_factory=set)  # clients and groups
    factors: dict[Node, float] = field(default_factory=dict)  # of a client's weight
    samples: dict[Node, int] = field(default_factory=dict)  # instead of what it claims
    max_update_norm: float | None = None  # norm of an update
    server_rate: float = 1.0
    local: Local | None = None  # instead of the experiment's
    stop_at_nonfinite: bool = False
    aggregator: Any = None  # instead of the experiment's
    resample_cohort: bool = False

    def is_quarantined(self, node: Node, group: str | None) -> bool:
        """Return whether a client, or the group it belongs to, is in quarantine."""
        return node in self.quarantined or (group is not None and group in self.quarantined)

    def adjust_task(self, task: Task) -> Task:
        """Return the task with the corrections applied.

        A quarantined member of a group that exchanges models during training does not train, since it would affect the
        others. In all other cases it trains as usual and its update is ignored, so that its recovery can be observed.
        """
        nodes = task.nodes
        if task.exchange is not None:
            nodes = tuple(node for node in nodes if not self.is_quarantined(node, task.group))
        iterations = task.iterations
        if iterations is not None and self.local is not None and self.local.iterations is not None:
            iterations = min(iterations, self.local.iterations)
        return dataclasses.replace(
            task, nodes=nodes, iterations=iterations, local=self.local, stop_at_nonfinite=self.stop_at_nonfinite
        )

    def adjust_update(self, update: Update, start: Tensor, weights: int) -> Update:
        """Correct an update's weight and norm, and return it. Its state is replaced, not modified."""
        if update.node in self.samples:
            update.samples = self.samples[update.node]
        if update.node in self.factors:
            update.samples = max(1, round(update.samples * self.factors[update.node]))
        if self.max_update_norm is not None:
            limited = self._limit_norm(update.state[:weights], start[:weights], self.max_update_norm)
            update.state = torch.cat((limited, update.state[weights:]))
        return update

    def _limit_norm(self, state: Tensor, start: Tensor, max_update_norm: float) -> Tensor:
        """Return a state with its change scaled to the norm. Non-finite values are left alone, so that detectors see
        them.
        """
        change = state - start
        norm = torch.linalg.vector_norm(change)
        if not state.is_cpu:  # by a mask: nobody waits for a device to tell how long it is
            return torch.where(norm > max_update_norm, start + change * (max_update_norm / norm), state)
        return start + change * (max_update_norm / float(norm)) if float(norm) > max_update_norm else state

    def adjust_model(self, before: Tensor, after: Tensor, weights: int) -> Tensor:
        """Return the server's new model after scaling its step by the corrected server rate."""
        if self.server_rate == 1:
            return after
        return scaled_step(before, after, weights, self.server_rate)


def quarantine(corrections: ActiveCorrections, action: Action, _: Experiment) -> None:
    corrections.quarantined.add(target_of(action, "a client or a group"))


def reweight(corrections: ActiveCorrections, action: Action, _: Experiment) -> None:
    node = target_of(action, "a client or a group")
    if "samples" in action.arguments:
        corrections.samples[node] = int(action.arguments["samples"])
    else:
        corrections.factors[node] = corrections.factors.get(node, 1.0) * positive_argument(action, "factor")


def clip_updates(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    if experiment.secure_aggregation is not None:
        raise ConfigError("Updates are aggregated securely: a server that sees their sum alone cannot clip them.")
    corrections.max_update_norm = positive_argument(action, "norm")


def clip_gradients(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    limit, present = positive_argument(action, "limit"), _local_settings(corrections, experiment)
    if present.clip is not None and present.clip.by == "tensor" and present.clip.limit <= limit:
        raise ConfigError(f"Gradients are clipped already, each tensor to {present.clip.limit:g}.")
    corrections.local = msgspec.structs.replace(present, clip=Clip(limit, "tensor"))


def stop_client_at_nonfinite(corrections: ActiveCorrections, _: Action, __: Experiment) -> None:
    corrections.stop_at_nonfinite = True


def client_rate(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    present = _local_settings(corrections, experiment)
    rate = present.optimizer.learning_rate * positive_argument(action, "factor")
    corrections.local = msgspec.structs.replace(
        present, optimizer=msgspec.structs.replace(present.optimizer, learning_rate=rate)
    )


def shorten_local_training(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    present, factor = _local_settings(corrections, experiment), positive_argument(action, "factor")
    if present.iterations is not None:
        corrections.local = msgspec.structs.replace(present, iterations=max(1, round(present.iterations * factor)))
    elif (present.epochs or 1) > 1:
        corrections.local = msgspec.structs.replace(present, epochs=max(1, round((present.epochs or 1) * factor)))
    else:
        raise ConfigError("Clients train for one epoch: local training by epochs cannot be shorter.")


def server_rate(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    _require_single_model(experiment)
    corrections.server_rate *= positive_argument(action, "factor")


def robust_aggregator(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    _require_single_model(experiment)
    if isinstance(experiment.aggregator, DriftCorrection):
        raise ConfigError("Clients train with what this experiment's aggregator remembers: it cannot be replaced.")
    rule = robust_rule(action)
    msgspec.structs.replace(experiment, aggregator=rule)  # refuses it where too few updates come together
    corrections.aggregator = rule


def robust_rule(action: Action) -> Any:
    """Return the aggregator that a correction names."""
    table = {key: value for key, value in action.arguments.items() if key in ("fraction", "faulty", "keep")}
    return toml.decode_kind("aggregator", {"kind": action.arguments.get("rule"), **table}, kinds_of(AGGREGATORS))


def resample(corrections: ActiveCorrections, _: Action, experiment: Experiment) -> None:
    if experiment.participation == 1:
        raise ConfigError("All clients are asked in every round: there is no other cohort.")
    corrections.resample_cohort = True


def roll_back(corrections: ActiveCorrections, action: Action, experiment: Experiment) -> None:
    """Change no settings: `CorrectionApplier` restores the checkpoint."""


KINDS: Mapping[str, Callable[[ActiveCorrections, Action, Experiment], None]] = {
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


class CorrectionApplier:
    """Applies the prescribed corrections of a run round by round, and keeps the checkpoints they need in memory."""

    def __init__(self, experiment: Experiment, observer: Observer, *, saved: bool = False) -> None:
        self._experiment, self._observer, self._saved = experiment, observer, saved
        self._checkpoints: dict[int, ServerState] = {}
        self._restored: set[str] = set()  # whose checkpoint has been gone back to already

    def apply(self, actions: Iterable[Action], round_index: int, server: ServerState) -> ActiveCorrections:
        """Return the corrections for a round, and restore the server's state where one of them asks for it.

        A correction that cannot be applied is reported to the observer as refused.
        """
        corrections = ActiveCorrections()
        for action in actions:
            if action.kind == "checkpoint":
                if self._saved:
                    raise ConfigError(
                        "A run that is saved (checkpoint=) cannot be corrected by itself: what is in force is no part "
                        'of its state, and would be lost when it is resumed. Use Monitor(cure="suggest").'
                    )
                self._checkpoint(action.arguments["keep"], round_index - 1, server)
                continue
            try:
                self._apply_action(corrections, action, server)
            except ConfigError as error:
                self._observer.refused(action, str(error))
        return corrections

    def _apply_action(self, corrections: ActiveCorrections, action: Action, server: ServerState) -> None:
        apply = KINDS.get(action.kind)
        if apply is None:
            raise ConfigError(f"The lab does not know '{action.kind}'. Known: {', '.join(KINDS)}.")
        apply(corrections, action, self._experiment)
        name = str(action.arguments.get("id", action.at))  # one in force for many rounds goes back once
        if "restore" in action.arguments and name not in self._restored:
            self._restore(int(action.arguments["restore"]), server)
            self._restored.add(name)

    def _checkpoint(self, keep: Sequence[int], round_index: int, server: ServerState) -> None:
        now = copy.copy(server)
        now.model, now.memory, now.past = server.model.clone(), dict(server.memory), list(server.past)
        now.notes = copy.deepcopy(server.notes)
        self._checkpoints[round_index] = now
        self._checkpoints = {held: state for held, state in self._checkpoints.items() if held in keep}

    def _restore(self, round_index: int, server: ServerState) -> None:
        """Restore a checkpoint, except for the virtual clock, the clients in progress, and the privacy spent."""
        if round_index not in self._checkpoints:
            held = ", ".join(map(str, sorted(self._checkpoints))) or "none"
            raise ConfigError(f"There is no checkpoint of round {round_index} any more. Kept: {held}.")
        saved = self._checkpoints[round_index]
        flying = {key: tensor for key, tensor in server.memory.items() if key.startswith(version_key(""))}
        under_way = {key: note for key, note in server.notes.items() if key in KEPT_NOTES}
        server.model, server.past = saved.model.clone(), list(saved.past)
        server.memory = {k: t for k, t in saved.memory.items() if not k.startswith(version_key(""))} | flying
        server.notes = {k: n for k, n in copy.deepcopy(saved.notes).items() if k not in KEPT_NOTES} | under_way


def _local_settings(corrections: ActiveCorrections, experiment: Experiment) -> Local:
    return experiment.local if corrections.local is None else corrections.local


def _require_single_model(experiment: Experiment) -> None:
    if isinstance(experiment.topology, Clustered):
        raise ConfigError("Clusters have models of their own, by a rule of their own: there is no one server step.")
