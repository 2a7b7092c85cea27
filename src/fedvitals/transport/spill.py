# SPDX-License-Identifier: Apache-2.0
"""Records that found no room in memory, or no sink at the end: kept in files, JSON lines with a checksum in front.

An important record is a line of its own. Of bulk, a line holds a payload of the wire format, and the runs that it is
about.

A file is locked as long as its queue lives, so that `drain_spill` takes over only what a dead process left behind.
JSON and not pickle: whoever can write into the folder must not be able to run code in the next process.
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
except ImportError:  # Windows: there an open file cannot be removed, which protects it as well
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("fedvitals.telemetry")

KINDS: dict[str, type[Run | Event | Finding | Action | Snapshot | Truth]] = {
    kind.__name__: kind for kind in (Run, Event, Finding, Action, Snapshot, Truth)
}
BULK = "bulk"  # kind of a line, and name of the files that hold such lines
BULK_BYTES = 1 << 30  # that a file of bulk may take on the disk


def to_json(record: Record) -> str:
    """The record on one line; only for the kinds that are important (see `measurements.is_important`)."""
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
    """A line of a file of bulk: how many elements of a queue it ends, and for how many records it stands."""

    content: bytes
    elements: int
    records: int


def bulk_lines(telemetry: Sequence[Emitted]) -> Iterator[BulkLine]:
    """Yield lines that hold these: one, unless a payload would be too large. A record too large for any is left out."""
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
    """Cut bulk into parts of about `size` records each."""
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
    """Return what a line holds. Raises RecordError if it is damaged; lines of older files have no checksum."""
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
    """The record back from `to_json`; tuples inside free-form data have become lists."""
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
    """Where a record belongs. One in a round that is no integer is kept, in no round: a store cannot take it else."""
    wrong = {name: None for name in ("round", "step") if type(where.get(name)) not in (int, type(None))}
    texts = {name: str(where[name]) for name in ("node", "group") if where.get(name) is not None}
    return Where(**{**where, **texts, **wrong})


def _table(table: Mapping[str, Any]) -> LayerTable:
    layers = (Layer(layer["name"], tuple(layer["shape"]), layer["dtype"]) for layer in table["layers"])
    return LayerTable(table["rows"], tuple(layers))


class Spill:
    """A file of records that waits for the sink: appended at the end, read from the front.

    Writing and reading may happen on two threads, one each. Nothing is made on disk before the first record.
    """

    def __init__(self, folder: Path, sink: str) -> None:
        self.waiting = 0  # records that were appended and not yet read; whoever appends and reads keeps the count
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
        """Write one line through to the operating system. Raises OSError, and leaves no part of it, if that fails."""
        if self._closed:  # a new file would take the place of the one that waits for the next process
            raise OSError(f"The file is closed: {self.path}")
        writer = self._writer or self._open()
        written = 0
        try:
            written = writer.write(line)
        finally:
            if written != len(line):
                # The disk is full. Half a line would spoil the next one.
                with contextlib.suppress(OSError):
                    writer.truncate(self._end)
        if written != len(line):
            raise OSError(f"The disk took only a part of a record: {self.path}")
        self._end += len(line)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._end

    def read(self, count: int) -> list[Telemetry]:
        """The records of the next `count` lines in order; a line that cannot be read is left out and logged."""
        if self._reader is None:
            self._reader = self.path.open("rb")
        return [record for batch in _batches(self._reader, count) for record in batch]

    def clear(self) -> None:
        """Forget what was read: everything has reached the sink."""
        if self._writer is not None and self._reader is not None:
            self._writer.truncate(0)
            self._end = 0
            # A reader that only seeks back would still serve the old lines from its buffer.
            self._reader.close()
            self._reader = None

    def close(self, *, keep: bool) -> None:
        """Let go of the file, for the next process to find if `keep`."""
        self._closed = True
        if self._writer is not None and not keep:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self.detach()

    def detach(self) -> None:
        """Close the descriptors and leave the file as it is; in a forked child the parent keeps its lock."""
        for handle in (self._writer, self._reader):
            if handle is not None:
                handle.close()
        self._writer = self._reader = None

    def _open(self) -> IO[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Locked under another name first: a drainer must never see it unlocked.
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
    """Every record that dead processes left in a folder (of one sink, or of all), oldest file first, bulk last.

    A file is removed when the caller comes back for more after its last record. Whoever stops before that, or dies,
    leaves it for the next time: delivered twice, a record is stored once.
    """
    for batch in _drained(folder, sink):
        yield from batch


def _drained(folder: Path, sink: str | None = None) -> Iterator[list[Telemetry]]:
    """The same, line by line."""
    paths = Path(folder).glob(f"spill-{sink or '*'}-*.jsonl")
    for path in sorted(paths, key=lambda path: (_is_bulk(path), path.stat().st_mtime_ns, path.name)):
        try:
            file = path.open("r+b")
        except OSError:  # another process drained it meanwhile, or it is no file
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
    """The files that `drain_spill` would take: those whose queue is no more."""
    files = []
    for path in sorted(Path(folder).glob("spill-*.jsonl")):
        with contextlib.suppress(OSError), path.open("r+b") as file:
            _lock(file)
            files.append(path)
    return files


def waiting_runs(folder: Path) -> set[str]:
    """The ids of the runs of which dead processes left records in a folder."""
    runs = set[str]()
    for path in leftover(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            runs |= _runs_in(path, status.st_size, status.st_mtime_ns)
    return runs


@functools.lru_cache(maxsize=64)
def _runs_in(path: Path, _size: int, _changed: int) -> frozenset[str]:
    """The runs that a file is about, which is read again only when it has changed."""
    runs = set[str]()
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(RecordError, ValueError, KeyError, TypeError):
                runs |= {*json.loads(_content_of(line))["runs"]} if _is_bulk(path) else {*map(run_of, from_line(line))}
    return frozenset(runs)


def damaged_lines(folder: Path) -> int:
    """Count the lines that cannot be read in what dead processes left; a folder in place of a file counts, too."""
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
    """Give a sink what earlier processes could not; a file goes once its last record is written."""
    takes = as_sink(sink).takes_measurements
    for batch in _drained(folder):
        parts = [batch if takes else [*single_records(batch)]]
        while parts:
            part = parts.pop()
            try:
                sink.write(part)  # type: ignore[arg-type]  # no measurements, unless it takes them
            except RecordError as error:  # it would keep all behind it from coming back
                if len(part) > 1:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                else:
                    logger.warning("Left out of what had waited beside the store: %s", error)


def _lock(file: IO[bytes]) -> None:
    """Hold the file until it is closed; raises OSError when somebody else does."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _batches(file: IO[bytes], count: int | None = None) -> Iterator[list[Telemetry]]:
    """What each of the next `count` lines holds."""
    while count is None or count > 0:
        line = file.readline()
        if not line:
            return
        count = None if count is None else count - 1
        try:
            yield from_line(line)
        except RecordError as error:  # e.g. torn by a crash
            logger.warning("Left out of the spill file: %s", error)
