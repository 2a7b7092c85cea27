# SPDX-License-Identifier: Apache-2.0
"""The nine sums of tensors on a GPU: of a list of tensors, or of stacked clients' matrices at every step, into a ring.

The partition of the work is computed once for each combination of lengths and kept on the device. Nothing here
synchronises with the device. The kernels are in `statistics.py`, in Triton.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedvitals.kernels import fallback, layout
from fedvitals.kernels.cuda import loading
from fedvitals.stats import STATISTICS

_COLUMNS = len(STATISTICS)
_PARTIALS = 8  # the count is known
_BORDER = 16  # bytes; as in the kernels
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

Whole = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tuning:
    """How memory is cut: into items of at most `most` values, or fewer if that leaves less than `items` per SM.

    A lane adds at most 64 values of an item, which keeps float32 sums accurate to a millionth.
    """

    warps: int = 4
    most: int = 1 << 15
    items: int = 16

    def chunk(self, values: int, processors: int) -> int:
        lanes = self.warps * 32 * 4
        tile = 4 * lanes
        wanted = -(-values // (processors * self.items))
        return min(max(tile, -(-wanted // tile) * tile), max(tile, min(self.most, 64 * lanes)))


TUNING = Tuning()


@dataclass(frozen=True, slots=True)
class WorkPartition:
    """The partition of segments into items, on the device."""

    chunk: int
    warps: int
    kinds: tuple[tuple[torch.dtype, int, int], ...]  # a type, its first item, and how many
    items: Tensor  # [4, items]: see `partials_of`
    items_of: Tensor  # each segment's first item, and the first item after it
    lengths: Tensor  # [segments]
    most: int  # the most items of one segment

    @property
    def count(self) -> int:
        return self.items.shape[1]


def partition_work(
    rows: Whole, starts: Whole, lengths: Whole, kinds: Sequence[torch.dtype], device: torch.device, tuning: Tuning
) -> WorkPartition:
    """Return the partition for segments, each with its row, first value, length and type."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    chunk = tuning.chunk(int(lengths.sum()), processors)
    own = np.array([DTYPES.index(kind) for kind in kinds], np.int64)
    spare = np.array([_BORDER // kind.itemsize - 1 for kind in DTYPES], np.int64)[own]
    # A segment that does not begin at a border takes up to `spare` values more of room, which may need one more item.
    pieces = np.where(lengths > 0, -(-(lengths + spare) // chunk), 0)
    order = np.argsort(own, kind="stable")  # items of a type lie together: each type has a kernel of its own
    ends = np.empty_like(pieces)
    ends[order] = np.cumsum(pieces[order])
    segment = np.repeat(order, pieces[order])
    position = (np.arange(len(segment)) - (ends - pieces)[segment]) * chunk
    items = np.stack([rows[segment], starts[segment], lengths[segment], position])
    numbers = np.concatenate([items.ravel(), ends - pieces, ends, lengths]).astype(np.int64)
    on_device = upload(torch.from_numpy(numbers), device)
    count, segments = len(segment), len(lengths)
    rest = on_device[4 * count :].view(3, segments)
    each = [int(pieces[own == index].sum()) for index in range(len(DTYPES))]
    firsts = np.cumsum([0, *each]).tolist()
    groups = tuple((kind, first, n) for kind, first, n in zip(DTYPES, firsts, each, strict=False) if n)
    table = on_device[: 4 * count].view(4, count)
    return WorkPartition(chunk, tuning.warps, groups, table, rest[:2], rest[2], int(pieces.max(initial=0)))


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting: torch reuses pinned memory only after such a copy is done."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def launch(
    kernels: Any, partition: WorkPartition, addresses: Tensor, stride: int | None, partials: Tensor, rows: Tensor,
    slot: Tensor | None = None, slots: int = 1,
) -> None:  # fmt: skip
    """Fill the rows. `stride` is that of the matrix at `addresses`, in values; None if `addresses` are the segments'
    own.
    """
    launch_partials(kernels, partition, addresses, stride, partials)
    combine(kernels, partition, partials, rows, slot, slots)


def launch_partials(
    kernels: Any, partition: WorkPartition, addresses: Tensor, stride: int | None, partials: Tensor
) -> None:
    """Reduce every item to its partial sums, which `combine` reduces to rows."""
    language = kernels.tl
    with device_context(partials.device):
        for dtype, first, number in partition.kinds:
            kernels.partials_of[(number,)](
                addresses, stride or 0, partition.items, first, partition.count, partition.chunk, partials,
                LISTED=stride is None, DTYPE=getattr(language, str(dtype).removeprefix("torch.")), SIZE=dtype.itemsize,
                THREADS=32 * partition.warps, num_warps=partition.warps,
            )  # fmt: skip


def combine(
    kernels: Any, partition: WorkPartition, partials: Tensor, rows: Tensor, slot: Tensor | None = None, slots: int = 1,
    steps: int = 1,
) -> None:  # fmt: skip
    """Fill the rows of each step from its partial sums; `partials` and `rows` are those of all steps in a row."""
    with device_context(rows.device):
        if len(partition.lengths):
            block = min(max(32, 1 << (partition.most - 1).bit_length()), 512) if partition.most else 32
            kernels.combine[(len(partition.lengths), steps)](
                partials, partition.count, partition.items_of, partition.lengths, rows,
                rows if slot is None else slot, slots,
                SLOTTED=slot is not None, BLOCK=block, num_warps=max(1, block // 128),
            )  # fmt: skip


def device_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device current, since Triton launches its kernels on the current device."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


# -- a list of tensors ------------------------------------------------------------------------------------------------


def sums(tensors: Sequence[Tensor | None], clients: int | None) -> Tensor | None:
    """Return `[layers, 9]`, or `[clients, layers, 9]`, on the tensors' device; None unless that is one supported
    GPU.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1 or clients == 0:
        return None
    (device,) = devices
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None  # a graph would replay with the current addresses
    with device_context(device):
        kernels = loading.load_kernels().kernels
        return None if kernels is None else sums_of_list(kernels, tensors, clients)


def sums_of_parts(values: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
    """Return `[parts, 9]` of a vector that consists of parts of these sizes, or `[rows, parts, 9]` of a matrix with
    such a vector in each row: no addresses need to travel. None if our kernels do not support it.
    """
    if torch.cuda.is_current_stream_capturing() or values.dtype not in DTYPES or not values.is_contiguous():
        return None
    with device_context(values.device):
        kernels = loading.load_kernels().kernels
        count = math.prod(values.shape[:-1])
        if kernels is None or not count:
            return None
        trained, device = (True,) * len(sizes), values.device
        partition = matrix_partition(sizes, trained, count, values.dtype, device, stream_of(device), TUNING)
        rows = torch.empty(*values.shape[:-1], len(sizes), _COLUMNS, dtype=torch.float64, device=device)
        launch(kernels, partition, values, values.shape[-1], partials_for(partition, device), rows)
        return rows


def sums_of_list(
    kernels: Any, tensors: Sequence[Tensor | None], clients: int | None, tuning: Tuning | None = None
) -> Tensor:
    """Return the sums of a list of tensors by our kernels."""
    each = clients or 1
    ready = [
        t if t is None or (clients is None and _plain(t)) else layout.flat(t, DTYPES, clients=clients is not None)
        for t in tensors
    ]
    (device,) = {tensor.device for tensor in ready if tensor is not None}
    addresses = [0 if t is None else t.data_ptr() for t in ready]
    lengths = tuple(0 if t is None else t.numel() // each for t in ready)
    kinds = tuple(torch.float32 if t is None else t.dtype for t in ready)
    if clients is not None:
        strides = [0 if t is None else t.stride(0) * t.element_size() for t in ready]
        where = np.arange(clients)[:, None] * np.array(strides) + np.array(addresses)
        pointers = torch.from_numpy(where.astype(np.int64).ravel())
    else:
        pointers = torch.tensor(addresses, dtype=torch.int64)
    partition = list_partition(lengths, kinds, each, device, stream_of(device), tuning or TUNING)
    rows = torch.empty(each, len(ready), _COLUMNS, dtype=torch.float64, device=device)
    launch(kernels, partition, upload(pointers, device), None, partials_for(partition, device), rows)
    return rows if clients is not None else rows[0]


def _plain(tensor: Tensor) -> bool:
    """Return whether the tensor can be read directly; cheap, since it is called for hundreds of tensors."""
    return tensor.layout is torch.strided and tensor.dtype in DTYPES and tensor.is_contiguous() and not tensor.is_neg()


@lru_cache(maxsize=256)
def list_partition(
    lengths: tuple[int, ...],
    kinds: tuple[torch.dtype, ...],
    clients: int,
    device: torch.device,
    stream: int,  # noqa: ARG001 - another stream would have to wait for the tables' way to the device
    tuning: Tuning,
) -> WorkPartition:
    whole = np.tile(np.array(lengths, np.int64), clients)
    return partition_work(np.arange(len(whole)), np.zeros_like(whole), whole, kinds * clients, device, tuning)


def stream_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))  # noqa: SLF001 - without making a Stream at every step


def partials_for(partition: WorkPartition, device: torch.device, steps: int = 1) -> Tensor:
    return torch.empty(steps, _PARTIALS, max(1, partition.count), dtype=torch.float64, device=device)


# -- stacked clients --------------------------------------------------------------------------------------------------


class MatrixSums:
    """The nine sums of every client's part of every layer of matrices [clients, weights], prepared for one shape.

    `sizes` are the numbers of values of the layers; a layer that is not `trained` gives the row of an empty tensor.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        trained: Sequence[bool],
        clients: int,
        device: torch.device | str,
        tuning: Tuning = TUNING,
    ) -> None:
        self._sizes, self._trained, self._clients = [*sizes], [*trained], clients
        device = torch.empty(0, device=device).device  # including its index
        self._kernels = loading.load_kernels().kernels if clients and self._sizes else None
        self._cuts: dict[torch.dtype, tuple[WorkPartition, Tensor]] = {}
        self._device, self._tuning = device, tuning
        if self._kernels is not None:
            self._partition_for(torch.float32)

    @property
    def compiled(self) -> bool:
        """Whether our kernels are used; else torch computes everything."""
        return self._kernels is not None

    def supports(self, matrix: Tensor) -> bool:
        """Return whether our kernels can read this matrix directly."""
        as_rows = matrix.stride(1) == 1 or matrix.shape[1] <= 1
        return self.compiled and as_rows and matrix.dtype in DTYPES and matrix.device.type == self._device.type

    def measure(self, matrix: Tensor, rows: Tensor, slot: Tensor | None = None) -> None:
        """Write the sums into `rows`, [clients, layers, 9]; with a `slot`, a number on the device, into rows[slot]."""
        if self.supports(matrix):
            partition, partials = self._partition_for(matrix.dtype)
            stride = matrix.stride(0) if len(matrix) > 1 else matrix.shape[1]
            launch(self._kernels, partition, matrix, stride, partials, rows, slot, 1 if slot is None else len(rows))
            return
        parts = matrix.split(self._sizes, dim=1)
        layers = [part if trained else None for part, trained in zip(parts, self._trained, strict=True)]
        rows_by_torch = fallback.sums(layers, self._clients).to(rows.device)
        if slot is None:
            rows.copy_(rows_by_torch)
        else:
            rows.index_copy_(0, slot.view(1).remainder(len(rows)), rows_by_torch[None])

    def _partition_for(self, dtype: torch.dtype) -> tuple[WorkPartition, Tensor]:
        if dtype not in self._cuts:
            size = (tuple(self._sizes), tuple(self._trained), self._clients)
            partition = matrix_partition(*size, dtype, self._device, stream_of(self._device), self._tuning)
            self._cuts[dtype] = (partition, partials_for(partition, self._device))
        return self._cuts[dtype]


@lru_cache(maxsize=64)
def matrix_partition(
    sizes: tuple[int, ...],
    trained: tuple[bool, ...],
    clients: int,
    dtype: torch.dtype,
    device: torch.device,
    stream: int,  # noqa: ARG001 - as above
    tuning: Tuning,
) -> WorkPartition:
    rows = np.repeat(np.arange(clients), len(sizes))
    starts = np.tile(np.cumsum([0, *sizes[:-1]]), clients)
    lengths = np.tile(np.where(trained, sizes, 0), clients)
    return partition_work(rows, starts, lengths, [dtype] * len(rows), device, tuning)


class DeviceRing:
    """A ring of sums for captured CUDA graphs: memory is allocated, and every kernel compiled, before the capture.

    `ring` is [slots, clients, layers, 9] in float64 on the device. `record(matrix, slot)` fills one slot; the slot is a
    number on the device, read when the kernel runs, and wraps around.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        trained: Sequence[bool],
        clients: int,
        slots: int,
        device: torch.device | str,
        tuning: Tuning = TUNING,
    ) -> None:
        self._sums = MatrixSums(sizes, trained, clients, device, tuning)
        self.ring = torch.zeros(slots, clients, len(sizes), _COLUMNS, dtype=torch.float64, device=device)
        if self._sums.compiled:  # everything compiled on first use is compiled now; one row represents all
            matrix = torch.zeros(1, sum(sizes), device=device).expand(clients, -1)
            self.record(matrix, torch.zeros(1, dtype=torch.int64, device=device))
            self.ring.zero_()

    def record(self, matrix: Tensor, slot: Tensor) -> None:
        """Measure a matrix, [clients, weights], as it is when this runs."""
        self._sums.measure(matrix, self.ring, slot)
