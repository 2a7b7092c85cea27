# SPDX-License-Identifier: Apache-2.0
"""The same statistics by torch alone: on any device, without a compiled kernel, and without synchronising."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvitals.kernels.layout import readable
from fedvitals.stats import MAX, MIN, STATISTICS

CHUNK = 1 << 22  # values in float64 at a time: 32 MB and a few temporaries of the same size


def sums(tensors: Sequence[Tensor | None], clients: int | None = None) -> Tensor:
    """Return `[layers, 9]`, or `[clients, layers, 9]` if every tensor has a leading client axis; in float64.

    The result is on the tensors' device; if there are several, on the first that is not the CPU.
    """
    groups = 1 if clients is None else clients
    device = common_device(tensors)
    rows = [_rows(tensor, groups, device) for tensor in tensors]
    stacked = torch.stack(rows, dim=1) if rows else torch.zeros(groups, 0, len(STATISTICS), dtype=torch.float64)
    return stacked[0] if clients is None else stacked


def common_device(tensors: Sequence[Tensor | None]) -> torch.device:
    """Return the device for results. MPS has no float64, so its results are on the CPU."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type not in ("cpu", "mps"):
            return tensor.device
    return torch.device("cpu")


def _rows(tensor: Tensor | None, groups: int, device: torch.device) -> Tensor:
    """Return one row per group, `[groups, 9]`."""
    total = torch.zeros(groups, len(STATISTICS), dtype=torch.float64, device=device)
    total[:, MIN], total[:, MAX] = torch.inf, -torch.inf
    if tensor is None:
        return total
    values = readable(tensor).detach()
    if not groups or not values.numel():
        return total
    values = values.reshape(groups, -1)
    if values.device.type == "mps":
        values = values.cpu()
    width = max(1, CHUNK // groups)
    for start in range(0, values.shape[1], width):
        part = _chunk(values[:, start : start + width].double()).to(device)
        smallest, largest = torch.minimum(total[:, MIN], part[:, MIN]), torch.maximum(total[:, MAX], part[:, MAX])
        total += part
        total[:, MIN], total[:, MAX] = smallest, largest
    return total


def _chunk(values: Tensor) -> Tensor:
    """Return the nine columns of non-empty `[groups, values]`."""
    finite = values.isfinite()
    kept = values.where(finite, 0.0)
    columns = (
        torch.full_like(values[:, 0], values.shape[1]),
        kept.sum(1),
        torch.linalg.vecdot(kept, kept),
        kept.abs().sum(1),
        values.where(finite, torch.inf).amin(1),
        values.where(finite, -torch.inf).amax(1),
        (values == 0).sum(1),
        values.isnan().sum(1),
        values.isinf().sum(1),
    )
    return torch.stack([column.double() for column in columns], dim=1)
