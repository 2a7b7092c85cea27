# SPDX-License-Identifier: Apache-2.0
"""What a queue leaves out while its sink is slower than the training, to avoid losing records.

    the queue is full to   layer statistics, sketches and steps   metrics, spans and transfers
    less than 1/2          of all client-rounds                   of all client-rounds
    1/2                    of one client-round in 2               of all
    5/8                    of one in 4                            of all
    3/4                    of one in 8                            of one in 2; from 13/16 on of one in 4
    7/8                    of one in 16                           of one in 8; from 15/16 on of one in 16

The client-rounds are chosen by a hash of client and round: one kept at a level is kept at all lower levels. Events,
findings, and everything about the whole round, the server or an edge is never thinned; the second column is for our own
sinks, which take measurements as arrays. A queue that is full nevertheless loses its oldest bulk, whatever it concerns,
and counts it. Sinks that ignore layer statistics are not thinned.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fedvitals.measurements import NO_STEP, Emitted, MeasuredLayers, Measurements, Transfers
from fedvitals.records import LayerStats, Metric, Sketch, Span, Transfer, is_client

UNIT = 2048  # bytes that count as one small record


def room_of(telemetry: Emitted) -> int:
    """Return the room that a record takes in a queue, in units of one small record."""
    if isinstance(telemetry, Transfers):
        return len(telemetry)
    if isinstance(telemetry, Measurements):
        size = telemetry.values.nbytes + (0 if telemetry.sketches is None else telemetry.sketches.nbytes)
        size += sum(part.matrices.nbytes for part in telemetry.layers)
    else:
        size = getattr(telemetry.matrix, "nbytes", 0) if isinstance(telemetry, LayerStats) else 0
    return max(1, size // UNIT)


def levels(fullness: float) -> tuple[int, int]:
    """Return the levels of the two columns above: level n keeps one client-round in 2**n."""
    return max(0, int(8 * fullness) - 3), max(0, int(16 * fullness) - 11)


def is_kept(node: str | None, round_index: int | None, level: int) -> bool:
    """Return whether a node's numbers of a round are kept at a level."""
    return level == 0 or not is_client(node) or not zlib.crc32(f"{round_index} {node}".encode()) % (1 << level)


def thinned(telemetry: Emitted, detail: int, rest: int) -> tuple[Emitted | None, list[str | None]]:
    """Return what is kept at these levels (None: nothing), and the nodes for which something is left out."""
    if isinstance(telemetry, Measurements):
        return _thinned_measurements(telemetry, detail, rest)
    if isinstance(telemetry, Transfers):
        return _thinned_transfers(telemetry, rest)
    level = detail if isinstance(telemetry, LayerStats | Sketch) else rest
    if isinstance(telemetry, Transfer):
        node: str | None = telemetry.sender if is_client(telemetry.sender) else telemetry.receiver
    elif isinstance(telemetry, LayerStats | Sketch | Metric | Span):
        node = telemetry.where.node
    else:
        return telemetry, []
    return (telemetry, []) if is_kept(node, telemetry.where.round, level) else (None, [node])


def _thinned_measurements(
    measured: Measurements, detail: int, rest: int
) -> tuple[Measurements | None, list[str | None]]:
    with_detail = np.array([is_kept(node, measured.round, detail) for node in measured.nodes], np.bool_)
    with_rest = np.array([is_kept(node, measured.round, rest) for node in measured.nodes], np.bool_)
    present = measured.present & with_rest[:, None]
    if measured.steps is not None:
        present &= with_detail[:, None] | (measured.steps == NO_STEP)
    layers = [_rows_of(part, with_detail) for part in measured.layers]
    sketched = [i for i, row in enumerate(measured.sketch_rows) if with_detail[row]]
    kept = replace(
        measured,
        present=present,
        layers=tuple(part for part in layers if part.rows),
        sketch_rows=tuple(measured.sketch_rows[i] for i in sketched),
        sketches=None if measured.sketches is None else measured.sketches[sketched],
    )
    if len(kept) == len(measured):
        return measured, []
    gone = {*np.flatnonzero((present != measured.present).any(axis=1)).tolist()}
    gone.update(row for row in measured.sketch_rows if not with_detail[row])
    gone.update(row for part in measured.layers for row in part.rows if not with_detail[row])
    return kept.without_absent() if len(kept) else None, [measured.nodes[row] for row in sorted(gone)]


def _thinned_transfers(messages: Transfers, level: int) -> tuple[Transfers | None, list[str | None]]:
    ends = zip(messages.senders, messages.receivers, strict=True)
    clients = [sender if is_client(sender) else receiver for sender, receiver in ends]
    kept = [row for row, node in enumerate(clients) if is_kept(node, messages.round, level)]
    if len(kept) == len(messages):
        return messages, []
    gone = dict.fromkeys(node for node in clients if not is_kept(node, messages.round, level))
    return messages.of_rows(kept) if kept else None, [*gone]


def _rows_of(part: MeasuredLayers, kept: npt.NDArray[np.bool_]) -> MeasuredLayers:
    places = [i for i, row in enumerate(part.rows) if kept[row]]
    return replace(part, rows=tuple(part.rows[i] for i in places), matrices=part.matrices[places])


@dataclass(slots=True)
class ThinnedClientRounds:
    """Counts the client-rounds for which something was left out; each once, unless rounds overlap."""

    detail: int = 0  # client-rounds without layer statistics, sketches or steps
    rest: int = 0  # of these, also without metrics, spans and transfers
    _round: int | None = None
    _without_detail: set[str | None] = field(default_factory=set)  # in the newest round
    _without_rest: set[str | None] = field(default_factory=set)

    def add(self, round_index: int | None, nodes: Sequence[str | None], rest: int) -> None:
        """Count the nodes for which something was left out; `rest` is the level of metrics, spans and transfers."""
        if round_index != self._round:
            self._round, self._without_detail, self._without_rest = round_index, set(), set()
        before = len(self._without_detail), len(self._without_rest)
        self._without_detail.update(nodes)
        self._without_rest.update(node for node in nodes if not is_kept(node, round_index, rest))
        self.detail += len(self._without_detail) - before[0]
        self.rest += len(self._without_rest) - before[1]
