# SPDX-License-Identifier: Apache-2.0
"""A client's parameters as its training began, and its update, measured piece by piece where it lies.

The parameters are seen as one long vector. On a GPU one kernel reads them and the copy and measures everything, without
the difference ever being stored. Elsewhere the vector is cut into pieces of a few megabytes, and the difference exists
for one piece at a time, so that a model of any size needs memory for one copy of what it trains; on a CPU a piece is
summed and sketched while it is in the cache. Where a device is nearly full, the copy is kept on the host.

Nothing here waits for a device, except who reads a copy on the host (`ParameterSnapshot.vector`);
`MeasuredUpdate.tensors` are for the caller to copy to the host, all at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from fedvitals.kernels import count_sketch, is_sharded, local, sums_of_parts
from fedvitals.kernels.cuda import updates as device_updates
from fedvitals.kernels.layout import readable
from fedvitals.stats import Array, empty_sums, merge_sums

PIECE = 1 << 20  # values of a piece on a CPU: 4 MB in float32. A multiple of 256, as sketches need it
PIECE_ON_DEVICE = 1 << 27  # there, each call has its price; a larger model is cut into 16
SMALL_SHARE = 1 / 64  # of a device's memory, for a copy without asking whether there is room for it
LARGEST_SHARE = 1 / 16
TRAINING_COPIES = 4  # gradients, two moments and a reserve: what training still allocates, in parameter copies
FEW = 1 << 16  # parameters on a CPU that are compared whole: that takes some 20 µs
SAMPLED_LAYERS, SAMPLED = 32, 8  # where there are more: layers, and values of the first row of each
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Piece:
    """The values from `start` to `stop` of all parameters in a row: of each layer that it touches, a part."""

    start: int
    stop: int
    parts: tuple[tuple[int, int, int], ...]  # layer, and from where to where in it

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(last - first for _, first, last in self.parts)


@lru_cache(maxsize=64)
def pieces_of(sizes: tuple[int, ...], length: int) -> tuple[Piece, ...]:
    """Cut layers of these sizes, seen as one vector, into pieces of `length` values; the last one may be shorter."""
    pieces: list[Piece] = []
    parts: list[tuple[int, int, int]] = []
    start = place = 0
    for layer, size in enumerate(sizes):
        done = 0
        while done < size:
            taken = min(size - done, start + length - place)
            parts.append((layer, done, done + taken))
            done, place = done + taken, place + taken
            if place == start + length:
                pieces.append(Piece(start, place, tuple(parts)))
                start, parts = place, []
    if parts:
        pieces.append(Piece(start, place, tuple(parts)))
    return tuple(pieces)


@dataclass(slots=True)
class InitialModel:
    """The model that drift is measured from: its values, or, if they are too many to keep, their sketch."""

    length: int
    vector: Tensor | None
    sketch: Tensor | None = None


@dataclass(slots=True)
class MeasuredUpdate:
    """A client's update: `vector` if it is kept, and sums, possibly still on a device until `settle` was called."""

    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    vector: Tensor | None = None
    sketch: Tensor | None = None  # where the vector is not kept
    sums: list[Tensor | Array] = field(default_factory=list)  # of each piece, [its layers, 9]
    weight_sums: list[Tensor | Array] = field(default_factory=list)  # the same of the weights themselves, if asked for
    start_squares: list[Tensor] = field(default_factory=list)  # of each piece, of the parameters at the beginning
    drift_squares: list[Tensor] = field(default_factory=list)  # of each piece, of the way from the initial model
    drift_sketch: Tensor | None = None  # the same as a sketch, where the initial model is one
    rows: Array = field(default_factory=lambda: empty_sums(0))  # nine sums per layer
    weight_rows: Array | None = None
    start_norm: float = 0.0
    drift: float | None = None  # from the initial model; estimated to 5 % where that is a sketch

    @property
    def tensors(self) -> list[Tensor | Array]:
        """What `settle` needs on the host."""
        sketches = [sketch for sketch in (self.sketch, self.drift_sketch) if sketch is not None]
        return [*self.sums, *self.weight_sums, *self.start_squares, *self.drift_squares, *sketches]

    def settle(self, arrays: Sequence[Array]) -> None:
        """Take the tensors as arrays on the host, in the same order."""
        left = iter(arrays)
        self.rows = self._merged([next(left) for _ in self.sums])
        if self.weight_sums:
            self.weight_rows = self._merged([next(left) for _ in self.weight_sums])
        self.start_norm = float(np.sqrt(sum(float(next(left)) for _ in self.start_squares)))
        if self.drift_squares:
            self.drift = float(np.sqrt(sum(float(next(left)) for _ in self.drift_squares)))
        if self.sketch is not None:
            self.sketch = torch.from_numpy(next(left))
        if self.drift_sketch is not None:
            self.drift = float(np.linalg.norm(next(left)))

    @property
    def additive(self) -> tuple[list[Array], list[Array]]:
        """What adds up over the shards of a model: nine sums per layer, and totals. After `settle`."""
        squares = np.array([self.start_norm**2, np.nan if self.drift is None else self.drift**2])
        sketch = [] if self.sketch is None else [self.sketch.numpy()]
        return [self.rows, *([] if self.weight_rows is None else [self.weight_rows])], [squares, *sketch]

    def set_additive(self, rows: Sequence[Array], totals: Sequence[Array]) -> None:
        """Take what `additive` gave, added up."""
        self.rows = rows[0]
        self.weight_rows = None if self.weight_rows is None else rows[1]
        start, drift = np.sqrt(totals[0]).tolist()
        self.start_norm, self.drift = start, None if self.drift is None else drift
        self.sketch = None if self.sketch is None else torch.from_numpy(totals[1])

    def _merged(self, sums: list[Array]) -> Array:
        """Return the sums of each layer from those of its parts."""
        if len(sums) == 1 and len(sums[0]) == len(self.sizes):
            return sums[0]
        parts: dict[int, list[Array]] = {}
        for piece, rows in zip(self.pieces, sums, strict=True):
            for (layer, _, _), row in zip(piece.parts, rows, strict=True):
                parts.setdefault(layer, []).append(row)
        merged = empty_sums(len(self.sizes))
        for layer, rows_of_layer in parts.items():
            merged[layer] = rows_of_layer[0] if len(rows_of_layer) == 1 else merge_sums(np.stack(rows_of_layer))
        return merged


class ParameterSnapshot:
    """A copy of parameters, taken when it is created.

    `buffers` is memory of earlier snapshots on a CPU, where fresh memory costs four times as much as the copy itself;
    `release` puts its own there. `start`: what the update is measured from, in place of the parameters themselves.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: list[Tensor] | None = None,
        start: Sequence[Tensor] | None = None,
    ) -> None:
        self._parameters, self._buffers = parameters, [] if buffers is None else buffers
        self._buffer: Tensor | None = None
        shards = shards_of(parameters)
        # One pass over the layers here and one in `measure`: for a large model each costs a client as much as a kernel.
        self._kinds = [(p.numel(), p.dtype, p.device) for p in shards]
        self._sizes = tuple(size for size, _, _ in self._kinds)
        dtypes, devices = {dtype for _, dtype, _ in self._kinds}, {device for _, _, device in self._kinds}
        away = any(device.type != "cpu" for device in devices)
        self._dtype = _common(dtypes)
        self._on_host = away and not _has_room(shards)
        self._in_one_pass = away and not self._on_host and device_updates.supports(shards, dtypes, devices)
        length = sum(self._sizes)
        piece = max(1, length) if self._in_one_pass else _piece_length(length) if away else PIECE
        self._pieces = pieces_of(self._sizes, piece)
        self._marks = _marks(shards)
        self._samples = [] if away or length <= FEW else [row.clone() for row in _first_rows(shards)]
        with torch.no_grad():
            if start is not None:
                pairs = zip(shards_of(start), shards, strict=True)
                shards = [own.detach().to(like.device, like.dtype) for own, like in pairs]
            if not away and len(self._pieces) > 1 and dtypes == {self._dtype}:
                self._buffer = self._free_buffer()
                self._before = [values(shards, p, self._buffer[p.start : p.stop]) for p in self._pieces]
            else:
                self._before = [self._kept(values(shards, piece)) for piece in self._pieces]
        self.held_bytes = sum(part.nbytes for part in self._before)  # until it is released

    def is_outdated(self) -> bool:
        """Return whether the parameters are others now than when they were copied, without waiting for a device.

        On a CPU values are compared, of a large model a few of each layer unless something was plainly written to. On
        a device, addresses and version counters tell, which do not see a write through `parameter.data`.
        """
        shards = shards_of(self._parameters)
        written = _marks(shards) != self._marks
        if not all(p.is_cpu for p in shards):
            return written
        with torch.no_grad():
            if self._samples and not written:
                return not all(map(same_values, _first_rows(shards), self._samples))
            return not all(map(same_values, (values(shards, piece) for piece in self._pieces), self._before))

    def release(self) -> None:
        """Give the memory back. The snapshot is empty then."""
        if self._buffer is not None:
            self._buffers.append(self._buffer)
        self._buffer, self._before = None, []

    def _free_buffer(self) -> Tensor:
        length = sum(self._sizes)
        with contextlib.suppress(IndexError):  # clients may begin on several threads: `pop` is one operation
            while True:
                buffer = self._buffers.pop()
                if len(buffer) == length and buffer.dtype is self._dtype:
                    return buffer
        with torch.inference_mode(mode=False):  # memory made in that mode cannot be written to outside of it
            return torch.empty(length, dtype=self._dtype)

    @property
    def vector(self) -> Tensor:
        """All parameters as they were, in one vector: float64 if any of them is, else float32."""
        if not self._before:
            return torch.zeros(0)
        for device in {p.device for p in shards_of(self._parameters) if p.is_cuda and self._on_host}:
            torch.cuda.synchronize(device)  # the copies to the host may still be under way
        before = [part.to(self._dtype) for part in self._before]
        return before[0] if len(before) == 1 else torch.cat(before)

    @property
    def update_bytes(self) -> int:
        """The bytes of the update as one vector."""
        return sum(self._sizes) * self._dtype.itemsize

    def measure(
        self, *, keep: bool, sketch: bool, initial: InitialModel | None = None, weigh: bool = False, brief: bool = False
    ) -> MeasuredUpdate:
        """Measure how far the parameters have moved since; `keep` the update as a vector, or `sketch` it.

        `weigh` asks for the sums of the parameters as they are now, too. If `brief`, only the sums of the update are
        measured, of all layers together.
        """
        if brief or (initial is not None and initial.length != sum(self._sizes)):
            initial = None
        shards = shards_of(self._parameters)
        kinds = [(p.numel(), p.dtype, p.device) for p in shards]
        if tuple(size for size, _, _ in kinds) != self._sizes:
            raise ValueError("parameters were resized inside the client's scope, so that no update can be measured")
        in_one_pass = self._in_one_pass and kinds == self._kinds and not torch.cuda.is_current_stream_capturing()
        measure = self._measure_in_one_pass if in_one_pass else self._measure_in_pieces
        update = measure(shards, initial, keep=keep, sketch=sketch, weigh=weigh, brief=brief)
        if update.drift_sketch is not None and initial is not None and initial.sketch is not None:
            update.drift_sketch = update.drift_sketch - initial.sketch.to(update.drift_sketch.device)
        return update

    def _measure_in_pieces(
        self,
        shards: Sequence[Tensor],
        initial: InitialModel | None,
        *,
        keep: bool,
        sketch: bool,
        weigh: bool,
        brief: bool,
    ) -> MeasuredUpdate:
        length = sum(self._sizes)
        update = MeasuredUpdate(self._sizes, self._pieces)
        device = shards[0].device if shards else torch.device("cpu")
        longest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        changes = torch.empty(length if keep else longest, dtype=self._dtype, device=device)
        with torch.no_grad():
            offset = _sketch_offset(self._parameters)
            for place, piece in enumerate(self._pieces):
                now = seen(shards, piece)
                before = self._before[place].to(now.device, non_blocking=True)
                if weigh:
                    update.weight_sums.append(sums_of_parts(now, piece.sizes))
                if not brief:
                    update.start_squares.append(_squares(before))
                self._measure_drift(update, piece, now, initial, offset)
                first = piece.start if keep else 0
                change = changes[first : first + len(now)]
                torch.sub(now.to(device, self._dtype), before.to(device), out=change)  # a model may use several devices
                update.sums.append(sums_of_parts(change, (len(change),) if brief else piece.sizes))
                if sketch and not keep:
                    own = count_sketch(change, offset + piece.start)
                    update.sketch = own if update.sketch is None else update.sketch + own.to(update.sketch.device)
        if keep:
            update.vector = changes
        if brief:
            update.sizes = (length,)
            update.pieces = tuple(Piece(p.start, p.stop, ((0, p.start, p.stop),)) for p in self._pieces)
        return update

    def _measure_in_one_pass(
        self,
        shards: Sequence[Tensor],
        initial: InitialModel | None,
        *,
        keep: bool,
        sketch: bool,
        weigh: bool,
        brief: bool,
    ) -> MeasuredUpdate:
        device, length = shards[0].device, sum(self._sizes)
        changes = torch.empty(length, dtype=self._dtype, device=device) if keep else None
        own = device_updates.measure_update(
            shards,
            self._before[0],
            offset=_sketch_offset(self._parameters),
            sketch=sketch and not keep,
            weigh=weigh,
            initial=None if initial is None or initial.vector is None else initial.vector.to(device),
            sketch_parameters=initial is not None and initial.sketch is not None,
            changes=changes,
        )
        pieces = (Piece(0, length, ((0, 0, length),) * len(self._sizes)),) if brief else self._pieces
        return MeasuredUpdate(
            (length,) if brief else self._sizes,
            pieces,  # if brief, one whose rows are all of the same layer
            changes,
            own.sketch,
            [own.rows],
            [] if own.weight_rows is None else [own.weight_rows],
            [] if brief else [own.start_squares],
            [] if own.drift_squares is None else [own.drift_squares],
            own.drift_sketch,
        )

    @staticmethod
    def _measure_drift(
        update: MeasuredUpdate, piece: Piece, now: Tensor, initial: InitialModel | None, offset: int
    ) -> None:
        if initial is None:
            return
        if initial.vector is not None:
            start = initial.vector[piece.start : piece.stop].to(now.device)
            update.drift_squares.append(_squares(now - start))
        elif initial.sketch is not None:
            own = count_sketch(now, offset + piece.start)
            total = update.drift_sketch
            update.drift_sketch = own if total is None else total + own.to(total.device)

    def _kept(self, copied: Tensor) -> Tensor:
        if not self._on_host:
            return copied
        host = torch.empty(copied.shape, dtype=copied.dtype, pin_memory=True)
        return host.copy_(copied, non_blocking=True)


def shards_of(parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the parts of the parameters that this process holds: all of them, unless they are sharded.

    Complex ones are seen as pairs of real numbers, which share their memory.
    """
    shards = [local(p) for p in parameters] if is_sharded(parameters) else parameters
    return [readable(p.detach()) for p in shards] if any(p.is_complex() for p in shards) else shards


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, NaN being equal to NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _marks(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return what changes when tensors are replaced or written to, except through `data`; empty if unavailable."""
    try:
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]  # noqa: SLF001 - torch's own
    except RuntimeError:  # of tensors that are no memory by themselves, as some quantised ones
        return []


def _first_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the first values of some layers, spread over the model."""
    rows = []
    for tensor in tensors[:: -(-len(tensors) // SAMPLED_LAYERS)]:
        row = tensor.detach()
        while row.dim() > 1 and len(row):
            row = row[0]
        rows.append(row.reshape(-1)[:SAMPLED])
    return rows


def _sketch_offset(parameters: Sequence[Tensor]) -> int:
    """Return where this process's shards begin in the vector that is sketched: each process has a range of its own."""
    return torch.distributed.get_rank() << 40 if is_sharded(parameters) else 0


def sketch_of(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the sketch of parameters seen as one vector; None if there are none."""
    shards = shards_of(parameters)
    total: Tensor | None = None
    with torch.no_grad():
        sizes = tuple(p.numel() for p in shards)
        for piece in pieces_of(sizes, _piece_length(sum(sizes))):
            own = count_sketch(values(shards, piece).float(), _sketch_offset(parameters) + piece.start)
            total = own if total is None else total + own.to(total.device)
    return total


def seen(tensors: Sequence[Tensor], piece: Piece) -> Tensor:
    """Return a piece's values in one vector, like `values`; not a copy where they are part of one contiguous tensor."""
    layer, first, last = piece.parts[0]
    own = tensors[layer].detach()
    if len(piece.parts) == 1 and own.is_contiguous() and own.dtype in _FLOATS:
        return own.view(-1)[first:last]
    return values(tensors, piece)


def values(tensors: Sequence[Tensor], piece: Piece, out: Tensor | None = None) -> Tensor:
    """Return a copy of a piece's values in one vector, in their own type if that is a common floating one.

    `out`, where it is given, is the vector to copy them to, of their own type.
    """
    parts = [tensors[layer] for layer, _, _ in piece.parts]
    for place in {0, len(parts) - 1}:  # all others are whole
        _, first, last = piece.parts[place]
        if last - first != parts[place].numel():
            parts[place] = parts[place].reshape(-1)[first:last]
    kinds, devices = {part.dtype for part in parts}, {part.get_device() for part in parts}
    if len(kinds) > 1 or len(devices) > 1:  # precisions are mixed, or several devices used
        kind = parts[0].new_empty(0, dtype=_common([part.dtype for part in parts]))
        parts = [part.to(kind) for part in parts]
    if out is not None:
        return torch.cat([part.detach().reshape(-1) for part in parts], out=out)
    copied = _flatten_dense_tensors(parts) if len(parts) > 1 else parts[0].reshape(-1).clone()
    return copied if copied.dtype in _FLOATS else copied.float()


def _common(kinds: Collection[torch.dtype]) -> torch.dtype:
    """Return float64 if one of the types is, else float32."""
    return torch.float64 if torch.float64 in kinds else torch.float32


def _piece_length(total: int) -> int:
    """Return how many values a piece on a device has: a multiple of 256."""
    return PIECE_ON_DEVICE if total <= PIECE_ON_DEVICE else -(-total // (16 * 256)) * 256


def _squares(vector: Tensor) -> Tensor:
    half = vector.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float32 if half else None)
    return norm.square() if norm.device.type == "mps" else norm.double().square()  # MPS has no float64


def _has_room(parameters: Sequence[Tensor]) -> bool:
    """Return whether the device may hold a copy of these parameters: what training will need comes first."""
    device = next((p.device for p in parameters if p.is_cuda), None)
    if device is None:
        return True
    needed = sum(p.nbytes for p in parameters)
    total = torch.cuda.get_device_properties(device).total_memory
    if needed <= SMALL_SHARE * total or needed > LARGEST_SHARE * total:
        return needed <= SMALL_SHARE * total
    allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated["current"]
    coming = allocated["peak"] - allocated["current"]  # what training will allocate, if it has trained before
    reserve = coming if coming >= needed else TRAINING_COPIES * needed
    return bool(needed <= (free - reserve) / 2)
