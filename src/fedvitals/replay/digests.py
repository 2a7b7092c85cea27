# SPDX-License-Identifier: Apache-2.0
"""What a state is, in a few bytes: a digest of each tensor and one of them all; and where two states first differ.

BLAKE3: 5 GB/s on one core here, where BLAKE2 has 0.9; and unlike faster checksums nobody can make two states with one
digest, which counts where updates come from machines that may lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from fedvitals.errors import MissingExtraError

Tensors = Mapping[str, Tensor]
LENGTH = 16  # bytes of a state's digest
_vector_norm = torch.linalg.vector_norm
SHORT = 8  # of a tensor's, which only has to differ from the one that was recorded in its place


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A state as the journal knows it: which bits, and about how large. The tensors are in the order of their names."""

    digest: str
    layers: tuple[str, ...] = ()  # a digest of each tensor
    norms: tuple[float | None, ...] = ()  # None: not finite


def mark_of(tensors: Tensors) -> Mark:
    blake3 = _blake3()
    parts: list[bytes] = []
    layers, norms = [], []
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        digest = blake3(_bytes(own)).digest(LENGTH)
        parts += (_head(name, own.dtype, own.shape), digest)
        layers.append(digest[:SHORT].hex())
        norms.append(_norm(own))
    return Mark(blake3(b"".join(parts)).digest(LENGTH).hex(), tuple(layers), tuple(norms))


@functools.lru_cache(maxsize=4096)
def _head(name: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{name} {dtype} {tuple(shape)} ".encode()


def digest_of(tensors: Tensors) -> str:
    return mark_of(tensors).digest


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element in which two states differ."""

    tensor: str
    index: tuple[int, ...]
    recorded: float
    replayed: float


def first_difference(recorded: Tensors, replayed: Tensors) -> Difference | None:
    """Bit by bit: 0 and -0 differ, a NaN equals itself. None where all bits are the same."""
    for name, before in recorded.items():
        after = replayed[name]
        flat, other = before.contiguous().reshape(-1), after.to(before.dtype).contiguous().reshape(-1)
        apart = (_bits(flat) != _bits(other)).nonzero()
        if len(apart):
            place = int(apart[0])
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tuple(before.shape) or (1,)))
            return Difference(name, index, float(flat[place]), float(other[place]))
    return None


def _bits(flat: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(whole)


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype is torch.float32 and tensor.is_cpu and tensor.dim():  # nearly all of them: the shortest way
        return tensor.numpy().data.cast("B")
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


def _norm(tensor: Tensor) -> float | None:
    if not tensor.numel() or tensor.is_complex():
        return 0.0
    norm: float = _vector_norm(tensor if tensor.dtype is torch.float32 else tensor.to(torch.float64)).item()
    return norm if math.isfinite(norm) else None


def _blake3() -> Any:  # its own type is private
    try:
        from blake3 import blake3  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("blake3", "replay", "The replay tape") from error
    return blake3
