# SPDX-License-Identifier: Apache-2.0
"""Hooks on a strategy of Flower's older API (`flwr.server.strategy`), whose clients are NumPyClients.

It has no grid of its own: each client's proxy holds it, and is met when the first round is configured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flwr.app import Array, ArrayRecord

from fedvitals.hosts.flower.grid_hooks import MARK, watch_post
from fedvitals.hosts.flower.hooks import hooks_of_evaluation, set_hooks
from fedvitals.hosts.flower.server_rounds import EVALUATE, Journal


def is_legacy(strategy: Any) -> bool:
    return callable(getattr(strategy, "configure_fit", None)) and callable(getattr(strategy, "aggregate_fit", None))


def watch_legacy(strategy: Any, journal: Journal, begin: Callable[[Any], None]) -> None:
    journal.hooked, journal.weight = True, "num_examples"
    journal.evaluates = callable(getattr(strategy, "evaluate_fn", None))
    hooks: dict[str, Callable[..., Any]] = {
        "configure_fit": functools.partial(_configure_fit, begin),
        "aggregate_fit": _aggregate_fit,
        "evaluate": _evaluate,
        **hooks_of_evaluation(_hear),
    }
    set_hooks(strategy, journal, hooks)


def arrays_of(parameters: Any) -> ArrayRecord | None:
    """The parameters of the older API as arrays; None where they are no NumPy arrays."""
    if getattr(parameters, "tensor_type", "") != "numpy.ndarray":
        return None
    found = ArrayRecord()
    for number, data in enumerate(parameters.tensors):
        found[str(number)] = Array(dtype="", shape=(), stype="numpy.ndarray", data=data)
    return found


def _configure_fit(
    begin: Callable[[Any], None], configure: Callable[..., Any], journal: Journal, server_round: int, parameters: Any,
    *rest: Any, **more: Any,
) -> Any:  # fmt: skip
    chosen = configure(server_round, parameters, *rest, **more)
    grid = next((proxy.grid for proxy, _ in chosen if hasattr(proxy, "grid")), None)
    if grid is not None:
        begin(grid)
        if getattr(grid, MARK, None) is None:
            watch_post(grid, journal)
    journal.begin(server_round, arrays_of(parameters))
    return chosen


def _aggregate_fit(aggregate: Callable[..., Any], journal: Journal, *args: Any, **more: Any) -> Any:
    with journal.busy_with("aggregate"):
        result = aggregate(*args, **more)
    model = arrays_of(result[0]) if isinstance(result, tuple) and result else None
    if model is not None:
        journal.models.newest = model
        journal.tell_tape(lambda scribe: scribe.aggregated(model, model, None))
    return result


def _evaluate(evaluate: Callable[..., Any], journal: Journal, *args: Any, **more: Any) -> Any:
    with journal.busy_with(EVALUATE):
        found = evaluate(*args, **more)
    _hear(journal, found, best=True)
    return found


def _hear(journal: Journal, found: Any, *, best: bool) -> None:
    """A loss and metrics, as the older API gives them."""
    if isinstance(found, tuple) and len(found) == 2:
        loss, metrics = found
        told = {} if loss is None else {"loss": loss}
        journal.heard({**(metrics or {}), **told}, best=best)
