# SPDX-License-Identifier: Apache-2.0
"""Hooks on a strategy of the Message API: when rounds begin and end, what was aggregated, and how long it took.

They are set on the instance. The object stays what it was, of the same class, with the same methods and results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord

from fedvitals.hosts.flower.grid_hooks import watched_post
from fedvitals.hosts.flower.hooks import hooks_of_evaluation, set_hooks
from fedvitals.hosts.flower.server_rounds import EVALUATE, Journal

Begin = Callable[[Any], None]  # told of the grid, before anything is sent


def watch_strategy(strategy: Any, journal: Journal, begin: Begin) -> None:
    """Every method that a strategy has of these; `start` may be the user's own."""
    hooks: dict[str, Callable[..., Any]] = {
        "start": functools.partial(_start, begin),
        "configure_train": _configure_train,
        "aggregate_train": _aggregate_train,
        **hooks_of_evaluation(_hear),
    }
    set_hooks(strategy, journal, hooks)
    journal.hooked = journal.ward.aggregates = True


def _start(begin: Begin, start: Callable[..., Any], journal: Journal, *args: Any, **more: Any) -> Any:
    grid = more.get("grid", args[0] if args else None)
    args, more = _with_evaluation(start, journal, args, more)
    begin(grid)
    with watched_post(grid, journal):
        try:
            return start(*args, **more)
        except BaseException as error:
            journal.failed(error)
            raise
        finally:
            journal.close()


def _with_evaluation(
    start: Callable[..., Any], journal: Journal, args: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with the server's own evaluation timed and heard, where there is one."""
    try:
        bound = inspect.signature(start).bind(*args, **more)
    except (TypeError, ValueError):
        return args, more  # it will say itself what is wrong
    evaluate = bound.arguments.get("evaluate_fn")
    if not callable(evaluate):
        return args, more
    journal.evaluates = True

    @functools.wraps(evaluate)
    def heard(number: int, *rest: Any, **named: Any) -> Any:
        with journal.busy_with(EVALUATE):
            found = evaluate(number, *rest, **named)
        _hear(journal, found, best=True)
        return found

    bound.arguments["evaluate_fn"] = heard
    return bound.args, bound.kwargs


def _configure_train(
    configure: Callable[..., Any], journal: Journal, server_round: int, arrays: ArrayRecord, *rest: Any, **more: Any
) -> Iterable[Message]:
    journal.begin(server_round, arrays)
    found: Iterable[Message] = configure(server_round, journal.start_of(arrays), *rest, **more)
    return found


def _aggregate_train(
    aggregate: Callable[..., Any],
    journal: Journal,
    server_round: int,
    replies: Iterable[Message],
    *rest: Any,
    **more: Any,
) -> Any:
    given = [*replies]
    taken = journal.robust(given)
    journal.tell_tape(lambda scribe: scribe.aggregating(taken, changed=taken is not given))
    with journal.busy_with("aggregate"):
        result = aggregate(server_round, taken, *rest, **more)
    own, told = (*result, None, None)[:2] if isinstance(result, tuple) else (None, None)
    if not isinstance(own, ArrayRecord):
        journal.tell_tape(lambda scribe: scribe.aggregated(None, None, told))
        return result
    model = journal.aggregated(own)
    journal.tell_tape(lambda scribe: scribe.aggregated(own, model, told))
    return result if model is own else (model, *result[1:])


def _hear(journal: Journal, found: Any, *, best: bool) -> None:
    if isinstance(found, MetricRecord):
        journal.heard(found, best=best)
