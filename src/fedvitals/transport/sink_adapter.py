# SPDX-License-Identifier: Apache-2.0
"""Turns a user's own object, which needs no more than `write(records)`, into a complete `Sink`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fedvitals.measurements import Emitted, Transfers, single_records
from fedvitals.protocols import RecordWriter, Sink
from fedvitals.records import Record


@runtime_checkable
class _HasName(Protocol):
    name: Any


@runtime_checkable
class _HasIgnores(Protocol):
    ignores: Any


@runtime_checkable
class _HasPrepare(Protocol):
    def prepare(self, folder: Path | None = None, families: Mapping[str, str] | None = None) -> None: ...


@runtime_checkable
class _HasClose(Protocol):
    def close(self) -> None: ...


class SinkAdapter(Sink):
    """A user's own sink with what it defines; otherwise the defaults of `Sink`."""

    def __init__(self, writer: RecordWriter) -> None:
        self._writer = writer
        self.name = str((writer.name if isinstance(writer, _HasName) else None) or type(writer).__name__)
        ignores = writer.ignores if isinstance(writer, _HasIgnores) else ()
        self.ignores = tuple(ignores) if isinstance(ignores, Iterable) else (ignores,)  # a list, or a single type

    def prepare(self, folder: Path | None = None, families: Mapping[str, str] | None = None) -> None:
        if isinstance(self._writer, _HasPrepare):
            self._writer.prepare(folder, families)

    def write(self, records: Sequence[Record], /) -> None:
        """Pass records on."""
        self._writer.write(records)

    def close(self) -> None:
        if isinstance(self._writer, _HasClose):
            self._writer.close()


def as_sink(writer: RecordWriter) -> Sink:
    """Return the object itself if it is a complete sink, else one that writes to it."""
    return writer if isinstance(writer, Sink) else SinkAdapter(writer)


def form_for(sink: Sink, batch: Sequence[Emitted]) -> list[Emitted]:
    """Return a batch in the form that the sink accepts; as single records, without those that it ignores."""
    if sink.takes_transfers:
        return [*batch]
    if not sink.takes_measurements:
        return [record for record in single_records(batch) if not isinstance(record, sink.ignores)]
    records: list[Emitted] = []
    for telemetry in batch:
        if isinstance(telemetry, Transfers):
            records += telemetry.records()
        else:
            records.append(telemetry)
    return records
