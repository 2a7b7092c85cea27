# SPDX-License-Identifier: Apache-2.0
"""Keeps the checksums of a store's pages up to date while it is written; `checksums` explains their purpose."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedvitals.errors import StoreError
from fedvitals.store.checksums import (
    DATABASE_HEADER,
    NEVER_ZERO,
    UNKNOWN,
    Checksums,
    Report,
    Sums,
    beside,
    change_counter,
    checksum_of_first_page,
    checksums_of,
    examine,
    log_note,
    log_of,
    log_salts,
    open_file,
    page_size_in,
    remember_sound,
)
from fedvitals.store.log_file import FRAME, HEADER, Log, Salts, frame_heads, page_in, read_log, sums_in
from fedvitals.store.positions import read_at, write_at

logger = logging.getLogger("fedvitals.store")

FOLD_FRAMES = 4000  # the length of the log at which it is folded in
MOST_CHANGES = 3  # by others, after which there are no checksums until the next writer
RETRY_FRAMES = 1000  # additional frames before the next attempt, when a reader prevented the log from being folded in


def _resized(pages: Checksums, count: int) -> Checksums:
    resized = np.full((count, 2), UNKNOWN, np.uint32)
    resized[: len(pages)] = pages[:count]
    return resized


class Seal:
    """Keeps the checksums of a store while one process writes it.

    Nothing here may keep a store from being written: a failure is logged once, and the store has no checksums until the
    next writer makes new ones.
    """

    def __init__(self, path: Path, note: str | None = None) -> None:
        """Examine a store before its first writing connection; `note`: the last writer's note in the lock file."""
        self._path = path.absolute()
        self._partial = self._path.with_name(f"{path.name}.sums.{os.getpid()}-{id(self):x}.partial")
        self.report = Report()
        self._sums: Sums | None = None
        self._damaged: frozenset[int] = frozenset()  # pages that were already damaged: their checksums stay wrong
        self._log = Log()
        self._inherited: Salts | None = None  # of a log in which frames of a killed process may follow the last commit
        self._frames = 0  # of the log, up to the last commit
        self._last_commit = 1  # its number of frames
        self._noted_frames = 0  # frames whose pages' checksums are recorded
        self._next_fold = FOLD_FRAMES
        self._open_log: int | None = None
        self._changes = 0  # by other processes
        self._off = sys.byteorder == "big"  # the log has different checksums there
        with self._guarded():
            if not path.exists() or not path.stat().st_size:
                beside(self._path).unlink(missing_ok=True)
                return
            self.report = examine(path, note)
            self._sums, self._damaged = self.report.sums, frozenset(self.report.damaged_pages)
            if self.report.problems:
                logger.warning(
                    "The store '%s' is damaged: %s. `fedvitals doctor %s --mend` saves what is sound.",
                    path,
                    "; ".join(self.report.problems),
                    path,
                )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, struct.error, StoreError) as error:
            logger.warning("The store '%s' has no checksums for now: %s.", self._path, error)
            self.drop()

    def drop(self) -> None:
        """Give up the checksums: the file is no longer ours, or its pages cannot be followed."""
        self._off = True
        self._close_log()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)
            beside(self._path).unlink(missing_ok=True)

    def begin(self) -> None:
        """Record the checksums beside the store, once it is open and before its log is folded in."""
        if self._off:
            return
        with self._guarded():
            start = read_at(open_file(self._path), DATABASE_HEADER, 0)
            page_size = page_size_in(start)
            self._log = read_log(log_of(self._path), page_size) or Log()
            self._inherited = self._log.salts if log_salts(self._path) else None
            if self._sums is None:
                count = os.fstat(open_file(self._path)).st_size // page_size
                count = min(count, int.from_bytes(start[28:32], "big")) or count
                pages = checksums_of(open_file(self._path), page_size, count)
                wrong = [page - 1 for page in self._damaged if page <= count]
                pages[wrong] = ~pages[wrong]
                self._sums = Sums(page_size, change_counter(start), pages)
            self._sums = Sums(page_size, change_counter(start), self._sums.pages)
            self._frames, self._noted_frames = self._log.frames, 0
            self._next_fold = 0 if self._log.frames else FOLD_FRAMES
            self._write()

    def committed(self) -> str | None:
        """Return the line of the lock file that records the length of the log after a commit."""
        if self._sums is None:
            self.begin()
        if not self._off and self._sums is not None:
            with self._guarded():
                self._count(self._sums.page_size)
        return None if self._off else log_note(self._log.salts, self._frames)

    def _count(self, page_size: int) -> None:
        """Find the last commit in the log: it is followed by frames with other salts, or of a transaction that was
        undone.
        """
        file = self._log_file()
        start = read_at(file, HEADER.size, 0) if file is not None else b""
        salts = HEADER.unpack(start)[4:6] if len(start) == HEADER.size else (0, 0)
        if salts != self._log.salts:
            self._log, self._frames = Log((salts[0], salts[1])), 0
            self._noted_frames, self._next_fold = 0, FOLD_FRAMES
        elif salts == self._inherited:
            self._log = read_log(log_of(self._path), page_size) or Log()
            self._frames = self._log.frames
        if file is None or salts in (self._inherited, (0, 0)):
            return
        own, size = start[16:24], FRAME.size + page_size
        low, high = self._frames, (os.fstat(file).st_size - HEADER.size) // size
        middle = low + self._last_commit - 1  # most are as long as the previous one
        while low < high:
            middle = middle if low <= middle < high else (low + high) // 2
            if read_at(file, 8, HEADER.size + middle * size + 8) == own:
                low = middle = middle + 1
            else:
                high, middle = middle, -1
        while low > self._frames and not any(read_at(file, 4, HEADER.size + (low - 1) * size + 4)):
            low -= 1
        self._frames, self._last_commit = low, low - self._frames

    def _log_file(self) -> int | None:
        """Return a descriptor of the log, which stays open until another file has its name."""
        if self._open_log is not None and os.fstat(self._open_log).st_nlink:
            return self._open_log
        self._close_log()
        with contextlib.suppress(FileNotFoundError):
            self._open_log = os.open(log_of(self._path), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return self._open_log

    def _close_log(self) -> None:
        if self._open_log is not None:
            os.close(self._open_log)
        self._open_log = None

    @property
    def wants_fold(self) -> bool:
        """Whether the log has become long enough to be folded in."""
        return self._frames >= self._next_fold

    def changed_elsewhere(self) -> None:
        """Handle a write by another program or monitor, which may have folded the log in.

        All pages are read again; but not each time if two processes take turns: then the next writer makes new
        checksums.
        """
        self._changes += 1
        if self._changes > MOST_CHANGES:
            self.drop()
        with contextlib.suppress(OSError):
            beside(self._path).unlink(missing_ok=True)
        self._sums = None

    def before_fold(self) -> None:
        """Update the checksums with the log; call this each time before the log is folded in."""
        if self._off:
            return
        self.committed()
        with self._guarded():
            self._write()
        self._next_fold = self._frames + RETRY_FRAMES

    def _write(self) -> None:
        """Write the checksums that the file's pages will have after the log is folded in."""
        if self._sums is None:
            return
        page_size, counter, file = self._sums.page_size, self._sums.counter, self._log_file()
        pages, first, last = self._sums.pages, self._noted_frames, self._frames
        if file is not None and first < last:
            heads = frame_heads(file, first, last, page_size)
            sums = sums_in(file, first, heads, page_size) + NEVER_ZERO
            page_of_frame, counts = heads[:, 0].byteswap().tolist(), heads[:, 1].byteswap()
            pages = _resized(pages, int(counts[counts > 0][-1]))
            newest = {page: i for i, page in enumerate(page_of_frame) if page <= len(pages)}
            if 1 in newest:
                content = page_in(file, first + newest[1], page_size)
                counter, sums[newest[1]] = change_counter(content), checksum_of_first_page(content)
            for page in self._damaged:
                newest.pop(page, None)
            pages[np.array([*newest], int) - 1] = sums[[*newest.values()]]
        self._sums, self._noted_frames = Sums(page_size, counter, pages), last
        self._partial.write_bytes(self._sums.to_bytes())
        self._partial.replace(beside(self._path))

    def finish(self) -> None:
        """Append the checksums to the last page, if the log was folded in and no other process has the store open."""
        self._close_log()
        if self._off or self._sums is None:
            return
        with self._guarded():
            file = open_file(self._path)
            start = read_at(file, DATABASE_HEADER, 0)
            # SQLite may also count what followed the last page as pages, but its header does not.
            count = int.from_bytes(start[28:32], "big")
            if log_of(self._path).exists() or start[18] != 1 or count > len(self._sums.pages):
                return
            sums = Sums(self._sums.page_size, change_counter(start), self._sums.pages[:count])
            end = count * sums.page_size
            os.ftruncate(file, end)
            write_at(file, sums.to_bytes(), end)
            beside(self._path).unlink(missing_ok=True)
            if not self._damaged and not self.report.problems:
                remember_sound(self._path)
