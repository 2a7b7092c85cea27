# SPDX-License-Identifier: Apache-2.0
"""Records the nine sums of a user's gradients on a GPU at every step without synchronising, for `GradientRecorder`.

Gradients move: torch frees them between steps and allocates them elsewhere. Their addresses are therefore collected at
every step and sent to the device ahead of the kernel that reads them. The rows stay on the device until they are
needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedvitals.kernels import layout
from fedvitals.kernels.cuda import loading
from fedvitals.kernels.cuda.sums import DTYPES, TUNING, launch, list_partition, partials_for, stream_of
from fedvitals.stats import STATISTICS

_COLUMNS = len(STATISTICS)
_STEPS_PER_BLOCK = 64  # steps that a block of memory on the device holds


def for_parameters(parameters: Sequence[Tensor | None]) -> DeviceGradients | None:
    """Return a recorder for these parameters, or None if they are not on one GPU that our kernels support."""
    present = [p for p in parameters if p is not None]
    if not present or not all(p.is_cuda and p.device == present[0].device and p.dtype in DTYPES for p in present):
        return None
    if torch.cuda.is_current_stream_capturing() or loading.load_kernels().kernels is None:
        return None
    return DeviceGradients(parameters, present[0].device)


class DeviceGradients:
    """Records the gradients of a model's parameters on one GPU; call `record()` before each optimiser step."""

    def __init__(self, parameters: Sequence[Tensor | None], device: torch.device) -> None:
        self._device = device
        self._known = [(p, None, 0) if p is None else (p, p.dtype, p.numel()) for p in parameters]
        self._lengths = tuple(length for _, _, length in self._known)
        self._kinds = tuple(dtype or torch.float32 for _, dtype, _ in self._known)
        self._kernels = loading.load_kernels().kernels
        self._stream: int | None = None
        self._addresses: list[int] = []  # of the step before
        self._rows: list[Tensor] = []  # free ones, of a block of memory on the device
        self._places: list[Tensor] = []  # free ones, of a block of pinned memory on the host

    def record(self) -> Tensor | None:
        """Return the rows [layers, 9] that the device will fill, or None if each tensor must be measured separately."""
        index = self._device.index
        addresses = []
        for parameter, dtype, length in self._known:
            if parameter is None:
                addresses.append(0)
                continue
            gradient = parameter.grad
            if (
                gradient is None
                or gradient.dtype is not dtype
                or gradient.numel() != length
                or gradient.get_device() != index
                or gradient.layout is not torch.strided
                or not (gradient.is_contiguous() or layout.is_dense(gradient))
            ):
                return None
            addresses.append(gradient.data_ptr())
        if torch.cuda.is_current_stream_capturing():
            return None  # a graph would replay with the addresses of today
        stream = stream_of(self._device)
        if stream != self._stream:
            self._stream = stream
            self._cut = list_partition(self._lengths, self._kinds, 1, self._device, stream, TUNING)
            self._partials = partials_for(self._cut, self._device)
            self._addresses = []
        if addresses != self._addresses:  # torch mostly gives gradients the memory that they had at the step before
            self._addresses = addresses
            self._pointers = self._upload(addresses)
        rows = self._row()
        launch(self._kernels, self._cut, self._pointers, None, self._partials, rows)
        return rows

    def _upload(self, addresses: list[int]) -> Tensor:
        """Return the addresses on the device. Each step has its own pinned memory, so that nothing waits.

        torch reuses a block of pinned memory only after the copies out of it are done.
        """
        if not self._places:
            self._places = [
                *torch.empty(
                    _STEPS_PER_BLOCK, len(addresses), dtype=torch.int64, pin_memory=self._device.type == "cuda"
                )
            ]
        place = self._places.pop()
        place.numpy()[:] = addresses
        return place.to(self._device, non_blocking=True)

    def _row(self) -> Tensor:
        if not self._rows:
            shape = (_STEPS_PER_BLOCK, len(self._known), _COLUMNS)
            self._rows = [*torch.empty(shape, dtype=torch.float64, device=self._device)]
        return self._rows.pop()


def copy_to_host(rows: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the rows on the host, with one copy and one synchronisation per device."""
    on_host: dict[int, Tensor] = {}
    for device in {tensor.device for tensor in rows.values()}:
        indices = [index for index, tensor in rows.items() if tensor.device == device]
        on_host |= zip(indices, torch.stack([rows[index] for index in indices]).cpu(), strict=True)
    return on_host
