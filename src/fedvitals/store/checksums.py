# SPDX-License-Identifier: Apache-2.0
"""Checksums of all pages of a store's file, so that damage to the file cannot change an answer unnoticed.

SQLite only has checksums for its log: a flipped bit in the file itself may become another number. A store at rest
therefore carries a checksum of each page behind its last page, where SQLite does not look and where any copy of the
file includes them. While a store is written, the checksums are in a separate file beside it (`runs.db.sums`) and are
brought up to date each time before the log is folded in: every page that is not in the log has its checksum recorded
there. They are the checksums that SQLite computes for the log, so recording them does not require reading a page.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedvitals.errors import StoreError
from fedvitals.store.identity import has_foreign_log
from fedvitals.store.lock import note_of
from fedvitals.store.log_file import HEADER, Log, Salts, page_sums, read_log
from fedvitals.store.positions import read_at, read_into

Checksums = npt.NDArray[np.uint32]  # [pages, 2]

UNKNOWN = 0  # in place of the checksum of a page that was never written
FOOTER = struct.Struct("<8sIIIII")  # magic, page size, change counter, pages, CRC of the checksums, CRC of all before
MAGIC = b"fvsums1\n"
DATABASE_HEADER = 100
NEVER_ZERO = np.uint32(1)  # added, so that a page of zeros does not pass for one that was never written
AT_ONCE = 256  # pages; two megabytes fit into the processor's cache
# Bytes of the first page that SQLite changes outside of our transactions: the journal mode and the last writer.
UNSEALED_BYTES = ((18, 20), (24, 28), (92, 100))
FILES_OPEN = 64
ATTEMPTS, PAUSE = 3, 0.02  # to read a store that is being written at the same time; seconds

_GATE = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may hold the lock while this one forks
    os.register_at_fork(after_in_child=lambda: globals().update(_GATE=threading.Lock()))
_FILES: OrderedDict[tuple[int, int], int] = OrderedDict()  # by device and inode
_SOUND: dict[tuple[int, int], object] = {}  # the state in which each file was last found undamaged


@dataclass(frozen=True, slots=True)
class Sums:
    """The checksums of a file's pages, and the change counter of the file header that they belong to."""

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
    """The result of comparing a file with its checksums."""

    state: str = "absent"  # "sealed"; "absent"; "edited": another program has written to the file since
    problems: list[str] = field(default_factory=list)
    damaged_pages: list[int] = field(default_factory=list)  # counted from 1
    sums: Sums | None = None


def beside(path: Path) -> Path:
    """Return the file that holds a store's checksums while the store is written."""
    return path.with_name(f"{path.name}.sums")


def examine(path: Path, note: str | None = None) -> Report:
    """Compare a store's file and log with the checksums recorded when they were written.

    `note`: the last writer's note in the lock file, for a process that has since taken the lock; others read it from
    there.
    """
    report = _examine(path, note)
    for _ in range(ATTEMPTS - 1):
        if not report.problems:
            break
        before = _state(path)
        time.sleep(PAUSE if _is_in_use(path) else 0)
        report = _examine(path, note)
        if report.problems and before == _state(path):
            break
    else:
        if report.problems and _is_in_use(path):
            return Report()  # written faster than it can be read
    return report


def is_known_sound(path: Path) -> bool:
    """Whether this process has found the store undamaged, and the file has not changed at rest since."""
    return _SOUND.get(_identity(path)) == _state_at_rest(path)


def remember_sound(path: Path) -> None:
    """Remember that the store was just found undamaged."""
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
    return _stamp(path), _stamp(beside(path)), log_salts(path), note_of(path)


def _state_at_rest(path: Path) -> object:
    """Return the state of a store at rest; changes to a store that is being written are its writer's."""
    return "written" if beside(path).exists() else _stamp(path)


def _is_in_use(path: Path) -> bool:
    return beside(path).exists() or log_of(path).exists()


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def log_salts(path: Path) -> Salts | None:
    with contextlib.suppress(OSError, struct.error), log_of(path).open("rb") as file:
        salts = HEADER.unpack(file.read(HEADER.size))[4:6]
        return salts[0], salts[1]
    return None


def _examine(path: Path, note: str | None) -> Report:
    file = open_file(path)
    start, size = read_at(file, DATABASE_HEADER, 0), os.fstat(file).st_size
    if len(start) < DATABASE_HEADER:
        return Report()
    page_size = page_size_in(start)
    if page_size < 512 or page_size & (page_size - 1):
        return Report()  # SQLite refuses such a file
    log = None if has_foreign_log(path) else read_log(log_of(path), page_size)
    report = Report()
    try:
        report.sums = _noted(path, file, start, size, in_use=log is not None or _has_journal(path))
    except ValueError as error:
        report.problems.append(str(error))
    if log is not None and log.damaged:
        report.problems.append(_LOG_DAMAGED)
    if report.sums is not None:
        _compare(file, start, report.sums, log or Log(), report)
    _compare_log(log, report, note_of(path) if note is None else note)
    return report


def _compare(file: int, start: bytes, sums: Sums, log: Log, report: Report) -> None:
    report.state = "sealed"
    if 1 not in log.frame_of:
        counter, valid = change_counter(start), int.from_bytes(start[92:96], "big")
        if counter != valid:
            report.problems.append("the file's header is damaged")
        elif counter != sums.counter:
            report.state, report.sums = "edited", None
            return
    if sums.page_size != page_size_in(start):
        report.problems.append("the file's header is damaged")
        return
    actual = checksums_of(file, sums.page_size, len(sums.pages))
    wrong = np.flatnonzero((actual != sums.pages).any(axis=1) & (sums.pages != UNKNOWN).any(axis=1)) + 1
    report.damaged_pages = [page for page in wrong.tolist() if page not in log.frame_of]
    if report.damaged_pages:
        count, total = len(report.damaged_pages), len(sums.pages)
        report.problems.append(f"{count} of its {total} pages {'is' if count == 1 else 'are'} not as written")


_LOG_DAMAGED = "its log is damaged, and SQLite ignores what follows the damage"


def _compare_log(log: Log | None, report: Report, note: str | None) -> None:
    """Compare the log with the note of a writer that has ended. A running writer has it in its own memory."""
    noted = noted_log(note)
    if noted is None or not noted[1]:
        return
    salts, frames = noted
    if log is None:
        if report.state == "edited" or report.damaged_pages:
            # Another program has folded the log into the file, as any program does that opens and closes it.
            report.state, report.problems, report.damaged_pages, report.sums = "edited", [], [], None
        elif report.sums is not None:
            report.problems.append("its log is missing, and with it what was written last")
    elif log.salts == salts and log.frames < frames and _LOG_DAMAGED not in report.problems:
        report.problems.append(f"its log is cut off or damaged: {frames - log.frames} of {frames} pages are missing")
    elif log.salts != salts and log.salts[0] != (salts[0] + 1) & 0xFFFFFFFF and not log.damaged:
        report.problems.append("the log beside it is not the one that was written")


def log_note(salts: Salts, frames: int) -> str:
    """Return the line of the lock file that records the length of the log."""
    return f"log {salts[0]:010} {salts[1]:010} {frames:010}"


def noted_log(note: str | None) -> tuple[Salts, int] | None:
    """Return the salts and the number of frames from the note in a lock file, or None if it has none."""
    for line in (note or "").splitlines():
        words = line.split()
        if len(words) == 4 and words[0] == "log" and all(word.isdecimal() for word in words[1:]):
            return (int(words[1]), int(words[2])), int(words[3])
    return None


def _noted(path: Path, file: int, start: bytes, size: int, *, in_use: bool) -> Sums | None:
    """Return the checksums of a store, or None if it has none. Raises ValueError if they are damaged."""
    try:
        content = beside(path).read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"The checksums of the store in '{beside(path)}' cannot be read: {error.strerror}.") from error
    else:
        return _decoded(content, start)
    end = int.from_bytes(start[28:32], "big") * page_size_in(start)
    if size == end or in_use:
        return None
    if size < end:
        raise ValueError(f"the file is cut off: it has {size} of {end} bytes")
    footer = read_at(file, FOOTER.size, size - FOOTER.size)
    page_size, _, pages, _ = _footer(footer)
    length = -(-(8 * pages + FOOTER.size) // page_size) * page_size
    return _decoded(read_at(file, length, size - length), start)


_DAMAGED = "its checksums are damaged"


def _footer(footer: bytes) -> tuple[int, int, int, int]:
    """Return the page size, the change counter, the number of pages and the checksum of the checksums."""
    if len(footer) < FOOTER.size:
        raise ValueError(_DAMAGED)
    magic, page_size, counter, pages, checksum, own = FOOTER.unpack(footer)
    if magic != MAGIC or own != zlib.crc32(footer[:-4]):
        raise ValueError(_DAMAGED)
    return page_size, counter, pages, checksum


def _decoded(content: bytes, start: bytes) -> Sums:
    page_size, counter, pages, checksum = _footer(content[-FOOTER.size :])
    body = content[: -FOOTER.size]
    # If another program has since added pages to the file, they overwrite the checksums, which no longer count.
    if zlib.crc32(body) != checksum and counter == change_counter(start):
        raise ValueError(_DAMAGED)
    count = min(pages, len(body) // 8)
    return Sums(page_size, counter, np.frombuffer(body, "<u4", 2 * count).astype(np.uint32).reshape(-1, 2))


def _has_journal(path: Path) -> bool:
    return path.with_name(f"{path.name}-journal").exists()


def change_counter(start: bytes) -> int:
    return int.from_bytes(start[24:28], "big")


def page_size_in(start: bytes) -> int:
    size = int.from_bytes(start[16:18], "big")
    return 65536 if size == 1 else size


def open_file(path: Path) -> int:
    """Return a descriptor of a store's file, which stays open.

    Closing it would release every lock that SQLite holds on the file for this process, as POSIX requires.
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


def checksums_of(file: int, page_size: int, count: int) -> Checksums:
    """Return the checksums of the first pages of an open file; UNKNOWN for pages that it does not have."""
    sums = np.full((count, 2), UNKNOWN, np.uint32)
    # Read into one place: a new one for each piece would cost as much as the checksums.
    words = np.empty((min(AT_ONCE, count), page_size // 4), "<u4")
    for first in range(0, count, AT_ONCE):
        wanted = words[: count - first]
        pages = read_into(file, wanted, first * page_size) // page_size
        sums[first : first + pages] = page_sums(wanted[:pages].astype(np.uint32, copy=False)) + NEVER_ZERO
        if not first and pages:
            sums[0] = checksum_of_first_page(wanted[0].tobytes())
    return sums


def checksum_of_first_page(page: bytes) -> Checksums:
    changed = bytearray(page)
    for begin, end in UNSEALED_BYTES:
        changed[begin:end] = bytes(end - begin)
    words = np.frombuffer(bytes(changed), "<u4")[None, :].astype(np.uint32)
    checksum: Checksums = page_sums(words)[0] + NEVER_ZERO
    return checksum
