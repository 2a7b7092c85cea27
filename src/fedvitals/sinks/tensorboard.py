# SPDX-License-Identifier: Apache-2.0
"""A sink that writes TensorBoard event files with the package's own record writer; needs neither torch nor TensorFlow.

    Monitor("runs.db", sinks=[TensorBoard("tb")])        then:  tensorboard --logdir tb

Each run is a folder in `folder`, named after it and its id.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fedvitals.errors import MissingExtraError
from fedvitals.protocols import Sink
from fedvitals.records import Finding, LayerStats, Metric, Record, Run
from fedvitals.sinks.curves import NODES, Bars, Curves, Point, link_of, settings_of, tags_of
from fedvitals.sinks.spread import all_but, plain

CELL_CHARACTERS = 1000
_files = itertools.count()  # distinguishes two files of one process in the same second
_PARTS = {
    "event": "tensorboard.compat.proto.event_pb2",
    "summary": "tensorboard.compat.proto.summary_pb2",
    "tensor": "tensorboard.compat.proto.tensor_pb2",
    "types": "tensorboard.compat.proto.types_pb2",
    "text": "tensorboard.plugins.text.metadata",
    "records": "tensorboard.summary.writer.record_writer",
}


class _File:
    """One event file. A batch is written completely or not at all, so that it can be retried."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files)}"
        self._file: BinaryIO = (folder / name).open("xb", buffering=0)

    def append(self, data: bytes) -> None:
        before = self._file.tell()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(before)
            self._file.seek(before)
            raise

    def close(self) -> None:
        self._file.close()


class TensorBoard(Sink):
    """A sink that writes event files for TensorBoard: scalars per round, layer histograms, and findings as text.

    Args:
        folder: Where the event files go, a subfolder for each run.
        nodes: How many clients get curves of their own, or which ones.
        layers_of: Nodes whose layers are shown, beside those of the whole round.
        store: The file or address of the store, to be mentioned in the run's description.
    """

    name = "tensorboard"
    ignores = all_but(Finding, LayerStats, Metric)

    def __init__(
        self,
        folder: str | os.PathLike[str] = "tb",
        *,
        nodes: int | Sequence[str] = NODES,
        layers_of: Sequence[str] = (),
        store: str | os.PathLike[str] | None = None,
    ) -> None:
        try:
            self._parts: dict[str, Any] = {name: importlib.import_module(home) for name, home in _PARTS.items()}
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard", "The TensorBoard exporter") from error
        self.folder = Path(folder)
        self._store = store
        self._curves = Curves(nodes, layers_of)
        self._names: dict[str, str] = {}
        self._written_settings: dict[str, str] = {}
        self._files: dict[str, _File] = {}

    def folder_of(self, run: str) -> Path:
        """Return the folder of a run's event files.

        Args:
            run: The run's id.

        Returns:
            The folder.
        """
        name = re.sub(r"[^\w.-]+", "_", self._names.get(run, "")).strip("._")[:80]
        identity = re.sub(r"[^\w.-]+", "_", run)[:80].lstrip(".") or "run"
        return self.folder / (f"{name}-{identity}" if name else identity)

    def write(self, records: Sequence[Record], /) -> None:
        """Append the records that can be drawn to the event files of their runs.

        Args:
            records: The records that the monitor has produced since the last call.
        """
        buffers: dict[str, io.BytesIO] = {}
        settings_texts: dict[str, str] = {}
        for record in records:
            if isinstance(record, Run):
                self._names.setdefault(record.id, record.name)
                text = _described(record, self._store)
                if self._written_settings.get(record.id) != text:
                    settings_texts[record.id] = text
                    self._put(buffers, record.id, self._text("run", 0, record.started, text))
            elif isinstance(record, Finding):
                place = record.where.node or record.where.group or "the whole"
                words = f"{record.severity}: {record.issue} ({plain(place)}). {record.message[:1000]}"
                event = self._text(f"findings/{plain(record.issue)}", record.where.round or 0, record.at, words)
                self._put(buffers, record.where.run, event)
        value = self._parts["summary"].Summary.Value
        for drawn in self._curves.of(records):
            shape = {"simple_value": drawn.value} if isinstance(drawn, Point) else {"histo": self._histogram(drawn)}
            self._put(buffers, drawn.run, self._event(drawn.round, drawn.at, value(tag=drawn.tag, **shape)))
        for run, buffer in buffers.items():
            self._file(run).append(buffer.getvalue())
        self._written_settings |= settings_texts

    def close(self) -> None:
        """Close the event files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, run: str) -> _File:
        if run not in self._files:
            file = _File(self.folder_of(run))
            first = io.BytesIO()
            self._record(first, self._parts["event"].Event(wall_time=time.time(), file_version="brain.Event:2"))
            file.append(first.getvalue())
            self._files[run] = file
        return self._files[run]

    def _put(self, buffers: dict[str, io.BytesIO], run: str, event: Any) -> None:
        self._record(buffers.setdefault(run, io.BytesIO()), event)

    def _record(self, buffer: io.BytesIO, event: Any) -> None:
        self._parts["records"].RecordWriter(buffer).write(event.SerializeToString())

    def _event(self, round_: int, at: float, value: Any) -> Any:
        summary = self._parts["summary"].Summary(value=[value])
        return self._parts["event"].Event(wall_time=at, step=round_, summary=summary)

    def _histogram(self, bars: Bars) -> Any:
        middles = (bars.edges[1:] + bars.edges[:-1]) / 2
        # A bucket is given only by its upper end: an empty one marks where the first of ours begins.
        return self._parts["summary"].HistogramProto(
            min=bars.edges[0],
            max=bars.edges[-1],
            num=bars.counts.sum(),
            sum=float(middles @ bars.counts),
            sum_squares=float(middles**2 @ bars.counts),
            bucket_limit=bars.edges.tolist(),
            bucket=[0.0, *bars.counts.tolist()],
        )

    def _text(self, tag: str, round_: int, at: float, words: str) -> Any:
        metadata = self._parts["text"].create_summary_metadata(display_name=tag, description="")
        tensor = self._parts["tensor"].TensorProto(
            dtype=self._parts["types"].DT_STRING, string_val=[words.encode("utf-8", "replace")]
        )
        tensor.tensor_shape.dim.add().size = 1
        value = self._parts["summary"].Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        return self._event(round_, at, value)


def _described(run: Run, store: str | os.PathLike[str] | None) -> str:
    """Return the run as Markdown: how to find it again, what it was, and its settings."""
    rows = [*tags_of(run).items(), *settings_of(run).items()]
    cells = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows]
    return "\n".join([_cell(link_of(run, store)), "", "| setting | value |", "| --- | --- |", *cells])


def _cell(text: str) -> str:
    """Return text that cannot end its cell; TensorBoard itself lets no HTML through."""
    return plain(text, CELL_CHARACTERS).replace("|", "¦")
