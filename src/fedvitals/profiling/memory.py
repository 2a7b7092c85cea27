# SPDX-License-Identifier: Apache-2.0
"""Memory of this process, where the system tells it for free."""

from __future__ import annotations

import os
import sys

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident_bytes() -> int | None:
    """What the process holds in memory now (Linux); None elsewhere."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:  # noqa: PTH123 - half the cost of a Path
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def peak_bytes() -> int | None:
    """The most it ever held (Unix); None elsewhere."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS
