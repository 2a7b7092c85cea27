# SPDX-License-Identifier: Apache-2.0
"""The callback for Lightning's Trainer: notifies a `TrainerWatch` of trainings, epochs and steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    from lightning.pytorch import Callback as LightningCallback
except ModuleNotFoundError as missing:
    try:
        from pytorch_lightning import Callback as LightningCallback  # type: ignore[assignment]
    except ModuleNotFoundError:
        raise missing from None

from fedvitals.hosts.own_failures import guarded
from fedvitals.hosts.trainer_watch import EVALUATED, TrainerWatch
from fedvitals.monitor.monitor import Monitor
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.records import AnyName

LOSSES = ("loss", "train_loss", "train_loss_epoch", "train/loss", "train/loss_epoch", "training_loss")


class Callback(LightningCallback):
    """Watches what a Trainer trains. It changes nothing, and an error in fedvitals does not stop the training.

    Inside a client that is watched (in a Flower app or an NVFlare task) the model is that client's, and
    no monitor is needed. Otherwise the training is a run of its own in `monitor`.

    Args:
        monitor: A `fv.Monitor`, a worker's observer, or the file of a store; None inside a client that is
            watched.
        client: The name of the client that trains, inside `monitor.round(...)`.
        steps: Optimiser steps in a round, if the training is a run of its own; by default its rounds are the epochs
            or, if the trainer validates within an epoch, the stretches between two validations.
        data: The client's own samples, as in `Monitor.client`.
        loss: The loss function, as in `Monitor.client`.
        held_back: Samples that are not trained on: the loss on them is measured after each round of a run of its own.
            Inside a federation pass them to `monitor.round`.
        settings: Settings of `fv.Monitor`, if `monitor` is a file.
    """

    def __init__(
        self,
        monitor: Monitor | WorkerObserver | str | os.PathLike[str] | None = "runs.db",
        *,
        client: AnyName | None = None,
        steps: int | None = None,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        held_back: Any = None,
        **settings: Any,
    ) -> None:
        self._watch = TrainerWatch(monitor, client, steps, data, loss, settings, LOSSES, held_back=held_back)
        self._steps = 0  # of all optimisers so far

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch the model, which is prepared for all processes by now."""
        self._steps = trainer.global_step
        guarded("beginning a training", lambda: self._watch.begin(pl_module, range(trainer.world_size)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Begin a round unless one is open."""
        guarded("ending a round", self._watch.close_round)
        guarded("beginning a round", self._watch.step_begins)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Count the optimiser step; with accumulated gradients not every batch ends one."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            guarded("counting steps", self._watch.step_ended)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the round: the training before a validation is over."""
        if trainer.sanity_checking:
            return
        if trainer.val_check_batch < trainer.num_training_batches:
            guarded("logging", lambda: self._log(trainer, evaluated=False))
        guarded("ending a round", self._watch.boundary)
        guarded("ending a round", self._watch.close_round)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Record the metrics of the validation."""
        if not trainer.sanity_checking:
            guarded("logging", lambda: self._log(trainer, evaluated=True))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Record the metrics of the epoch, and let the round end."""
        guarded("logging", lambda: self._log(trainer, evaluated=False))
        guarded("ending a round", self._watch.boundary)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Stop watching the model."""
        guarded("ending a training", self._watch.end)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Stop watching the model; the exception is recorded with its client."""
        guarded("ending a training", lambda: self._watch.end(exception))

    def _log(self, trainer: Any, *, evaluated: bool) -> None:
        """Log what the module has logged: of the validation, or of the training."""
        metrics = trainer.callback_metrics
        self._watch.log({name: metrics[name] for name in metrics if name.startswith(EVALUATED) == evaluated})
