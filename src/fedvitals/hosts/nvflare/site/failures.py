# SPDX-License-Identifier: Apache-2.0
"""Why a task failed at a site: NVFlare sends the server a return code, and keeps the exception in the site's log.

Exceptions of executors, and of scripts that train inside the site's process, are caught when NVFlare logs them, since
they are being handled then. A script in a process of its own writes the exception that ends it to a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from fedvitals.errors import text_of
from fedvitals.hosts.nvflare.envelope import LONGEST_MESSAGE, LONGEST_TRACEBACK, SiteFailure
from fedvitals.resources.periodic_thread import PeriodicThread

LOGGERS = (
    "nvflare.app_common.executors.task_script_runner.TaskScriptRunner",
    "nvflare.private.fed.client.client_runner.ClientRunner",
)
LARGEST_FILE = 200_000  # bytes
INTERVAL_SECONDS = 0.5  # between two checks for a file


class FailureFileWatch:
    """Watches for a training script's report of its end while a task is worked on, and calls `report` with it.

    NVFlare may not notice for minutes, because its own threads keep the process of a failed script alive.
    """

    def __init__(self, path: Path, report: Callable[[SiteFailure], None]) -> None:
        self._path, self._report = path, report
        self._thread = PeriodicThread("fedvitals-failures", INTERVAL_SECONDS, self._look)
        self._thread.start()

    def _look(self, ticks: Iterator[None]) -> None:
        for _ in ticks:
            failure = take_written_failure(self._path, of_trainer=True)
            if failure is not None:
                self._report(failure)
                return

    def stop(self) -> None:
        """Stop watching."""
        self._thread.stop()


class LoggedExceptions(logging.Handler):
    """Keeps the first exception that NVFlare logs while a task is worked on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first: BaseException | None = None

    def install(self) -> None:
        """Start listening to NVFlare's loggers that report the end of a task."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

    def remove(self) -> None:
        """Stop listening."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the exception being handled where this was logged."""
        del record
        error = sys.exc_info()[1]
        if error is not None and self.first is None:
            self.first = error

    def forget(self) -> None:
        """Clear the exception, because a new task begins."""
        self.first = None


def failure_of(error: BaseException) -> SiteFailure:
    """Return an exception as a failure with everything that can be reported."""
    text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    return SiteFailure(type(error).__name__, text_of(error)[:LONGEST_MESSAGE], text)


def take_written_failure(path: Path, *, of_trainer: bool = False) -> SiteFailure | None:
    """Return what a process of the site wrote about its end, and remove the file; None if there is none.

    `of_trainer`: only for the script that talks to NVFlare, and no other program.
    """
    try:
        text = path.read_text(encoding="utf-8")[:LARGEST_FILE]
    except OSError:
        return None
    try:
        fields = json.loads(text)
        if of_trainer and fields["trainer"] is not True:
            return None
        with contextlib.suppress(OSError):
            path.unlink()
        return SiteFailure(*(str(fields[name]) for name in ("exception", "message", "traceback")))
    except (ValueError, KeyError, TypeError):
        return None
