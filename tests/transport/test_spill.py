# SPDX-License-Identifier: Apache-2.0
"""Important records survive a file, a crash in the midst of a line, and a drain that stops early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedvitals.errors import RecordError
from fedvitals.records import Action, Event, Finding, Layer, LayerTable, Run, Snapshot, Suspect, Truth, Where
from fedvitals.transport.spill import Spill, drain_spill, from_json, to_json
from support.sinks import metric

WHERE = Where("run", 3, "c7", 5, "conv.weight", "edge-2")
IMPORTANT = [
    Run(
        "run",
        "digits",
        config={"rate": 0.1, "nested": {"a": [1, None, True]}},
        seed=7,
        tables=(LayerTable("parameter", (Layer("conv.weight", (8, 1, 3, 3), "float32"),)), LayerTable("buffer", ())),
    ),
    Event(WHERE, 1.5, "error", "log", "line\nbreak «ü» \u2028", {"file": "train.py:3"}, "pid-1", 9),
    Finding(WHERE, 2.0, "nan", "critical", 0.9, "NaN", {"z": 4.2}, (Suspect("c7", 0.8, "why"), Suspect("c8", 0.1))),
    Action(WHERE, 2.0, "nan", "exclude", None, {"rounds": 2}, "applied", "pid-1", 10),
    Snapshot(WHERE, 3.0, "global", "abc", 2**40),
    Truth(Where("run"), 3.0, "label_noise", ("c7", "c8"), 2, 9, {"rate": 0.8}, "pid-1", 11),
]


@pytest.mark.parametrize("record", IMPORTANT, ids=lambda record: type(record).__name__)
def test_important_records_survive_json(record):
    line = to_json(record)
    assert "\n" not in line
    assert from_json(line) == record


def test_numbers_of_numpy_and_strange_objects_become_plain():
    event = Event(
        WHERE, np.float64(1.0), "error", "log", "x", {"a": np.float32(0.5), "b": np.arange(2), "c": WHERE.run}
    )
    assert from_json(to_json(event)).data == {"a": 0.5, "b": [0, 1], "c": "run"}
    assert np.isnan(from_json(to_json(Event(WHERE, 1.0, "error", "log", "x", {"a": float("nan")}))).data["a"])
    assert from_json(to_json(Event(WHERE, 1.0, "error", "log", "x", {"a": ValueError("v")}))).data == {"a": "v"}


def test_bulk_records_and_broken_lines_are_refused():
    with pytest.raises(RecordError, match="got Metric"):
        to_json(metric(1))
    for line in ("", "{", "[]", '{"kind": "Metric"}', '{"kind": "Run", "record": {"odd": 1}}'):
        with pytest.raises(RecordError, match="cannot be read"):
            from_json(line)


def test_a_torn_last_line_costs_only_itself(tmp_path, caplog):
    text = "\n".join(to_json(record) for record in IMPORTANT)
    (tmp_path / "spill-store-1-ab.jsonl").write_text(text[:-10])
    assert list(drain_spill(tmp_path)) == IMPORTANT[:-1]
    assert "Left out of the spill file" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_drain_that_stops_early_leaves_the_file(tmp_path):
    spill = Spill(tmp_path, "store")
    for record in IMPORTANT:
        spill.append(record)
    spill.close(keep=True)
    draining = drain_spill(tmp_path)
    assert next(draining) == IMPORTANT[0]
    draining.close()
    assert list(drain_spill(tmp_path)) == IMPORTANT
    assert list(drain_spill(tmp_path / "nowhere")) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to be had")
def test_a_full_disk_fails_cleanly():
    spill = Spill(Path("/dev"), "store")
    with Path("/dev/full").open("ab", buffering=0) as spill._writer:
        with pytest.raises(OSError, match="No space left"):
            spill.append(IMPORTANT[0])
        assert spill._end == 0
