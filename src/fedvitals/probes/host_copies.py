# SPDX-License-Identifier: Apache-2.0
"""Copies many small results of a device to the host in one operation, while the training thread continues."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvitals.stats import Array


class HostCopies:
    """Copies of tensors and arrays as float64 arrays; started on creation, one for each device.

    On CUDA nothing waits before `arrays` is called, and then only for work submitted before the copy.
    """

    def __init__(self, tensors: Sequence[Tensor | Array]) -> None:
        self._arrays: list[Array | None] = [None] * len(tensors)
        self._places: list[list[tuple[int, Sequence[int]]]] = []  # for each copy: positions in the list, and shapes
        self._copies: list[tuple[Tensor, Any]] = []  # for each device, with the event that completes it
        on_device: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
        for place, values in enumerate(tensors):
            if isinstance(values, Tensor) and not values.is_cpu:
                on_device[values.device].append((place, values.detach()))
            elif isinstance(values, Tensor):
                self._arrays[place] = values.detach().to(torch.float64, copy=True).numpy()
            else:
                self._arrays[place] = np.asarray(values, np.float64)
        for device, own in on_device.items():
            self._places.append([(place, values.shape) for place, values in own])
            flat = torch.cat([_exact(values).flatten() for _, values in own])
            self._copies.append(_start(flat) if device.type == "cuda" else (flat, None))

    @property
    def ready(self) -> bool:
        """Whether `arrays` would not wait."""
        return all(event is not None and event.query() for _, event in self._copies)

    def arrays(self) -> list[Array]:
        """Return all arrays, in the order of the tensors; waits for those not yet copied."""
        for places, (copied, event) in zip(self._places, self._copies, strict=True):
            if event is not None:
                event.synchronize()
            parts = copied.cpu().double().split([math.prod(shape) for _, shape in places])
            for (place, shape), part in zip(places, parts, strict=True):
                self._arrays[place] = part.view(tuple(shape)).numpy()
        self._copies, self._places = [], []
        return [array for array in self._arrays if array is not None]


def to_host(tensors: Sequence[Tensor | Array]) -> list[Array]:
    """Return all as float64 arrays, in the order given: one copy and one wait for each device that holds any."""
    return HostCopies(tensors).arrays()


def _start(flat: Tensor) -> tuple[Tensor, Any]:
    with torch.cuda.device(flat.device):
        copied = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copied, event


def _exact(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()  # MPS has no float64
