# SPDX-License-Identifier: Apache-2.0
"""The wire format: what goes in comes out, small; and whatever bytes come in, nothing worse than a RecordError."""

import hashlib
import math
import struct
import tracemalloc
import zlib
from dataclasses import fields, is_dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.catalog import CATALOG
from fedvitals.errors import RecordError
from fedvitals.measurements import Measurements, single_records
from fedvitals.records import (
    Action,
    Event,
    Finding,
    Layer,
    LayerStats,
    LayerTable,
    Metric,
    Run,
    Sketch,
    Snapshot,
    Span,
    Suspect,
    Transfer,
    Where,
)
from fedvitals.stats import FAMILIES, empty_sums, pack, unpack
from fedvitals.testing import examples_of_records
from fedvitals.transport.wire.fields import DEPTH
from fedvitals.transport.wire.payload import LIMITS, MAGIC, VERSION, Limits, decode, encode
from fedvitals.transport.wire.vocabulary import WORDS, WORDS_SINCE_2
from fedvitals_studies.bench.wire import client_round

# -- there and back ---------------------------------------------------------------------------------------------------

whole = st.integers(-(2**63), 2**63 - 1)
natural = st.integers(0, 2**63 - 1)
number = st.floats()
word = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | whole | number | word,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(word, inner, max_size=3),
    max_leaves=8,
)
data = st.dictionaries(word, plain, max_size=3)
where = st.builds(
    Where,
    st.sampled_from(["run-1", "run-2", "später"]),
    st.none() | whole,
    st.none() | word,
    st.none() | whole,
    st.none() | word,
    st.none() | word,
)
identity = {"source": word, "sequence": st.integers(0, 2**40)}
about = {"where": where, "at": number, **identity}


@st.composite
def layer_stats(draw):
    family = draw(st.sampled_from(sorted(FAMILIES)))
    rows, columns = draw(st.integers(0, 4)), len(FAMILIES[family].columns)
    matrix = np.array(draw(st.lists(st.floats(width=32), min_size=rows * columns, max_size=rows * columns)))
    return LayerStats(matrix=matrix.reshape(rows, columns), table=draw(word), family=family,
                      **{name: draw(value) for name, value in about.items()})  # fmt: skip


layer = st.builds(Layer, word, st.lists(natural, max_size=3).map(tuple), word)
table = st.builds(LayerTable, word, st.lists(layer, max_size=3).map(tuple))
record = st.one_of(
    st.builds(
        Run, id=word.filter(bool), name=word, host=word, topology=st.none() | word, config=data,
        seed=st.none() | whole, started=number, finished=st.none() | number,
        versions=st.dictionaries(word, word, max_size=2), tables=st.lists(table, max_size=2).map(tuple), **identity,
    ),
    st.builds(Metric, name=word, value=number, **about),
    layer_stats(),
    st.builds(Span, name=word, seconds=number, trace=word, id=word, parent=st.none() | word, attributes=data, **about),
    st.builds(Transfer, sender=word, receiver=word, bytes=natural, raw_bytes=natural, seconds=st.none() | number,
              kind=word, **about),
    st.builds(Event, level=word, name=word, message=word, data=data, **about),
    st.builds(Sketch, values=st.lists(number, max_size=4).map(tuple), digest=word, **about),
    st.builds(Finding, issue=word, severity=word, confidence=number, message=word, evidence=data,
              suspects=st.lists(st.builds(Suspect, word, number, word), max_size=2).map(tuple), **about),
    st.builds(Action, finding=word, kind=word, target=st.none() | word, arguments=data, status=word, **about),
    st.builds(Snapshot, kind=word, digest=word, bytes=natural, **about),
)  # fmt: skip


*SENDABLE, _ = examples_of_records()  # the last is a Truth, which no worker may tell


def same(a, b) -> bool:
    """Equal to the bit, where NaN equals NaN; matrices as float32 has them."""
    if isinstance(a, LayerStats):
        with np.errstate(all="ignore"):
            wanted = unpack(a.family, pack(a.family, a.matrix))
        return same((a.where, a.at, a.table), (b.where, b.at, b.table)) and np.array_equal(wanted, b.matrix, True)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)


def check(records) -> list:
    found = decode(encode(records))
    assert len(found) == len(records)
    for wanted, got in zip(records, found, strict=True):
        assert same(wanted, got), (wanted, got)
    return found


@given(st.lists(record, max_size=6))
def test_every_kind_of_record_comes_back(records):
    check(records)


@given(st.lists(st.sampled_from(range(6)), max_size=30), st.randoms(use_true_random=False))
def test_what_neighbours_share_or_not_makes_no_difference(kinds, chance):
    """Metrics and others in any order, with and without a common place, time, source and next sequence."""
    places, sequence, records = [Where("r", 0, "c1"), Where("r", 0, "c1"), Where("r", 1, "c2", 3)], 0, []
    for kind in kinds:
        sequence = sequence + 1 if chance.random() < 0.8 else chance.randrange(100)
        common = {"where": chance.choice(places), "at": chance.choice([1.0, 2.0]), "source": chance.choice("ab"),
                  "sequence": sequence}  # fmt: skip
        if kind < 4:
            records.append(Metric(name=f"n{kind}", value=chance.random(), **common))
        elif kind == 4:
            records.append(LayerStats(family="weight", matrix=np.ones((2, 9)), table="t", **common))
        else:
            records.append(Run("r", "name", source="a", sequence=sequence))
    check(records)


def test_examples_come_back():
    found = check(SENDABLE)
    stats = next(r for r in found if isinstance(r, LayerStats))
    assert stats.get("l2").shape == (2,)
    assert (stats + stats).matrix.shape == (2, 9)
    assert hash(next(r for r in found if isinstance(r, Metric))) is not None
    assert decode(encode([])) == []


def test_matrices_stay_exact_to_a_millionth():
    stream = np.random.default_rng(0)
    matrix = empty_sums(50)
    matrix[:, :4] = stream.uniform(1, 1e6, (50, 4))
    matrix[:, 2] = matrix[:, 1] ** 2 / matrix[:, 0] * 1.5
    (found,) = decode(encode([LayerStats(Where("r"), 0.0, "gradient", matrix, "t")]))
    np.testing.assert_allclose(found.matrix, matrix, rtol=1e-6)


def test_what_users_put_into_data_is_made_plain():
    """Tuples, numpy's numbers, huge integers, strange keys and objects, and text that UTF-8 cannot hold."""
    deep: dict = {}
    for _ in range(100):
        deep = {"in": deep}
    odd = {1: (1, 2), "n": np.float32(0.5), "i": np.int64(3), "a": np.arange(2), "big": 10**30, "huge": 10**400,
           "set": {1}, "bad": "a\ud800b", "deep": deep, "b": b"x"}  # fmt: skip
    (found,) = decode(encode([Event(Where("r"), 0.0, "info", "n", "torn \udcff text", odd)]))
    assert found.message == "torn ? text"
    left = {key: value for key, value in found.data.items() if key not in ("deep", "huge")}
    assert left == {
        "1": [1, 2], "n": 0.5, "i": 3, "a": [0, 1], "big": 1e30, "set": "{1}", "bad": "a?b", "b": "b'x'",
    }  # fmt: skip


def test_a_metric_that_is_no_number_is_refused_with_words():
    with pytest.raises(RecordError, match="cannot be sent"):
        encode([Metric(Where("r"), 0.0, "loss", "high")])
    with pytest.raises(RecordError, match="Only records"):
        encode(["loss"])


def test_words_keep_their_numbers():
    """A change here would mislabel the payloads of another version: raise VERSION instead."""
    assert VERSION == 2
    assert len(set(WORDS_SINCE_2)) == len(WORDS_SINCE_2) < 128  # one byte each
    assert hashlib.sha256("\n".join(WORDS).encode()).hexdigest()[:16] == "50290635e6fa6077"
    assert hashlib.sha256("\n".join(WORDS_SINCE_2).encode()).hexdigest()[:16] == "1851a77c660af6c8"


def test_names_that_the_format_does_not_know_travel_as_text():
    names = [*CATALOG, "user.мой", "of.tomorrow"]
    assert [
        m.name for m in check([Metric(Where("r"), 0.0, name, 1.0, "s", i) for i, name in enumerate(names)])
    ] == names


@pytest.mark.thorough
@pytest.mark.parametrize("first", [True, False])
def test_a_client_round_of_the_papers_cnn_takes_less_than_3_kb(first):
    """Losses by class are 0.9 kB of it. The first also describes labels and images of 43 classes, once: 8 kB more."""
    records = client_round(first=first)
    assert {type(r) for r in records} >= {Measurements, Span}
    assert {type(r) for r in single_records(records)} >= {Metric, LayerStats, Span}
    assert len(encode(records)) <= (11_500 if first else 3000)


# -- what is not as it should be --------------------------------------------------------------------------------------


def payload_of(head, matrices=b"", written=0):
    raw = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    body = raw + matrices
    return struct.pack("<2sBBII", MAGIC, VERSION, written, len(raw), zlib.crc32(body)) + body


def refuse(payload, words=".", limits=LIMITS):
    tracemalloc.start()
    try:
        with pytest.raises(RecordError, match=words):
            decode(payload, limits)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 << 20, f"{peak / 2**20:.0f} MB"


PLACE = [1, 0, 2, None, None, None]
METRICS = [0, 0, 0.0, 1, 0, [40], [], struct.pack("<d", 1.0)]
LAYERS = [1, 0, 0.0, 1, 0, WORDS.index("weight"), 0, 2]


def event(raw):
    return (
        b"\x93\x90\x91"
        + msgspec.msgpack.encode(PLACE)
        + b"\x91\x99\x04\x00\xcb"
        + bytes(8)
        + b"\x01\x00\x01\x01\xa0"
        + raw
    )


def test_the_handmade_heads_are_right():
    """The tests below change one thing each."""
    assert decode(payload_of([[], [PLACE], [METRICS]]))[0].name == "loss"
    assert decode(payload_of([[], [PLACE], [LAYERS]], bytes(72)))[0].matrix.shape == (2, 9)
    assert decode(payload_of(event(b"\x80")))[0].data == {}


def test_another_version_is_refused():
    payload = bytearray(encode(SENDABLE))
    payload[2] = VERSION + 1
    refuse(bytes(payload), "newer fedvitals")
    payload[2] = 0
    refuse(bytes(payload), "version 0")


@pytest.mark.parametrize("payload", [b"", b"f", b"fv\x01", b"\x80\x04K\x01.", b"PK\x03\x04aaaaaaaa", "text", None])
def test_foreign_bytes_are_refused(payload):
    refuse(payload, "payload")


def test_every_truncation_and_extension_is_refused():
    for records in (SENDABLE, SENDABLE[1:5]):
        payload = encode(records)
        for size in range(len(payload)):
            with pytest.raises(RecordError):
                decode(payload[:size])
        for more in (b"\0", bytes(4), bytes(36)):
            with pytest.raises(RecordError):
                decode(payload + more)


@pytest.mark.parametrize(
    ("head", "matrices", "words"),
    [
        ([[], [PLACE], [[*METRICS[:-1], b"1234567"]]], b"", "cannot be read"),
        ([[], [PLACE], [[*METRICS[:-3], [40, 41], *METRICS[-2:]]]], b"", "cannot be read"),
        ([[], [PLACE], [[*METRICS[:-3], [500], *METRICS[-2:]]]], b"", "IndexError"),
        ([[], [PLACE], [[*METRICS[:-3], [-1], *METRICS[-2:]]]], b"", ">= 0"),
        ([[], [], [METRICS]], b"", "IndexError"),
        *[([[], [PLACE], [[*METRICS[:-2], m, METRICS[-1]]]], b"", "impossible") for m in ([0], [0, 0], [1, 0], [9, 0])],
        ([[], [PLACE], [[*METRICS[:-3], [40, 41], [1, 7], bytes(16)]]], b"", "IndexError"),
        ([[], [[0, *PLACE[1:]]], [METRICS]], b"", "no run"),
        ([[], [PLACE], [[0, 0, None, *METRICS[3:]]]], b"", "lacks its time"),
        ([[], [PLACE], [[0, 0, 0.0, None, *METRICS[4:]]]], b"", "lacks its time"),
        ([[], [PLACE], [[*METRICS[:4], 2**63 - 1, *METRICS[5:]]] * 2], b"", ""),
        ([[], [PLACE], [[*METRICS[:4], 2**63, *METRICS[5:]]]], b"", "<= 9223372036854775807"),
        ([[], [[1, 2**64 - 1, *PLACE[2:]]], [METRICS]], b"", "<= 9223372036854775807"),
        ([["x" * 2000], [PLACE], [METRICS]], b"", "length <= 1024"),
        ([[], [PLACE], [[99, *METRICS[1:]]]], b"", "cannot be read"),
        ([[], [PLACE], [[*LAYERS[:-1], 2**62]]], bytes(72), "announced"),
        ([[], [PLACE], [[*LAYERS[:-1], 1]]], bytes(72), "announced"),
        ([[], [PLACE], [[*LAYERS[:-1], -1]]], bytes(72), ">= 0"),
        ([[], [PLACE], [[*LAYERS[:5], WORDS.index("loss"), *LAYERS[6:]]]], bytes(72), "Unknown family 'loss'"),
        ([[], [PLACE], [[*LAYERS[:5], WORDS.index("gradient.histogram"), *LAYERS[6:]]]], bytes(72), "announced"),
        ({"words": []}, b"", "cannot be read"),
        ([[], [PLACE], [METRICS], 1], b"", "cannot be read"),
    ],
)
def test_wrong_numbers_sizes_and_names_are_refused(head, matrices, words):
    if words:
        refuse(payload_of(head, matrices), words)
    else:
        assert decode(payload_of(head, matrices))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x81\xa1a" * DEPTH + b"\x80", "deeper"),
        (b"\x81\xa1a" + b"\x91" * 200_000, "RecursionError"),
        (b"\x81\xa1a\x81\x01\x02", "not text"),
        (b"\x81\x01\x02", "Expected `str`"),
        (b"\x81\xa1a\xc4\x01x", "a bytes"),
        (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", "a datetime"),
        (b"\x81\xa1a\xc7\x01\x05a", "an? Ext"),
        (b"\x90", "Expected `object`"),
        (b"\x81\xa2\xff\xfe\xc0", "UnicodeDecodeError"),
    ],
)
def test_free_form_data_is_plain_or_refused(raw, words):
    refuse(payload_of(event(raw)), words)


ANNOUNCED = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
             b"\x93\xdd\xff\xff\xff\xff", b"\x93\x90\xdd\xff\xff\xff\xff" * 1000, b"\x91" * 400_000]  # fmt: skip


@pytest.mark.parametrize("head", ANNOUNCED)
def test_sizes_that_are_only_announced_cost_nothing(head):
    refuse(payload_of(head), "cannot be read")
    refuse(struct.pack("<2sBBII", MAGIC, VERSION, 0, 2**32 - 1, zlib.crc32(head)) + head)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "filler",
    [
        b"\x93\x90\x90\xdd" + struct.pack(">I", 500_000) + b"\x80" * 500_000,
        b"\x93\xdd" + struct.pack(">I", 500_000) + b"\xa0" * 500_000 + b"\x90\x90",
        b"\x93\xdd" + struct.pack(">I", 170_000) + b"\xa2ab" * 170_000 + b"\x90\x90\x00",
        event(b"\x81\xa1a\xdd" + struct.pack(">I", 250_000) + b"\x80" * 250_000),
        event(b"\x81\xa1a\xdd" + struct.pack(">I", 500_000) + b"\x80" * 500_000),
        event(b"\x81\xa1a\xdd" + struct.pack(">I", 85_000) + b"\x81\xa0\xc0" * 85_000),
        b"\x93\x90\x90\xdd" + struct.pack(">I", 40_000) + b"\x98\x00\x00\xc0\xc0\xc0\x90\x90\xc4\x00" * 40_000,
    ],
    ids=["maps", "empty words", "words", "data at its limit", "too much data", "small maps", "empty entries"],
)
def test_a_small_payload_cannot_fill_the_memory(filler):
    """The largest head and the largest matrices: decoded or refused, in less than 64 MB."""
    for payload in (payload_of(filler, bytes(7 << 20)), payload_of(zlib.compress(filler), b"", written=1)):
        tracemalloc.start()
        try:
            with_records = decode(payload)
        except RecordError:
            with_records = []
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20, f"{peak / 2**20:.0f} MB, {len(with_records)} records"


@pytest.mark.thorough
@pytest.mark.parametrize(("maps", "layers"), [(260_000, 60_000), (0, 125_000), (260_000, 0)])
def test_the_worst_that_is_well_formed_stays_in_bounds(maps, layers):
    """Empty maps and layers without a name, the most memory per byte, beside as many matrices as fit: 49 MB."""
    rows = (7 << 20) // 36
    common = msgspec.msgpack.encode([0, 0.0, 1, 0])[1:]
    stats = msgspec.msgpack.encode([*LAYERS[:-1], rows])
    data = b"\x81\xa1a\xdd" + struct.pack(">I", maps) + b"\x80" * maps
    line = b"\x99\x04" + common + b"\x01\x01\xa0" + data
    table = b"\x91\x92\x00\xdd" + struct.pack(">I", layers) + b"\x93\x00\x90\x00" * layers
    run = b"\x9e\x09" + common + b"\xa0\x00\xc0\x80\xc0\x00\xc0\x80" + table
    head = b"\x93\x90\x91" + msgspec.msgpack.encode(PLACE) + b"\x93" + stats + line + run
    payload = payload_of(head, bytes(rows * 36))
    tracemalloc.start()
    found = decode(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(r) for r in found] == [LayerStats, Event, Run]
    assert peak < 64 << 20, f"{peak / 2**20:.0f} MB"


@pytest.mark.thorough
def test_the_largest_payload_that_is_legal_stays_in_bounds():
    """As many layers as fit, and as much data."""
    rows = (LIMITS.bytes - 4096) // 36
    lines = [Event(Where("r", 0, f"c{i}"), float(i), "info", "log", "", {"a": {}, "b": [[]] * 400}) for i in range(500)]
    big = LayerStats(Where("r"), 0.0, "weight", np.ones((rows - 8000, 9)), "t")
    payload = encode([big, *lines])
    assert len(payload) > 7 << 20
    tracemalloc.start()
    found = decode(payload)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 501
    assert peak < 64 << 20, f"{peak / 2**20:.0f} MB"


@pytest.mark.thorough
def test_a_bomb_of_zeros_is_not_inflated():
    bomb = zlib.compress(bytes(200 << 20), 9)
    assert len(bomb) < LIMITS.head
    refuse(payload_of(bomb, written=1), "524289 bytes without its matrices")
    refuse(payload_of(b"\x01\x02\x03", written=1), "cannot be read")
    refuse(payload_of(zlib.compress(b"\x93\x90\x90\x90") + b"more", written=1), "does not end")
    refuse(payload_of(b"\x93\x90\x90\x90", written=2), "not known: 2")


def test_limits_hold_on_both_sides():
    metrics = [Metric(Where("r"), 0.0, "loss", float(i), "s", i) for i in range(200)]
    noise = [Event(Where("r"), 0.0, "info", "n", "", {"x": str(i) * 20}) for i in range(200)]
    for records, limits, words in (
        (metrics, Limits(records=199), "200 records; 199"),
        (metrics, Limits(bytes=100), "bytes; 100 are the limit"),
        (metrics, Limits(head=500), "without its matrices; 500"),
        (noise, Limits(data=1000), "free-form data; 1000"),
    ):
        with pytest.raises(RecordError, match=words):
            encode(records, limits)
        refuse(encode(records), "limit", limits)
