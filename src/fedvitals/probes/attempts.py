# SPDX-License-Identifier: Apache-2.0
"""Work that is done in separate attempts, so that one client's invalid data affects nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Attempt(Protocol):
    """Does a piece of work, described in words, about a node or None; returns its result, or None if it failed."""

    def __call__(self, doing: str, work: Callable[[], Any], node: str | None = None, /) -> Any: ...


def unguarded(doing: str, work: Callable[[], Any], node: str | None = None, /) -> Any:  # noqa: ARG001 - as an Attempt
    """Do the work and let it raise."""
    return work()
