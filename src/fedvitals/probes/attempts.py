# SPDX-License-Identifier: Apache-2.0
"""Pieces of work that are done each by itself, so that one client's nonsense costs nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Attempt(Protocol):
    """Does a piece of work, described in words, about a node or None; gives its result, or None if it failed."""

    def __call__(self, doing: str, work: Callable[[], Any], node: str | None = None, /) -> Any: ...


def unguarded(doing: str, work: Callable[[], Any], node: str | None = None, /) -> Any:  # noqa: ARG001 - as an Attempt
    """Do the work and let it raise."""
    return work()
