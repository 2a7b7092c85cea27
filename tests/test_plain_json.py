# SPDX-License-Identifier: Apache-2.0
"""The converter to plain JSON, and the rule for NaN and infinity at each place that uses it."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest

from fedvitals import plain_json
from fedvitals.records import Event, Where
from fedvitals.store.rows import to_json as stored
from fedvitals.transport import spill

NAN, INF = math.nan, math.inf


@dataclass
class Point:
    x: float
    tags: tuple[str, ...] = ()


def test_what_is_shown_has_null_for_what_json_lacks():
    value = {1: [NAN, -INF, 0.5], "point": Point(INF, ("a",)), "array": np.array([[1.0, NAN]]), "n": np.int64(3)}
    assert plain_json.shown(value) == {
        "1": [None, None, 0.5], "point": {"x": None, "tags": ["a"]}, "array": [[1.0, None]], "n": 3,
    }  # fmt: skip
    json.dumps(plain_json.shown(value), allow_nan=False)


def test_a_store_keeps_the_name_of_a_number_that_json_lacks_and_the_text_of_what_it_does_not_know():
    value = {"a": [NAN, INF, -INF, 1.0], "b": {2}, 3: np.float32(0.5), "c": Point(1.0)}
    assert json.loads(stored(value)) == {
        "a": ["NaN", "Infinity", "-Infinity", 1.0], "b": [2], "3": 0.5, "c": str(Point(1.0)),
    }  # fmt: skip


def test_a_spilled_record_keeps_the_number_itself():
    event = Event(Where("r"), 1.0, "error", "log", "x", {"a": [NAN, INF], "b": np.array([1, 2])})
    data = spill.from_json(spill.to_json(event)).data
    assert math.isnan(data["a"][0])
    assert data["a"][1] == INF
    assert data["b"] == [1, 2]


def test_depth_length_and_absent_entries_are_limited_where_asked():
    limited = plain_json.PlainJson(unknown=str, most=2, absent=False, depth=2, text=lambda text: text[:3])
    assert limited({"a": "long text", "b": None, "c": 1}) == {"a": "lon"}
    assert limited([[[1]], 2, 3]) == [["[1]"], 2]


def test_a_hook_refuses_what_it_is_told_to():
    def refuse(value):
        raise TypeError(type(value).__name__)

    assert plain_json.as_builtin(Point(1.0), refuse) == {"x": 1.0, "tags": ()}
    with pytest.raises(TypeError, match="object"):
        plain_json.as_builtin(object(), refuse)
