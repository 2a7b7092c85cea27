# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and of its machine, where the system reports it cheaply."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = {"": "memory.max", "memory": "memory.limit_in_bytes"}  # of version 2 and 1, by name of the controller


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes (Linux); None elsewhere."""
    statm = _statm(os.getpid())
    if statm is None:
        return None
    try:
        return int(os.pread(statm, 100, 0).split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


@functools.lru_cache(maxsize=1)
def _statm(_process: int) -> int | None:
    """Return an open descriptor of the file to read: opening it each time takes six times as long. Each fork has its
    own.
    """
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None


def heap_bytes() -> int | None:
    """Return the bytes in use on the C library's heap, which includes CPU tensors (glibc 2.33 or later); else None.

    Resident memory hides who uses it: a leak first fills what others have freed. The heap in use does not. But counting
    it may require walking through all free memory, so use it only when a leak is suspected.
    """
    ask = _mallinfo()
    if ask is None:
        return None
    answer = ask()
    return int(answer.uordblks + answer.hblkhd)


_MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO)


@functools.lru_cache(maxsize=1)
def _mallinfo() -> Any:
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.argtypes, ask.restype = [], _Mallinfo
    return ask


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of glibc's malloc.h
_LARGE = 32 << 10  # bytes; glibc begins with 128 KiB


def use_one_heap() -> bool:
    """Make all threads started from now on allocate from one heap (glibc). Returns whether that succeeded.

    By default the C library gives each thread its own heap, up to eight per core, and each keeps room for the most that
    it ever held. This is for processes whose threads take turns, as in Python. Large blocks are kept out of the heap,
    so that they leave no holes there: by default, glibc stops doing so once the first of them is freed.
    """
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_M_ARENA_MAX, 1)) and bool(library.mallopt(_M_MMAP_THRESHOLD, _LARGE))
    except (AttributeError, OSError, TypeError):  # another C library
        return False


def give_back_free_memory() -> bool:
    """Return free memory of the C library's heap to the system (glibc). Returns whether any was returned.

    By default the library only returns what is free at the heap's end: one small object there keeps megabytes.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError, TypeError):  # another C library
        return False


def peak_bytes() -> int | None:
    """Return the largest resident memory so far (Unix); None elsewhere."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


@functools.lru_cache(maxsize=1)
def limit_bytes() -> int | None:
    """Return the memory available to this process: the machine's, or a container's lower limit."""
    limits = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * _PAGE)
    for path in _limit_files():
        text = _read(path)
        if text is not None and text.strip().isdigit():  # «max» if there is no limit
            limits.append(int(text))
    return min((limit for limit in limits if limit > 0), default=None)


def _limit_files() -> Iterator[Path]:
    """Yield the files that limit the memory of this process: those of its control group and of all its parents."""
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        for version, name in _CGROUP_FILES.items():
            if controllers == version:
                own = _CGROUP / controllers / group.strip("/")
                yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(_CGROUP))


def kernel_kills() -> int | None:
    """Return how many processes the kernel has killed for lack of memory: in this container, else on the machine."""
    for path in (_CGROUP / "memory.events", Path("/proc/vmstat")):
        for line in (_read(path) or "").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
