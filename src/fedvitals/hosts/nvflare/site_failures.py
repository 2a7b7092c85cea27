# SPDX-License-Identifier: Apache-2.0
"""Why a task failed at a site: NVFlare sends the server a return code, and keeps the exception in the site's log.

Exceptions of executors, and of scripts that train inside of the site's process, are seen when NVFlare logs them, since
they are being handled then. A script in a process of its own writes the one that ends it to a file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from pathlib import Path

from fedvitals.hosts.nvflare.envelope import LONGEST_MESSAGE, LONGEST_TRACEBACK, SiteFailure

LOGGERS = (
    "nvflare.app_common.executors.task_script_runner.TaskScriptRunner",
    "nvflare.private.fed.client.client_runner.ClientRunner",
)
LARGEST_FILE = 200_000  # bytes


class LoggedExceptions(logging.Handler):
    """Keeps the first exception that NVFlare logs while a task is worked on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first: BaseException | None = None

    def install(self) -> None:
        """Listen to the loggers of NVFlare that log what ends a task."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)

    def remove(self) -> None:
        """Listen no more."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note the exception that is being handled where this was logged."""
        del record
        error = sys.exc_info()[1]
        if error is not None and self.first is None:
            self.first = error

    def forget(self) -> None:
        """Forget what was noted: a new task begins."""
        self.first = None


def failure_of(error: BaseException) -> SiteFailure:
    """Return an exception as what may be told of it, all of it."""
    text = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    return SiteFailure(type(error).__name__, str(error)[:LONGEST_MESSAGE], text)


def take_written_failure(path: Path) -> SiteFailure | None:
    """Return what a training script wrote about its end, and remove it; None if it wrote nothing."""
    try:
        text = path.read_text(encoding="utf-8")[:LARGEST_FILE]
    except OSError:
        return None
    with contextlib.suppress(OSError):
        path.unlink()
    try:
        fields = json.loads(text)
        return SiteFailure(*(str(fields[name]) for name in ("exception", "message", "traceback")))
    except (ValueError, KeyError, TypeError):
        return None
