# SPDX-License-Identifier: Apache-2.0
"""Corrections in a plain loop: one line between the clients' training and the average.

    updates, weights = monitor.corrections().apply(updates, weights)

`CorrectionTrials` decides and records what is in force, and why, as for every host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedvitals.diagnosis.corrections.followed import CorrectionsInForce, FollowedCorrections
from fedvitals.errors import ConfigError
from fedvitals.probes.backends import as_array, torch_is_loaded
from fedvitals.records import Action, client_name

if TYPE_CHECKING:
    from fedvitals.monitor.host import HostObserver

Name = TypeVar("Name")


class LoopCorrections:
    """The corrections of a plain loop's open round; `actions` are those in force."""

    def __init__(self, host: HostObserver) -> None:
        self._host = host
        self._round: int | None = None  # the round last asked about
        self._by_models = False  # whether the loop averages models, not differences
        self.actions: Sequence[Action] = ()
        self._followed = FollowedCorrections[Any](host, self._obstacle)

    def ask(self) -> None:
        """Ask once per round which corrections are in force, and keep them in `actions`."""
        opened = self._host.monitored.rounds.open
        round_index = None if opened is None else opened.scope.round
        if round_index is None:
            self._host.guarded("corrections()", _outside_round)
            self._round, self.actions = None, ()
        elif round_index != self._round:
            self._round, self.actions = round_index, self._host.prescribed(round_index)

    def apply(
        self, updates: Mapping[Name, Any], weights: Mapping[Name, float] | None = None, *, start: Any = None
    ) -> tuple[dict[Name, Any], dict[Name, float]]:
        """Return the updates to average and their weights, as corrected.

        The updates are measured here, so that `Monitor.updates` need not be called as well. A robust rule gives every
        client the same update, and returning to an earlier model gives every client that model: your own average of
        equal updates is then the intended result, whatever the weights.

        Args:
            updates: What each client sent, by client, in one of the forms that `Monitor.updates` takes.
            weights: Your averaging weights, by client; by default 1 each.
            start: The model that clients were sent (a module, or a state or arrays like the updates), if `updates`
                holds whole models; without it, a correction that returns to an earlier model is refused.

        Returns:
            The updates and the weights, two mappings by client. Excluded clients are in neither.
        """
        sent = dict(updates)
        weighed = dict.fromkeys(sent, 1.0) if weights is None else dict(weights)
        if self._round is None:
            return sent, weighed
        correct = functools.partial(self._corrected, self._round, sent, weighed, start)
        corrected: tuple[dict[Name, Any], dict[Name, float]] | None = self._host.guarded("corrections()", correct)
        return (sent, weighed) if corrected is None else corrected

    def _corrected(
        self, round_index: int, sent: dict[Name, Any], weights: dict[Name, float], start: Any
    ) -> tuple[dict[Name, Any], dict[Name, float]] | None:
        begun = start.state_dict() if hasattr(start, "state_dict") else start
        self._by_models = begun is not None
        unusable = self._measured(round_index, sent, begun)
        self._followed.follow(self.actions, round_index, None if not self.actions else _copied(begun))
        in_force, restored = self._followed.in_force, self._followed.restored
        if restored is not None:
            return {name: _copied(restored) for name in sent}, weights
        left_out = unusable | in_force.quarantined
        kept = {name: update for name, update in sent.items() if client_name(name) not in left_out}
        if not kept:
            raise ConfigError("Every update of the round would be left out: they are averaged as they came.")
        changed = _changed_updates(in_force, kept, begun)
        return changed, {name: _weight(in_force, name, weights) for name in kept if name in weights}

    def _measured(self, round_index: int, sent: Mapping[Name, Any], begun: Any) -> set[str]:
        """Measure the updates, and return the clients whose update cannot be used."""
        differences = sent
        if begun is not None:
            differences = {name: _each(lambda now, before: now - before, own, begun) for name, own in sent.items()}
        actions = self._host.any_updates(round_index, differences)
        return {action.target for action in actions if action.kind == "exclude" and action.target is not None}

    def _obstacle(self, action: Action) -> str | None:
        if "restore" in action.arguments and not self._by_models:
            return f"'{action.kind}' goes back to an earlier model, which needs apply(models, weights, start=model)."
        if action.kind == "robust_aggregator" and not torch_is_loaded():
            return f"'{action.kind}' needs torch, which this loop has not imported."
        return None


def _outside_round() -> None:
    raise ConfigError("monitor.corrections() belongs inside monitor.round(...): nothing is corrected outside.")


def _weight(in_force: CorrectionsInForce, name: Any, weights: Mapping[Any, float]) -> float:
    """Return a client's corrected weight. A sample count that is not trusted becomes the median of the others'."""
    node = client_name(name)
    weight = weights[name]
    if node in in_force.samples and len(weights) > 1:
        weight = float(np.median([own for other, own in weights.items() if other != name]))
    return weight * in_force.factors[node] if node in in_force.factors else weight


def _changed_updates(in_force: CorrectionsInForce, updates: dict[Name, Any], begun: Any) -> dict[Name, Any]:
    """Return the updates cut to the longest norm, then made equal by a robust rule, then scaled by the server rate."""
    if in_force.max_update_norm is not None:
        norms = {name: _norm(update, begun) for name, update in updates.items()}
        updates = {
            name: _scaled(update, begun, in_force.max_update_norm / norms[name])
            if norms[name] > in_force.max_update_norm
            else update
            for name, update in updates.items()
        }
    if in_force.robust is not None:
        updates = _robust(in_force.robust, updates)
    if in_force.server_rate != 1:
        updates = {name: _scaled(update, begun, in_force.server_rate) for name, update in updates.items()}
    return updates


def _each(change: Callable[..., Any], update: Any, *others: Any) -> Any:
    """Return an update in its own form, with `change` applied to each floating array and its counterparts in others."""

    def changed(array: Any, *beside: Any) -> Any:
        array = array if hasattr(array, "dtype") else np.asarray(array)
        return change(array, *beside) if _is_floating(array) else array

    if isinstance(update, Mapping):
        return {name: changed(array, *(other[name] for other in others)) for name, array in update.items()}
    if hasattr(update, "shape"):
        return changed(update, *others)
    return [changed(*arrays) for arrays in zip(update, *others, strict=True)]


def _is_floating(array: Any) -> bool:
    """Return whether an array is trained or averaged: integer arrays, such as batch counters, are not."""
    return bool(array.is_floating_point()) if hasattr(array, "is_floating_point") else array.dtype.kind == "f"


def _copied(model: Any) -> Any:
    return None if model is None else _each(lambda array: array.clone() if hasattr(array, "clone") else +array, model)


def _scaled(update: Any, begun: Any, share: float) -> Any:
    if begun is None:
        return _each(lambda array: array * share, update)
    return _each(lambda array, before: before + (array - before) * share, update, begun)


def _norm(update: Any, begun: Any) -> float:
    squares: list[float] = []

    def add(array: Any, *before: Any) -> None:
        change = as_array(array) - as_array(before[0]) if before else as_array(array)
        squares.append(float(np.sum(np.square(change))))

    _each(add, update, *(() if begun is None else (begun,)))
    return math.sqrt(sum(squares))


def _robust(rule: Callable[[Any], Any], updates: dict[Name, Any]) -> dict[Name, Any]:
    """Return the updates, each replaced by the robust aggregate of all."""
    import torch  # noqa: PLC0415 - the loop has imported it

    vectors = []
    for update in updates.values():
        parts: list[Any] = []
        _each(lambda array, parts=parts: parts.append(torch.as_tensor(array).detach().reshape(-1)), update)
        vectors.append(torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]))
    aggregate = rule(vectors)
    results: dict[Name, Any] = {}
    for name, update in updates.items():
        rest = [aggregate]

        def take(array: Any, rest: list[Any] = rest) -> Any:
            part, rest[0] = rest[0].tensor_split([int(np.prod(array.shape))])
            like = part.reshape(tuple(array.shape))
            return like.to(array.dtype) if hasattr(array, "is_floating_point") else like.numpy().astype(array.dtype)

        results[name] = _each(take, update)
    return results
