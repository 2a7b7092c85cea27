# SPDX-License-Identifier: Apache-2.0
"""Compression of updates: states are really encoded and decoded, so bytes and losses are exact.

An update is sent as the difference from the model that the client started with, which is small and compresses well;
pruning, which is about the weights themselves, and no compression send the state. Models are sent to clients plain, or
in half precision. Buffers, such as running means, are few and always sent as float32.

With error feedback (EF-SGD, Karimireddy et al. 2019) a client adds what its last encodings lost to its next update, so
that the sum of what arrives and the residual is the sum of what was trained.

A payload is a header (kind, number of values), then the arrays named in each class, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedvitals.errors import FedvitalsError
from fedvitals.lab.description import Description, require

Values = npt.NDArray[np.float32]

HEADER = struct.Struct("<BI")  # kind, number of values
COUNT = struct.Struct("<BI")  # of a sparse message: whether a bitmap follows, how many values are kept
LARGEST_HALF = np.float32(65504.0)
LARGEST = float(np.finfo(np.float32).max)
NOT_FINITE = -128  # the one code of int8 that a symmetric scale leaves free


class PayloadError(FedvitalsError):
    """Raised when bytes are not what the encoding would have written."""


@dataclass(frozen=True, slots=True)
class ReceivedState:
    """A state as its receiver decoded it, and its size on the wire."""

    state: Tensor  # [size]
    bytes: int  # on the wire
    raw_bytes: int  # as plain float32
    residual: Tensor | None = None  # [weights]: what the encoding lost, where the client keeps it


class Compression(Description, frozen=True):
    """Base class of encodings. The receiver works with what `decode` returns."""

    code: ClassVar[int]
    differences: ClassVar[bool] = True  # of updates: the difference from the start, instead of the state

    def encode(self, values: Values) -> bytes:
        raise NotImplementedError

    def decode(self, payload: bytes) -> Values:
        raise NotImplementedError

    def compress(self, values: Tensor) -> tuple[Tensor, int]:
        """Return the values as they arrive, and their bytes on the wire."""
        payload = self.encode(values.detach().cpu().numpy())
        return torch.from_numpy(self.decode(payload)).to(values.device), len(payload)


class LossyDifference(Compression, frozen=True, kw_only=True):
    """Base class of encodings that lose a part of the difference; with `error_feedback` the client sends it later."""

    error_feedback: bool = False

    later = ("error_feedback",)


class Plain(Compression, frozen=True):
    """float32 unchanged and lossless, 4 bytes a value."""

    code: ClassVar[int] = 0
    differences: ClassVar[bool] = False  # start + (state − start) would round

    def encode(self, values: Values) -> bytes:
        return HEADER.pack(self.code, len(values)) + values.astype("<f4").tobytes()

    def decode(self, payload: bytes) -> Values:
        body, count = split_header(self, payload)
        return decode_array(body, "<f4", count).astype(np.float32)


class FP16(LossyDifference, frozen=True):
    """Half precision, 2 bytes a value: 11 significant bits down to 6e-5, steps of 6e-8 below.

    NaN and Inf survive; finite values beyond 65504 are clamped, so that the encoding never creates an Inf.

    Args:
        error_feedback: Whether a client adds what the encoding lost to its next update.
    """

    code: ClassVar[int] = 1

    def encode(self, values: Values) -> bytes:
        held = np.where(np.isfinite(values), np.clip(values, -LARGEST_HALF, LARGEST_HALF), values)
        return HEADER.pack(self.code, len(values)) + held.astype("<f2").tobytes()

    def decode(self, payload: bytes) -> Values:
        body, count = split_header(self, payload)
        return decode_array(body, "<f2", count).astype(np.float32)


class TopK(LossyDifference, frozen=True):
    """The values with the largest magnitude, exact; the others arrive as 0 (Aji and Heafield 2017). 4 bytes per kept
    value, plus its position: 4 bytes each, or one bit per value, whichever is smaller. Of equal magnitudes the first
    are kept. NaN counts as the largest, then Inf, so that they survive while there is space.

    Args:
        share: The share of values that is kept.
        error_feedback: Whether a client adds what the encoding lost to its next update.
    """

    share: float = 0.1
    code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "share of top_k", self.share, "above 0, up to 1")

    def encode(self, values: Values) -> bytes:
        return encode_sparse(self.code, values, max(1, round(self.share * len(values))))

    def decode(self, payload: bytes) -> Values:
        return decode_sparse(self, payload)


class Int8(LossyDifference, frozen=True):
    """Integers from −127 to 127 with a float32 scale per block of values: about 1 byte a value. The error is at most
    half a scale, which is the block's largest finite magnitude / 127. A non-finite value arrives as NaN and does not
    affect its neighbours.

    Args:
        block: Values in a block.
        error_feedback: Whether a client adds what the encoding lost to its next update.
    """

    block: int = 256
    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        require(self.block >= 1, "block of int8", self.block, "a number of values, 1 or more")

    def encode(self, values: Values) -> bytes:
        blocks = -(-len(values) // self.block)
        padded = np.zeros(blocks * self.block, np.float64)
        padded[: len(values)] = values
        rows = padded.reshape(blocks, self.block)
        finite = np.isfinite(rows)
        rows[~finite] = 0
        scales = (np.abs(rows).max(axis=1, initial=0) / 127).astype("<f4")
        steps = np.where(scales > 0, scales, 1).astype(np.float64)
        codes: npt.NDArray[np.int8] = np.rint(rows / steps[:, None]).clip(-127, 127).astype(np.int8)
        codes[~finite] = NOT_FINITE
        body: bytes = scales.tobytes() + codes.reshape(-1)[: len(values)].tobytes()
        return HEADER.pack(self.code, len(values)) + body

    def decode(self, payload: bytes) -> Values:
        body, count = split_header(self, payload)
        blocks = -(-count // self.block)
        scales = decode_array(body[: 4 * blocks], "<f4", blocks).astype(np.float64)
        codes = decode_array(body[4 * blocks :], "i1", count)
        values: Values = (codes * np.repeat(scales, self.block)[:count]).clip(-LARGEST, LARGEST).astype(np.float32)
        values[codes == NOT_FINITE] = np.nan
        return values


class Sign(LossyDifference, frozen=True):
    """One bit a value, and for each `block` of values their mean magnitude as float32 (scaled signSGD, Bernstein 2018).

    The mean magnitude is the scale with the least squared error. It is taken per block, as in `int8`, since layers
    differ by orders of magnitude, and since an encoding need not know the layers: 1.03 bits a value. 0 counts as
    positive. A block with a value that is not finite arrives as NaN, because a bit cannot say which one it was.

    Args:
        block: Values that share a magnitude.
        error_feedback: Whether a client adds what the encoding lost to its next update.
    """

    block: int = 1024
    code: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require(self.block >= 1, "block of sign", self.block, "a number of values, 1 or more")

    def encode(self, values: Values) -> bytes:
        starts = np.arange(0, len(values), self.block)
        lengths = np.minimum(self.block, len(values) - starts)
        magnitudes = np.where(np.isfinite(values), np.abs(values.astype(np.float64)), np.nan)
        sums = np.add.reduceat(magnitudes, starts) if len(values) else magnitudes
        scales: bytes = (sums / lengths).astype("<f4").tobytes()
        return HEADER.pack(self.code, len(values)) + scales + np.packbits(values < 0).tobytes()

    def decode(self, payload: bytes) -> Values:
        body, count = split_header(self, payload)
        blocks = -(-count // self.block)
        scales = decode_array(body[: 4 * blocks], "<f4", blocks).astype(np.float32)
        negative = np.unpackbits(decode_array(body[4 * blocks :], "u1", -(-count // 8)), count=count)
        values: Values = np.repeat(scales, self.block)[:count]
        return np.where(negative, -values, values)


class Pruning(Compression, frozen=True):
    """The state without the weights of the smallest magnitude, which arrive as 0 (Han et al. 2015). Encoded as in TopK,
    but by the magnitude of the weights instead of their change. NaN and Inf count as the largest.

    Args:
        share: The share of the weights that is removed.
    """

    share: float = 0.5
    code: ClassVar[int] = 4
    differences: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, "share of pruning", self.share, "from 0 up to, but not including, 1")

    def encode(self, values: Values) -> bytes:
        return encode_sparse(self.code, values, len(values) - round(self.share * len(values)))

    def decode(self, payload: bytes) -> Values:
        return decode_sparse(self, payload)


COMPRESSIONS = (Plain, FP16, TopK, Int8, Sign, Pruning)


def send_update(
    compression: Compression,
    state: Tensor,
    start: Tensor,
    weights: int,
    residual: Tensor | None = None,
) -> ReceivedState:
    """Return a client's state as the server, which knows `start`, receives it. Values from `weights` on are buffers.

    `residual` is what the client's last encodings lost, with error feedback: it is added before encoding. A state whose
    shape does not match its start is sent unchanged, so that the aggregator can report it.
    """
    if state.shape != start.shape or state.dtype != start.dtype:
        length = state.numel() * state.element_size()
        return ReceivedState(state, length, length)
    trained = state[:weights]
    if getattr(compression, "error_feedback", False):
        change = trained - start[:weights] if residual is None else trained - start[:weights] + residual
        received, sent = compression.compress(change)
        lost = torch.nan_to_num(change - received, 0.0, 0.0, 0.0)  # what is not finite must not stay for ever
        return received_state(start[:weights] + received, state[weights:], sent, lost)
    if compression.differences:
        received, sent = compression.compress(trained - start[:weights])
        received = start[:weights] + received
    else:
        received, sent = compression.compress(trained)
    return received_state(received, state[weights:], sent)


def update_bytes(compression: Compression, size: int, weights: int) -> int:
    """Return the bytes of an encoded update of this size, known in advance since no encoding depends on the values."""
    return len(compression.encode(np.zeros(weights, np.float32))) + 4 * (size - weights)


def received_state(trained: Tensor, buffers: Tensor, sent: int, residual: Tensor | None = None) -> ReceivedState:
    state = torch.cat([trained, buffers])
    return ReceivedState(state, sent + 4 * len(buffers), 4 * len(state), residual)


def encode_sparse(code: int, values: Values, keep: int) -> bytes:
    """Encode the `keep` values of the largest magnitude with their positions."""
    keep = min(keep, len(values))
    kept = mask_of_largest(values, keep)
    bitmap = 4 * keep > -(-len(values) // 8)
    places = np.packbits(kept).tobytes() if bitmap else np.flatnonzero(kept).astype("<u4").tobytes()
    head = HEADER.pack(code, len(values)) + COUNT.pack(bitmap, keep)
    return head + places + values[kept].astype("<f4").tobytes()


def decode_sparse(compression: Compression, payload: bytes) -> Values:
    body, count = split_header(compression, payload)
    if len(body) < COUNT.size:
        raise PayloadError(f"A sparse payload has {COUNT.size} bytes of head or more, but this has {len(body)}.")
    bitmap, keep = COUNT.unpack_from(body)
    width = -(-count // 8) if bitmap else 4 * keep
    places, kept = body[COUNT.size : COUNT.size + width], body[COUNT.size + width :]
    if bitmap:
        where = np.flatnonzero(np.unpackbits(decode_array(places, "u1", width), count=count))
    else:
        where = decode_array(places, "<u4", keep)
    if len(where) != keep or (where >= count).any():
        raise PayloadError(f"The places of a sparse payload do not fit its {keep} kept of {count} values.")
    values = np.zeros(count, np.float32)
    values[where] = decode_array(kept, "<f4", keep)
    return values


def mask_of_largest(values: Values, keep: int) -> npt.NDArray[np.bool_]:
    """Return a mask of exactly `keep` values of the largest magnitude; of equal ones the first are taken."""
    if keep == 0:
        return np.zeros(len(values), bool)
    # Bit patterns of magnitudes are ordered as the magnitudes are, with Inf above them and NaN above Inf.
    ranks = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    bound = np.partition(ranks, len(ranks) - keep)[len(ranks) - keep]
    mask: npt.NDArray[np.bool_] = ranks > bound
    mask[np.flatnonzero(ranks == bound)[: keep - int(mask.sum())]] = True
    return mask


def split_header(compression: Compression, payload: bytes) -> tuple[bytes, int]:
    """Return the payload without its header, and the number of values it encodes."""
    if len(payload) < HEADER.size:
        raise PayloadError(f"A payload has a header of {HEADER.size} bytes, but this has {len(payload)} in all.")
    code, count = HEADER.unpack_from(payload)
    if code != compression.code:
        names = {kind.code: kind.__name__ for kind in COMPRESSIONS}
        got = names.get(code, f"unknown kind {code}")
        raise PayloadError(f"{type(compression).__name__} cannot read this payload: it is of {got}.")
    return payload[HEADER.size :], count


def decode_array(body: bytes, kind: str, count: int) -> npt.NDArray[Any]:
    expected = count * np.dtype(kind).itemsize
    if len(body) != expected:
        raise PayloadError(f"Expected {expected} bytes for {count} values of {kind}, but got {len(body)}.")
    return np.frombuffer(body, kind)
