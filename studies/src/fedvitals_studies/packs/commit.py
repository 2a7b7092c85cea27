# SPDX-License-Identifier: Apache-2.0
"""The code version behind a result, also outside of its repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit() -> str:
    """Return the commit of the running code if it is in a repository; else FEDVITALS_COMMIT."""
    told = os.environ.get("FEDVITALS_COMMIT")
    if told:
        return told
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
