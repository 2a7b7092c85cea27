# SPDX-License-Identifier: Apache-2.0
"""The callback for `transformers.Trainer`: notifies a `TrainerWatch` of trainings, epochs and steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainingArguments

from fedvitals.hosts.own_failures import guarded
from fedvitals.hosts.trainer_watch import TrainerWatch
from fedvitals.monitor.monitor import Monitor
from fedvitals.monitor.workers import WorkerObserver
from fedvitals.records import AnyName


class Callback(TrainerCallback):
    """Watches what a Trainer trains. It changes nothing, and an error in fedvitals does not stop the training.

    Inside a client that is watched (in a Flower app or an NVFlare task) the model is that client's, and
    no monitor is needed. Otherwise the training is a run of its own in `monitor`.

    Args:
        monitor: A `fv.Monitor`, a worker's observer, or the file of a store; None inside a client that is
            watched.
        client: The name of the client that trains, inside `monitor.round(...)`.
        steps: Optimiser steps in a round, if the training is a run of its own; by default its rounds are the epochs
            or, with `eval_strategy="steps"`, the stretches between two evaluations.
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
        self._watch = TrainerWatch(monitor, client, steps, data, loss, settings, held_back=held_back)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin to watch the model, which is prepared for all processes by now."""
        guarded("beginning a training", lambda: self._watch.begin(kwargs["model"], range(args.world_size)))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """End the round of the epoch before: all its metrics have been logged."""
        guarded("ending a round", self._watch.close_round)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin a round unless one is open. Called before the first batch of an optimiser step."""
        guarded("ending a round", self._watch.close_round)
        guarded("beginning a round", self._watch.step_begins)

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Count the step. If an evaluation follows, the round ends once its metrics have been logged."""
        guarded("counting steps", self._watch.step_ended)
        if _evaluates_between_steps(args) and control.should_evaluate:
            guarded("ending a round", self._watch.boundary)

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Let the round end once the metrics that follow, such as those of an evaluation, have been logged."""
        if not _evaluates_between_steps(args):
            guarded("ending a round", self._watch.boundary)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Record the metrics that the trainer logs."""
        guarded("logging", lambda: self._watch.log(logs or {}))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """End the round: once a batch has been evaluated, the training before it is over."""
        guarded("ending a round", self._watch.close_round)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Stop watching the model."""
        guarded("ending a training", self._watch.end)


def _evaluates_between_steps(args: TrainingArguments) -> bool:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "steps"
