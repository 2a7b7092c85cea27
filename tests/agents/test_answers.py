# SPDX-License-Identifier: Apache-2.0
"""What a tool returns: never larger than promised, always JSON, and nothing in it looks like anything but data."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.agents import documentation
from fedvitals.agents.answers import LIMIT, TEXT, encode, quoted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=60,
)


@given(JSON, st.integers(300, 3000))
def test_any_answer_is_json_within_its_bound(value, limit):
    text = encode({"value": value}, limit)
    assert len(text.encode()) <= limit
    assert set(json.loads(text)) <= {"result", "left_out", "note"}
    assert "<" not in text
    assert ">" not in text


def test_what_is_cut_is_counted_and_its_beginning_stays():
    rows = [{"client": f"c{i}", "score": i / 7} for i in range(5000)]
    answer = json.loads(encode({"run": "r", "rows": rows}))
    kept = answer["result"]["rows"]
    assert kept[0] == {"client": "c0", "score": 0}
    assert len(kept) + answer["left_out"]["rows"] == 5000
    assert len(encode({"run": "r", "rows": rows}).encode()) > LIMIT / 3
    assert answer["result"]["run"] == "r"


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x1b[31mb", "a\u202eb", "a\u200bb", "a\U000e0041b", "a\x00b", "x" * 100_000, "\ud800"]
)
def test_names_lose_what_cannot_be_seen(name):
    shown = quoted(name)
    assert shown.isprintable()
    assert len(shown) <= TEXT


def test_numbers_keep_four_digits_and_times_their_seconds():
    assert json.loads(encode([0.123456, 1234.56, 1795101692.17, -12345.6]))["result"] == [
        0.1235,
        1235,
        1795101692,
        -12346,
    ]


def test_numbers_that_are_not_finite_are_null():
    answer = json.loads(encode({"values": [float("nan"), float("inf"), 1 / 3, 2.0, 10**20]}))
    assert answer["result"]["values"] == [None, None, 0.3333, 2, 10**20]


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("client sends wrong labels", "LABEL_NOISE"),
        ("cosine of the update to the mean of others", "update.cosine_mean"),
        ("straggler slow client", "STRAGGLER"),
        ("what may leave a client: privacy level 2", "privacy level 2"),
        ("table of spans", "spans"),
    ],
)
def test_search_finds_what_is_meant(words, title):
    assert any(title in entry.title for entry in documentation.search(words, 4))


def test_search_for_nothing_known_is_empty():
    assert documentation.search("zzzzqqq") == []
