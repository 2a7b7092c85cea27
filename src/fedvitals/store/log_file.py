# SPDX-License-Identifier: Apache-2.0
"""Reads SQLite's write-ahead log: which pages it holds, and how much of it SQLite accepts.

SQLite gives each page in the log (a *frame*) a checksum that includes all frames before it. It silently ignores a
damaged frame and all that follow, because the log of a killed process may end anywhere. The layout is described at
https://sqlite.org/fileformat2.html#walformat.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedvitals.store.positions import read_at

HEADER, FRAME = struct.Struct(">8I"), struct.Struct(">6I")
MAGIC = 0x377F0682  # with the lowest bit set, checksums are of big-endian words
AT_ONCE = 64  # frames; half a megabyte of pages fits into the processor's cache

Salts = tuple[int, int]
Words = npt.NDArray[np.uint32]


@dataclass(slots=True)
class Log:
    """The committed part of a log."""

    salts: Salts = (0, 0)  # changed whenever SQLite restarts the log
    frames: int = 0  # up to the last commit
    frame_of: dict[int, int] = field(default_factory=dict)  # the newest committed frame of each page
    page_count: int = 0  # of the database after the last commit
    damaged: bool = False  # whether there are later commits that SQLite ignores


def read_log(path: Path, page_size: int) -> Log | None:
    """Return the part of a log that SQLite would accept; None if there is no log, or an empty one."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        return _read(file, page_size) if os.fstat(file).st_size else None
    finally:
        os.close(file)  # unlike for the store's own file, SQLite holds no locks on this one


def frame_heads(file: int, first: int, last: int, page_size: int) -> Words:
    """Return the headers of the frames from `first` up to, but not including, `last` in an open log: [frames, 6]."""
    size = FRAME.size + page_size
    heads = b"".join([read_at(file, FRAME.size, HEADER.size + i * size) for i in range(first, last)])
    return np.frombuffer(heads, np.uint32).reshape(-1, 6)


def page_in(file: int, frame: int, page_size: int) -> bytes:
    """Return the page in one frame of an open log."""
    return read_at(file, page_size, HEADER.size + frame * (FRAME.size + page_size) + FRAME.size)


def sums_in(file: int, first: int, heads: Words, page_size: int) -> Words:
    """Return `page_sums` of the pages in these frames without reading the pages: SQLite has already summed them."""
    place = HEADER.size + first * (FRAME.size + page_size) - page_size - 8 if first else 24
    before = np.frombuffer(read_at(file, 8, place), np.uint32)[None, :]
    states = np.concatenate((before, heads[:, 4:6])).byteswap()
    steps = page_size // 8 + 1
    step = np.array(_step(steps), np.uint32).reshape(2, 2)
    sums: Words = states[1:] - states[:-1] @ step.T - heads[:, :2] @ _weights(steps)[:, :2].T
    return sums


def page_sums(pages: Words) -> Words:
    """Return the checksum that SQLite's log would give each page alone, from rows of words: [pages, 2].

    Every bit of a page counts: of the two weights of a word, neighbouring Fibonacci numbers, at least one is odd.
    """
    # Products of integers take three times as long with `@`, which does not use the processor's vectors for them.
    sums: Words = np.einsum("ij,kj->ik", pages, _weights(pages.shape[1] // 2))
    return sums


def _read(file: int, page_size: int) -> Log:
    start = read_at(file, HEADER.size, 0)
    if len(start) < HEADER.size:
        return Log(damaged=True)
    magic, _, size, _, *rest = HEADER.unpack(start)
    log = Log((rest[0], rest[1]))
    order = ">" if magic & 1 else "<"
    own = page_sums(np.frombuffer(start[:24], f"{order}u4").astype(np.uint32)[None, :])[0].tolist()
    if magic & ~1 != MAGIC or size != page_size or own != rest[2:]:
        log.damaged = True
        return log
    state, pages, broken = (rest[2], rest[3]), dict[int, int](), None
    step = _step(page_size // 8 + 1)
    for number, (page, count, salts, checksum, added) in enumerate(_frames(file, page_size, order)):
        if salts != log.salts:
            break
        if broken is not None:
            log.damaged = log.damaged or (count > 0 and number > broken)
            continue
        state = (
            (step[0] * state[0] + step[1] * state[1] + added[0]) & 0xFFFFFFFF,
            (step[2] * state[0] + step[3] * state[1] + added[1]) & 0xFFFFFFFF,
        )
        if state != checksum:
            broken = number  # alone no sign of damage: a process may have been killed while it wrote this frame
            continue
        pages[page] = number
        if count:  # a commit
            log.frame_of |= pages
            log.frames, log.page_count, pages = number + 1, count, {}
    return log


Frame = tuple[int, int, Salts, tuple[int, int], tuple[int, int]]


def _frames(file: int, page_size: int, order: str) -> Iterator[Frame]:
    """Yield page, page count, salts, checksum, and the contribution of the frame's own bytes to the checksum."""
    size, place = FRAME.size + page_size, HEADER.size
    while True:
        content = read_at(file, AT_ONCE * size, place)
        count = len(content) // size
        if not count:
            return
        place += count * size
        frames = np.frombuffer(content, np.uint8, count * size).reshape(count, size)
        heads = frames[:, : FRAME.size].copy().view(">u4").tolist()
        words = np.concatenate((frames[:, :8], frames[:, FRAME.size :]), axis=1).view(f"{order}u4").astype(np.uint32)
        for (page, pages, *rest), added in zip(heads, page_sums(words).tolist(), strict=True):
            yield page, pages, (rest[0], rest[1]), (rest[2], rest[3]), (added[0], added[1])


# One step of the checksum processes two words x: s0 += x0 + s1; s1 += x1 + s0. That is linear modulo 2³², so the
# contribution of a page is a product of its words with fixed weights.
@functools.lru_cache(maxsize=8)
def _weights(steps: int) -> Words:
    """Return the weight of each word in the two sums: [2, 2 · steps]."""
    weights = np.zeros((steps, 2, 2), np.uint32)
    a, b, c, d = 1, 0, 0, 1
    for i in reversed(range(steps)):
        weights[i] = [[(a + b) & 0xFFFFFFFF, (c + d) & 0xFFFFFFFF], [b, d]]
        a, b, c, d = (value & 0xFFFFFFFF for value in (a + b, a + 2 * b, c + d, c + 2 * d))
    return np.ascontiguousarray(weights.reshape(2 * steps, 2).T)


@functools.lru_cache(maxsize=8)
def _step(steps: int) -> tuple[int, int, int, int]:
    """Return the weights of the two previous sums in the sums after this many steps."""
    a, b, c, d = 1, 0, 0, 1
    for _ in range(steps):
        a, b, c, d = (value & 0xFFFFFFFF for value in (a + b, a + 2 * b, c + d, c + 2 * d))
    return a, b, c, d
