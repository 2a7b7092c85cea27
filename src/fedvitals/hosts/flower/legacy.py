# SPDX-License-Identifier: Apache-2.0
"""Hooks on a strategy of Flower's older API (`flwr.server.strategy`), whose clients are NumPyClients.

It has no grid of its own: each client's proxy holds it, and it is taken from there when the first round is configured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord

from fedvitals.hosts.flower.grid_hooks import MARK, hook_grid
from fedvitals.hosts.flower.hooks import evaluation_hooks, set_hooks
from fedvitals.hosts.flower.server_rounds import EVALUATE, TRAIN, ServerRounds


def is_legacy(strategy: Any) -> bool:
    """Return whether a strategy belongs to the older API."""
    return callable(getattr(strategy, "configure_fit", None)) and callable(getattr(strategy, "aggregate_fit", None))


def watch_legacy(strategy: Any, server_rounds: ServerRounds, begin: Callable[[Any], None]) -> None:
    """Hook a strategy of the older API. `begin` is called with the grid before anything is sent."""
    server_rounds.hooked, server_rounds.weight = True, "num_examples"
    server_rounds.evaluates = callable(getattr(strategy, "evaluate_fn", None))
    hooks: dict[str, Callable[..., Any]] = {
        "configure_fit": functools.partial(_configure_fit, begin),
        "aggregate_fit": _aggregate_fit,
        "evaluate": _evaluate,
        **evaluation_hooks(_record_evaluation),
    }
    set_hooks(strategy, server_rounds, hooks)


def arrays_of(parameters: Any) -> ArrayRecord | None:
    """Return the parameters of the older API as arrays; None if they are not NumPy arrays."""
    if getattr(parameters, "tensor_type", "") != "numpy.ndarray":
        return None
    record = ArrayRecord()
    for index, data in enumerate(parameters.tensors):
        record[str(index)] = Array(dtype="", shape=(), stype="numpy.ndarray", data=data)
    return record


def _configure_fit(
    begin: Callable[[Any], None],
    configure: Callable[..., Any],
    server_rounds: ServerRounds,
    server_round: int,
    parameters: Any,
    *rest: Any,
    **more: Any,
) -> Any:
    chosen = configure(server_round, parameters, *rest, **more)
    grid = next((proxy.grid for proxy, _ in chosen if hasattr(proxy, "grid")), None)
    if grid is not None:
        begin(grid)
        if getattr(grid, MARK, None) is None:
            hook_grid(grid, server_rounds)
    server_rounds.begin(server_round, arrays_of(parameters))
    return chosen


def _aggregate_fit(
    aggregate: Callable[..., Any],
    server_rounds: ServerRounds,
    server_round: int,
    results: list[Any],
    failures: list[Any],
    *rest: Any,
    **more: Any,
) -> Any:
    left_out = server_rounds.unfitting_nodes()
    if left_out:
        failures = [*failures, *(ValueError(f"{node} was left out: {why}") for node, why in left_out.items())]
        results = [pair for pair in results if str(getattr(pair[0], "node_id", "")) not in left_out]
    with server_rounds.aggregating(TRAIN):
        result = aggregate(server_round, results, failures, *rest, **more)
    parameters = result[0] if isinstance(result, tuple) and result else None
    server_rounds.record_train_metrics(result[1] if isinstance(result, tuple) and len(result) == 2 else None)
    if parameters is None:
        server_rounds.nothing_aggregated()
    model = arrays_of(parameters)
    if model is not None:
        server_rounds.models.newest = model
        server_rounds.record_on_tape(lambda tape: tape.aggregated(model, model, None))
    return result


def _evaluate(evaluate: Callable[..., Any], server_rounds: ServerRounds, *args: Any, **more: Any) -> Any:
    with server_rounds.busy_with(EVALUATE):
        evaluation = evaluate(*args, **more)
    _record_evaluation(server_rounds, evaluation, best=True)
    return evaluation


def _record_evaluation(server_rounds: ServerRounds, evaluation: Any, *, best: bool) -> None:
    """Record a loss and metrics, as returned by the older API."""
    if isinstance(evaluation, tuple) and len(evaluation) == 2:
        loss, metrics = evaluation
        loss_metric = {} if loss is None else {"loss": loss}
        server_rounds.record_metrics({**(metrics or {}), **loss_metric}, best=best)
