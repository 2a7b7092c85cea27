# SPDX-License-Identifier: Apache-2.0
"""One model without a federation: `with fv.watch(model, optimizer, "one.db"):` around a plain training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedvitals.errors import ConfigError
from fedvitals.hosts.loop.model_run import ModelRun, train_for_federation
from fedvitals.hosts.own_failures import guarded
from fedvitals.monitor.monitor import Monitor
from fedvitals.probes.ranks import parameters_of
from fedvitals.scope import current


@contextmanager
def watch(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    store: str | os.PathLike[str] = "runs.db",
    *,
    run: str = "watch",
    steps: int = 100,
    data: Any = None,
    loss: Callable[..., Any] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """Watch one model's training: `with fv.watch(model, optimizer, "one.db"):`.

    Inside a client that is watched already, such as the handler of a Flower app with `fv.flower.client_mod`, the
    model is that client's: its numbers belong to the federation's run, and nothing is stored here. Of several
    processes that train the model together, the one of the lowest rank stores it.

    Args:
        model: The module that trains.
        optimizer: The optimiser; by default the one that steps the model's parameters is detected.
        store: The file that the run is written to, or an address.
        run: A name for people.
        steps: Optimiser steps that count as one round of the node «model».
        data: Samples to measure the model's fit on, as `Monitor.client` takes them.
        loss: The loss function for these.
        settings: Settings of `fv.Monitor`: probes, sinks, detectors, privacy, config, seed...

    Returns:
        A context manager that gives the monitor, or the client's scope.
    """
    if isinstance(optimizer, str | os.PathLike):
        raise ConfigError(f"watch(model, optimizer, store) got {optimizer!r} for the optimiser. Name it as store=...")
    if steps < 1:
        raise ConfigError(f"watch(steps=) needs at least 1 step per round, got {steps}.")
    around = current.get()
    if around is not None and around.watch is not None:
        guarded("talking to other processes", lambda: train_for_federation(model))
        watching = around.watch(model, data=data, loss=loss)
    else:
        watching = _alone(model, optimizer, Monitor(store, run, **settings), steps, data, loss)
    with watching as observer:
        yield observer


@contextmanager
def _alone(
    model: nn.Module, optimizer: Optimizer | None, monitor: Monitor, steps: int, data: Any, loss: Any
) -> Iterator[Monitor]:
    own = {id(parameter) for _, parameter in parameters_of(model)}
    rounds = ModelRun(monitor, model, data, loss)
    count, ended = 0, False  # steps in the round; whether a round has ended

    def after_step(stepping: Optimizer, *_: Any) -> None:
        nonlocal count, ended
        if stepping is not optimizer and not any(id(p) in own for g in stepping.param_groups for p in g["params"]):
            return
        count += 1
        if count % steps == 0 and rounds.is_divided:
            # After a step, not before: torch iterates over the hooks that closing a client removes.
            rounds.end()
            rounds.begin()
            count, ended = 0, True

    rounds.begin()
    handle = register_optimizer_step_post_hook(after_step)
    failure: BaseException | None = None
    try:
        yield monitor
    except BaseException as error:
        failure = error
        raise
    finally:
        handle.remove()
        if ended and not count and failure is None:
            monitor.host.discard()  # the last window has just closed, and no step followed
        else:
            rounds.end(failure)
        monitor.close()
