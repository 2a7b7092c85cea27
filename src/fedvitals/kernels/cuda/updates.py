# SPDX-License-Identifier: Apache-2.0
"""Everything that is measured of an update on a GPU, in one pass over memory: launches `update_statistics.py`.

Nothing here synchronises with the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedvitals.kernels.cuda import loading
from fedvitals.kernels.cuda.sums import (
    Tuning,
    WorkPartition,
    combine,
    device_context,
    partials_for,
    partition_work,
    stream_of,
    upload,
)
from fedvitals.kernels.sketch_hash import SIZE
from fedvitals.stats import STATISTICS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TUNING = Tuning(warps=8, most=1 << 16)  # larger items than sums need: each leaves two sketches of 2 KB


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """An update as it was measured on a device, where all of this lies."""

    rows: Tensor  # [layers, 9] of the change
    weight_rows: Tensor | None  # the same of the parameters as they are now
    start_squares: Tensor  # of the parameters as they were
    drift_squares: Tensor | None  # of the drift from the initial model
    sketch: Tensor | None
    drift_sketch: Tensor | None  # of the parameters as they are now


def supports(parameters: Sequence[Tensor], dtypes: Collection[torch.dtype], devices: Collection[torch.device]) -> bool:
    """Return whether our kernels measure updates of these parameters: on one GPU, of common types, not captured.

    `dtypes` and `devices` are those of all of them.
    """
    if not (parameters and parameters[0].is_cuda and len(devices) == 1 and {*DTYPES}.issuperset(dtypes)):
        return False
    return not torch.cuda.is_current_stream_capturing() and loading.load_kernels().kernels is not None


def measure_update(
    parameters: Sequence[Tensor],
    before: Tensor,
    *,
    offset: int = 0,
    sketch: bool = False,
    weigh: bool = False,
    initial: Tensor | None = None,
    sketch_parameters: bool = False,
    changes: Tensor | None = None,
    tuning: Tuning = TUNING,
) -> DeviceUpdate:
    """Measure how far the parameters have moved from `before`, a vector of all of them on their device or pinned.


    `offset`, a multiple of 256, is the vector's place in a longer one that is sketched. `initial` is a float32 vector
    from which drift is measured; `sketch_parameters` sketches the parameters themselves, `changes` takes the change.
    """
    from fedvitals.kernels.cuda import update_statistics  # noqa: PLC0415 - imports Triton

    kernels = loading.load_kernels().kernels
    readable = [p if p.is_contiguous() else p.detach().contiguous() for p in parameters]
    device = readable[0].device
    sizes, kinds = tuple(p.numel() for p in readable), tuple(p.dtype for p in readable)
    with device_context(device):
        partition = _partition(sizes, kinds, device, stream_of(device), tuning)
        count, options = max(1, partition.count), {"dtype": torch.float64, "device": device}
        partials = partials_for(partition, device, 2)
        squares = torch.empty(2, count, **options)  # type: ignore[call-overload]
        sketches = torch.empty(2, count if sketch or sketch_parameters else 0, SIZE, **options)  # type: ignore[call-overload]
        addresses = upload(torch.tensor([p.data_ptr() for p in readable], dtype=torch.int64), device)
        for dtype, first, number in partition.kinds:
            update_statistics.measure_items[(number,)](
                addresses, before, before if initial is None else initial, partition.items, first, partition.count,
                partition.chunk, offset // SIZE, before if changes is None else changes, partials, squares, sketches,
                DTYPE=getattr(kernels.tl, str(dtype).removeprefix("torch.")), SKETCH=sketch, WEIGH=weigh,
                DRIFT=initial is not None, DRIFT_SKETCH=sketch_parameters, KEEP=changes is not None,
                num_warps=tuning.warps,
            )  # fmt: skip
        rows = torch.empty(2, len(sizes), len(STATISTICS), **options)  # type: ignore[call-overload]
        combine(kernels, partition, partials, rows, steps=2 if weigh else 1)
        used = slice(0, partition.count)
        return DeviceUpdate(
            rows[0],
            rows[1] if weigh else None,
            squares[0, used].sum(),
            None if initial is None else squares[1, used].sum(),
            sketches[0, used].sum(0) if sketch else None,
            sketches[1, used].sum(0) if sketch_parameters else None,
        )


@lru_cache(maxsize=64)
def _partition(
    sizes: tuple[int, ...],
    kinds: tuple[torch.dtype, ...],
    device: torch.device,
    stream: int,  # noqa: ARG001 - another stream would have to wait for the tables' way to the device
    tuning: Tuning,
) -> WorkPartition:
    """Return the partition of layers, whose vector is cut where they begin, into items."""
    lengths = np.array(sizes, np.int64)
    return partition_work(np.arange(len(sizes)), np.cumsum(lengths) - lengths, lengths, kinds, device, tuning)
