# SPDX-License-Identifier: Apache-2.0
"""`fedvitals lab` as a process of a test, with all that it starts: heard as it speaks, gone when the test is over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any, Self

import psutil

MARK = "FEDVITALS_TEST_COMMAND"
LONGEST = 300  # seconds
# A shell that started the tests in the background has switched Ctrl-C off, for us and our children.
PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from fedvitals.cli.main import main; main()"
)


class Command:
    """`fedvitals lab e.toml ...` in a folder."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "lab", "e.toml", *words], cwd=folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **environment, MARK: self._mark},
        )  # fmt: skip
        self._guard = threading.Timer(LONGEST, self.process.kill)
        self._guard.daemon = True
        self._guard.start()
        self.said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.cancel()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def until(self, words: str) -> None:
        """Wait until it says so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if words in line:
                return
        raise AssertionError(f"it ended without {words!r}:\n{self.said}")

    def result(self) -> Any:
        """What it prints with --json, at its end."""
        out, more = self.process.communicate(timeout=LONGEST)
        assert self.process.returncode == 0, self.said + more
        return json.loads(out)["result"]

    def left(self) -> list[psutil.Process]:
        """Itself, and all that it has started, directly or not, that is still there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
