# SPDX-License-Identifier: Apache-2.0
"""The corrections of one round as a server applies them, to what clients send and to the model that it starts from.

A server that does not own its clients' training code (a plain loop, Flower, NVFlare) can leave updates out, weight
them, clip them, average them by a robust rule, and return to an earlier model. It refuses what would have to happen in
the clients (gradient clipping, another learning rate), and gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fedvitals.diagnosis.corrections.catalog import positive_argument, target_of
from fedvitals.diagnosis.corrections.correction_trials import FIRST_MODEL
from fedvitals.errors import ConfigError
from fedvitals.protocols import Observer
from fedvitals.records import Action

Model = TypeVar("Model")
RobustRule = Callable[[Any], Any]  # [vectors] → vector


@dataclass
class CorrectionsInForce:
    """The corrections in force in one round; by default none."""

    quarantined: set[str] = field(default_factory=set)
    factors: dict[str, float] = field(default_factory=dict)  # of a client's weight
    samples: dict[str, int] = field(default_factory=dict)  # replaces the count that a client claims
    max_update_norm: float | None = None
    server_rate: float = 1.0
    robust: RobustRule | None = None

    @property
    def of_replies(self) -> bool:
        """Return whether any correction changes an update or its weight."""
        return bool(self.factors or self.samples or self.max_update_norm is not None)


def quarantine(in_force: CorrectionsInForce, action: Action) -> None:
    """Leave the client's updates out."""
    in_force.quarantined.add(target_of(action, "a client"))


def reweight(in_force: CorrectionsInForce, action: Action) -> None:
    """Change the client's sample count, or multiply its weight by a factor."""
    node = target_of(action, "a client")
    if "samples" in action.arguments:
        in_force.samples[node] = int(action.arguments["samples"])
    else:
        in_force.factors[node] = in_force.factors.get(node, 1.0) * positive_argument(action, "factor")


def clip_updates(in_force: CorrectionsInForce, action: Action) -> None:
    """Limit the norm of updates."""
    in_force.max_update_norm = positive_argument(action, "norm")


def server_rate(in_force: CorrectionsInForce, action: Action) -> None:
    """Multiply the server's step by a factor."""
    in_force.server_rate *= positive_argument(action, "factor")


def robust_aggregator(in_force: CorrectionsInForce, action: Action) -> None:
    """Replace the average by a robust rule."""
    from fedvitals.kernels.ranked_means import median, trimmed_mean  # noqa: PLC0415 - imports torch

    rule = action.arguments.get("rule")
    if rule == "median":
        in_force.robust = median
    elif rule == "trimmed_mean":
        fraction = positive_argument(action, "fraction")
        in_force.robust = lambda states: trimmed_mean(states, fraction)
    else:
        raise ConfigError(f"Unknown robust rule {rule!r}. Known: median, trimmed_mean.")


def roll_back(in_force: CorrectionsInForce, action: Action) -> None:
    """Do nothing here: the model is restored elsewhere."""


KINDS: Mapping[str, Callable[[CorrectionsInForce, Action], None]] = {
    function.__name__: function
    for function in (quarantine, reweight, clip_updates, server_rate, robust_aggregator, roll_back)
}
TENSOR_KINDS = ("clip_updates", "server_rate", "robust_aggregator")  # corrections that compute with tensors


class FollowedCorrections(Generic[Model]):
    """Follows the prescribed actions round by round.

    `in_force` are the corrections of the round, `restored` the model to start from, if that is an earlier one.
    `observer` is notified of actions that cannot be applied, and why. `obstacle` returns why this server cannot apply
    an action, or None if it can.
    """

    def __init__(self, observer: Observer, obstacle: Callable[[Action], str | None]) -> None:
        self._observer, self._obstacle = observer, obstacle
        self._checkpoints: dict[int, Model] = {}  # by the round after which this was the model
        self._restored_by: set[str] = set()  # actions whose model has already been restored
        self._begun = False
        self.in_force = CorrectionsInForce()
        self.restored: Model | None = None

    def follow(self, actions: Iterable[Action], round_index: int, model: Model | None) -> None:
        """Set the corrections of a round. `model`: the model it starts from, kept as a checkpoint."""
        self.in_force, self.restored = CorrectionsInForce(), None
        for action in actions:
            if action.kind == "checkpoint":
                self._checkpoint(action.arguments["keep"], round_index - 1, model)
                continue
            try:
                self._apply(action)
            except ConfigError as error:
                self._observer.refused(action, str(error))

    def _checkpoint(self, keep: Iterable[int], round_index: int, model: Model | None) -> None:
        if model is not None:
            self._checkpoints[round_index] = model
            if not self._begun:  # rounds may be counted from 1
                self._checkpoints[FIRST_MODEL], self._begun = model, True
        self._checkpoints = {held: self._checkpoints[held] for held in keep if held in self._checkpoints}

    def _apply(self, action: Action) -> None:
        apply = KINDS.get(action.kind)
        if apply is None:
            raise ConfigError(f"'{action.kind}' is up to the clients, which train by code of their own.")
        why = self._obstacle(action)
        if why is not None:
            raise ConfigError(why)
        name = str(action.arguments.get("id", action.at))  # an action in force for several rounds restores once
        if "restore" in action.arguments and name not in self._restored_by:
            round_index = int(action.arguments["restore"])
            if round_index not in self._checkpoints:
                held = ", ".join(map(str, sorted(self._checkpoints))) or "none"
                raise ConfigError(f"There is no checkpoint of round {round_index}. Kept: {held}.")
            self.restored = self._checkpoints[round_index]
            self._restored_by.add(name)
        apply(self.in_force, action)
