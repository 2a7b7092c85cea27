# SPDX-License-Identifier: Apache-2.0
"""Whether an app's own code runs because somebody replays it: then nothing is watched, and nothing recorded again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fedvitals.loop_tape import random_states, set_random_states

_REPLAYING: ContextVar[bool] = ContextVar("fedvitals_flower_replaying", default=False)


def in_replay() -> bool:
    return _REPLAYING.get()


@contextmanager
def replaying() -> Iterator[None]:
    token = _REPLAYING.set(True)
    try:
        yield
    finally:
        _REPLAYING.reset(token)


@contextmanager
def random_generators_at(states: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the random generators stand where they were told to; afterwards where they stand now."""
    before = random_states()
    try:
        set_random_states(states)
        yield
    finally:
        set_random_states(before)
