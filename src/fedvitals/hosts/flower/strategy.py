# SPDX-License-Identifier: Apache-2.0
"""Hooks on a strategy of the Message API: when rounds begin and end, what was aggregated, and how long it took.

They are set on the instance, which keeps its class, methods and results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedvitals.hosts.flower.grid_hooks import grid_hooked
from fedvitals.hosts.flower.hooks import evaluation_hooks, set_hooks
from fedvitals.hosts.flower.server_rounds import EVALUATE, TRAIN, ServerRounds

OnGrid = Callable[[Any], None]  # called with the grid, before anything is sent


def watch_strategy(strategy: Any, server_rounds: ServerRounds, begin: OnGrid) -> None:
    """Hook the methods of a strategy; `start` may be the user's own."""
    hooks: dict[str, Callable[..., Any]] = {
        "start": functools.partial(_start, begin),
        "configure_train": _configure_train,
        "aggregate_train": _aggregate_train,
        **evaluation_hooks(_record_evaluation),
    }
    set_hooks(strategy, server_rounds, hooks)
    server_rounds.hooked = server_rounds.corrections.aggregates = True
    server_rounds.same_metrics = isinstance(strategy, FedAvg)


def _start(begin: OnGrid, start: Callable[..., Any], server_rounds: ServerRounds, *args: Any, **more: Any) -> Any:
    grid = more.get("grid", args[0] if args else None)
    args, more = _with_evaluation(start, server_rounds, args, more)
    begin(grid)
    with grid_hooked(grid, server_rounds):
        try:
            return start(*args, **more)
        except BaseException as error:
            server_rounds.failed(error)
            raise
        finally:
            server_rounds.close()


def _with_evaluation(
    start: Callable[..., Any], server_rounds: ServerRounds, args: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same arguments, with the server's own evaluation timed and recorded, if there is one."""
    try:
        bound = inspect.signature(start).bind(*args, **more)
    except (TypeError, ValueError):
        return args, more  # Flower itself reports what is wrong
    evaluate = bound.arguments.get("evaluate_fn")
    if not callable(evaluate):
        return args, more
    server_rounds.evaluates = True

    @functools.wraps(evaluate)
    def recorded(server_round: int, *rest: Any, **named: Any) -> Any:
        with server_rounds.busy_with(EVALUATE):
            evaluation = evaluate(server_round, *rest, **named)
        _record_evaluation(server_rounds, evaluation, best=True)
        return evaluation

    bound.arguments["evaluate_fn"] = recorded
    return bound.args, bound.kwargs


def _configure_train(
    configure: Callable[..., Any],
    server_rounds: ServerRounds,
    server_round: int,
    arrays: ArrayRecord,
    *rest: Any,
    **more: Any,
) -> Iterable[Message]:
    server_rounds.begin(server_round, arrays)
    messages: Iterable[Message] = configure(server_round, server_rounds.start_of(arrays), *rest, **more)
    return messages


def _aggregate_train(
    aggregate: Callable[..., Any],
    server_rounds: ServerRounds,
    server_round: int,
    replies: Iterable[Message],
    *rest: Any,
    **more: Any,
) -> Any:
    received = server_rounds.fitting([*replies], entries=server_rounds.same_metrics)
    taken = server_rounds.robust(received)
    server_rounds.record_on_tape(lambda tape: tape.aggregating(taken, changed=taken is not received))
    with server_rounds.aggregating(TRAIN):
        result = aggregate(server_round, taken, *rest, **more)
    own, metrics = (*result, None, None)[:2] if isinstance(result, tuple) else (None, None)
    server_rounds.record_train_metrics(metrics)
    if own is None:
        server_rounds.nothing_aggregated()
    if not isinstance(own, ArrayRecord):
        server_rounds.record_on_tape(lambda tape: tape.aggregated(None, None, metrics))
        return result
    model = server_rounds.aggregated(own)
    server_rounds.record_on_tape(lambda tape: tape.aggregated(own, model, metrics))
    return result if model is own else (model, *result[1:])


def _record_evaluation(server_rounds: ServerRounds, evaluation: Any, *, best: bool) -> None:
    if isinstance(evaluation, MetricRecord):
        server_rounds.record_metrics(evaluation, best=best)
