# SPDX-License-Identifier: Apache-2.0
"""Shared by the callbacks for trainers: watches a trainer's model, inside a federation's client or alone.

Inside an open client (`monitor.client`, a Flower app with `client_mod`, an NVFlare task) the model belongs to that
client. Inside an open round, a client of the round is opened for the training. Otherwise the training is a run of its
own, and its parts are the rounds of one client.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any

from torch import Tensor, nn

from fedvitals.errors import ConfigError
from fedvitals.hosts.loop.model_run import NODE, ModelRun, train_for_federation
from fedvitals.hosts.own_failures import guarded
from fedvitals.monitor.monitor import Monitor
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.probes.ranks import train_together
from fedvitals.records import AnyName, node_name
from fedvitals.scope import current

logger = logging.getLogger("fedvitals")
EVALUATED = ("eval_", "eval/", "val_", "val/", "valid_", "valid/", "validation_", "validation/")
UNNAMED = "fedvitals: a client trains in this round, and is called «%s». Name it: Callback(monitor, client='c7')."
PROGRESS = ("epoch", "step", "global_step")
MEANINGS = {"loss": "loss", "accuracy": "accuracy", "acc": "accuracy"}  # names in an evaluation


class TrainerWatch:
    """Watches one trainer's models, from `begin` to `end`; in between, `boundary` ends a round of a run of its own.

    `monitor`: a `Monitor`, the observer of a worker process, or the store of a new run. `client`: the name of the
    client if none is open. `steps`: optimiser steps in a round of a run of its own; None: as the trainer chooses.
    `settings`: of `Monitor`, if a store is given. `losses`: the trainer's names for the training loss. `held_back`:
    samples measured after each round of a run of its own.
    """

    def __init__(
        self,
        monitor: Monitor | WorkerObserver | str | os.PathLike[str] | None,
        client: AnyName | None,
        steps: int | None,
        data: Any,
        loss: Callable[..., Any] | None,
        settings: Mapping[str, Any],
        losses: Sequence[str] = ("loss",),
        held_back: Any = None,
    ) -> None:
        if not isinstance(monitor, Monitor | WorkerObserver | str | os.PathLike | None):
            raise ConfigError(f"Callback(monitor) takes a fv.Monitor or the file of a store; got {monitor!r}.")
        if isinstance(monitor, Monitor | WorkerObserver) and settings:
            raise ConfigError(
                f"Callback(monitor, {', '.join(settings)}=...): settings belong to the fv.Monitor itself."
            )
        if steps is not None and steps < 1:
            raise ConfigError(f"Callback(steps=) needs at least 1 step per round, got {steps}.")
        self._monitor: Any = monitor
        self._client, self._named = NODE if client is None else node_name(client), client is not None
        self.steps, self._data, self._loss, self._settings = steps, data, loss, dict(settings)
        self._losses, self._held_back = losses, held_back
        self._open = ExitStack()  # inside a federation: the client's scope, or the context in which its model trains
        self._observer: Any = None  # receives the client's metrics
        self._rounds: ModelRun | None = None  # of a run of its own
        self._in_round = self._over = False  # whether a round is open, and whether it ends with the next call
        self._count = 0  # steps in it
        self._logged: dict[str, list[float]] = {}

    # -- what a callback calls ----------------------------------------------------------------------------------------

    def begin(self, model: nn.Module, ranks: Sequence[int] = ()) -> None:
        """Begin a training. `ranks`: the processes that train the model together, if the model does not say so."""
        self._logged.clear()
        self.end()  # of a training that was left by an exception
        if len(ranks) > 1:
            train_together(model, ranks)
        around = current.get()
        own = {"data": self._data, "loss": self._loss}
        if around is not None and around.watch is not None:
            self._observer = self._open.enter_context(around.watch(model, **own))
        elif isinstance(self._monitor, WorkerObserver) or self._is_in_round(around):
            if not self._named:
                logger.warning(UNNAMED, self._client)
            self._observer = self._open.enter_context(self._monitor.client(self._client, model, **own))
        else:
            self._begin_run(model)
            return
        train_for_federation(model)

    def step_begins(self) -> None:
        """Note that the batches of an optimiser step follow."""
        if self._rounds is not None and not self._in_round:
            self._rounds.begin()
            self._in_round, self._over, self._count = True, False, 0

    def step_ended(self) -> None:
        """Note that an optimiser step is over."""
        self._count += 1
        if self.steps is not None and self._count >= self.steps:
            self._over = True

    def boundary(self) -> None:
        """Note the end of the trainer's own unit, an epoch or the way to an evaluation; its last metrics may follow."""
        self._over |= self.steps is None

    def close_round(self) -> None:
        """Close the round of a run of its own, if it is over."""
        if self._in_round and self._over and self._rounds is not None:
            self._over = False
            if self._rounds.is_divided:
                self._close(None)

    def log(self, values: Mapping[str, Any]) -> None:
        """Record metrics that the trainer logs: per round the mean of losses, and the last value of everything else."""
        outside = isinstance(self._monitor, Monitor) and current.get() is None and self._observer is None
        observer = self._monitor if outside else self._observer  # `evaluate()` may be called after `train()`
        for name, value in _numbers(values).items() if observer is not None else ():
            alone = self._rounds is not None or outside
            if alone and name.startswith(EVALUATED):
                self.close_round()
                observer.log({_meaning(name): value})  # of the model rather than its training
            elif alone and not self._in_round:
                observer.log({self._own_name(name): value}, node=self._client)
            else:
                kept = self._logged.setdefault(self._own_name(name), [])
                kept[:] = [*kept, value] if "loss" in name else [value]

    def end(self, error: BaseException | None = None) -> None:
        """End the training; `error` is the exception that it raised."""
        atexit.unregister(self._end_at_exit)
        if self._in_round:
            self._close(error)
        elif self._observer is not None and self._rounds is None:
            self._tell_logged()
        if error is None:
            self._open.close()
        else:
            self._open.__exit__(type(error), error, error.__traceback__)
        if self._rounds is not None and self._observer is not self._monitor:
            self._observer.close()
        self._observer = self._rounds = None

    # -- a run of its own ---------------------------------------------------------------------------------------------

    def _begin_run(self, model: nn.Module) -> None:
        monitor = self._monitor
        if not isinstance(monitor, Monitor):
            monitor = Monitor(monitor, **{"run": "trainer", **self._settings})
        atexit.register(self._end_at_exit)  # runs before the monitor's own, which was registered earlier
        self._observer = monitor
        self._rounds = ModelRun(monitor, model, self._data, self._loss, self._client, self._held_back)

    def _is_in_round(self, around: Any) -> bool:
        """Return whether a round of the monitor is open here."""
        mine = isinstance(self._monitor, Monitor) and around is not None and around.run == self._monitor.run.id
        return bool(mine and around.round is not None)

    def _close(self, error: BaseException | None) -> None:
        self._tell_logged()
        self._in_round = False
        if self._rounds is not None:
            self._rounds.end(error)

    def _tell_logged(self) -> None:
        """Log what the trainer has logged, once for the client and its round."""
        own = {name: sum(values) / len(values) for name, values in self._logged.items()}
        self._logged.clear()
        if own:
            self._observer.log(own)

    def _own_name(self, name: str) -> str:
        """Return the stored name of a metric of the training."""
        return "loss" if name in self._losses else name

    def _end_at_exit(self) -> None:
        """End a training that was left by an exception, which ended the program."""
        guarded("ending a training", lambda: self.end(getattr(sys, "last_value", None)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state sent to processes that a trainer starts, in which nothing is open."""
        fields = {name: value for name, value in self.__dict__.items() if name not in ("_open", "_observer", "_rounds")}
        return {**fields, "_open": ExitStack(), "_observer": None, "_rounds": None, "_in_round": False, "_logged": {}}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric values, without those on the training's progress."""
    single = {
        str(name): value
        for name, value in values.items()
        if name not in PROGRESS
        and (
            (isinstance(value, Real) and not isinstance(value, bool))
            or (isinstance(value, Tensor) and value.numel() == 1)
        )
    }
    return {name: float(value) for name, value in single.items()}


def _meaning(name: str) -> str:
    """Return the stored name of an evaluation's metric: «eval_loss» is the model's `loss`."""
    prefix = next(prefix for prefix in EVALUATED if name.startswith(prefix))
    return MEANINGS.get(name.removeprefix(prefix), name)
