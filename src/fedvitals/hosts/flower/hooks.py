# SPDX-License-Identifier: Apache-2.0
"""Hooks on a strategy's own methods, whichever of Flower's APIs it is of: how they are set, and those of evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedvitals.hosts.flower.grid_hooks import MARK
from fedvitals.hosts.flower.server_rounds import Journal


class Hear(Protocol):
    """Tells the journal what an evaluation has found, as the API gives it."""

    def __call__(self, journal: Journal, found: Any, *, best: bool) -> None: ...


def set_hooks(strategy: Any, journal: Journal, hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Each hook takes the method in whose place it is called, the journal, and what the method was called with."""
    for name, hook in hooks.items():
        method = getattr(strategy, name)
        setattr(strategy, name, functools.update_wrapper(functools.partial(hook, method, journal), method))
    setattr(strategy, MARK, journal)
    journal.scribe.strategy = strategy


def hooks_of_evaluation(hear: Hear) -> dict[str, Callable[..., Any]]:
    """The rounds in which clients evaluate: when they begin, when they end, and what came of them."""

    def configure(method: Callable[..., Any], journal: Journal, *args: Any, **more: Any) -> Any:
        journal.evaluating(begin=True)
        return method(*args, **more)

    def aggregate(method: Callable[..., Any], journal: Journal, *args: Any, **more: Any) -> Any:
        found = method(*args, **more)
        journal.evaluating(begin=False)
        hear(journal, found, best=False)
        return found

    return {"configure_evaluate": configure, "aggregate_evaluate": aggregate}
