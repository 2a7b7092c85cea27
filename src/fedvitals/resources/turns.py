# SPDX-License-Identifier: Apache-2.0
"""Which client trained last on a thread on which several take turns, and until when."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedvitals.resources.phases import StepClock


class Turn(threading.local):
    """Of a thread: which client trained on it last, until when, and how long it has waited for DataLoaders so far."""

    clock: StepClock | None = None
    mark = 0.0
    loading = 0.0
    loaders = 0  # batches that came from one
    inside = 0  # of how many loaders, one within the other


turn = Turn()


def turn_over() -> None:
    """A client was closed on this thread: until now it was its turn."""
    turn.mark = time.perf_counter()
