# SPDX-License-Identifier: Apache-2.0
"""Asks for the thread stacks of clients in other processes of this machine, through a folder.

The server's process puts a request there when a round stands still. A client's process looks for one every second while
a client is open, and answers with its own stacks. The folder belongs to the user alone, and its name is derived from
the run's trace, which only processes that take part know. A client on another machine never sees the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedvitals.records import printable
from fedvitals.resources.thread_stacks import MOST_CHARACTERS, MOST_THREADS, thread_stacks

REQUEST = "request"
PERIOD = 1.0  # seconds between two checks for a request
IDLE = 5.0  # seconds without a client after which checking stops
ANSWER_BYTES = 64 << 10


class StackRequests:
    """The server's side. Call `ask` before `answers`; `close` removes the folder."""

    def __init__(self, trace: str) -> None:
        self._folder = _folder(trace)
        self._asked = False

    def ask(self) -> None:
        """Ask the processes of all clients that are open on this machine."""
        self._asked = True
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_own(self._folder):
            for old in [*self._folder.glob("*.json")]:
                old.unlink(missing_ok=True)
            _write(self._folder / REQUEST, str(time.time_ns()))

    def answers(self) -> dict[str, dict[str, str]]:
        """Return the stacks of the clients' processes that have answered, by client and thread."""
        stacks_by_client: dict[str, dict[str, str]] = {}
        if not self._asked or not _is_own(self._folder):
            return stacks_by_client
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                if path.stat().st_size <= ANSWER_BYTES:
                    answer = json.loads(path.read_text(encoding="utf-8"))
                    threads = [*answer["stacks"].items()][:MOST_THREADS]
                    stacks = {printable(str(name)): printable(str(stack))[:MOST_CHARACTERS] for name, stack in threads}
                    stacks_by_client |= {printable(str(node)): stacks for node in answer["nodes"]}
        return stacks_by_client

    def close(self) -> None:
        """Remove the folder, if this process has created it."""
        if self._asked and _is_own(self._folder):
            for path in [*self._folder.iterdir()]:
                path.unlink(missing_ok=True)
            self._folder.rmdir()


class StackAnswers:
    """A client's side. `open_clients` returns the clients training in this process, `threads` their threads."""

    def __init__(
        self, trace: str, open_clients: Callable[[], Mapping[str, float]], threads: Callable[[], tuple[int, ...]]
    ) -> None:
        self._folder, self._open_clients, self._threads = _folder(trace), open_clients, threads
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Check for requests from now on, until no client has been open for a while."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="fedvitals-stacks", daemon=True)
            thread.start()  # raises at the system's limit of threads
            self._thread = thread

    def _work(self) -> None:
        answered, idle = "", 0.0
        try:
            while idle < IDLE:
                time.sleep(PERIOD)
                nodes = [*self._open_clients()]
                idle = 0.0 if nodes else idle + PERIOD
                with contextlib.suppress(OSError):
                    request = (self._folder / REQUEST).read_text(encoding="utf-8")
                    if nodes and request != answered and _is_own(self._folder):
                        answered = request
                        answer = {"nodes": nodes, "stacks": thread_stacks(self._threads())}
                        _write(self._folder / f"{os.getpid()}.json", json.dumps(answer))
        finally:
            self._thread = None


def _folder(trace: str) -> Path:
    name = hashlib.blake2b(trace.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"fedvitals-{os.getuid() if hasattr(os, 'getuid') else 'stacks'}" / name


def _is_own(folder: Path) -> bool:
    """Whether a folder and its parent belong to this user and are no links: others may write beside them."""
    try:
        for path in (folder, folder.parent):
            status = path.lstat()
            if path.is_symlink() or (
                hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022)
            ):
                return False
    except OSError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
