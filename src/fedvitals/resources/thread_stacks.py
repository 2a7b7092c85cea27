# SPDX-License-Identifier: Apache-2.0
"""Where each thread of this process is: functions, files and lines, never the values of variables.

The interpreter returns the frames of all threads in one call; no thread is stopped or interrupted for it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import PurePath
from types import FrameType

OWN = "fedvitals-"  # the prefix of our own threads' names
MOST_THREADS = 12
MOST_FRAMES = 25  # of one thread, innermost first
MOST_CHARACTERS = 1900  # of one thread: pages show no more


def thread_stacks(first: tuple[int, ...] = ()) -> dict[str, str]:
    """Return for each thread, by its name, where it is: «wait (lib/threading.py:355) ← main (app/server.py:41)».

    The main thread comes first, then those whose identifiers are in `first`. Our own threads are omitted, and so are
    any beyond `MOST_THREADS`.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()  # noqa: SLF001 - documented, and the only way
    order = sorted(frames, key=lambda ident: (ident != main, ident not in first, names.get(ident) is None))
    stacks: dict[str, str] = {}
    for ident in order:
        name = names.get(ident) or f"thread {ident}"  # started by C code
        if not name.startswith(OWN) and len(stacks) < MOST_THREADS:
            stacks[name if name not in stacks else f"{name} ({ident})"] = stack_words(frames[ident])
    return stacks


def stack_words(frame: FrameType | None) -> str:
    """Return a stack in one line, from the innermost function outwards."""
    calls: list[str] = []
    while frame is not None and len(calls) < MOST_FRAMES:
        code = frame.f_code
        file = "/".join(PurePath(code.co_filename).parts[-2:])
        calls.append(f"{code.co_name} ({file}:{frame.f_lineno})")
        frame = frame.f_back
    return " ← ".join(calls)[:MOST_CHARACTERS]
