# SPDX-License-Identifier: Apache-2.0
"""The position of the running code in the federation: one contextvar, the only global of the project."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Scope:
    """The innermost open run, round and node, and the function that takes records made here.

    `emit` accepts any record; it is loosely typed because this module is below the records.
    """

    run: str
    emit: Callable[[Any], None]
    round: int | None = None
    node: str | None = None
    group: str | None = None
    trace: str = ""
    span: str | None = None
    parent: str | None = None
    watch: Callable[..., Any] | None = None  # inside a client: takes its model, if it has none yet (see `fv.watch`)


current: ContextVar[Scope | None] = ContextVar("fedvitals_scope", default=None)
