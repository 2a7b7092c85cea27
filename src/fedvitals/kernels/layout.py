# SPDX-License-Identifier: Apache-2.0
"""Which tensors can be read as contiguous numbers, and how the others are converted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fedvitals.errors import RecordError

_ORDINARY = (Tensor, torch.nn.Parameter)  # which have no shards


def is_sharded(parameters: Sequence[Tensor]) -> bool:
    """Return whether a model's parameters are sharded over processes (DTensor), which the first of them shows."""
    return any(hasattr(parameter, "to_local") for parameter in parameters[:1])


def local(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor (DTensor) that this process counts, without communication; others as they
    are.

    Of copies that several processes hold, the first process counts its own, and the others count nothing.
    """
    if type(tensor) in _ORDINARY or not hasattr(tensor, "to_local"):  # called for hundreds of tensors at a time
        return tensor
    sharded: Any = tensor
    shard: Tensor = sharded.to_local().detach()
    places = zip(sharded.device_mesh.get_coordinate() or (), sharded.placements, strict=False)
    return shard.new_empty(0) if any(own and placement.is_replicate() for own, placement in places) else shard


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, with complex numbers as pairs of real ones. Raises if it has no numbers in memory."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise RecordError(
            f"A tensor could not be measured: it is stored as {kind}, and only ordinary dense tensors can be read. "
            "Pass its values instead (of a sparse gradient: `gradient.coalesce().values()`)."
        )
    if tensor.is_meta:
        raise RecordError(
            f"A tensor could not be measured: it lies on the device 'meta' (shape {tuple(tensor.shape)}), where "
            "tensors have a shape but no numbers. Measure after the model has been moved to a real device."
        )
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def flat(tensor: Tensor, dtypes: Collection[torch.dtype], *, clients: bool = False) -> Tensor:
    """Return the tensor if its memory can be read from end to end in one of `dtypes`, else a copy that can.

    With `clients`, each entry of the leading axis only needs to be readable by itself.
    """
    tensor = readable(tensor).detach().resolve_neg()
    if tensor.dtype not in dtypes:
        # float16 fits in float32; integers up to 2^53 are exact in float64
        tensor = tensor.to(torch.float32 if tensor.dtype is torch.float16 else torch.float64)
    return tensor if is_dense(tensor[0] if clients else tensor) else tensor.contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gap or overlap, in any order (transposed, channels
    last).
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
