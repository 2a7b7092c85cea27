# SPDX-License-Identifier: Apache-2.0
"""Damaged payloads of the wire format: what a decoder receives over a bad line, or from a malicious sender."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator, Sequence

_CHECKSUM_AT, _BODY = 8, 12  # their offsets in a payload


def fuzzed_payloads(payloads: Sequence[bytes], count: int, seed: int = 20260101) -> Iterator[bytes]:
    """Damage these payloads in turn, `count` times in all; the same ones for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - no secrets here
    for i in range(count):
        yield _damaged(chance, payloads[i % len(payloads)], chance.choice(payloads))


def _damaged(chance: random.Random, payload: bytes, other: bytes) -> bytes:
    """Return random bytes, or a payload with bits flipped, parts cut, doubled or swapped in, or a false length."""
    kind = chance.randrange(7)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        body = chance.randbytes(chance.randrange(300))
        return payload[:_CHECKSUM_AT] + struct.pack("<I", zlib.crc32(body)) + body
    new = bytearray(payload)
    a, b = sorted(chance.randrange(len(new) + 1) for _ in range(2))
    if kind == 2:
        for _ in range(chance.randrange(1, 9)):
            new[chance.randrange(_BODY, len(new))] ^= 1 << chance.randrange(8)
    elif kind == 3:
        del new[a : min(b, a + 40)]
    elif kind == 4:
        new[a:a] = new[a : min(b, a + 40)]
    elif kind == 5:
        new[a:b] = other[a:b]
    else:
        new[a : a + 5] = chance.choice([b"\xdd", b"\xdb", b"\xc6", b"\xdf"]) + struct.pack(
            ">I", chance.randrange(2**32)
        )
    if kind in (3, 4) and chance.random() < 0.7:  # with a header whose size is right again
        size = struct.unpack_from("<I", payload, 4)[0] + len(new) - len(payload)
        new[4:8] = struct.pack("<I", max(0, size))
    if chance.random() < 0.9:  # as a malicious sender would write it
        new[_CHECKSUM_AT:_BODY] = struct.pack("<I", zlib.crc32(new[_BODY:]))
    return bytes(new)
