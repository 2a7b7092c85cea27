# SPDX-License-Identifier: Apache-2.0
"""Whether an app's code runs because it is replayed; then nothing is watched or recorded again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fedvitals.loop_tape import random_states, set_random_states

_REPLAYING: ContextVar[bool] = ContextVar("fedvitals_flower_replaying", default=False)


def in_replay() -> bool:
    """Return whether the code runs inside `replaying`."""
    return _REPLAYING.get()


@contextmanager
def replaying() -> Iterator[None]:
    """Mark the code inside the block as replayed."""
    token = _REPLAYING.set(True)
    try:
        yield
    finally:
        _REPLAYING.reset(token)


@contextmanager
def random_generators_at(states: Mapping[str, Any]) -> Iterator[None]:
    """Set the random generators to these states inside the block, and restore them afterwards."""
    before = random_states()
    try:
        set_random_states(states)
        yield
    finally:
        set_random_states(before)
