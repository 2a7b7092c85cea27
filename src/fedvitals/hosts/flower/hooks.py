# SPDX-License-Identifier: Apache-2.0
"""Hooks on a strategy's own methods, whichever of Flower's APIs it is of: how they are set, and those of evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedvitals.hosts.flower.grid_hooks import MARK
from fedvitals.hosts.flower.server_rounds import ServerRounds


class RecordEvaluation(Protocol):
    """Tells the journal what an evaluation has found, as the API gives it."""

    def __call__(self, server_rounds: ServerRounds, evaluation: Any, *, best: bool) -> None: ...


def set_hooks(strategy: Any, server_rounds: ServerRounds, hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Each hook takes the method in whose place it is called, the journal, and what the method was called with."""
    for name, hook in hooks.items():
        method = getattr(strategy, name)
        setattr(strategy, name, functools.update_wrapper(functools.partial(hook, method, server_rounds), method))
    setattr(strategy, MARK, server_rounds)
    server_rounds.tape.strategy = strategy


def evaluation_hooks(record_evaluation: RecordEvaluation) -> dict[str, Callable[..., Any]]:
    """The rounds in which clients evaluate: when they begin, when they end, and what came of them."""

    def configure(method: Callable[..., Any], server_rounds: ServerRounds, *args: Any, **more: Any) -> Any:
        server_rounds.evaluating(begin=True)
        return method(*args, **more)

    def aggregate(method: Callable[..., Any], server_rounds: ServerRounds, *args: Any, **more: Any) -> Any:
        evaluation = method(*args, **more)
        server_rounds.evaluating(begin=False)
        record_evaluation(server_rounds, evaluation, best=False)
        return evaluation

    return {"configure_evaluate": configure, "aggregate_evaluate": aggregate}
