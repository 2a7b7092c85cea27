# SPDX-License-Identifier: Apache-2.0
"""Wait for a condition, however busy the machine is."""

import time
from collections.abc import Callable

PATIENCE = 120.0  # seconds after which a test is taken to hang; a test never passes because of how short it is


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE, what: str = "the condition") -> None:
    """Return when `condition()` is true; fail, saying `what` was waited for, if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.002)
