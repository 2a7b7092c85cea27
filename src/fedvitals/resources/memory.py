# SPDX-License-Identifier: Apache-2.0
"""Memory of this process and of its machine, where the system tells it for free."""

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
    """What the process holds in memory now (Linux); None elsewhere."""
    statm = _statm(os.getpid())
    if statm is None:
        return None
    try:
        return int(os.pread(statm, 100, 0).split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


@functools.lru_cache(maxsize=1)
def _statm(_process: int) -> int | None:
    """The file that tells it, kept open: opening it each time costs six times as much. A forked child has its own."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None


def heap_bytes() -> int | None:
    """What is in use of the C library's heap, where tensors on the CPU lie too (glibc 2.33 or later); else None.

    Resident memory hides who took it: a leak first fills what others have freed. This does not. But it may have to walk
    through all that is free: for when there is a suspicion.
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
    """Let all threads that start from now on allocate from one heap (glibc); return whether that is so.

    By default the C library gives each thread a heap of its own, up to eight per core, and each keeps room for the
    largest that it ever held. For processes whose threads take turns, as those of Python do.
    What is large never lies in the heap, so that it leaves no hole there: by default that ends with the first that is
    freed.
    """
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_M_ARENA_MAX, 1)) and bool(library.mallopt(_M_MMAP_THRESHOLD, _LARGE))
    except (AttributeError, OSError, TypeError):  # another C library
        return False


def give_back_free_memory() -> bool:
    """Give the system what is free in the C library's heap (glibc); return whether anything was given back.

    By itself the library gives back only what is free at the heap's end: one small object there keeps megabytes.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError, TypeError):  # another C library
        return False


def peak_bytes() -> int | None:
    """The most it ever held (Unix); None elsewhere."""
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


@functools.lru_cache(maxsize=1)
def limit_bytes() -> int | None:
    """The most that this process can have: the machine's memory, or less where a container is given less."""
    limits = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * _PAGE)
    for path in _limit_files():
        text = _read(path)
        if text is not None and text.strip().isdigit():  # «max» where there is none
            limits.append(int(text))
    return min((limit for limit in limits if limit > 0), default=None)


def _limit_files() -> Iterator[Path]:
    """Yield the files that limit the memory of this process: those of its control group and of all above it."""
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        for version, name in _CGROUP_FILES.items():
            if controllers == version:
                own = _CGROUP / controllers / group.strip("/")
                yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(_CGROUP))


def kernel_kills() -> int | None:
    """How many processes the kernel has killed for want of memory: of this container, else of the whole machine."""
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
