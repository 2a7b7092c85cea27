# SPDX-License-Identifier: Apache-2.0
"""The callback for Lightning's Trainer: tells a `TrainerWatch` when a training, its epochs and its steps begin."""

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
    """Watches what a Trainer trains; nothing of it is changed, and an error of ours does not stop it.

    Inside of a client that somebody watches, as of a Flower app or an NVFlare task, the model is that client's, and no
    monitor is needed. Inside of `monitor.round(...)`, `client` names the client that trains. Otherwise the training is
    a run of its own in `monitor`, a `fv.Monitor` or the file of a store, whose `settings` may follow. Its rounds are
    the epochs, or, where the trainer validates within an epoch, the stretches between two validations, or `steps`
    optimiser steps each. `data` and `loss` are those of `Monitor.client`.
    """

    def __init__(
        self,
        monitor: Monitor | WorkerObserver | str | os.PathLike[str] | None = "runs.db",
        *,
        client: AnyName | None = None,
        steps: int | None = None,
        data: Any = None,
        loss: Callable[..., Any] | None = None,
        **settings: Any,
    ) -> None:
        self._watch = TrainerWatch(monitor, client, steps, data, loss, settings, LOSSES)
        self._steps = 0  # of the optimisers so far

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A training begins; its model is prepared for all processes."""
        self._steps = trainer.global_step
        guarded("beginning a training", lambda: self._watch.begin(pl_module, range(trainer.world_size)))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """A batch begins."""
        guarded("ending a round", self._watch.close_round)
        guarded("beginning a round", self._watch.step_begins)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """A batch is over; with it an optimiser step, unless gradients are accumulated."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            guarded("counting steps", self._watch.step_ended)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """A validation begins: the training before it is over."""
        if trainer.sanity_checking:
            return
        if trainer.val_check_batch < trainer.num_training_batches:
            guarded("logging", lambda: self._log(trainer, evaluated=False))
        guarded("ending a round", self._watch.boundary)
        guarded("ending a round", self._watch.close_round)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """A validation is over, and its metrics are known."""
        if not trainer.sanity_checking:
            guarded("logging", lambda: self._log(trainer, evaluated=True))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """An epoch is over, and its metrics are known."""
        guarded("logging", lambda: self._log(trainer, evaluated=False))
        guarded("ending a round", self._watch.boundary)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """The training is over."""
        guarded("ending a training", self._watch.end)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """The training was left by an exception."""
        guarded("ending a training", lambda: self._watch.end(exception))

    def _log(self, trainer: Any, *, evaluated: bool) -> None:
        """Log what the module has logged: of the validation, or of the training."""
        metrics = trainer.callback_metrics
        self._watch.log({name: metrics[name] for name in metrics if name.startswith(EVALUATED) == evaluated})
