# SPDX-License-Identifier: Apache-2.0
"""Set hooks on a strategy's own methods, for both of Flower's APIs; and the evaluation hooks, which they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedvitals.hosts.flower.grid_hooks import MARK
from fedvitals.hosts.flower.server_rounds import EVALUATE, ServerRounds


class RecordEvaluation(Protocol):
    """Records the result of an evaluation, as returned by the API.

    `best`: whether it was the server's own evaluation.
    """

    def __call__(self, server_rounds: ServerRounds, evaluation: Any, *, best: bool) -> None: ...


def set_hooks(strategy: Any, server_rounds: ServerRounds, hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Replace methods by hooks. Each hook gets the original method, the server rounds, and the method's arguments."""
    for name, hook in hooks.items():
        method = getattr(strategy, name)
        setattr(strategy, name, functools.update_wrapper(functools.partial(hook, method, server_rounds), method))
    setattr(strategy, MARK, server_rounds)
    server_rounds.tape.strategy = strategy


def evaluation_hooks(record_evaluation: RecordEvaluation) -> dict[str, Callable[..., Any]]:
    """Return the hooks of the clients' evaluation: its beginning, its end, and its result."""

    def configure(method: Callable[..., Any], server_rounds: ServerRounds, *args: Any, **more: Any) -> Any:
        server_rounds.evaluating(begin=True)
        return method(*args, **more)

    def aggregate(
        method: Callable[..., Any],
        server_rounds: ServerRounds,
        server_round: int,
        replies: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        if server_rounds.same_metrics:
            replies = server_rounds.fitting([*replies], EVALUATE, entries=True)
        with server_rounds.aggregating(EVALUATE):
            evaluation = method(server_round, replies, *args, **more)
        server_rounds.evaluating(begin=False)
        record_evaluation(server_rounds, evaluation, best=False)
        return evaluation

    return {"configure_evaluate": configure, "aggregate_evaluate": aggregate}
