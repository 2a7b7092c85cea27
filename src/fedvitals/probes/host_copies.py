# SPDX-License-Identifier: Apache-2.0
"""Brings many small results of a device to the host with one copy, since each copy waits for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedvitals.stats import Array


def to_host(tensors: Sequence[Tensor | Array]) -> list[Array]:
    """Return all as float64 arrays, in the order given: one copy, and one wait, for each device that holds any."""
    arrays: list[Array | None] = [None] * len(tensors)
    on_device: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
    for place, values in enumerate(tensors):
        if isinstance(values, Tensor) and not values.is_cpu:
            on_device[values.device].append((place, values.detach()))
        elif isinstance(values, Tensor):
            arrays[place] = values.detach().double().numpy()
        else:
            arrays[place] = np.asarray(values, np.float64)
    for own in on_device.values():
        flat = torch.cat([_exact(values).flatten() for _, values in own]).cpu().double()
        for (place, values), part in zip(own, flat.split([values.numel() for _, values in own]), strict=True):
            arrays[place] = part.view(values.shape).numpy()
    return [array for array in arrays if array is not None]


def _exact(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()  # MPS has no float64
