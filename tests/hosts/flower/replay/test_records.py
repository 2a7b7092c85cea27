# SPDX-License-Identifier: Apache-2.0
"""Flower's records on a tape: whatever they hold comes back as it was, through JSON and tensors."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedvitals.errors import StoreError
from fedvitals.hosts.flower.tape.records import content_of, left_out_names, outline_of
from support.flower.federation import keys_and_bytes


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=np.uint32),
        np.array(["a", "bc"]),
        np.array(2.5, np.float16),
        np.zeros((0, 3), np.float32),
        np.array([1 + 2j]),
        np.array([True, False]),
        np.array([np.nan, -0.0, np.inf]),
    ],
)
def test_records_of_any_kind_come_back_as_they_were(array):
    content = RecordDict(
        {
            "a/b": ArrayRecord({"c": Array(array)}),
            "a": ArrayRecord({"b/c": Array(np.ones(2, np.float32)), "": Array(array)}),
            "odd": ArrayRecord({"z": Array(dtype="bf16", shape=(2,), stype="other", data=b"\x00\x01\x02")}),
            "metrics": MetricRecord({"nan": float("nan"), "one": 1, "also": 1.0, "many": [1.5, float("-inf")]}),
            "config": ConfigRecord(
                {
                    "text": "é\n",
                    "yes": True,
                    "raw": b"\x00\xff",
                    "list": [b"a", b""],
                    "long": b"x" * 100_000,
                    "big": "é" * 70_000,
                }
            ),
        }
    )
    outline, tensors = outline_of(content, whole=True)
    again = content_of(json.loads(json.dumps(outline)), {name: t.clone() for name, t in tensors.items()})
    assert [*again] == [*content]
    assert keys_and_bytes(again) == keys_and_bytes(content)


def test_what_is_too_long_for_an_outline_is_left_out_and_named():
    content = RecordDict({"config": ConfigRecord({"long": b"x" * 100_000, "short": b"x"})})
    outline, tensors = outline_of(content)
    assert (left_out_names(outline), tensors) == (["config/long"], {})
    assert dict(content_of(outline, {})["config"]) == {"short": b"x"}


@pytest.mark.parametrize("value", [{"bytes": 7}, {"float": "1; 2"}, {"tensor": "elsewhere"}])
def test_values_that_nobody_wrote_so_are_refused(value):
    with pytest.raises(StoreError, match="cannot be read"):
        content_of({"x": {"kind": "config", "values": {"a": value}}}, {})
