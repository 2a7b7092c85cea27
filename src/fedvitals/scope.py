# SPDX-License-Identifier: Apache-2.0
"""Where the running code stands in the federation: one contextvar, the only global of the project."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scope:
    """The innermost open run, round and node, and whom to hand a record that is made here.

    `emit` takes any record; it is typed loosely because this module lies below the records.
    """

    run: str
    emit: Callable[[Any], None]
    round: int | None = None
    node: str | None = None
    group: str | None = None
    trace: str = ""
    span: str | None = None
    parent: str | None = None
    watch: Callable[..., Any] | None = None  # inside of a client: takes its model, if it has none yet (see `fv.watch`)


current: ContextVar[Scope | None] = ContextVar("fedvitals_scope", default=None)
