# SPDX-License-Identifier: Apache-2.0
"""Which client last trained on a thread that several clients share, and until when."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedvitals.resources.phases import StepClock


class Turn(threading.local):
    """A thread's state: the client that last trained on it, until when, and its waiting time for DataLoaders so far."""

    clock: StepClock | None = None
    mark = 0.0
    loading = 0.0
    loaders = 0  # batches that came from one
    inside = 0  # number of nested loaders


turn = Turn()


def turn_over() -> None:
    """Note that a client was closed on this thread, which ends its turn."""
    turn.mark = time.perf_counter()
