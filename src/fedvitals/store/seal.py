# SPDX-License-Identifier: Apache-2.0
"""Checksums of all pages of a store's file, so that no damage to it changes an answer unnoticed.

SQLite has checksums for its log alone: a flipped bit in the file itself may become another number. A store at rest
therefore carries a checksum of each page behind its last page, where SQLite does not look and from where any copy takes
them along. While a store is written they are in a file of their own beside it (`runs.db.sums`) and are brought up to
date before each time that the log is folded in: whatever page is not in the log has the checksum noted there. They are
those that SQLite computes for the log, so that writing them costs no look at a page.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedvitals.store.identity import has_foreign_log
from fedvitals.store.lock import note_of
from fedvitals.store.log_file import (
    FRAME,
    HEADER,
    Log,
    Salts,
    frame_heads,
    page_in,
    page_sums,
    read_log,
    sums_in,
)

logger = logging.getLogger("fedvitals.store")

Checksums = npt.NDArray[np.uint32]  # [pages, 2]

UNKNOWN = 0  # in place of the checksum of a page that was never written
FOOTER = struct.Struct("<8sIIIII")  # magic, page size, change counter, pages, CRC of the checksums, CRC of all before
MAGIC = b"fvsums1\n"
DATABASE_HEADER = 100
NEVER_ZERO = np.uint32(1)  # added, so that a page of zeros does not pass for one that was never written
AT_ONCE = 64  # pages; half a megabyte stays in the processor's cache
FOLD_FRAMES = 4000  # in the log, after which it is folded in
RETRY_FRAMES = 1000  # after a reader kept it from being folded in
# Bytes of the first page that SQLite changes without a transaction of ours: the journal mode, and who wrote last.
UNSEALED_BYTES = ((18, 20), (24, 28), (92, 100))
FILES_OPEN = 64
ATTEMPTS, PAUSE = 3, 0.1  # at a store that somebody writes meanwhile; seconds

_GATE = threading.Lock()
_FILES: OrderedDict[tuple[int, int], int] = OrderedDict()  # by device and number
_SOUND: dict[tuple[int, int], object] = {}  # state in which each file was last seen to be sound


@dataclass(frozen=True, slots=True)
class Sums:
    """The checksums of a file's pages, and the header's change counter that belongs to them."""

    page_size: int
    counter: int
    pages: Checksums

    def to_bytes(self) -> bytes:
        """Return the checksums, zeros up to a whole number of pages, and the footer."""
        content = self.pages.astype("<u4").tobytes()
        content += bytes(-(len(content) + FOOTER.size) % self.page_size)
        head = (MAGIC, self.page_size, self.counter, len(self.pages), zlib.crc32(content))
        footer = FOOTER.pack(*head, 0)
        return content + FOOTER.pack(*head, zlib.crc32(footer[:-4]))


@dataclass(slots=True)
class Report:
    """What the checksums say about a file."""

    state: str = "absent"  # "sealed"; "absent"; "edited": another program has written to it since
    problems: list[str] = field(default_factory=list)
    damaged_pages: list[int] = field(default_factory=list)  # from 1 up
    sums: Sums | None = None


def beside(path: Path) -> Path:
    """Return the file that has the checksums of a store while it is written."""
    return path.with_name(f"{path.name}.sums")


# -- examining ---------------------------------------------------------------------------------------------------------


def examine(path: Path) -> Report:
    """Compare a store's file and log with what was noted when they were written."""
    report = _examine(path)
    for _ in range(ATTEMPTS - 1):
        if not report.problems:
            break
        before = _state(path)
        time.sleep(PAUSE if _is_in_use(path) else 0)
        report = _examine(path)
        if report.problems and before == _state(path):
            break
    else:
        if report.problems and _is_in_use(path):
            return Report()  # somebody writes it faster than it can be read
    return report


def is_known_sound(path: Path) -> bool:
    """Whether this process has seen the store to be sound, and it was not changed at rest since."""
    return _SOUND.get(_identity(path)) == _state_at_rest(path)


def remember_sound(path: Path) -> None:
    """Note that the store was just seen to be sound."""
    _SOUND[_identity(path)] = _state_at_rest(path)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return None


def _state(path: Path) -> object:
    return _stamp(path), _stamp(beside(path)), _log_salts(path), note_of(path)


def _state_at_rest(path: Path) -> object:
    """Changes of a store that is being written are its writer's."""
    return "written" if beside(path).exists() else _stamp(path)


def _is_in_use(path: Path) -> bool:
    return beside(path).exists() or _log(path).exists()


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _log_salts(path: Path) -> Salts | None:
    with contextlib.suppress(OSError, struct.error), _log(path).open("rb") as file:
        salts = HEADER.unpack(file.read(HEADER.size))[4:6]
        return salts[0], salts[1]
    return None


def _examine(path: Path) -> Report:
    file = _open(path)
    start, size = os.pread(file, DATABASE_HEADER, 0), os.fstat(file).st_size
    if len(start) < DATABASE_HEADER:
        return Report()
    page_size = _page_size(start)
    if page_size < 512 or page_size & (page_size - 1):
        return Report()  # SQLite refuses it
    log = None if has_foreign_log(path) else read_log(_log(path), page_size)
    report = Report()
    try:
        report.sums = _noted(path, file, start, size, in_use=log is not None or _has_journal(path))
    except ValueError as error:
        report.problems.append(str(error))
    if log is not None and log.damaged:
        report.problems.append(_LOG_DAMAGED)
    if report.sums is not None:
        _compare(file, start, report.sums, log or Log(), report)
    _compare_log(path, log, report)
    return report


def _compare(file: int, start: bytes, sums: Sums, log: Log, report: Report) -> None:
    report.state = "sealed"
    if 1 not in log.frame_of:
        counter, valid = _counter(start), int.from_bytes(start[92:96], "big")
        if counter != valid:
            report.problems.append("the file's header is damaged")
        elif counter != sums.counter:
            report.state, report.sums = "edited", None
            return
    if sums.page_size != _page_size(start):
        report.problems.append("the file's header is damaged")
        return
    found = _checksums(file, sums.page_size, len(sums.pages))
    wrong = np.flatnonzero((found != sums.pages).any(axis=1) & (sums.pages != UNKNOWN).any(axis=1)) + 1
    report.damaged_pages = [page for page in wrong.tolist() if page not in log.frame_of]
    if report.damaged_pages:
        count, total = len(report.damaged_pages), len(sums.pages)
        report.problems.append(f"{count} of its {total} pages {'is' if count == 1 else 'are'} not as written")


_LOG_DAMAGED = "its log is damaged, and SQLite ignores what follows the damage"


def _compare_log(path: Path, log: Log | None, report: Report) -> None:
    """Compare the log with what a writer noted that is no more. One that lives has it in its own memory."""
    noted = noted_log(note_of(path))
    if noted is None or not noted[1]:
        return
    salts, frames = noted
    if log is None:
        if report.state == "edited" or report.damaged_pages:
            # Somebody else has folded the log into the file, as any program does that opens and closes it.
            report.state, report.problems, report.damaged_pages, report.sums = "edited", [], [], None
        elif report.sums is not None:
            report.problems.append("its log is missing, and with it what was written last")
    elif log.salts == salts and log.frames < frames and _LOG_DAMAGED not in report.problems:
        report.problems.append(f"its log is cut off or damaged: {frames - log.frames} of {frames} pages are missing")
    elif log.salts != salts and log.salts[0] != (salts[0] + 1) & 0xFFFFFFFF and not log.damaged:
        report.problems.append("the log beside it is not the one that was written")


def log_note(salts: Salts, frames: int) -> str:
    """Return the line of the lock file that says how much the log holds."""
    return f"log {salts[0]:010} {salts[1]:010} {frames:010}"


def noted_log(note: str | None) -> tuple[Salts, int] | None:
    """Return salts and frames from the note in a lock file; None if it has none."""
    for line in (note or "").splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "log" and all(word.isdecimal() for word in words[1:]):
            return (int(words[1]), int(words[2])), int(words[3])
    return None


def _noted(path: Path, file: int, start: bytes, size: int, *, in_use: bool) -> Sums | None:
    """Return the checksums of a store; None if it has none. Raises ValueError if they are damaged."""
    try:
        content = beside(path).read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ValueError(f"its checksums cannot be read: {error.strerror}") from error
    else:
        return _decoded(content, start)
    end = int.from_bytes(start[28:32], "big") * _page_size(start)
    if size == end or in_use:
        return None
    if size < end:
        raise ValueError(f"the file is cut off: it has {size} of {end} bytes")
    footer = os.pread(file, FOOTER.size, size - FOOTER.size)
    page_size, _, pages, _ = _footer(footer)
    length = -(-(8 * pages + FOOTER.size) // page_size) * page_size
    return _decoded(os.pread(file, length, size - length), start)


_DAMAGED = "its checksums are damaged"


def _footer(footer: bytes) -> tuple[int, int, int, int]:
    """Return page size, counter, number of pages and checksum of the checksums."""
    if len(footer) < FOOTER.size:
        raise ValueError(_DAMAGED)
    magic, page_size, counter, pages, checksum, own = FOOTER.unpack(footer)
    if magic != MAGIC or own != zlib.crc32(footer[:-4]):
        raise ValueError(_DAMAGED)
    return page_size, counter, pages, checksum


def _decoded(content: bytes, start: bytes) -> Sums:
    page_size, counter, pages, checksum = _footer(content[-FOOTER.size :])
    body = content[: -FOOTER.size]
    # Of a file to which another program has added pages since, they are overwritten, and do not count any more.
    if zlib.crc32(body) != checksum and counter == _counter(start):
        raise ValueError(_DAMAGED)
    count = min(pages, len(body) // 8)
    return Sums(page_size, counter, np.frombuffer(body, "<u4", 2 * count).astype(np.uint32).reshape(-1, 2))


def _has_journal(path: Path) -> bool:
    return path.with_name(f"{path.name}-journal").exists()


def _counter(start: bytes) -> int:
    return int.from_bytes(start[24:28], "big")


def _page_size(start: bytes) -> int:
    size = int.from_bytes(start[16:18], "big")
    return 65536 if size == 1 else size


def _open(path: Path) -> int:
    """Return a descriptor of a store's file, which stays open.

    Closing it would drop every lock that SQLite holds on the file for this process: so POSIX wants it.
    """
    with _GATE:
        identity = _identity(path)
        file = _FILES.pop(identity, None)
        if file is None:
            flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            try:
                file = os.open(path, os.O_RDWR | flags)
            except PermissionError:
                file = os.open(path, os.O_RDONLY | flags)
        _FILES[identity] = file
        while len(_FILES) > FILES_OPEN:
            os.close(_FILES.popitem(last=False)[1])
        return file


def _checksums(file: int, page_size: int, count: int) -> Checksums:
    """Return the checksums of the first pages of an open file; UNKNOWN for those that it does not have."""
    sums = np.full((count, 2), UNKNOWN, np.uint32)
    for first in range(0, count, AT_ONCE):
        content = os.pread(file, min(AT_ONCE, count - first) * page_size, first * page_size)
        pages = len(content) // page_size
        words = np.frombuffer(content, "<u4", pages * page_size // 4).reshape(pages, page_size // 4)
        sums[first : first + pages] = page_sums(words.astype(np.uint32, copy=False)) + NEVER_ZERO
        if not first and pages:
            sums[0] = _of_first_page(content[:page_size])
    return sums


def _of_first_page(page: bytes) -> Checksums:
    changed = bytearray(page)
    for begin, end in UNSEALED_BYTES:
        changed[begin:end] = bytes(end - begin)
    return page_sums(np.frombuffer(bytes(changed), "<u4")[None, :].astype(np.uint32))[0] + NEVER_ZERO


# -- keeping -----------------------------------------------------------------------------------------------------------


def _resized(pages: Checksums, count: int) -> Checksums:
    resized = np.full((count, 2), UNKNOWN, np.uint32)
    resized[: len(pages)] = pages[:count]
    return resized


class Seal:
    """Keeps the checksums of a store while one process writes it.

    Nothing here may stop a store from being written: what fails is logged once, and the store has no checksums until
    the next writer makes new ones.
    """

    def __init__(self, path: Path) -> None:
        """Examine a store before its first connection that may write."""
        self._path = path.absolute()
        self._partial = self._path.with_name(f"{path.name}.sums.partial")
        self.report = Report()
        self._sums: Sums | None = None
        self._damaged: frozenset[int] = frozenset()  # pages that were damaged before: their checksums stay wrong
        self._log = Log()
        self._inherited: Salts | None = None  # of a log in which frames of a killed process may lie behind the last one
        self._frames = 0  # of the log, up to the last commit
        self._last_commit = 1  # how many frames it had
        self._noted_frames = 0  # whose pages have their checksums noted
        self._next_fold = FOLD_FRAMES
        self._open_log: int | None = None
        self._off = sys.byteorder == "big"  # there, the log has other checksums
        with self._guarded():
            if not path.exists() or not path.stat().st_size:
                beside(self._path).unlink(missing_ok=True)
                return
            self.report = examine(path)
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
        except (OSError, ValueError, struct.error) as error:
            logger.warning("The store '%s' has no checksums for now: %s.", self._path, error)
            self.drop()

    def drop(self) -> None:
        """Give up: the file is no longer ours, or its pages cannot be followed."""
        self._off = True
        self._close_log()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)
            beside(self._path).unlink(missing_ok=True)

    def begin(self) -> None:
        """Note the checksums beside the store, once it is open and before its log is folded in."""
        if self._off:
            return
        with self._guarded():
            start = os.pread(_open(self._path), DATABASE_HEADER, 0)
            page_size = _page_size(start)
            self._log = read_log(_log(self._path), page_size) or Log()
            self._inherited = self._log.salts if _log_salts(self._path) else None
            if self._sums is None:
                count = os.fstat(_open(self._path)).st_size // page_size
                count = min(count, int.from_bytes(start[28:32], "big")) or count
                pages = _checksums(_open(self._path), page_size, count)
                wrong = [page - 1 for page in self._damaged if page <= count]
                pages[wrong] = ~pages[wrong]
                self._sums = Sums(page_size, _counter(start), pages)
            self._sums = Sums(page_size, _counter(start), self._sums.pages)
            self._frames, self._noted_frames = self._log.frames, 0
            self._next_fold = 0 if self._log.frames else FOLD_FRAMES
            self._write()

    def committed(self) -> str | None:
        """Return the line of the lock file that says how much the log holds after a commit."""
        if self._sums is None:
            self.begin()
        if not self._off and self._sums is not None:
            with self._guarded():
                self._count(self._sums.page_size)
        return None if self._off else log_note(self._log.salts, self._frames)

    def _count(self, page_size: int) -> None:
        """Find the last commit in the log: frames of another salt follow, or of a transaction that was undone."""
        file = self._log_file()
        start = os.pread(file, HEADER.size, 0) if file is not None else b""
        salts = HEADER.unpack(start)[4:6] if len(start) == HEADER.size else (0, 0)
        if salts != self._log.salts:
            self._log, self._frames = Log((salts[0], salts[1])), 0
            self._noted_frames, self._next_fold = 0, FOLD_FRAMES
        elif salts == self._inherited:
            self._log = read_log(_log(self._path), page_size) or Log()
            self._frames = self._log.frames
        if file is None or salts in (self._inherited, (0, 0)):
            return
        own, size = start[16:24], FRAME.size + page_size
        low, high = self._frames, (os.fstat(file).st_size - HEADER.size) // size
        middle = low + self._last_commit - 1  # most are as long as the one before
        while low < high:
            middle = middle if low <= middle < high else (low + high) // 2
            if os.pread(file, 8, HEADER.size + middle * size + 8) == own:
                low = middle = middle + 1
            else:
                high, middle = middle, -1
        while low > self._frames and not any(os.pread(file, 4, HEADER.size + (low - 1) * size + 4)):
            low -= 1
        self._frames, self._last_commit = low, low - self._frames

    def _log_file(self) -> int | None:
        """Return a descriptor of the log, which stays open until another file has its name."""
        if self._open_log is not None and os.fstat(self._open_log).st_nlink:
            return self._open_log
        self._close_log()
        with contextlib.suppress(FileNotFoundError):
            self._open_log = os.open(_log(self._path), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return self._open_log

    def _close_log(self) -> None:
        if self._open_log is not None:
            os.close(self._open_log)
        self._open_log = None

    @property
    def wants_fold(self) -> bool:
        """Whether the log has become so long that it should be folded in."""
        return self._frames >= self._next_fold

    def changed_elsewhere(self) -> None:
        """Another program has written to the store, and may have folded the log in: all pages are read again."""
        with contextlib.suppress(OSError):
            beside(self._path).unlink(missing_ok=True)
        self._sums = None

    def before_fold(self) -> None:
        """Bring the checksums up to date with the log; to be called before each time that it is folded in."""
        if self._off:
            return
        self.committed()
        with self._guarded():
            self._write()
        self._next_fold = self._frames + RETRY_FRAMES

    def _write(self) -> None:
        """Write the checksums of the file's pages as they are once the log is folded in."""
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
                counter, sums[newest[1]] = _counter(content), _of_first_page(content)
            for page in self._damaged:
                newest.pop(page, None)
            pages[np.array([*newest], int) - 1] = sums[[*newest.values()]]
        self._sums, self._noted_frames = Sums(page_size, counter, pages), last
        self._partial.write_bytes(self._sums.to_bytes())
        self._partial.replace(beside(self._path))

    def finish(self) -> None:
        """Put the checksums behind the last page, if the log was folded in and nobody else has the store open."""
        self._close_log()
        if self._off or self._sums is None:
            return
        with self._guarded():
            file = _open(self._path)
            start = os.pread(file, DATABASE_HEADER, 0)
            # SQLite may count what lay behind the last page as pages, too, but its header does not.
            count = int.from_bytes(start[28:32], "big")
            if _log(self._path).exists() or start[18] != 1 or count > len(self._sums.pages):
                return
            sums = Sums(self._sums.page_size, _counter(start), self._sums.pages[:count])
            end = count * sums.page_size
            os.ftruncate(file, end)
            os.pwrite(file, sums.to_bytes(), end)
            beside(self._path).unlink(missing_ok=True)
            if not self._damaged and not self.report.problems:
                remember_sound(self._path)
