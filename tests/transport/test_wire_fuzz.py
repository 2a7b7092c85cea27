# SPDX-License-Identifier: Apache-2.0
"""The wire format under fire: bytes that are changed at random give records as good as any, or a RecordError.

How long that takes, and how much memory, is measured by `fedvitals bench wire`.
"""

from dataclasses import replace

import pytest

from fedvitals.errors import RecordError
from fedvitals.measurements import places_of, single_records
from fedvitals.records import LayerStats, Where
from fedvitals.stats import FAMILIES
from fedvitals.transport.wire.payload import decode, encode
from fedvitals_studies.bench.fuzzed_payloads import fuzzed_payloads
from fedvitals_studies.bench.wire import sound_payloads


def fuzz(count: int) -> None:
    payloads = sound_payloads()
    # Two have plain heads: there, a flipped bit gets past zlib's checksum.
    assert [payload[3] for payload in payloads[1:3]] == [0, 0]
    accepted = 0
    for i, payload in enumerate(fuzzed_payloads(payloads, count)):
        try:
            records = decode(payload)
        except RecordError:
            continue
        accepted += 1
        if i % 10 == 0:
            check_again(records)
    assert 0 < accepted < count / 2


def check_again(records) -> None:
    """What was let through is a list of records as good as any: it can be sent on."""
    again = decode(encode(records))
    assert len(again) == len(records)
    assert all(isinstance(place, Where) for r in records for place in places_of(r))
    for r in single_records(records):
        if isinstance(r, LayerStats):
            assert r.matrix.shape[1] == len(FAMILIES[r.family].columns)
            replace(r)


@pytest.mark.thorough
def test_fuzzed_bytes_give_records_or_a_clear_error():
    fuzz(3000)


@pytest.mark.thorough
def test_a_hundred_thousand_fuzzed_payloads():
    fuzz(100_000)
