# SPDX-License-Identifier: Apache-2.0
"""Where a live run waits between two rounds, if a person who debugs it has asked for that: files in the tape's folder.

`debugger` is the session's sign of life, and says up to which round the run may go on. Without it, or when it has not
been renewed for a while, the run goes on: a session that dies holds nobody up.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

SIGN, AT = "debugger", "waiting"
STALE = 10.0  # seconds without a sign of life after which nobody is there
POLL = 0.05


class Orders(msgspec.Struct):
    go: int = -1  # rounds up to this one may be followed by the next


class Gate:
    """The run's side."""

    def __init__(self, folder: Path) -> None:
        self._sign, self._at = folder / SIGN, folder / AT

    @property
    def asked(self) -> bool:
        """Whether somebody is there: one look at a file for each round."""
        with contextlib.suppress(OSError):
            return time.time() - self._sign.stat().st_mtime < STALE
        return False

    def wait(self, number: int, sleep: Callable[[float], None] = time.sleep) -> None:
        """After a round, until the session lets the run go on, or is gone."""
        self._at.write_text(str(number), encoding="ascii")
        while self.asked and self._orders().go < number:
            sleep(POLL)
        self._at.unlink(missing_ok=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._at.unlink(missing_ok=True)

    def _orders(self) -> Orders:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._sign.read_bytes(), type=Orders)
        return Orders()


class Handle:
    """The session's side: `renew` at least every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._sign, self._at = folder / SIGN, folder / AT
        self._orders = Orders()

    def renew(self, go: int | None = None) -> None:
        if go is not None:
            self._orders.go = go
        partial = self._sign.with_name(f"{SIGN}.partial")
        partial.write_bytes(msgspec.json.encode(self._orders))
        os.replace(partial, self._sign)  # noqa: PTH105 - atomic

    def waiting(self) -> int | None:
        """The round after which the run waits now."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._at.read_text(encoding="ascii"))
        return None

    def release(self) -> None:
        self._sign.unlink(missing_ok=True)
