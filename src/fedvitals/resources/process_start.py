# SPDX-License-Identifier: Apache-2.0
"""When this process began."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_started() -> float | None:
    """Return when this process began, since the epoch; None on systems that do not report it (Linux does)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age
