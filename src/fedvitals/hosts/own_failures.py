# SPDX-License-Identifier: Apache-2.0
"""Keeps our own errors from the user's training, where no monitor can report them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from fedvitals.errors import text_of

logger = logging.getLogger("fedvitals")


def guarded(doing: str, work: Callable[[], Any]) -> Any:
    """Return the result of our own work, or None if it failed, which is logged once per cause."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the training goes on, whatever happens to us
        _warn_once(f"{doing}: {type(error).__name__}: {text_of(error)}")
        return None


@functools.lru_cache(maxsize=100)
def _warn_once(cause: str) -> None:
    logger.warning("fedvitals could not finish %s; training goes on.", cause)
