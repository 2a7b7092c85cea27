# SPDX-License-Identifier: Apache-2.0
"""Records as bytes, on the way from a client or a worker process to the process that writes the store.

    payload = b"fv" · version · how the head is written · its size · checksum · head · matrices · arrays

The head is MessagePack (`fields`), deflated if it is long; the matrices are float32 as packed by `stats.pack`; the
arrays are those of measurements. The checksum is the CRC-32 of everything after it; version 1 has neither checksum nor
arrays. The bytes read come from another machine: every number, size, shape and name is checked, nothing is executed,
and anything invalid is a RecordError. Matrices are restored within 1e-6, everything else exactly.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from fedvitals.errors import RecordError
from fedvitals.measurements import Telemetry
from fedvitals.transport.wire.decode import PayloadReader
from fedvitals.transport.wire.encode import PayloadWriter
from fedvitals.transport.wire.fields import Head, Limits, check_size
from fedvitals.transport.wire.vocabulary import WORDS, WORDS_SINCE_2

MAGIC, VERSION = b"fv", 2
_START = struct.Struct("<2sBBI")
_CHECKSUM = struct.Struct("<I")
_WITHOUT_CHECKSUM = 1  # a version that can still be read
_BYTES = (bytes, bytearray, memoryview)
_PLAIN, _DEFLATED = 0, 1
_SHORT = 800  # bytes of a head; shorter ones are not worth deflating
_HEADS = msgspec.msgpack.Decoder(Head)
LIMITS = Limits()


def encode(records: Sequence[Telemetry], limits: Limits = LIMITS) -> bytes:
    """Return records and measurements as one payload. RecordError if it would be too large for `decode`."""
    writer = PayloadWriter()
    try:
        writer.add(records)
        matrices = writer.finish()
        head = msgspec.msgpack.encode((writer.words, writer.places, writer.entries))
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise RecordError(f"A record holds what cannot be sent ({error}).") from error
    check_size("bytes without its matrices", len(head), limits.head)
    written = _PLAIN if len(head) <= _SHORT else _DEFLATED
    head = head if written == _PLAIN else zlib.compress(head)
    body = b"".join((head, *matrices))
    payload = b"".join((_START.pack(MAGIC, VERSION, written, len(head)), _CHECKSUM.pack(zlib.crc32(body)), body))
    check_size("bytes", len(payload), limits.bytes)
    check_size("bytes of free-form data", writer.data_bytes, limits.data)
    check_size("records", writer.records, limits.records)
    check_size("cells in tables of measurements", writer.cells, limits.cells)
    return payload


def decode(payload: bytes, limits: Limits = LIMITS) -> list[Telemetry]:
    """Return the content of a payload. RecordError for anything else; either in bounded time and memory."""
    if not isinstance(payload, _BYTES):
        raise RecordError(f"A payload is bytes, got {type(payload).__name__}.")
    check_size("bytes", len(payload), limits.bytes)
    if len(payload) < _START.size or payload[:2] != MAGIC:
        raise RecordError(f"Not a payload of fedvitals: {len(payload)} bytes that begin with {bytes(payload[:8])!r}.")
    _, version, written, size = _START.unpack_from(payload)
    if version not in (VERSION, _WITHOUT_CHECKSUM):
        newer = "a newer fedvitals; update this side" if version > VERSION else "no released fedvitals"
        raise RecordError(f"The payload has version {version} of the wire format, written by {newer}.")
    check_size("bytes without its matrices", size, limits.head)
    view = memoryview(payload)[_START.size :]
    words = WORDS if version == _WITHOUT_CHECKSUM else WORDS_SINCE_2
    if version != _WITHOUT_CHECKSUM:
        view = _verified(view)
    if size > len(view):
        raise RecordError(f"The payload is cut off: {len(view)} bytes are left of a head of {size}.")
    try:
        head = view[:size] if written == _PLAIN else _inflated(view[:size], written, limits.head)
        return PayloadReader(_HEADS.decode(head), view[size:], limits, words).read()
    except RecordError:
        raise
    # Errors of MessagePack and its checks; and of invalid words, places, texts and numbers.
    except (
        msgspec.MsgspecError,
        ValueError,
        IndexError,
        OverflowError,
        RecursionError,
        struct.error,
        zlib.error,
    ) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise RecordError(f"A payload of {len(payload)} bytes cannot be read ({reason}).") from error


def _verified(view: memoryview) -> memoryview:
    """Return the part that the checksum covers; RecordError if it does not match."""
    if len(view) < _CHECKSUM.size or zlib.crc32(view[_CHECKSUM.size :]) != _CHECKSUM.unpack_from(view)[0]:
        raise RecordError(f"A payload is damaged: the checksum of its {len(view)} bytes is not the one it came with.")
    return view[_CHECKSUM.size :]


def _inflated(head: memoryview, written: int, limit: int) -> bytes:
    if written != _DEFLATED:
        raise RecordError(f"The head of a payload is written in a way that is not known: {written}.")
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(head, limit + 1)
    check_size("bytes without its matrices", len(inflated), limit)
    if not inflater.eof or inflater.unused_data:
        raise RecordError("The deflated head of a payload does not end where it should.")
    return inflated
