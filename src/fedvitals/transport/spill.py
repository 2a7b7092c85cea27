# SPDX-License-Identifier: Apache-2.0
"""Records for which there was no room in memory, or no sink at the end: kept in files of JSON lines with a checksum.

An important record is a line of its own. A line of bulk holds a payload of the wire format, and the runs that it
concerns.

A file is locked as long as its queue lives, so that `drain_spill` only takes over what a dead process left behind. JSON
rather than pickle: write access to the folder must not allow running code in the next process.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from fedvitals.errors import RecordError
from fedvitals.measurements import Emitted, Measurements, Telemetry, Transfers, record_count, run_of, single_records
from fedvitals.plain_json import as_builtin
from fedvitals.protocols import RecordWriter
from fedvitals.records import Action, Event, Finding, Layer, LayerTable, Record, Run, Snapshot, Suspect, Truth, Where
from fedvitals.transport.sink_adapter import as_sink
from fedvitals.transport.wire.payload import decode, encode

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed, which protects it as well
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("fedvitals.telemetry")

KINDS: dict[str, type[Run | Event | Finding | Action | Snapshot | Truth]] = {
    kind.__name__: kind for kind in (Run, Event, Finding, Action, Snapshot, Truth)
}
BULK = "bulk"  # kind of a line, and the name of the files that hold such lines
BULK_BYTES = 1 << 30  # maximum size of a bulk file on disk


def to_json(record: Record) -> str:
    """Return the record on one line; only for the kinds that are important (see `measurements.is_important`)."""
    kind = type(record).__name__
    if kind not in KINDS:
        raise RecordError(f"Only {', '.join(KINDS)} can be spilled to a file, got {kind}.")
    return json.dumps({"kind": kind, "record": record}, default=as_builtin)


def to_line(record: Record) -> bytes:
    """Return the record as a line of a spill file: a CRC-32 in eight hexadecimal digits, then JSON."""
    return _with_checksum(to_json(record).encode())


def _with_checksum(content: bytes) -> bytes:
    return b"%08x %b\n" % (zlib.crc32(content), content)


@dataclass(frozen=True, slots=True)
class BulkLine:
    """A line of a bulk file: how many elements of a queue it completes, and how many records it represents."""

    content: bytes
    elements: int
    records: int


def bulk_lines(telemetry: Sequence[Emitted]) -> Iterator[BulkLine]:
    """Yield lines that hold these: one, unless a payload would be too large. A record that fits in none is left out."""
    batch: list[Telemetry] = []
    for item in telemetry:
        batch += item.records() if isinstance(item, Transfers) else (item,)
    try:
        payload = base64.b85encode(encode(batch)).decode()
    except RecordError:
        middle = len(telemetry) // 2
        if middle:
            yield from bulk_lines(telemetry[:middle])
            yield from bulk_lines(telemetry[middle:])
        elif isinstance(telemetry[0], Measurements | Transfers):
            lines = [*bulk_lines([*telemetry[0].records()])]
            yield from (replace(line, elements=int(line is lines[-1])) for line in lines)
        return
    content = json.dumps({"kind": BULK, "runs": sorted({*map(run_of, batch)}), "payload": payload}).encode()
    yield BulkLine(_with_checksum(content), len(telemetry), sum(map(record_count, batch)))


def bulk_parts(bulk: Sequence[Emitted], size: int) -> Iterator[list[Emitted]]:
    """Split bulk into parts of about `size` records each."""
    part, count = list[Emitted](), 0
    for record in bulk:
        part.append(record)
        count += record_count(record)
        if count >= size:
            yield part
            part, count = [], 0
    if part:
        yield part


def from_line(line: bytes) -> list[Telemetry]:
    """Return the content of a line. Raises RecordError if it is damaged; lines of older files have no checksum."""
    content = _content_of(line)
    if not content.startswith(b'{"kind": "%b"' % BULK.encode()):
        return [from_json(content)]
    try:
        return decode(base64.b85decode(json.loads(content)["payload"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"A spilled line cannot be read ({type(error).__name__}: {error}): {line[:80]!r}") from error


def _content_of(line: bytes) -> bytes:
    if line.startswith(b"{"):
        return line
    checksum, _, content = line.rstrip(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        raise RecordError(f"A spilled line is damaged, its checksum is not that of its content: {line[:80]!r}")
    return content


def from_json(line: str | bytes) -> Record:
    """Return the record from `to_json`; tuples inside free-form data have become lists."""
    try:
        content = json.loads(line)
        kind, fields = KINDS[content["kind"]], content["record"]
        if "where" in fields:
            fields["where"] = _place(fields["where"])
        if "suspects" in fields:
            fields["suspects"] = tuple(Suspect(**suspect) for suspect in fields["suspects"])
        if "nodes" in fields:
            fields["nodes"] = tuple(fields["nodes"])
        if "tables" in fields:
            fields["tables"] = tuple(_table(table) for table in fields["tables"])
        # `Action`, `Snapshot` and `Truth` have a field «kind» of their own, which is why the record is nested.
        return kind(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"A spilled line cannot be read ({type(error).__name__}: {error}): {line[:80]!r}") from error


def _place(where: Mapping[str, Any]) -> Where:
    """Return where a record belongs.

    One with a non-integer round is kept without a round, as a store could not take it.
    """
    wrong = {name: None for name in ("round", "step") if type(where.get(name)) not in (int, type(None))}
    texts = {name: str(where[name]) for name in ("node", "group") if where.get(name) is not None}
    return Where(**{**where, **texts, **wrong})


def _table(table: Mapping[str, Any]) -> LayerTable:
    layers = (Layer(layer["name"], tuple(layer["shape"]), layer["dtype"]) for layer in table["layers"])
    return LayerTable(table["rows"], tuple(layers))


class Spill:
    """A file of records that wait for the sink: appended at the end, read from the front.

    Writing and reading may happen on two threads, one each. Nothing is created on disk before the first record.
    """

    def __init__(self, folder: Path, sink: str) -> None:
        self.waiting = 0  # records appended and not yet read; the callers that append and read keep the count
        self.folder = folder
        self._name = f"spill-{sink}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._end = 0
        self._closed = False
        self._writer: IO[bytes] | None = None
        self._reader: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / self._name

    def append(self, record: Record) -> None:
        """Write one record through to the operating system, so that a killed process loses none."""
        self.append_line(to_line(record))

    def append_line(self, line: bytes) -> None:
        """Write one line through to the operating system. If that fails, raises OSError and leaves no partial line."""
        if self._closed:  # a new file would replace the one that waits for the next process
            raise OSError(f"The file is closed: {self.path}")
        writer = self._writer or self._open()
        written = 0
        try:
            written = writer.write(line)
        finally:
            if written != len(line):
                # The disk is full. A partial line would corrupt the next one.
                with contextlib.suppress(OSError):
                    writer.truncate(self._end)
        if written != len(line):
            raise OSError(f"The disk took only a part of a record: {self.path}")
        self._end += len(line)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self._end

    def read(self, count: int) -> list[Telemetry]:
        """Return the records of the next `count` lines in order; unreadable lines are left out and logged."""
        if self._reader is None:
            self._reader = self.path.open("rb")
        return [record for batch in _batches(self._reader, count) for record in batch]

    def clear(self) -> None:
        """Discard what was read, since everything has reached the sink."""
        if self._writer is not None and self._reader is not None:
            self._writer.truncate(0)
            self._end = 0
            # A reader that only seeks back would still return the old lines from its buffer.
            self._reader.close()
            self._reader = None

    def close(self, *, keep: bool) -> None:
        """Release the file; with `keep`, it stays for the next process."""
        self._closed = True
        if self._writer is not None and not keep:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.detach()

    def detach(self) -> None:
        """Close the descriptors and leave the file unchanged; in a forked child the parent keeps its lock."""
        for handle in (self._writer, self._reader):
            if handle is not None:
                handle.close()
        self._writer = self._reader = None

    def _open(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Locked under another name first, so that no drainer ever sees it unlocked.
        newborn = self.path.with_suffix(".new")
        writer = newborn.open("ab", buffering=0)
        try:
            _lock(writer)
            newborn.rename(self.path)
        except OSError:
            writer.close()
            raise
        self._writer = writer
        return writer


def drain_spill(folder: Path, sink: str | None = None) -> Iterator[Telemetry]:
    """Yield every record that dead processes left in a folder (of one sink, or of all), oldest file first, bulk last.

    A file is removed when the caller asks for more after its last record. If the caller stops before that, or dies, the
    file stays for the next time: a record delivered twice is stored once.
    """
    for batch in _drained(folder, sink):
        yield from batch


def _drained(folder: Path, sink: str | None = None) -> Iterator[list[Telemetry]]:
    """Yield the same, line by line."""
    paths = Path(folder).glob(f"spill-{sink or '*'}-*.jsonl")
    for path in sorted(paths, key=lambda path: (_is_bulk(path), path.stat().st_mtime_ns, path.name)):
        try:
            file = path.open("r+b")
        except OSError:  # another process drained it meanwhile, or it is not a file
            continue
        with file:
            try:
                _lock(file)
            except OSError:  # its queue is alive
                continue
            yield from _batches(file)
            with contextlib.suppress(FileNotFoundError, PermissionError):
                path.unlink()


def _is_bulk(path: Path) -> bool:
    return path.name.startswith(f"spill-{BULK}-")


def leftover(folder: Path) -> list[Path]:
    """Return the files that `drain_spill` would take: those whose queue no longer exists."""
    files = []
    for path in sorted(Path(folder).glob("spill-*.jsonl")):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            _lock(file)
            files.append(path)
    return files


def waiting_runs(folder: Path) -> set[str]:
    """Return the ids of the runs whose records dead processes left in a folder."""
    runs = set[str]()
    for path in leftover(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            runs |= _runs_in(path, status.st_size, status.st_mtime_ns)
    return runs


@functools.lru_cache(maxsize=64)
def _runs_in(path: Path, _size: int, _changed: int) -> frozenset[str]:
    """Return the runs that a file concerns; the file is only read again after a change."""
    runs = set[str]()
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(RecordError, ValueError, KeyError, TypeError):
                runs |= {*json.loads(_content_of(line))["runs"]} if _is_bulk(path) else {*map(run_of, from_line(line))}
    return frozenset(runs)


def damaged_lines(folder: Path) -> int:
    """Count the unreadable lines that dead processes left; a folder in place of a file counts as one."""
    count = sum(path.is_dir() for path in Path(folder).glob("spill-*.jsonl"))
    for path in leftover(folder):
        with contextlib.suppress(OSError), path.open("rb") as file:
            for line in file:
                try:
                    from_line(line)
                except RecordError:
                    count += 1
    return count


def readmit(folder: Path, sink: RecordWriter) -> None:
    """Pass to a sink what earlier processes could not; a file is removed once its last record is written."""
    takes = as_sink(sink).takes_measurements
    for batch in _drained(folder):
        parts = [batch if takes else [*single_records(batch)]]
        while parts:
            part = parts.pop()
            try:
                sink.write(part)  # type: ignore[arg-type]  # no measurements, unless it takes them
            except RecordError as error:  # it would block all records behind it
                if len(part) > 1:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                else:
                    logger.warning("Left out of what had waited beside the store: %s", error)


def _lock(file: IO[bytes]) -> None:
    """Lock the file until it is closed; raises OSError if another process holds it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _batches(file: IO[bytes], count: int | None = None) -> Iterator[list[Telemetry]]:
    """Yield the contents of each of the next `count` lines."""
    while count is None or count > 0:
        line = file.readline()
        if not line:
            return
        count = None if count is None else count - 1
        try:
            yield from_line(line)
        except RecordError as error:  # e.g. torn by a crash
            logger.warning("Left out of the spill file: %s", error)
