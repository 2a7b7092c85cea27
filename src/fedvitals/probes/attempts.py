# SPDX-License-Identifier: Apache-2.0
"""Work done in separate attempts, so that one client's invalid data affect no other client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Attempt(Protocol):
    """Runs work, described by a phrase, for a node or None; returns its result, or None if it failed."""

    def __call__(self, doing: str, work: Callable[[], Any], node: str | None = None, /) -> Any: ...


def unguarded(doing: str, work: Callable[[], Any], node: str | None = None, /) -> Any:  # noqa: ARG001 - as an Attempt
    """Do the work and let it raise."""
    return work()
