# SPDX-License-Identifier: Apache-2.0
"""Reads and writes open files at a position, also on systems without a call for it (Windows)."""

from __future__ import annotations

import os
import threading
from typing import Any

_GATE = threading.Lock()  # the position belongs to the file: without a call that takes one, threads take turns


def read_at(file: int, count: int, position: int) -> bytes:
    """Return at most `count` bytes of an open file, starting at a position."""
    if hasattr(os, "pread"):
        return os.pread(file, count, position)
    with _GATE:
        os.lseek(file, position, os.SEEK_SET)
        return os.read(file, count)


def read_into(file: int, buffer: Any, position: int) -> int:
    """Fill a buffer of bytes or numbers from an open file, starting at a position. Returns how many bytes were read."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [buffer], position)
    room = memoryview(buffer).cast("B")
    content = read_at(file, len(room), position)
    room[: len(content)] = content
    return len(content)


def write_at(file: int, content: bytes, position: int) -> int:
    """Write to an open file, starting at a position. Returns how many bytes were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, content, position)
    with _GATE:
        os.lseek(file, position, os.SEEK_SET)
        return os.write(file, content)
