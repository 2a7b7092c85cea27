# SPDX-License-Identifier: Apache-2.0
"""The gate at which a live run waits between two rounds while a debugger session holds it: files in the tape's folder.

`debugger` is the session's claim, renewed every second, and says up to which round the run may go on. Without it, or
when it has not been renewed for a while, the run goes on, so that a session that dies holds nothing up. `waiting` is
the run's: after which round it waits, renewed as well, so that a run that was killed there is not taken for one that
waits. One session holds a run at a time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fedvitals.errors import BusyError
from fedvitals.replay.tape.objects import replace_file
from fedvitals.replay.tape.unpack_limits import read_note

if sys.platform != "win32":
    import fcntl

CLAIM_FILE, WAITING_FILE = "debugger", "waiting"
STALE_SECONDS = 10.0  # seconds without a sign of life after which nobody is there
RENEWAL_SECONDS = 1.0  # seconds between two signs
POLL_SECONDS = 0.05


class SessionClaim(msgspec.Struct):
    """A session's claim on a run, as JSON in the tape's folder."""

    go: int = -1  # rounds up to this one may be followed by the next
    owner: str = ""  # the session: machine, process, and a mark of its own


def _is_fresh(path: Path) -> bool:
    """Return whether a file was renewed lately. One dated in the future comes from a clock that was set back, and is
    not fresh.
    """
    with contextlib.suppress(OSError):
        return abs(time.time() - path.stat().st_mtime) < STALE_SECONDS
    return False


class RoundGate:
    """The run's side of the gate."""

    def __init__(self, folder: Path) -> None:
        self._sign, self._at = folder / CLAIM_FILE, folder / WAITING_FILE
        self.close()  # a run that was killed here, and goes on now, waits no more

    @property
    def asked(self) -> bool:
        """Return whether a session is attached; one look at a file per round."""
        return _is_fresh(self._sign)

    def wait(self, round_index: int, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait after a round until the session lets the run go on, or is gone.

        The time since the last renewal is measured by a monotonic clock, which nobody sets.
        """
        stamp, renewed, written = self._stamp(), time.monotonic(), time.monotonic()
        try:
            self._at.write_text(str(round_index), encoding="ascii")
            while stamp is not None and time.monotonic() - renewed < STALE_SECONDS and self._orders().go < round_index:
                sleep(POLL_SECONDS)
                if time.monotonic() - written > RENEWAL_SECONDS:
                    os.utime(self._at)
                    written = time.monotonic()
                seen = self._stamp()
                if seen != stamp:
                    stamp, renewed = seen, time.monotonic()
        finally:
            self.close()

    def close(self) -> None:
        """Remove the note that the run waits."""
        with contextlib.suppress(OSError):
            self._at.unlink(missing_ok=True)

    def _stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = self._sign.stat()
            return status.st_mtime_ns, status.st_ino
        return None

    def _orders(self) -> SessionClaim:
        return _read_claim(self._sign) or SessionClaim()


class GateHandle:
    """The session's side: `claim` the run, `renew` the claim at least every few seconds, and `release` it in the
    end.
    """

    def __init__(self, folder: Path) -> None:
        self._sign, self._at = folder / CLAIM_FILE, folder / WAITING_FILE
        self._orders = SessionClaim(owner=f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}")
        self._lock = threading.Lock()

    @property
    def go(self) -> int:
        """Return the round up to which the run may go on."""
        return self._orders.go

    def claim(self) -> None:
        """Claim the run. Raises BusyError if another live session holds it."""
        with self._alone():
            claim = _read_claim(self._sign)
            if (
                claim is not None
                and claim.owner != self._orders.owner
                and _is_fresh(self._sign)
                and _is_alive(claim.owner)
            ):
                raise BusyError(self._busy(claim.owner))
            self._write()

    def renew(self, go: int | None = None) -> None:
        """Renew the claim, and set how far the run may go from now on.

        Raises BusyError if another session has taken the run because this one was not heard of for too long.
        """
        with self._lock:
            claim = _read_claim(self._sign)
            if claim is not None and claim.owner != self._orders.owner and _is_fresh(self._sign):
                raise BusyError(self._busy(claim.owner))
            if go is not None:
                self._orders.go = go
            if claim == self._orders:
                os.utime(self._sign)  # takes no room: a full disk holds nobody up
            else:
                self._write()

    def waiting(self) -> int | None:
        """Return the round after which the run waits now; None if it does not."""
        with contextlib.suppress(OSError, ValueError):
            return int(read_note(self._at)) if _is_fresh(self._at) else None
        return None

    def stands(self) -> bool:
        """Return whether the run noted that it waits and not that it goes on; it may have been killed there."""
        return self._at.exists()

    def release(self) -> None:
        """Let the run go on by itself from here."""
        with self._lock:
            claim = _read_claim(self._sign)
            if claim is None or claim.owner == self._orders.owner:
                self._sign.unlink(missing_ok=True)

    def _write(self) -> None:
        replace_file(self._sign, msgspec.json.encode(self._orders))  # never through a link that lies in the folder

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock, so that two sessions that begin at the same moment claim one after the other."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(self._sign.with_name(f"{CLAIM_FILE}.lock"), flags, 0o644)
        try:
            if sys.platform != "win32":
                with contextlib.suppress(OSError):  # a folder of a file server may know no locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # let go with the file, whatever happens
            yield
        finally:
            os.close(file)

    def _busy(self, owner: str) -> str:
        machine, _, process = owner.rpartition(":")[0].rpartition(":")
        return (
            f"Another session holds this run: process {process or '?'} on {machine or '?'}, and one does at a time. "
            f"End that one; where it died, its hold ends by itself after {STALE_SECONDS:.0f} s. Reading is always free."
        )


def _read_claim(sign: Path) -> SessionClaim | None:
    """Return the claim; None if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
        return msgspec.json.decode(read_note(sign), type=SessionClaim)
    return None


def _is_alive(owner: str) -> bool:
    """Return whether the session's process exists; for another machine it is assumed."""
    machine, _, process = owner.rpartition(":")[0].rpartition(":")
    if machine != socket.gethostname() or not process.isdecimal():
        return True
    return is_process(int(process))


def is_process(process_id: int) -> bool:
    """Return whether a process of this id exists on this machine, whoever owns it; on Windows always True."""
    if sys.platform == "win32":  # signal 0 is Ctrl-C there: asking would interrupt the training
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
