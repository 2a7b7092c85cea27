# SPDX-License-Identifier: Apache-2.0
"""Which code made a result, also where it runs without its repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit() -> str:
    """Of the code that runs, where it lies in a repository; FEDVITALS_COMMIT where it was taken out of one."""
    told = os.environ.get("FEDVITALS_COMMIT")
    if told:
        return told
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
