# SPDX-License-Identifier: Apache-2.0
"""The wire format under fire: bytes that are changed at random give records as good as any, or a RecordError."""

import random
import resource
import struct
import time
from dataclasses import replace

import pytest

from fedvitals.errors import RecordError
from fedvitals.records import LayerStats, Run, Where
from fedvitals.stats import FAMILIES
from fedvitals.testing import examples_of_records
from fedvitals.transport.wire.payload import decode, encode
from fedvitals_studies.bench.wire import client_round

*SENDABLE, _ = examples_of_records()  # the last is a Truth, which no worker may tell


def mutated(chance: random.Random, payload: bytes, other: bytes) -> bytes:
    """Random bytes, or a payload with bits flipped, parts cut, doubled, swapped in, or a length that lies."""
    kind = chance.randrange(7)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        return payload[:8] + chance.randbytes(chance.randrange(300))
    new = bytearray(payload)
    a, b = sorted(chance.randrange(len(new) + 1) for _ in range(2))
    if kind == 2:
        for _ in range(chance.randrange(1, 9)):
            new[chance.randrange(8, len(new))] ^= 1 << chance.randrange(8)
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
    if kind in (3, 4) and chance.random() < 0.7:  # with a head whose size is right again
        size = struct.unpack_from("<I", payload, 4)[0] + len(new) - len(payload)
        new[4:8] = struct.pack("<I", max(0, size))
    return bytes(new)


def fuzz(count: int, seconds: float) -> None:
    chance = random.Random(20260101)
    seeds = [encode(client_round(first=False)), encode(SENDABLE[:5]), encode(SENDABLE[5:8]),
             encode(SENDABLE[8:])]  # fmt: skip
    assert all(payload[3] == 0 for payload in seeds[1:3])  # plain heads: a flipped bit gets past zlib's checksum
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, slowest, good = time.perf_counter(), 0.0, 0
    for i in range(count):
        payload = mutated(chance, seeds[i % len(seeds)], chance.choice(seeds))
        started = time.perf_counter()
        try:
            records = decode(payload)
        except RecordError:
            pass
        else:
            good += 1
            if i % 10 == 0:
                check_again(records)
        slowest = max(slowest, time.perf_counter() - started)
    assert 0 < good < count / 2
    assert slowest < 2
    assert time.perf_counter() - began < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KB


def check_again(records) -> None:
    """What was let through is a list of records as good as any: it can be sent on."""
    again = decode(encode(records))
    assert len(again) == len(records)
    assert all(isinstance(r, Run) or isinstance(r.where, Where) for r in records)
    for r in records:
        if isinstance(r, LayerStats):
            assert r.matrix.shape[1] == len(FAMILIES[r.family].columns)
            replace(r)


def test_fuzzed_bytes_give_records_or_a_clear_error():
    fuzz(3000, 60)


@pytest.mark.thorough
def test_a_hundred_thousand_fuzzed_payloads():
    fuzz(100_000, 300)
